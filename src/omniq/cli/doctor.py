"""`omniq doctor`: is the store well, and if not, what helps?"""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.exits import FAILED
from omniq.cli.output import JsonOption, clean, print_json, print_line
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

    findings = run(lambda: examine(store, repair))
    if json:
        print_json(findings)
    else:
        for finding in findings:
            print_line(f"{finding.status:<9}{finding.check:<12}{clean(finding.message)}")
            if finding.remedy:
                print_line(f"{'':<21}{clean(finding.remedy)}")
    if any(finding.status == "wrong" for finding in findings):
        raise typer.Exit(FAILED)
