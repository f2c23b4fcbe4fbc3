"""A wrong argument is a type error in the editor."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILES = Path(__file__).parent / "types"
PAGES = ("README.md", "docs/index.md", "docs/how-to/typed-code.md")  # what a typed user reads first


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, dict[int, str]]:
    """What the type checker says about the files and about the code of the pages: by file and line."""
    checker = Path(sys.executable).parent / "pyright"
    if not checker.exists():
        pytest.skip("needs pyright")
    project = tmp_path_factory.mktemp("types")
    for file in FILES.glob("*.py"):
        shutil.copy(file, project)
    written = [file for page in PAGES for file in write_blocks(repository / page, project)]
    options = {"extraPaths": [str(repository / "src")], "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (project / "pyrightconfig.json").write_text(json.dumps(options))
    command = [str(checker), "--outputjson", "--pythonpath", sys.executable, "--project", str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, dict[int, str]] = {name: {} for name in ["right_calls.py", "wrong_calls.py", *written]}
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(found)
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            lines = found[Path(entry["file"]).name]
            lines[entry["range"]["start"]["line"] + 1] = entry["message"]
    return found


def write_blocks(page: Path, folder: Path) -> list[str]:
    """Each block of Python as a file, named by its own first line or by its place."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    named = [re.match(r"# (\w+\.py)\n", block) for block in blocks]
    names = [name[1] if name else f"{page.stem.replace('-', '_').lower()}_{n}.py" for n, name in enumerate(named)]
    for name, block in zip(names, blocks, strict=True):
        (folder / name).write_text(block)
    return names


def test_the_code_of_the_first_pages_has_no_type_errors(complaints: dict[str, dict[int, str]]) -> None:
    of_pages = {name: found for name, found in complaints.items() if not name.endswith("_calls.py")}
    assert len(of_pages) >= 8
    assert {name: found for name, found in of_pages.items() if found} == {}


def test_right_calls_are_accepted(complaints: dict[str, dict[int, str]]) -> None:
    assert complaints["right_calls.py"] == {}


def marked(ending: str) -> dict[int, str]:
    lines = (FILES / "wrong_calls.py").read_text().splitlines()
    return {n: line.strip() for n, line in enumerate(lines, 1) if line.endswith(ending)}


@pytest.mark.parametrize("ending", ["# wrong", "# wrong option"])
def test_wrong_calls_are_rejected(complaints: dict[str, dict[int, str]], ending: str) -> None:
    missed = {n: line for n, line in marked(ending).items() if n not in complaints["wrong_calls.py"]}
    assert not missed


def test_the_rest_of_the_wrong_calls_is_right(complaints: dict[str, dict[int, str]]) -> None:
    assert set(complaints["wrong_calls.py"]) <= marked("# wrong").keys() | marked("# wrong option").keys()
