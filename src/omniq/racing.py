"""Wait for whichever of several things comes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


async def first(*coroutines: Coroutine[Any, Any, object], timeout: float | None = None) -> list[bool]:
    """Wait until one of them ends or the time is over, and cancel the others. Returns for each whether it has ended.

    Raises the error of one that ended with an error.
    """
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return [task in done for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        # Waited for, so that none of them still runs when the caller goes on, and no error is left that nobody retrieves.
        await asyncio.gather(*tasks, return_exceptions=True)


async def woken(event: asyncio.Event, timeout: float | None) -> None:
    """Wait until the event is set or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
