"""Real processes to kill, freeze and wait for. Nothing here sleeps to synchronise: `until` waits for a condition."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

import pytest
from support.forks import Python

from omniq import BaseStorage

HERE = Path(__file__).parent
T = TypeVar("T")
_FAILED_ONCE = "RuntimeError: the first attempt always fails\n"
_TOLD_OF_FROZEN = r".* is stopped and holds the write lock.*\n"
_TRACEBACK = rf"Traceback .*\n(?:  .*\n)*(?:{_FAILED_ONCE}|\Z)"  # who is killed may leave a part of it
_EXPECTED = re.compile(rf".* failed, it will be retried: {_FAILED_ONCE}(?:{_TRACEBACK}|\Z)|{_TOLD_OF_FROZEN}")

on_each_store = pytest.mark.parametrize("fleet", ["sqlite", "file"], indirect=True)


def until(condition: Callable[[], T], what: str, seconds: float = 30.0) -> T:
    """The first true value of `condition`, asked every few milliseconds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.005)


class Process:
    """A child with its output in files, so that it never blocks on a pipe that nobody reads."""

    def __init__(self, arguments: list[str], folder: Path, name: str) -> None:
        self.name = name
        self.out_path, self.err_path = folder / f"{name}.out", folder / f"{name}.err"
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.popen = Python(arguments, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=folder, env=_environment())
        self.frozen = self.killed = False

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def lines(self) -> list[str]:
        """Complete lines of the output; what a kill cut off is left out."""
        return self.out_path.read_text().split("\n")[:-1]

    @property
    def errors(self) -> str:
        return self.err_path.read_text()

    @property
    def noise(self) -> str:
        """What it said beside the failures that `fail_once` is for, and that somebody who was frozen has the lock."""
        said = self.errors
        if self.killed:  # maybe in the middle of a line
            said = said[: said.rfind("\n") + 1]
        return _EXPECTED.sub("", said)

    def ready(self) -> Process:
        until(lambda: "ready" in self.lines or not self.running, f"{self.name} to be ready")
        assert "ready" in self.lines, self.errors
        return self

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.killed = True
        self.popen.kill()
        self.popen.wait()
        self._close_stdin()

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)
        self.frozen = True

    def freeze_outside_a_write(self, fleet: Fleet) -> None:
        """Freeze it while it does not hold the store's write lock, which would stop everybody."""
        while True:
            self.freeze()
            until(lambda: _state(self.pid) == "T", f"{self.name} to stop")
            if not fleet.write_locked():
                return
            self.thaw()

    def thaw(self) -> None:
        self.send(signal.SIGCONT)
        self.frozen = False

    def finish(self, seconds: float = 30.0) -> int:
        """Ask it to end in good order; its exit code."""
        self._close_stdin()
        return self.popen.wait(seconds)

    def end(self) -> None:
        if self.running:
            self.kill()
        self._close_stdin()

    def _close_stdin(self) -> None:
        stdin: IO[bytes] | None = self.popen.stdin
        if stdin is not None:
            stdin.close()


class Fleet:
    """All processes of one test, on one store; none of them outlives the test."""

    def __init__(self, folder: Path, kind: str = "sqlite") -> None:
        self.folder = folder
        if kind == "file":
            self.store = folder / "queue"
            self.url = f"file://{self.store}"
            self._write_lock, self._worker_locks = self.store / "locks" / "write", self.store / "locks" / "workers"
        else:
            self.store = folder / "queue.db"
            self.url = f"sqlite:///{self.store}"
            self._write_lock, self._worker_locks = folder / "queue.db-lock", folder / "queue.db-locks"
        self.side = folder / "side.txt"
        self.all: list[Process] = []

    def storage(self) -> BaseStorage:
        return BaseStorage.from_url(self.url)

    def write_locked(self) -> bool:
        """Whether some process holds the store's write lock now."""
        descriptor = os.open(self._write_lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def worker_locks(self) -> list[Path]:
        """What shows that a worker lives; nothing after all have ended in good order."""
        return list(self._worker_locks.glob("*"))

    def start(self, name: str, *arguments: str) -> Process:
        process = Process([sys.executable, *arguments], self.folder, f"{name}-{len(self.all)}")
        self.all.append(process)
        return process

    def worker(self, concurrency: int = 1, url: str | None = None) -> Process:
        return self.start("worker", str(HERE / "fault_worker.py"), url or self.url, str(concurrency))

    def producer(self, seed: object, per_second: float, lease: float, url: str | None = None) -> Process:
        script = str(HERE / "fault_producer.py")
        return self.start("producer", script, url or self.url, str(self.side), str(seed), str(per_second), str(lease))

    def noted(self, word: str = "run") -> list[tuple[str, int, int]]:
        """Lines of the side file that begin with `word`: task id, attempt, pid."""
        if not self.side.exists():
            return []
        lines = (line.split() for line in self._whole_lines())
        return [(task, int(attempt), int(pid)) for found, task, attempt, pid in lines if found == word]

    def words(self) -> list[str]:
        return [line.split()[0] for line in self._whole_lines()]

    def _whole_lines(self) -> list[str]:
        """What stands in the side file, without a line that is being written at this moment."""
        text = self.side.read_text() if self.side.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def end(self) -> None:
        for process in self.all:
            process.end()
        for word in self.words():
            if word.startswith("child-"):
                _kill_if_there(int(word.removeprefix("child-")))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _kill_if_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """This one without omniq's own variables, with this folder to import the tasks from, and the one that it needs itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNIQ_")}
    paths = [str(HERE), str(HERE.parent), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
