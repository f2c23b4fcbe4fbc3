"""`omniq doctor`: is the store well, and if not, what helps?"""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.output import JsonOption
from omniq.cli.stores import StoreOption, run


def doctor_command(
    repair: Annotated[bool, typer.Option("--repair", help="Set right what is safe: counters, lost leases, cascades.")] = False,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Check the store, and say what helps.

    Version, integrity, clock, expired leases, orphans, stuck groups, queues that nobody serves, disk space, file system.

    Exit code 0 when all is well, 1 when something is wrong; each finding comes with its remedy. Notes are no faults.

    Example: omniq doctor --repair
    """
    from omniq.cli.examination import examine
    from omniq.cli.findings import report

    report(run(lambda: examine(store, repair)), json)
