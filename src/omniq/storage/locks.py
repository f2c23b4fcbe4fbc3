"""Locks on files that the kernel lets go when their holder dies. Nothing else imports fcntl, which Windows does not have.

A `flock` belongs to an open file, and a forked child shares it; a `lockf` belongs to a process, and goes when the process
closes any descriptor of the file.
"""

from __future__ import annotations

from typing import Any

from omniq.errors import StoreUnavailable

try:
    import fcntl
except ImportError:
    fcntl = None

SHARED, EXCLUSIVE, AT_ONCE, FREE = 1, 2, 4, 8  # the same on Linux and macOS


def needed() -> Any:
    """Raise `StoreUnavailable` on a system that has none."""
    if fcntl is None:
        raise StoreUnavailable("this system has no file locks that omniq can use: keep tasks in Redis, or in memory for tests")
    return fcntl


def flock(descriptor: int, how: int) -> None:
    needed().flock(descriptor, how)


def lockf(descriptor: int, how: int) -> None:
    needed().lockf(descriptor, how)
