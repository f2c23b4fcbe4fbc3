"""Copying a store into another, a page at a time, so that it can be cut short and gone on with."""

from __future__ import annotations

from omniq.cli.output import bar, count
from omniq.cli.paging import PAGE, event_pages, groups_of, stored_events, task_pages
from omniq.cli.queues.activity import AT_WORK_US, alive
from omniq.errors import Invalid, Refused
from omniq.models import Record
from omniq.operations import EventRow, Filter, QueueCounts, Saved
from omniq.storage.base import BaseStorage


class NotFit(Refused):
    """These two stores cannot be copied into one another now."""


async def check_stores(source: BaseStorage, destination: BaseStorage) -> None:
    """Refuse a copy that would lose or double work."""
    src, dst = await source.info(), await destination.info()
    if src.store_id == dst.store_id:
        raise Invalid("SRC and DST are the same store")
    if not destination.capabilities.restores:
        raise Invalid(f"{type(destination).__name__} cannot take tasks and events of another store: choose another DST")
    for name, storage in (("SRC", source), ("DST", destination)):
        workers = alive(await storage.workers(), storage.clock(), AT_WORK_US)
        if workers:
            raise NotFit(f"{count(len(workers), 'worker')} of {name} are alive ({workers[0].worker}): stop them first")
    # A copy that was cut short has the first tasks of SRC, so a look at the first page tells it from a store in use.
    theirs = (await destination.find(Filter(), None, PAGE, newest_first=False)).tasks
    for task in theirs:
        if await source.get(task.id) is None:
            raise NotFit(f"DST has tasks of its own, such as {task.id}: give an empty store, or the copy that was cut short")


class Copy:
    """One copy, and how far it is."""

    def __init__(self, source: BaseStorage, destination: BaseStorage, key_ttl_us: int) -> None:
        self._src, self._dst, self._key_ttl_us = source, destination, key_ttl_us
        self.tasks = self.there = self.results = self.events = 0

    async def run(self) -> None:
        total = sum(_all(c) for c in await self._src.counts())
        with bar("tasks", total) as advance:
            # Staged tasks are no part of it: they belong to their run until it is committed.
            async for page in task_pages(self._src, Filter()):
                await self._copy_tasks(page)
                advance(len(page))
        await self._copy_steering()
        await self._copy_events()

    async def _copy_tasks(self, page: list[Record]) -> None:
        results = await self._src.results([task.id for task in page])
        saved = [Saved(record=task, result=results.get(task.id)) for task in page]
        new = await self._dst.restore(saved, self._key_ttl_us)
        self.tasks += len(page)
        self.there += len(page) - new
        self.results += len(results)

    async def _copy_steering(self) -> None:
        for queue in await self._src.queues():
            if await self._src.is_paused(queue):
                await self._dst.pause(queue)
            async for group in groups_of(self._src, queue):
                # A group that nobody gave a limit has 1, and gets it with its first task.
                if group.limit > 1:
                    await self._dst.set_group_limit(queue, group.group, group.limit)

    # -- events ------------------------------------------------------------------------------------

    async def _copy_events(self) -> None:
        finest = max(self._src.capabilities.resolution_us, self._dst.capabilities.resolution_us)
        last = {shard: _essence(row, finest) for shard, row in (await _last_events(self._dst)).items()}
        with bar("events", await stored_events(self._src)) as advance:
            for shard in await self._src.event_shards():
                async for rows in event_pages(self._src, shard):
                    self.events += len(rows)
                    advance(len(rows))
                    new = [row for row in rows if _is_new(row, last, finest)]
                    if new:
                        await self._dst.restore_events(new)
        # Every event that DST had was met in SRC, unless somebody else wrote it.
        if last:
            raise NotFit("DST has events that SRC does not have: it was used meanwhile; begin anew with an empty store")

    # -- comparing ---------------------------------------------------------------------------------

    async def differences(self) -> list[str]:
        """Returns a sentence for each difference between the two stores."""
        found: list[str] = []
        theirs = {c.queue: c for c in await self._dst.counts()}
        for ours in await self._src.counts():
            there = theirs.pop(ours.queue, None) or QueueCounts(queue=ours.queue)
            if _compared(ours) != _compared(there):
                found.append(f"queue {ours.queue!r} differs: SRC {_compared(ours)}, DST {_compared(there)}")
        found += [f"queue {name!r} is only in DST" for name, c in theirs.items() if _all(c)]
        results = 0
        async for page in task_pages(self._dst, Filter()):
            results += len(await self._dst.results([task.id for task in page]))
        if results != self.results:
            found.append(f"SRC has {self.results} results, DST has {results}")
        events = await stored_events(self._dst)
        if events != self.events:
            found.append(f"SRC has {self.events} events, DST has {events}")
        return found


def _compared(c: QueueCounts) -> dict[str, int]:
    """Waiting and running tasks are counted as one: time moves them, and a copy is not running. Staged tasks are not copied."""
    waiting = c.waiting + c.running
    return {"unended": waiting, "done": c.done, "dead": c.dead, "cancelled": c.cancelled}


def _all(c: QueueCounts) -> int:
    return sum(_compared(c).values())


async def _last_events(storage: BaseStorage) -> dict[str, EventRow]:
    """The newest event of each shard. A shard is a queue, or `""` for all of them."""
    last: dict[str, EventRow] = {}
    for shard in await storage.event_shards():
        if shard.last >= shard.first:
            for row in await storage.events(shard.name, shard.last - 1, 1):
                last[shard.name] = row
    return last


def _is_new(row: EventRow, last: dict[str, tuple[object, ...]], finest: int) -> bool:
    """Whether an event of the source is newer than all that its shard has in the destination.

    `last` has the newest event of each shard of the destination, until the source has reached it.
    """
    shard = row.queue if row.queue in last else ""
    if shard not in last:
        return True
    if last[shard] == _essence(row, finest):
        del last[shard]
    return False


def _essence(row: EventRow, finest: int) -> tuple[object, ...]:
    """Returns the parts by which an event is the same in two stores, as fine as both of them keep time."""
    return (row.ts_us // finest, row.task_id, row.event, row.attempt, row.queue, row.data)
