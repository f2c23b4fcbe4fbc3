"""A file store with one call more: it shows what no public call does, to tests that compare all of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from omniq.storage.file import FileStorage
from omniq.storage.file.writer import FileSection

T = TypeVar("T")


class InsideStorage(FileStorage):
    """Written as the author of a driver adds a call."""

    async def inside(self, work: Callable[[FileSection], T]) -> T:
        """Carry out a piece of work while nobody else works on the store."""
        return await self._do(work)
