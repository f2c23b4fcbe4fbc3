"""Which tasks a command means: ids, filters, or all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from omniq.cli.commands import run
from omniq.cli.exits import FAILED, INTERRUPTED, say
from omniq.cli.output import count
from omniq.cli.parsing import past
from omniq.cli.stores import opened
from omniq.errors import Invalid
from omniq.models import State, TaskStatus, to_us

if TYPE_CHECKING:
    from omniq.operations import Filter, QueueCounts

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Ids of tasks.", show_default=False)]
StatusOption = Annotated[
    list[TaskStatus] | None,
    typer.Option(
        "--status",
        metavar="STATUS",
        case_sensitive=False,
        help="Only tasks that are PENDING, RUNNING, RETRYING, SUCCESS, FAILED or CANCELLED; give it again for more.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; --all needs it where there is no terminal.")]


class Filters(msgspec.Struct, frozen=True):
    """The options that filter tasks."""

    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="Only tasks of this queue.")] = None
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only tasks of this function or registered name.")] = None
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Only tasks of this group.")] = None
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only tasks created since then: 2h for two hours ago, or RFC 3339.")
    ] = None
    error_contains: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only tasks whose last error has this text in it.")
    ] = None

    def filter(self, statuses: Sequence[TaskStatus] | None = None, states: tuple[State, ...] = ()) -> Filter:
        from omniq.operations import Filter

        return Filter(
            states=states,
            statuses=tuple(statuses or ()),
            queue=self.queue,
            name=self.name,
            group=self.group,
            created_from_us=None if self.since is None else to_us(past(self.since)),
            error_contains=self.error_contains,
        )


def must_select(ids: Sequence[str] | None, filter: Filter, everything: bool) -> None:
    """Refuse to act on all tasks only because something was left out."""
    from omniq.operations import Filter

    filtered = msgspec.structs.replace(filter, states=()) != Filter()
    if sum([bool(ids), filtered, everything]) > 1:
        raise Invalid("give ids, or filters, or --all, not several of them")
    if not (ids or filtered or everything):
        raise Invalid("name the tasks: ids, filters such as --queue, or --all")
    # A shell gives the empty text for --error-contains "$UNSET".
    if filter.error_contains == "":
        raise Invalid("--error-contains is empty, which every task contains: give some text of the error, or --all")


def must_be_sure(verb: str, what: str, number_in: Callable[[QueueCounts], int], store: str | None) -> None:
    """Ask on a terminal before something is done to all tasks that cannot be undone; elsewhere refuse, and say what to give."""

    async def number() -> int:
        async with opened(store) as oq:
            return sum(number_in(c) for c in await oq.counts())

    all_of_it = f"{verb} all {count(run(number()), what)}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Invalid(f"--all would {all_of_it}: add --yes if you are sure, or --dry-run to look first")
    try:
        # In no event loop: there Ctrl-C would not end the question.
        sure = typer.confirm(f"{all_of_it}?", err=True)
    except typer.Abort:
        raise typer.Exit(INTERRUPTED) from None
    if not sure:
        say("nothing was done")
        raise typer.Exit(FAILED)
