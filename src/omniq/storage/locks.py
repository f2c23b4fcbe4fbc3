"""Locks on files that the kernel lets go when their holder dies, and who waits for one that never does.

A `flock` belongs to an open file, and a forked child shares it; a `lockf` belongs to a process, and goes when the process
closes any descriptor of the file. Nothing else imports fcntl, which Windows does not have.

Nothing but its death takes the write lock from a process. One that is stopped (SIGSTOP, a debugger) keeps it, so that nobody
can write. Whoever waits for that hears of it, and which process it is. The wait itself cannot be broken off: a watcher tells
the others.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omniq.errors import StoreUnavailable

try:
    import fcntl
except ImportError:
    fcntl = None

SHARED, EXCLUSIVE, AT_ONCE, FREE = 1, 2, 4, 8  # the same on Linux and macOS
STOPPED_S = 1.0  # so long a stopped process may hold the lock before those who wait are told
PATIENCE_S = 60.0  # and one that runs: a large backup of a folder, the first reading of one
LOOK_S = 0.25  # between two looks of the watcher


def needed() -> Any:
    """Returns the module of locks. Raises `StoreUnavailable` on a system that has none."""
    if fcntl is None:
        raise StoreUnavailable("this system has no file locks that omniq can use: keep tasks in Redis, or in memory for tests")
    return fcntl


def flock(descriptor: int, how: int) -> None:
    needed().flock(descriptor, how)


def lockf(descriptor: int, how: int) -> None:
    needed().lockf(descriptor, how)


# -- the write lock --------------------------------------------------------------------------------


class Contended(Exception):
    """Somebody else has the lock, and this thread must not wait for it."""


class WriteLock:
    """Takes a `flock`. `on_stuck` is called, in a thread of its own, again and again while there is no end to the wait."""

    def __init__(self, where: str, on_stuck: Callable[[StoreUnavailable], None]) -> None:
        self._where, self._on_stuck = where, on_stuck
        self._waiting: tuple[float, int] | None = None  # since when, and for which descriptor

    def take(self, descriptor: int, wait: bool = True) -> None:
        try:
            flock(descriptor, EXCLUSIVE | AT_ONCE)  # mostly it is free, and then nobody need watch
            return
        except BlockingIOError:
            if not wait:
                raise Contended from None
        self._waiting = (time.monotonic(), descriptor)
        _watch(self)
        try:
            flock(descriptor, EXCLUSIVE)
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
        # Before it stands the name of the program in parentheses, which may have blanks and parentheses in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


# -- the watcher -----------------------------------------------------------------------------------

# Weak: a lock goes with its store.
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
    """Look at the locks as long as somebody waits for one."""
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
