"""`omniq queues`: what each queue holds, and how fast tasks come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from omniq.cli.commands import command
from omniq.cli.output import AfterOption, JsonOption, LimitOption, next_page, print_json, print_line, print_table
from omniq.cli.parsing import short
from omniq.cli.stores import StoreOption, opened

if TYPE_CHECKING:
    from omniq.cli.queues.activity import Rates
    from omniq.operations import QueueCounts

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of a queue.")]


@command
async def queues_command(
    limit: LimitOption = 50, after: AfterOption = None, json: JsonOption = False, store: StoreOption = None
) -> None:
    """Show what each queue holds, and how fast tasks come and go.

    A number per state, the oldest task that waits, whether the queue is paused. RUN is how many functions run, as the workers
    said within the last seconds; LEASED is how many tasks the store counts as running: a worker holds short ones ahead of need,
    and clients that are no workers of omniq show only there. Rates are tasks per second over the last minute, or over as many
    seconds as the end of the event log reaches back; less than 10 of them give no rate.

    In JSON, busy is RUN and running is LEASED.

    Example: omniq queues

    Example: omniq queues --json | jq '.[] | select(.paused) | .queue'
    """
    from omniq.cli.queues.activity import busy_in, read_rates

    async with opened(store) as oq:
        counts, rates, now = await oq.counts(), await read_rates(oq.storage), oq.storage.clock()
        workers = await oq.workers()
    counts = sorted((c for c in counts if after is None or c.queue > after), key=lambda c: c.queue)
    counts, more = counts[:limit], len(counts) > limit
    if json:
        print_json([_fields(c, rates, busy_in(c, workers, now)) for c in counts])
    elif counts:
        print_table(COLUMNS, [_row(c, rates, busy_in(c, workers, now), now) for c in counts])
    else:
        print_line("no queues yet" if after is None else "no more queues")
    next_page(counts[-1].queue if more else None)


COUNTS = [">READY", ">SCHED", ">BLOCK", ">RUN", ">LEASED", ">DONE", ">FAIL", ">CANC"]
COLUMNS = ["QUEUE", *COUNTS, ">IN/S", ">OUT/S", ">OLDEST", "="]


def _row(c: QueueCounts, rates: Rates | None, busy: int | None, now_us: int) -> tuple[object, ...]:
    oldest = None if c.oldest_ready_us is None else short((now_us - c.oldest_ready_us) / 1e6)
    speeds = (None, None) if rates is None else (f"{rates.into(c.queue):.1f}", f"{rates.out_of(c.queue):.1f}")
    counts = (c.ready, c.scheduled, c.blocked, busy, c.running, c.done, c.dead, c.cancelled)
    return (c.queue, *counts, *speeds, oldest, "paused" if c.paused else "")


def _fields(c: QueueCounts, rates: Rates | None, busy: int | None) -> dict[str, Any]:
    from omniq.models import maybe_from_us

    fields = msgspec.structs.asdict(c)
    fields["busy"] = busy
    fields["oldest_ready"] = maybe_from_us(fields.pop("oldest_ready_us"))
    fields["rate_in"] = None if rates is None else round(rates.into(c.queue), 3)
    fields["rate_out"] = None if rates is None else round(rates.out_of(c.queue), 3)
    return fields
