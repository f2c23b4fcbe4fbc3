"""Which tasks a command means: ids, filters, or all of them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.exits import FAILED, INTERRUPTED, say
from omniq.cli.output import count
from omniq.cli.parsing import past
from omniq.cli.stores import opened, run
from omniq.errors import Invalid, Refused
from omniq.models import State, TaskStatus, to_us

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ
    from omniq.models import Record
    from omniq.operations import Filter, Operation, QueueCounts

PAGE = 500

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
QueueOption = Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="Only tasks of this queue.")]
NameOption = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Only tasks of this function or registered name.")
]
GroupOption = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only tasks of this group.")]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Only tasks created since then: 2h for two hours ago, or RFC 3339."),
]
ErrorOption = Annotated[
    str | None, typer.Option("--error-contains", metavar="TEXT", help="Only tasks whose last error has this text in it.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; --all needs it where there is no terminal.")]


def make_filter(
    status: Sequence[TaskStatus] | None = None,
    queue: str | None = None,
    name: str | None = None,
    group: str | None = None,
    since: str | None = None,
    error_contains: str | None = None,
) -> Filter:
    from omniq.operations import Filter

    return Filter(
        statuses=tuple(status or ()),
        queue=queue,
        name=name,
        group=group,
        created_from_us=None if since is None else to_us(past(since)),
        error_contains=error_contains,
    )


def must_select(ids: Sequence[str] | None, filter: Filter, everything: bool) -> None:
    """Nobody cancels or deletes everything by leaving something out."""
    from omniq.operations import Filter

    filtered = filter != Filter()
    if sum([bool(ids), filtered, everything]) > 1:
        raise Invalid("give ids, or filters, or --all, not several of them")
    if not (ids or filtered or everything):
        raise Invalid("name the tasks: ids, filters such as --queue, or --all")
    if filter.error_contains == "":  # such as --error-contains "$UNSET"
        raise Invalid("--error-contains is empty, which every task contains: give some text of the error, or --all")


def must_be_sure(verb: str, what: str, number_in: Callable[[QueueCounts], int], store: str | None) -> None:
    """What cannot be undone, of everything, is asked for on a terminal; elsewhere it is refused, with what to say instead."""

    async def number() -> int:
        async with opened(store) as oq:
            return sum(number_in(c) for c in await oq.counts())

    all_of_it = f"{verb} all {count(run(number), what)}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Invalid(f"--all would {all_of_it}: add --yes if you are sure, or --dry-run to look first")
    try:
        sure = typer.confirm(f"{all_of_it}?", err=True)
    except typer.Abort:
        raise typer.Exit(INTERRUPTED) from None
    if not sure:
        say("nothing was done")
        raise typer.Exit(FAILED)


class Tally:
    """What came of an action on many tasks."""

    def __init__(self) -> None:
        self.done = 0
        self.refused: list[str] = []
        self.tasks: list[Record] = []


async def act(
    oq: AsyncOmniQ,
    ids: Sequence[str] | None,
    filter: Filter,
    states: tuple[State, ...],
    make: Callable[[Record], Operation | str],
    tally: Tally,
    *,
    dry_run: bool,
) -> None:
    """Apply what `make` gives for each task that is meant, a page at a time; text instead of an operation is a refusal."""
    async for tasks in _named(oq, ids, tally) if ids else _matching(oq, filter, states):
        made = [make(task) for task in tasks]
        tally.refused += [refusal for refusal in made if isinstance(refusal, str)]
        transactions = [(op,) for op in made if not isinstance(op, str)]
        if dry_run:
            tally.done += len(transactions)
            tally.tasks += [task for task, op in zip(tasks, made, strict=True) if not isinstance(op, str)][
                : PAGE - len(tally.tasks)
            ]
            continue
        for answer in await oq.storage.send(transactions):
            if isinstance(answer, Refused):
                tally.refused.append(str(answer))
            else:
                tally.done += 1


async def _named(oq: AsyncOmniQ, ids: Sequence[str], tally: Tally) -> AsyncIterator[list[Record]]:
    found: list[Record] = []
    for id in dict.fromkeys(ids):
        record = await oq.storage.get(id)
        if record is None:
            tally.refused.append(f"no task {id!r} in this store")
        else:
            found.append(record)
    yield found


async def _matching(oq: AsyncOmniQ, filter: Filter, states: tuple[State, ...]) -> AsyncIterator[list[Record]]:
    import msgspec

    wanted = msgspec.structs.replace(filter, states=states)
    cursor: str | None = None
    while True:
        page = await oq.storage.find(wanted, cursor, PAGE, newest_first=False)
        if page.tasks:
            yield page.tasks
        cursor = page.cursor
        if cursor is None:
            return
