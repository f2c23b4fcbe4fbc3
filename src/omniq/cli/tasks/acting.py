"""One action on all tasks that were chosen: `tasks cancel`, `tasks retry`, `dlq requeue`, `dlq purge`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import typer

from omniq.cli.exits import FAILED, say
from omniq.cli.output import count, print_line, print_table
from omniq.cli.paging import PAGE, task_pages
from omniq.cli.stores import opened
from omniq.cli.tasks.listing import COLUMNS, row
from omniq.errors import Refused

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ
    from omniq.models import Record
    from omniq.operations import Filter, Operation


async def act(
    store: str | None,
    ids: Sequence[str] | None,
    filter: Filter,
    make: Callable[[Record], Operation | str],
    *,
    verb: str,
    done: str,
    dry_run: bool,
    more: Callable[[], str] = str,
) -> None:
    """Apply the operation that `make` gives for each task, or refuse the task with the text that it gives instead.

    Then say how many tasks it was done to, with `more` behind it. Exit code 1 if any task was refused.
    """
    from omniq.translate import task_of

    number, refused = 0, list[str]()
    shown: list[Record] = []
    async with opened(store) as oq:
        async for tasks in _named(oq, ids, refused) if ids else task_pages(oq.storage, filter):
            made = [(task, make(task)) for task in tasks]
            refused += [refusal for _, refusal in made if isinstance(refusal, str)]
            wanted = [(task, op) for task, op in made if not isinstance(op, str)]
            number += len(wanted)
            # A dry run shows one page of tasks: of a million it keeps no more, and counts the rest.
            if dry_run:
                shown += [task for task, _ in wanted[: PAGE - len(shown)]]
                continue
            answers = await oq.storage.send([(op,) for _, op in wanted])
            failed = [str(answer) for answer in answers if isinstance(answer, Refused)]
            number -= len(failed)
            refused += failed
        if shown:
            print_table(COLUMNS, [row(task_of(record, oq.queue.serializer)) for record in shown])
    print_line(f"{f'would {verb}' if dry_run else done} {count(number, 'task')}{more()}")
    for sentence in refused:
        say(sentence)
    if refused:
        raise typer.Exit(FAILED)


async def _named(oq: AsyncOmniQ, ids: Sequence[str], refused: list[str]) -> AsyncIterator[list[Record]]:
    found: list[Record] = []
    for id in dict.fromkeys(ids):
        record = await oq.storage.get(id)
        if record is None:
            refused.append(f"no task {id!r} in this store")
        else:
            found.append(record)
    yield found
