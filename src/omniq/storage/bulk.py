"""A store for programs that move a great many tasks at once: synchronous, opened by its URL, nothing to pickle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from omniq.operations import Shard, StoreInfo
from omniq.portal import Portal
from omniq.storage.base import BaseStorage
from omniq.storage.scanning import BATCH, Range
from omniq.storage.tables import Columns, Condition, columns_of


def open_bulk(url: str, **options: Any) -> Bulk:
    """The bulk side of the store that a URL names; close it, or use it in a `with`."""
    return Bulk(BaseStorage.from_url(url, **options))


class Bulk:
    """Reading a store by ranges, and writing to it in staged runs."""

    def __init__(self, storage: BaseStorage) -> None:
        self.storage = storage
        self._portal = Portal()

    def __enter__(self) -> Self:
        self._portal.call(self.storage.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._portal.call(self.storage.close())
        self._portal.close()

    def info(self) -> StoreInfo:
        return self._portal.call(self.storage.info())

    # -- reading -----------------------------------------------------------------------------------

    def event_shards(self) -> list[Shard]:
        return self._portal.call(self.storage.event_shards())

    def ranges(self, table: str, parts: int = 1) -> list[Range]:
        """About `parts` ranges of a table, which any process may `scan` on its own."""
        columns_of(table)
        return self._portal.call(self.storage.ranges(table, parts))

    def scan(
        self, range: Range, columns: Sequence[str] | None = None, where: Sequence[Condition] = (), rows: int = BATCH
    ) -> Iterator[Columns]:
        """The rows of a range that meet every condition, as batches of columns.

        A task that is there all the while appears once (on Redis at least once: drop repeats by id).
        """
        names = [column.name for column in columns_of(range.table, columns)]
        columns_of(range.table, [condition.column for condition in where])
        batches = self.storage.scan(range, names, where, rows)
        while (batch := self._portal.call(_next(batches))) is not None:
            if batch[names[0]]:
                yield batch


async def _next(batches: Any) -> Columns | None:
    return await anext(batches, None)
