"""The integer ids of the protocol, from the store's counter."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from omniq.storage.base import BaseStorage

# So many turns that follow each other so quickly are load. A burst of a few is none: ids would have gaps for nothing.
BUSY_S = 0.05
BUSY_TURNS = 16
# How many turns of the present size to fetch ahead under load.
AHEAD = 4
MAX_AHEAD = 20_000


class TaskNumbers:
    """Takes only the numbers that are needed, so that ids have no gaps. Under load it takes more, to save commits."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._ranges: deque[range] = deque()
        self._have = 0
        self._streak = 0
        self._last = 0.0
        self._coming: asyncio.Task[None] | None = None

    async def take(self, n: int) -> list[int]:
        """The next `n` numbers, in order."""
        now = time.monotonic()
        self._streak = self._streak + 1 if now - self._last < BUSY_S else 0
        while self._have < n:
            if self._coming is not None:
                await self._coming
            else:
                await self._fetch(n - self._have)
        taken = self._cut(n)
        self._last = time.monotonic()
        if self._streak >= BUSY_TURNS and self._have < n and self._coming is None:
            self._coming = asyncio.get_running_loop().create_task(self._fetch(min(AHEAD * n, MAX_AHEAD)))
            self._coming.add_done_callback(_retrieve)  # if it failed, the next call asks again and hears why
        return taken

    def _cut(self, n: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < n:
            first = self._ranges.popleft()
            wanted = n - len(taken)
            taken += first[:wanted]
            if len(first) > wanted:
                self._ranges.appendleft(first[wanted:])
        self._have -= n
        return taken

    async def _fetch(self, n: int) -> None:
        try:
            first = await self._storage.allocate_ids(n)
            self._ranges.append(range(first, first + n))
            self._have += n
        finally:
            self._coming = None

    async def close(self) -> None:
        if self._coming is not None:
            await asyncio.gather(self._coming, return_exceptions=True)


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
