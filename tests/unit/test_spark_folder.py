"""The temporary folder of a session: it goes away with the process, even if that was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

MAKE = "from omniq.spark.sessions import _folder; print(_folder(), flush=True)"
THEN_DIE = MAKE + f"; import os; os.kill(os.getpid(), {signal.SIGKILL:d})"
THEN_WAIT = MAKE + "; input()"


def _start(code: str, folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)  # type: ignore[call-overload]


def test_it_ends_with_the_process(tmp_path: Path) -> None:
    with _start(MAKE, tmp_path) as process:
        made, _ = process.communicate()
    assert Path(made.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_that_of_a_killed_process_is_removed_by_the_next_and_no_other(tmp_path: Path) -> None:
    with _start(THEN_DIE, tmp_path) as killed:
        left, _ = killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert Path(left.strip()).is_dir()
    foreign = tmp_path / "omniq-spark-of-someone"
    foreign.mkdir()
    with _start(THEN_WAIT, tmp_path) as first:
        assert first.stdout is not None
        held = Path(first.stdout.readline().strip())
        with _start(MAKE, tmp_path) as second:
            second.communicate()
        assert held.is_dir()
        first.communicate("\n")
    assert list(tmp_path.iterdir()) == [foreign]
