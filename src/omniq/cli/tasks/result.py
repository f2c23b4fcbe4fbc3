"""`omniq result`: how a task ended, now or when it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.commands import command
from omniq.cli.exits import NOT_ENDED, TASK_FAILED, say
from omniq.cli.output import JsonOption, compact_json, print_json, print_line
from omniq.cli.parsing import seconds
from omniq.cli.stores import StoreOption, opened
from omniq.errors import Invalid, TaskNotFound

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ
    from omniq.models import TaskResult

WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the task has ended.")]
WaitTimeoutOption = Annotated[
    str | None, typer.Option("--wait-timeout", metavar="DURATION", help="Wait no longer than this: 30s, 10m, 2h.")
]


@command
async def result_command(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of a task.")],
    wait: WaitOption = False,
    wait_timeout: WaitTimeoutOption = None,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Print the result of a task. Exit code 3 if it FAILED or was CANCELLED, 4 if it has not ended.

    Example: omniq result 01JAB3Y8Z0000000000000000 --wait --wait-timeout 1m
    """
    timeout = wait_seconds(wait, wait_timeout)

    async with opened(store) as oq:
        result = await ended_or_not(oq, id, wait, timeout)
    if json:
        print_json(result)
    elif result.ok:
        print_line(compact_json(result.result))
    raise typer.Exit(tell(result))


def wait_seconds(wait: bool, timeout: str | None) -> float | None:
    if timeout is not None and not wait:
        raise Invalid("--wait-timeout needs --wait")
    return None if timeout is None else seconds(timeout)


async def ended_or_not(oq: AsyncOmniQ, id: str, wait: bool, timeout: float | None) -> TaskResult:
    """Returns the result of a task, or its status without a result if it has not ended. Raises `TaskNotFound`."""
    from omniq.models import TaskResult

    result = await oq.get_result(id, wait=wait, timeout=timeout)
    if result is None:
        task = await oq.get_task(id)
        if task is None:
            raise TaskNotFound(f"no task {id!r} in this store")
        # It may have ended between the two looks.
        result = await oq.get_result(id)
        if result is None:
            return TaskResult(task_id=id, status=task.status, attempts=task.attempts, finished_at=task.finished_at)
    return result


def tell(result: TaskResult) -> int:
    """The exit code for how a task ended, and a sentence on stderr unless it went well."""
    if result.ok:
        return 0
    if result.status.value in ("FAILED", "CANCELLED"):
        reason = "" if result.error is None else f": {result.error}"
        say(f"task {result.task_id} {'was CANCELLED' if result.status.value == 'CANCELLED' else 'FAILED'}{reason}")
        return TASK_FAILED
    say(f"task {result.task_id} has not ended: it is {result.status.value}")
    return NOT_ENDED
