"""`omniq purge`: delete what ended long ago, before its own time is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.commands import command
from omniq.cli.output import count, print_line
from omniq.cli.parsing import seconds
from omniq.cli.stores import StoreOption, opened
from omniq.cli.tasks.selection import DryRunOption

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

BATCH = 5000
# Longer than any store is old: for what `purge` must leave alone and cannot be told to.
FOREVER_US = 1 << 60


@command
async def purge_command(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="How long ago they ended: 12h, 30d.", show_default=False)
    ],
    events: Annotated[bool, typer.Option("--events", help="Delete events of that age, too.")] = False,
    dry_run: DryRunOption = False,
    store: StoreOption = None,
) -> None:
    """Delete tasks that ended long ago, with their results. Dead letters are among them.

    Workers do this by themselves when the result_ttl of a task is over; this is for sooner. Of a task that goes on, such as
    one with an interval, only the result is deleted.

    Example: omniq purge --older-than 30d --events --dry-run
    """
    age = timedelta(seconds=seconds(older_than))
    edge = datetime.now(UTC) - age
    async with opened(store) as oq:
        storage = oq.storage
        if dry_run:
            ended = await _count_ended(storage, edge)
            old = await _count_events(storage, age) if events else 0
        else:
            ended = await storage.purge_results(edge)
            old = await _purge_events(storage, age) if events else 0
    gone = count(ended, "result with its ended task", "results with their ended tasks")
    said = f"{'would delete' if dry_run else 'deleted'} {gone}"
    print_line(said + (f", and {count(old, 'event')}" if events else ""))


async def _count_ended(storage: BaseStorage, edge: datetime) -> int:
    from omniq.cli.paging import task_pages
    from omniq.models import to_us
    from omniq.operations import Filter

    return sum([len(tasks) async for tasks in task_pages(storage, Filter(finished_to_us=to_us(edge)), BATCH)])


async def _count_events(storage: BaseStorage, age: timedelta) -> int:
    from omniq.cli.paging import event_pages

    edge_us = storage.clock() - round(age.total_seconds() * 1e6)
    found = 0
    for shard in await storage.event_shards():
        async for rows in event_pages(storage, shard, BATCH):
            old = sum(row.ts_us <= edge_us for row in rows)
            found += old
            # What comes after is younger.
            if old < len(rows):
                break
    return found


async def _purge_events(storage: BaseStorage, age: timedelta) -> int:
    """Purge with a retention that is infinite for everything but events. What is past its own time goes as well, as always."""
    from omniq.cli.paging import stored_events
    from omniq.operations import Retention

    age_us = round(age.total_seconds() * 1e6)
    keep = Retention(dead_us=None, events_us=age_us, events_max=None, workers_us=FOREVER_US, limits_us=None)
    gone = 0
    while True:
        before = await stored_events(storage)
        await storage.purge(keep, limit=BATCH)
        went = before - await stored_events(storage)
        gone += max(went, 0)
        if went <= 0:
            return gone
