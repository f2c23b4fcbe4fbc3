"""What the checks of a `doctor` say, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import typer

from omniq.cli.exits import FAILED
from omniq.cli.output import print_json, print_line


class Finding(msgspec.Struct, kw_only=True):
    """What one check says.

    `wrong` is a fault. `warning` is none, and yet somebody should see to it. `note` is only worth knowing.
    """

    check: str
    status: Literal["ok", "note", "warning", "wrong", "repaired"]
    message: str
    remedy: str = ""


class FailOn(StrEnum):
    """From which level on a doctor ends with code 1."""

    WARNING = "warning"
    WRONG = "wrong"


FailOnOption = Annotated[
    FailOn,
    typer.Option(
        "--fail-on", metavar="LEVEL", case_sensitive=False, help="End with code 1 from this level on: wrong, or warning."
    ),
]
_FAILING = {FailOn.WARNING: ("warning", "wrong"), FailOn.WRONG: ("wrong",)}


def report(findings: Iterable[Finding], json: bool, fail_on: FailOn = FailOn.WRONG) -> None:
    """Show each finding as it comes, or all as one JSON document. Ends the command with code 1 when one is of that level."""
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if json:
            continue
        print_line(f"{finding.status:<9}{finding.check:<12}{finding.message}")
        if finding.remedy:
            print_line(f"{'':<21}{finding.remedy}")
    if json:
        print_json(found)
    if any(finding.status in _FAILING[fail_on] for finding in found):
        raise typer.Exit(FAILED)
