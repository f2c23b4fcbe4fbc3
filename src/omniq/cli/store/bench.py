"""`omniq bench`: how fast is this store, on this machine, now?"""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.commands import command
from omniq.cli.output import JsonOption, print_json, print_table
from omniq.cli.stores import StoreOption, opened


@command
async def bench_command(
    tasks: Annotated[
        int, typer.Option("--tasks", metavar="N", min=10, max=1_000_000, help="How many tasks the longest part takes.")
    ] = 5000,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Measure how fast tasks are enqueued, picked up and run.

    Works in a queue of its own, omniq.bench, and deletes its tasks at the end; their events stay. Not while workers are on the
    store, since they would take part.

    Example: omniq bench --store sqlite:///omniq.db --tasks 20000
    """
    from omniq.cli.store.measuring import measure

    async with opened(store) as oq:
        figures = await measure(oq, tasks)
    if json:
        print_json(figures)
    else:
        print_table(
            ["WHAT", ">TASKS", ">PER SECOND", ">MEDIAN", ">P99"],
            [(f.what, f.tasks, f"{f.per_second:,.0f}", _ms(f.median_ms), _ms(f.p99_ms)) for f in figures],
        )


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f} ms"
