"""`omniq doctor`: is the store well, and if not, what helps?"""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.findings import FailOn, FailOnOption, report
from omniq.cli.output import JsonOption
from omniq.cli.stores import StoreOption, run


def doctor_command(
    repair: Annotated[bool, typer.Option("--repair", help="Set right what is safe: counters, lost leases, cascades.")] = False,
    fail_on: FailOnOption = FailOn.WRONG,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Check the store, and say what helps.

    Version, integrity, clock, expired leases, orphans, stuck groups, queues, dead letters, disk space, file system.

    Exit code 0 when all is well, 1 when something is wrong; each finding comes with its remedy. Warnings are no faults of the
    store: dead letters, tasks that wait without a worker, a paused queue with tasks that could run. With --fail-on warning
    they give exit code 1 too.

    Example: omniq doctor --repair

    Example: omniq doctor --fail-on warning --json
    """
    from omniq.cli.examination import examine

    report(run(lambda: examine(store, repair)), json, fail_on)
