"""SIGTERM and SIGINT, in an event loop and without one. Afterwards the handlers from before are in place again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def caught(decide: Callable[[int], None], *, wanted: bool = True) -> Generator[None, None, None]:
    """In the main thread, call `decide` as soon as a signal comes, in the middle of other code. Elsewhere do nothing."""
    # Python lets only the main thread set handlers.
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
    _listen(loop, decide)
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            # Taking a handler from the loop leaves the default one, not the one before.
            signal.signal(number, handler)


def _listen(loop: asyncio.AbstractEventLoop, decide: Callable[[int], None]) -> None:
    """Call `decide` with the number of the signal, in the loop's next turn."""
    for number in NUMBERS:
        try:
            loop.add_signal_handler(number, decide, number)
        except NotImplementedError:  # loops of Windows know no signals
            signal.signal(number, lambda n, _: loop.call_soon_threadsafe(decide, n))
