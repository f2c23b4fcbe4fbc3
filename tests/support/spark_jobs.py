"""Functions that run on executors. A file per task keeps a line for each run, whichever process it was in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def note(path: str) -> int:
    """How often it was called for this path, with this time."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return runs(path)


def runs(path: str | Path) -> int:
    path = Path(path)
    return len(path.read_text().splitlines()) if path.exists() else 0


def once(path: str, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return note(path)


def at_second(path: str) -> int:
    if note(path) < 2:
        raise RuntimeError("try again")
    return 2


def never(path: str) -> None:
    note(path)
    raise RuntimeError("no luck")


def die(path: str) -> None:
    note(path)
    os.kill(os.getpid(), signal.SIGKILL)


def until(path: str, gate: str) -> str:
    """Says that it runs, and ends when the gate is there."""
    note(path)
    deadline = time.monotonic() + 120
    while not Path(gate).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return "through"
