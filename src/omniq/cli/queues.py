"""`omniq queues`, `omniq pause`, `omniq resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniq.cli.output import AfterOption, JsonOption, LimitOption, next_page, print_json, print_line, print_table
from omniq.cli.stores import StoreOption, opened, run
from omniq.cli.values import short

if TYPE_CHECKING:
    from omniq.cli.rates import Rates
    from omniq.operations import QueueCounts

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of a queue.")]


def queues_command(
    limit: LimitOption = 50, after: AfterOption = None, json: JsonOption = False, store: StoreOption = None
) -> None:
    """Show what each queue holds, and how fast tasks come and go.

    A number per state, the oldest task that waits, whether the queue is paused. Rates are tasks per second,
    over the last minute.

    Example: omniq queues

    Example: omniq queues --json | jq '.[] | select(.paused) | .queue'
    """
    from omniq.cli.rates import read_rates

    async def work() -> None:
        async with opened(store) as oq:
            counts, rates, now = await oq.counts(), await read_rates(oq.storage), oq.storage.clock()
        counts = sorted((c for c in counts if after is None or c.queue > after), key=lambda c: c.queue)
        counts, more = counts[:limit], len(counts) > limit
        if json:
            print_json([_fields(c, rates) for c in counts])
        elif counts:
            print_table(COLUMNS, [row(c, rates, now) for c in counts])
        else:
            print_line("no queues yet" if after is None else "no more queues")
        next_page(counts[-1].queue if more else None)

    run(work)


COUNTS = [">READY", ">SCHED", ">BLOCK", ">RUN", ">DONE", ">FAIL", ">CANC"]
COLUMNS = ["QUEUE", *COUNTS, ">IN/S", ">OUT/S", ">OLDEST"]


def row(c: QueueCounts, rates: Rates | None, now_us: int) -> tuple[object, ...]:
    oldest = None if c.oldest_ready_us is None else short((now_us - c.oldest_ready_us) / 1e6)
    speeds = (None, None) if rates is None else (f"{rates.into(c.queue):.1f}", f"{rates.out_of(c.queue):.1f}")
    name = f"{c.queue} (paused)" if c.paused else c.queue
    return (name, c.ready, c.scheduled, c.blocked, c.running, c.done, c.dead, c.cancelled, *speeds, oldest)


def _fields(c: QueueCounts, rates: Rates | None) -> dict[str, Any]:
    import msgspec

    from omniq.models import maybe_from_us

    fields = msgspec.structs.asdict(c)
    fields["oldest_ready"] = maybe_from_us(fields.pop("oldest_ready_us"))
    fields["rate_in"] = None if rates is None else round(rates.into(c.queue), 3)
    fields["rate_out"] = None if rates is None else round(rates.out_of(c.queue), 3)
    return fields


def pause_command(queue: QueueArgument, store: StoreOption = None) -> None:
    """Stop handing out tasks of a queue. Running ones go on, new ones are accepted and wait.

    A queue may be paused before its first task.

    Example: omniq pause mail
    """

    async def work() -> None:
        async with opened(store) as oq:
            was = await oq.is_paused(queue)
            await oq.pause(queue)
        print_line(f"queue {queue} was paused already" if was else f"paused queue {queue}")

    run(work)


def resume_command(queue: QueueArgument, store: StoreOption = None) -> None:
    """Hand out tasks of a paused queue again.

    Example: omniq resume mail
    """

    async def work() -> None:
        async with opened(store) as oq:
            was = await oq.resume(queue)
        print_line(f"resumed queue {queue}" if was else f"queue {queue} was not paused")

    run(work)
