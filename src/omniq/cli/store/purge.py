"""`omniq purge`: delete what ended long ago, before its own time is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.output import count, print_line
from omniq.cli.parsing import seconds
from omniq.cli.stores import StoreOption, opened, run
from omniq.cli.tasks.selection import DryRunOption

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

BATCH = 5000
FOREVER_US = 1 << 60


def purge_command(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="How long ago they ended: 12h, 30d.", show_default=False)
    ],
    events: Annotated[bool, typer.Option("--events", help="Delete events that are as old, too.")] = False,
    dry_run: DryRunOption = False,
    store: StoreOption = None,
) -> None:
    """Delete tasks that ended long ago, with their results. Dead letters are among them.

    Workers do this by themselves when the result_ttl of a task is over; this is for sooner. Of a task that goes on, such as
    one with an interval, only the result is deleted.

    Example: omniq purge --older-than 30d --events --dry-run
    """
    age = timedelta(seconds=seconds(older_than))

    async def work() -> None:
        async with opened(store) as oq:
            storage = oq.storage
            edge = datetime.now(UTC) - age
            if dry_run:
                ended = await _count_ended(storage, edge)
                old = await _count_events(storage, age) if events else 0
            else:
                ended = await storage.purge_results(edge)
                old = await _purge_events(storage, age) if events else 0
        gone = count(ended, "result with its ended task", "results with their ended tasks")
        said = f"{'would delete' if dry_run else 'deleted'} {gone}"
        print_line(said + (f", and {count(old, 'event')}" if events else ""))

    run(work)


async def _count_ended(storage: BaseStorage, edge: datetime) -> int:
    from omniq.models import to_us
    from omniq.operations import Filter

    found, cursor = 0, None
    while True:
        page = await storage.find(Filter(finished_to_us=to_us(edge)), cursor, BATCH)
        found += len(page.tasks)
        cursor = page.cursor
        if cursor is None:
            return found


async def _count_events(storage: BaseStorage, age: timedelta) -> int:
    edge = storage.clock() - round(age.total_seconds() * 1e6)
    found = 0
    for shard in await storage.event_shards():
        after = shard.first - 1
        while after < shard.last:
            rows = await storage.events(shard.name, after, BATCH, shard.last)
            old = [row for row in rows if row.ts_us <= edge]
            found += len(old)
            if not rows or len(old) < len(rows):
                break
            after = rows[-1].seq
    return found


async def _purge_events(storage: BaseStorage, age: timedelta) -> int:
    """Events have one clock for all queues; nothing else is touched but what is past its own time anyway."""
    from omniq.operations import Retention

    age_us = round(age.total_seconds() * 1e6)
    keep = Retention(dead_us=None, events_us=age_us, events_max=None, workers_us=FOREVER_US, limits_us=None)
    gone = 0
    while True:
        before = await _stored_events(storage)
        await storage.purge(keep, limit=BATCH)
        went = before - await _stored_events(storage)
        gone += max(went, 0)
        if went <= 0:
            return gone


async def _stored_events(storage: BaseStorage) -> int:
    return sum(shard.last - shard.first + 1 for shard in await storage.event_shards())
