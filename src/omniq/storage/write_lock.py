"""The lock that decides which process writes next, and who waits for one that never lets go.

Nothing but its death takes a lock from a process. One that is stopped (SIGSTOP, a debugger) keeps it, so that nobody can write.
Whoever waits for that hears of it, and which process it is. The wait itself cannot be broken off: a watcher tells the others.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from omniq.errors import StoreUnavailable
from omniq.storage import locks

STOPPED_S = 1.0  # so long a stopped process may hold the lock before those who wait are told
PATIENCE_S = 60.0  # and one that runs: a large backup of a folder, the first reading of one
LOOK_S = 0.25


class Contended(Exception):
    """Somebody else has the lock, and this thread must not wait for it."""


class WriteLock:
    """Takes a `flock`. `on_stuck` is called, in a thread of its own, again and again while there is no end to the wait."""

    def __init__(self, where: str, on_stuck: Callable[[StoreUnavailable], None]) -> None:
        self._where, self._on_stuck = where, on_stuck
        self._waiting: tuple[float, int] | None = None  # since when, and for which descriptor

    def take(self, descriptor: int, wait: bool = True) -> None:
        try:
            locks.flock(descriptor, locks.EXCLUSIVE | locks.AT_ONCE)
            return
        except BlockingIOError:
            if not wait:
                raise Contended from None
        self._waiting = (time.monotonic(), descriptor)
        _watch(self)
        try:
            locks.flock(descriptor, locks.EXCLUSIVE)
        finally:
            self._waiting = None

    @property
    def waiting(self) -> bool:
        return self._waiting is not None

    def stuck(self) -> StoreUnavailable | None:
        """Why there is no end to the wait; None while there may be."""
        waiting = self._waiting
        if waiting is None or (waited_s := time.monotonic() - waiting[0]) < STOPPED_S:
            return None
        pid = holder(waiting[1])
        if pid is not None and is_stopped(pid):
            told = f"process {pid} is stopped and holds the write lock: let it go on (kill -CONT {pid}) or end it"
        elif waited_s >= PATIENCE_S:
            who = "another process" if pid is None else f"process {pid}"
            told = f"{who} has held the write lock for {waited_s:.0f} s: see what it does, or end it"
        else:
            return None
        return StoreUnavailable(f"{self._where}: {told}; nothing of this call was stored")

    def look(self) -> None:
        error = self.stuck()
        if error is not None:
            self._on_stuck(error)


def holder(descriptor: int) -> int | None:
    """The process that holds the `flock` of an open file, where the system tells (Linux)."""
    try:
        found = os.fstat(descriptor)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    flocks = [words for words in map(str.split, lines) if words[1:2] == ["FLOCK"] and int(words[4]) > 0]
    here = [words for words in flocks if words[5] == place]
    return int(here[0][4]) if here else None


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


# -- the watcher -----------------------------------------------------------------------------------

_watched: weakref.WeakSet[WriteLock] = weakref.WeakSet()
_gate = threading.Lock()
_watcher_of = 0  # the process that has the thread: a forked child begins without


def _watch(lock: WriteLock) -> None:
    global _watcher_of
    with _gate:
        _watched.add(lock)
        if _watcher_of != os.getpid():
            _watcher_of = os.getpid()
            threading.Thread(target=_look_on, name="omniq-lock-watcher", daemon=True).start()


def _look_on() -> None:
    """As long as somebody waits."""
    global _watcher_of
    pause = threading.Event()
    while True:
        pause.wait(LOOK_S)
        with _gate:
            waiting = [lock for lock in _watched if lock.waiting]
            if not waiting:
                _watcher_of = 0
                return
        for lock in waiting:
            lock.look()
