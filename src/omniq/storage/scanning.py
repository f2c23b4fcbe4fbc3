"""Reading a store in bulk, by ranges that any process can read on its own, written once over the looking calls."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.models import Record
from omniq.operations import EventRow, GroupInfo, Shard
from omniq.storage.tables import Attempt, Columns, Condition, Thing, batch_of, visible

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

BATCH = 10_000  # rows; Spark spends less on many rows in few batches
_ENDS = frozenset({"succeeded", "retried", "failed", "expired", "released", "cancelled"})
_data = msgspec.json.Decoder(dict[str, Any])


class Range(msgspec.Struct, frozen=True):
    """A part of a table: what a shard has after `after`, up to `upto`. Of attempts: those of every `parts`-th task."""

    table: str
    shard: str = ""
    after: int = 0
    upto: int = 0
    part: int = 0
    parts: int = 1


async def ranges_of(storage: BaseStorage, table: str, parts: int) -> list[Range]:
    """About `parts` ranges that together hold everything that the table has now, and nothing twice."""
    if table in ("queues", "groups"):
        return [Range(table)]
    if table == "attempts":  # the events of one task must meet in one place
        shards = await storage.event_shards()
        return [Range(table, s.name, s.first - 1, s.last, n, parts) for s in shards for n in range(parts)]
    return split(table, await (storage.event_shards() if table == "events" else storage.task_shards()), parts)


def split(table: str, shards: Sequence[Shard], parts: int) -> list[Range]:
    """Cut stretches of numbers into about `parts` ranges of equal length."""
    whole = sum(max(shard.last - shard.first + 1, 0) for shard in shards)
    # Of numbers and not of rows, so that nothing has to be counted; numbers of deleted tasks make a range lighter.
    step = max(-(-whole // max(parts, 1)), 1)
    return [
        Range(table, shard.name, after, min(after + step, shard.last))
        for shard in shards
        for after in range(shard.first - 1, shard.last, step)
    ]


async def scan_range(
    storage: BaseStorage, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int = BATCH
) -> AsyncIterator[Columns]:
    """The rows of a range as column batches. No read transaction stays open between two of them."""
    things = _THINGS[range.table](storage, range, rows)
    async for batch in things:
        yield batch_of(range.table, batch, columns, where)


async def _tasks(storage: BaseStorage, range: Range, rows: int) -> AsyncIterator[Sequence[Record]]:
    after = range.after
    while after < range.upto:
        page, after = await storage.task_page(range.shard, after, range.upto, rows)
        yield [task for task in page if visible(task)]


async def _results(storage: BaseStorage, range: Range, rows: int) -> AsyncIterator[Sequence[Thing]]:
    async for tasks in _tasks(storage, range, rows):
        yield list((await storage.results([task.id for task in tasks])).values())


async def _events(storage: BaseStorage, range: Range, rows: int) -> AsyncIterator[Sequence[EventRow]]:
    after = range.after
    while after < range.upto:
        page = await storage.events(range.shard, after, rows, range.upto)
        if not page:
            break
        yield page
        after = page[-1].seq


async def _attempts(storage: BaseStorage, range: Range, rows: int) -> AsyncIterator[Sequence[Attempt]]:
    open_ones: dict[str, Attempt] = {}
    async for page in _events(storage, range, rows):
        ended: list[Attempt] = []
        for event in page:
            # Not `hash`, which differs between processes: the parts may be read by several.
            if zlib.crc32(event.task_id.encode()) % range.parts != range.part:
                continue
            if event.event == "started":
                open_ones[event.task_id] = _begun(event)
            elif event.event in _ENDS:
                attempt = open_ones.pop(event.task_id, None)
                if attempt is not None:
                    ended.append(_ended(attempt, event))
        yield ended
    # A run that goes on is an attempt without an end.
    yield list(open_ones.values())


def _begun(event: EventRow) -> Attempt:
    return Attempt(
        task_id=event.task_id,
        queue=event.queue,
        name=event.name,
        group=event.group,
        attempt=event.attempt,
        worker=event.worker,
        enqueued_at_us=event.enqueued_at_us,
        due_us=event.due_us,
        started_at_us=event.ts_us,
    )


def _ended(attempt: Attempt, event: EventRow) -> Attempt:
    attempt.outcome, attempt.finished_at_us = event.event, event.ts_us
    if event.data is not None:
        data = _data.decode(event.data)
        error: dict[str, str] = data.get("error") or {}
        attempt.run_us, attempt.error_type, attempt.error = data.get("ran_us"), error.get("type"), error.get("message")
    return attempt


async def _queues(storage: BaseStorage, range: Range, rows: int) -> AsyncIterator[Sequence[Thing]]:
    yield await storage.counts()


async def _groups(storage: BaseStorage, range: Range, rows: int) -> AsyncIterator[Sequence[GroupInfo]]:
    for queue in await storage.queues():
        cursor: str | None = None
        while True:
            page, cursor = await storage.groups(queue, cursor, rows)
            yield page
            if cursor is None:
                break


_THINGS: dict[str, Any] = {
    "tasks": _tasks,
    "results": _results,
    "events": _events,
    "attempts": _attempts,
    "queues": _queues,
    "groups": _groups,
}
