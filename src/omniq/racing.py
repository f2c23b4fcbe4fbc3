"""Wait for whichever of several things comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first(*coroutines: Coroutine[Any, Any, object], timeout: float | None = None) -> list[bool]:
    """Return when the first of them ends, or time is up; which have ended. The others are cancelled.

    Raises what one that ended has raised.
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
        await asyncio.gather(*tasks, return_exceptions=True)
