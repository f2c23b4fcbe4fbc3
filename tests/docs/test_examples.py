"""Every example runs by itself, ends well, and leaves the folder of the examples as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAYS = {
    "async_quickstart.py": "SUCCESS Hello, world!",
    "demo.py": "ended 328 of 328 tasks",
    "groups.py": "{'ada': 1, 'ben': 1, 'cleo': 1}",
    "pipeline.py": "The texts have 9 words.",
    "quickstart.py": "2 + 3 = 5",
    "scheduled.py": "ready (attempt 2)",
}
ON_SPARK = {"lake.ipynb", "lake_demo.py"}  # tests/spark/test_notebook.py runs them


def run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMNIQ_")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_every_example_is_run_here() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert sorted(there - ON_SPARK) == sorted(SAYS)
    assert there >= ON_SPARK


@pytest.mark.parametrize("script", SAYS)
def test_an_example_ends_well(script: str, tmp_path: Path) -> None:
    done = run(script, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert SAYS[script] in done.stdout
    assert done.stderr == ""


def test_the_demo_keeps_its_queue_where_it_is_told(tmp_path: Path) -> None:
    done = run("demo.py", tmp_path, "kept")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kept" / "demo.db").is_file()
    assert "retried" in done.stdout
    assert "ConnectionError: no answer on attempt 2" in done.stdout
    assert "\x1b" not in done.stdout
