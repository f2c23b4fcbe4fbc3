"""`omniq top`: a full screen that shows what happens, until `q`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from omniq.cli.commands import run
from omniq.cli.parsing import seconds
from omniq.cli.stores import StoreOption
from omniq.errors import Invalid


def top_command(
    every: Annotated[str, typer.Option("--every", metavar="DURATION", help="How often to look.")] = "1s",
    store: StoreOption = None,
) -> None:
    """Watch the store live, on the whole screen; q quits.

    Queues with their rates, leased tasks with age and progress, workers, failures. If the store goes away, the screen says
    so and goes on when it is back. A narrow terminal shows fewer columns, first of all without those that matter least.

    Example: omniq top --every 2s
    """
    pause = seconds(every)
    if not 0.1 <= pause <= 3600:
        raise Invalid(f"--every {every}: the shortest time between two looks is 100ms")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Invalid("omniq top needs a terminal; for programs there is omniq queues --json")
    try:
        from omniq.cli.queues.top_loop import watch
    except ImportError as exc:  # Windows: its terminals are others
        raise Invalid("omniq top needs Linux or macOS; everywhere there is omniq queues") from exc

    run(watch(store, pause))
