"""A wrong argument is a type error in the editor."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILES = Path(__file__).parent / "types"


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, dict[int, str]]:
    """What the type checker says about the two files: by file and line."""
    checker = Path(sys.executable).parent / "pyright"
    if not checker.exists():
        pytest.skip("needs pyright")
    project = tmp_path_factory.mktemp("types")
    for file in FILES.glob("*.py"):
        shutil.copy(file, project)
    options = {"extraPaths": [str(repository / "src")], "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (project / "pyrightconfig.json").write_text(json.dumps(options))
    command = [str(checker), "--outputjson", "--pythonpath", sys.executable, "--project", str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, dict[int, str]] = {"right_calls.py": {}, "wrong_calls.py": {}}
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            lines = found[Path(entry["file"]).name]
            lines[entry["range"]["start"]["line"] + 1] = entry["message"]
    return found


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
