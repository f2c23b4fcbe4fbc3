"""The tasks that the benchmarks run: none of them does anything (one fails), so that what is measured is the queue."""

import time


async def nothing(payload: str = "") -> None:
    pass


def nothing_in_a_thread(payload: str = "") -> None:
    pass


async def broken(payload: str = "") -> None:
    raise ValueError("it always fails")


async def when() -> float:
    """The moment at which the function started; on Linux the monotonic clock is the same in every process."""
    return time.monotonic()
