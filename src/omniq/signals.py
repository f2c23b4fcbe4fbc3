"""SIGTERM and SIGINT in an event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

NUMBERS = (signal.SIGTERM, signal.SIGINT)


def listen(loop: asyncio.AbstractEventLoop, decide: Callable[[int], None]) -> None:
    """Call `decide` with the number of the signal, in the loop's next turn."""
    for number in NUMBERS:
        try:
            loop.add_signal_handler(number, decide, number)
        except NotImplementedError:  # loops of Windows know no signals
            signal.signal(number, lambda n, _: loop.call_soon_threadsafe(decide, n))
