"""A program of one file: what it enqueues runs in its own worker, and in one that imports the file."""

import subprocess
import sys
from pathlib import Path

import pytest

from omniq import OmniQ, SQLiteStorage

SCRIPT = """
import sys

import omniq
from omniq import OmniQ, SQLiteStorage


def add(a: int, b: int) -> int:
    return a + b


@omniq.task
def triple(n: int) -> int:
    return 3 * n


if __name__ == "__main__":
    with OmniQ(SQLiteStorage("queue.db")) as oq:
        ids = [oq.enqueue(add, 2, 3), triple.enqueue(oq, 3)]
        if "work" in sys.argv:
            with oq.worker(allow=["shop.app" if __spec__ else "app"]):
                print([oq.get_result(id, wait=True, timeout=20).result for id in ids])
        else:
            print(" ".join(ids))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    for file in (tmp_path / "app.py", tmp_path / "shop" / "app.py"):
        file.write_text(SCRIPT)
    return tmp_path


def python(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WAYS = pytest.mark.parametrize(("words", "module"), [(["app.py"], "app"), (["-m", "shop.app"], "shop.app")])


@WAYS
def test_its_own_worker_runs_it(folder: Path, words: list[str], module: str) -> None:
    assert python(folder, *words, "work") == "[5, 9]\n"


@WAYS
def test_a_worker_that_imports_the_file_runs_it(folder: Path, words: list[str], module: str) -> None:
    ids = python(folder, *words).split()
    python(folder, "-m", "omniq", "worker", module, "--store", "sqlite:///queue.db", "--drain-and-exit")
    with OmniQ(SQLiteStorage(folder / "queue.db")) as oq:
        assert [oq.get_task(id).func_path for id in ids] == [f"{module}:add", f"{module}:triple"]
        assert [oq.get_result(id).result for id in ids] == [5, 9]
