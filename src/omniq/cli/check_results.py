"""The findings of a `doctor`, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import typer

from omniq.cli.exits import FAILED
from omniq.cli.output import print_json, print_line
from omniq.errors import OmniQError


class Finding(msgspec.Struct, kw_only=True):
    """The finding of one check.

    `wrong` is a fault. `warning` is none, and yet somebody should see to it. `note` is only worth knowing.
    """

    check: str
    status: Literal["ok", "note", "warning", "wrong", "repaired"]
    message: str
    remedy: str = ""


def fault(check: str, exc: OmniQError) -> Finding:
    """Returns an error as a finding. The texts of errors end with a colon and what to do, which makes the remedy."""
    message, colon, remedy = str(exc).rpartition(": ")
    return Finding(check=check, status="wrong", message=message if colon else remedy, remedy=remedy if colon else "")


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
