"""Waiting for a condition with a deadline, on a loop and off it."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 10.0
PAUSE_S = 0.002


async def eventually(condition: Callable[[], Any], within: float = DEADLINE_S) -> Any:
    """The first truthy answer of a function, plain or async; an AssertionError when time is up."""
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within} s: {inspect.getsource(condition).strip()}"
        await asyncio.sleep(PAUSE_S)


def wait_for(condition: Callable[[], Any], within: float = DEADLINE_S) -> Any:
    """The same from a plain function."""
    deadline = time.monotonic() + within
    pause = threading.Event()
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within} s: {inspect.getsource(condition).strip()}"
        pause.wait(PAUSE_S)
