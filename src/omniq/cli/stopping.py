"""The end of commands that go on until they are told to stop: in good order at the first signal, at once at the second."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable

log = logging.getLogger("omniq.cli")


def stopper(
    stopping: asyncio.Event | threading.Event, begin: Callable[[], object], *, left: str = "unfinished tasks"
) -> Callable[[int], None]:
    """Returns a handler of signals: the first one calls `begin` and sets `stopping`, the second one leaves."""

    def on_signal(number: int) -> None:
        if stopping.is_set():
            leave(number, left)
        begin()
        stopping.set()

    return on_signal


def leave(number: int, left: str = "unfinished tasks") -> None:
    """End now, without tidying up: whoever sends a second signal does not want to wait for that."""
    log.warning("second signal: leaving now; %s come back by themselves", left)
    # A status line had hidden the cursor.
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()
    # No `finally`, no thread and no task is waited for; 128 + n is how shells tell of signal n.
    os._exit(128 + number)
