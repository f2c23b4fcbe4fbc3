"""What the checks of a `doctor` say, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import typer

from omniq.cli.exits import FAILED
from omniq.cli.output import clean, print_json, print_line


class Finding(msgspec.Struct, kw_only=True):
    """What one check says. `wrong` is a fault; `note` is only worth knowing."""

    check: str
    status: Literal["ok", "note", "wrong", "repaired"]
    message: str
    remedy: str = ""


def report(findings: Iterable[Finding], json: bool) -> None:
    """Show each finding as it comes, or all as one JSON document. Ends the command with code 1 when something is wrong."""
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if json:
            continue
        print_line(f"{finding.status:<9}{finding.check:<12}{clean(finding.message)}")
        if finding.remedy:
            print_line(f"{'':<21}{clean(finding.remedy)}")
    if json:
        print_json(found)
    if any(finding.status == "wrong" for finding in found):
        raise typer.Exit(FAILED)
