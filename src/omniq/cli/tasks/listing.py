"""Tasks as lines: for `tasks list`, `dlq list` and dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.cli.output import next_page, one_line, print_json, print_line, print_table
from omniq.cli.parsing import short

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ
    from omniq.models import Task
    from omniq.operations import Filter

COLUMNS = ["=ID", "=STATUS", "QUEUE", "NAME", ">TRIES", ">AGE", "ERROR"]


async def list_tasks(oq: AsyncOmniQ, filter: Filter, limit: int, after: str | None, as_json: bool) -> None:
    """A page of tasks, newest first. A page that the scan limit cut short is filled from the next ones."""
    tasks: list[Task] = []
    # A search for rare tasks gives short pages with a cursor: without this loop a page could be empty and not the last.
    cursor = after
    while True:
        found, cursor = await oq.find(filter, cursor=cursor, limit=limit - len(tasks))
        tasks += found
        if cursor is None or len(tasks) >= limit:
            break
    if as_json:
        print_json([with_error(task) for task in tasks])
    elif tasks:
        print_table(COLUMNS, [row(task) for task in tasks])
    else:
        print_line("no tasks")
    next_page(cursor)


def row(task: Task) -> Sequence[object]:
    age = short((datetime.now(UTC) - task.created_at).total_seconds())
    error = None if task.last_error is None else one_line(str(task.last_error), 120)
    return (task.id, task.status.value, task.queue, task.func_path, task.attempts, age, error)


def with_error(task: Task) -> dict[str, Any]:
    """A task by its field names; `error` is its last one, as in a result."""
    fields = msgspec.structs.asdict(task)
    return {**fields, "error": fields["last_error"]}
