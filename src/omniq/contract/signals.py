"""What SIGTERM and SIGINT mean to a consumer.

|               | drain=True                  | drain=False                 |
|---------------|-----------------------------|-----------------------------|
| SIGTERM       | finish the jobs, return     | the same                    |
| SIGINT once   | finish the jobs, return     | hand the jobs back, return  |
| SIGINT twice  | hand the jobs back, return  | as once                     |
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

from omniq.signals import NUMBERS, listen


class Decision:
    """Turns signals into one of two calls: end in good order, or leave now."""

    def __init__(self, drain: bool, stop: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._drain, self._stop, self._abandon = drain, stop, abandon
        self._stopping = False

    def __call__(self, number: int) -> None:
        if number == signal.SIGINT and (self._stopping or not self._drain):
            self._abandon()
        else:
            self._stopping = True
            self._stop()


@contextlib.contextmanager
def caught(decide: Callable[[int], None], *, wanted: bool = True) -> Generator[None, None, None]:
    """In the main thread: signals go to `decide`, between two instructions of whatever runs. Elsewhere nothing changes."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        decide(number)

    before = {number: signal.signal(number, handle) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def caught_on_loop(decide: Callable[[int], None], *, wanted: bool = True) -> Generator[None, None, None]:
    """The same on an event loop in the main thread, where signals wait for the loop's next turn."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in NUMBERS}
    listen(loop, decide)
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            signal.signal(number, handler)
