"""The real command in a process of its own, on a store of each kind that other processes can see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from omniq import OmniQ
from support.forks import Python, run
from support.terminal import Terminal
from support.waiting import wait_for

JOBS = '''
import os
import time
from pathlib import Path

import omniq


def add(a, b=0):
    return a + b


def boom(text="no luck"):
    raise RuntimeError(text)


def pid(seconds=0.0):
    time.sleep(seconds)
    return os.getpid()


def wait_for(path):
    """Says that it runs, and ends when a file is there."""
    omniq.current_task().progress(3, 4, note="three of four")
    Path(path + ".runs").touch()
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return "through"


def die():
    os.kill(os.getpid(), 9)


def grow():
    global kept
    kept = bytearray(os.urandom(1)) * 300_000_000
    return os.getpid()


@omniq.task(name="send-mail", queue="mail", max_retries=7)
def send_mail(to, *, subject="hello"):
    return f"{subject} to {to}"
'''


class Ended:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def last(self) -> str:
        """The last line of stdout: the id that enqueue prints."""
        return self.out.splitlines()[-1]

    def json(self) -> Any:
        return json.loads(self.out)

    def sentence(self) -> str:
        """What it said on stderr, which must be one line and no traceback."""
        assert "Traceback" not in self.err, self.err
        (line,) = self.err.splitlines()
        assert line.startswith("omniq: "), line
        return line.removeprefix("omniq: ")


class Shell:
    """Runs `omniq` in a folder, on one store."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMNIQ_", "COLUMNS"))}
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self._started: list[Python] = []

    def command(self, *words: str, store: bool = True) -> list[str]:
        given = ["--store", self.url] if store and "--store" not in words else []
        return [sys.executable, "-m", "omniq", *words, *given]

    def __call__(self, *words: str, store: bool = True, input: str = "", within: float = 60, **environment: str) -> Ended:
        command, env = self.command(*words, store=store), {**self.environment, **environment}
        done = run(command, cwd=self.folder, env=env, input=input, timeout=within)
        return Ended(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str, **options: Any) -> Ended:
        done = self(*words, **options)
        assert done.code == 0, done.err
        return done

    def enqueue(self, *words: str) -> str:
        return self.ok("enqueue", *words).last

    def put(self) -> str:
        """A store with one waiting task, made without a process of its own."""
        with self.queue() as oq:
            return oq.enqueue("jobs:add", 1)

    def work(self, *options: str) -> Ended:
        """Run all tasks that can run now."""
        return self.ok("worker", "jobs", "--drain-and-exit", *options)

    def start(self, *words: str, store: bool = True, **options: Any) -> Python:
        """A command that goes on while the test does; its output goes to files `out` and `err` unless pipes are asked for."""
        given: dict[str, Any] = {"stderr": (self.folder / "err").open("a"), "stdin": subprocess.DEVNULL, **options}
        started = Python(
            self.command(*words, store=store),
            cwd=self.folder,
            env=self.environment,
            text=True,
            **({"stdout": (self.folder / "out").open("a")} | given),
        )
        self._started.append(started)
        return started

    @property
    def said(self) -> str:
        """What started commands have said on stderr so far."""
        path = self.folder / "err"
        return path.read_text() if path.exists() else ""

    def until_said(self, text: str) -> None:
        try:
            wait_for(lambda: text in self.said, within=30)
        except AssertionError:
            raise AssertionError(f"not said within 30 s: {text!r}; but:\n{self.said}") from None

    def interrupt(self, started: Python, number: int = signal.SIGINT) -> int:
        started.send_signal(number)
        return started.wait(30)

    def terminal(self, *words: str, store: bool = True, columns: int = 120, lines: int = 40) -> Terminal:
        return Terminal(self.command(*words, store=store), self.folder, self.environment, columns, lines)

    def queue(self) -> OmniQ:
        return OmniQ.from_url(self.url)

    def close(self) -> None:
        for started in self._started:
            if started.poll() is None:
                started.kill()
            started.wait()
            for pipe in (started.stdin, started.stdout, started.stderr):
                if pipe is not None:
                    pipe.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def url_of(kind: str, path: Path) -> str:
    return f"sqlite:///{path}.db?durability=process" if kind == "sqlite" else f"file://{path}?durability=process"
