"""Everything that a store holds of one kind, a page at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniq.models import Record
    from omniq.operations import EventRow, Filter, GroupInfo, Shard
    from omniq.storage.base import BaseStorage

PAGE = 500


async def task_pages(storage: BaseStorage, filter: Filter, size: int = PAGE) -> AsyncIterator[list[Record]]:
    """The tasks that fit a filter, in the order in which they were made: blockers come before the tasks that they block."""
    cursor = None
    while True:
        page = await storage.find(filter, cursor, size, newest_first=False)
        # A page may be empty and not the last: a search for rare tasks is cut into parts.
        if page.tasks:
            yield page.tasks
        cursor = page.cursor
        if cursor is None:
            return


async def groups_of(storage: BaseStorage, queue: str) -> AsyncIterator[GroupInfo]:
    cursor = None
    while True:
        page, cursor = await storage.groups(queue, cursor, 1000)
        for group in page:
            yield group
        if cursor is None:
            return


async def event_pages(storage: BaseStorage, shard: Shard, size: int = PAGE) -> AsyncIterator[list[EventRow]]:
    """The events of a shard, oldest first, up to the last one when the shard was asked for."""
    after = shard.first - 1
    while after < shard.last:
        rows = await storage.events(shard.name, after, size, shard.last)
        if not rows:
            return
        yield rows
        after = rows[-1].seq


async def stored_events(storage: BaseStorage) -> int:
    return sum(shard.last - shard.first + 1 for shard in await storage.event_shards())
