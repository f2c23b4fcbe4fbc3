"""`omniq doctor`: is the store well, and if not, what helps?"""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.check_results import FailOn, FailOnOption, report
from omniq.cli.commands import command
from omniq.cli.output import JsonOption
from omniq.cli.stores import StoreOption


@command
async def doctor_command(
    repair: Annotated[bool, typer.Option("--repair", help="Set right what is safe: counters, lost leases, cascades.")] = False,
    lake: Annotated[
        list[str] | None,
        typer.Option(
            "--lake", metavar="DIR", help="Whether this lake keeps up with the store too; repeatable.", show_default=False
        ),
    ] = None,
    fail_on: FailOnOption = FailOn.WRONG,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Check the store, and say what helps.

    Version, integrity, clock, expired leases, orphans, stuck groups, queues, dead letters, disk space, file system.

    Exit code 0 when all is well, 1 when something is wrong; each finding comes with its remedy. Warnings are no faults of the
    store: dead letters, tasks that wait without a worker, a paused queue with tasks that could run. With --fail-on warning
    they give exit code 1 too.

    With --lake it also looks whether a lake keeps up with the store: a warning when less than a third is left of the time or
    the number of events for which the store keeps what has not come in, and something wrong when events were purged before
    that. How much the store keeps is what this command's settings say: give it the OMNIQ_… variables of the workers.

    Example: omniq doctor --repair

    Example: omniq doctor --fail-on warning --json

    Example: omniq doctor --lake history --fail-on warning
    """
    from omniq.cli.store.checks import examine

    report(await examine(store, repair, lake or ()), json, fail_on)
