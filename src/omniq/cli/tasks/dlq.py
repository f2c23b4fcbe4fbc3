"""`omniq dlq`: the dead letters, tasks that failed for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.commands import command, run
from omniq.cli.output import AfterOption, JsonOption, LimitOption
from omniq.cli.stores import StoreOption, opened
from omniq.cli.tasks.selection import AllOption, DryRunOption, Filters, IdsArgument, YesOption, must_be_sure, must_select
from omniq.models import State

if TYPE_CHECKING:
    from omniq.models import Record
    from omniq.operations import Remove, Requeue

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Dead letters: list them, run them again, delete them.")

DEAD = (State.DEAD,)


@app.command("list")
@command
async def list_command(
    filters: Filters, limit: LimitOption = 50, after: AfterOption = None, json: JsonOption = False, store: StoreOption = None
) -> None:
    """List dead letters with their errors, newest first.

    Example: omniq dlq list --error-contains Timeout
    """
    from omniq.cli.tasks.listing import list_tasks

    filter = filters.filter(states=DEAD)
    async with opened(store) as oq:
        await list_tasks(oq, filter, limit, after, json)


@app.command("requeue")
@command
async def requeue_command(
    *,
    ids: IdsArgument = None,
    filters: Filters,
    everything: AllOption = False,
    reset_attempts: Annotated[
        bool, typer.Option("--reset-attempts", help="Count attempts from zero again, so that each task has all its retries.")
    ] = False,
    dry_run: DryRunOption = False,
    store: StoreOption = None,
) -> None:
    """Run dead letters again. Without --reset-attempts each has one attempt: it is out of retries.

    Example: omniq dlq requeue --queue mail --error-contains Timeout --reset-attempts

    Example: omniq dlq requeue --all --dry-run
    """
    from omniq.cli.tasks.acting import act
    from omniq.operations import Requeue

    filter = filters.filter(states=DEAD)
    must_select(ids, filter, everything)

    def requeue(record: Record) -> Requeue | str:
        if record.state is not State.DEAD:
            return f"task {record.id!r} is {record.status}; only a FAILED task can be requeued"
        return Requeue(queue=record.queue, id=record.id, reset_attempts=reset_attempts)

    await act(store, ids, filter, requeue, verb="requeue", done="requeued", dry_run=dry_run)


@app.command("purge")
@command
def purge_command(
    *,
    ids: IdsArgument = None,
    filters: Filters,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    store: StoreOption = None,
) -> None:
    """Delete dead letters, with their results and idempotency keys.

    With --all it asks first on a terminal; elsewhere it wants --yes, and without it deletes nothing and ends with code 2.

    Example: omniq dlq purge --queue mail --dry-run

    Example: omniq dlq purge --all --yes
    """
    from omniq.cli.tasks.acting import act
    from omniq.operations import Remove

    filter = filters.filter(states=DEAD)
    must_select(ids, filter, everything)
    if everything and not (yes or dry_run):
        must_be_sure("delete", "dead letter", lambda c: c.dead, store)

    def remove(record: Record) -> Remove | str:
        if record.state is not State.DEAD:
            return f"task {record.id!r} is {record.status}; only a FAILED task is a dead letter"
        return Remove(queue=record.queue, id=record.id, if_state=State.DEAD)

    run(act(store, ids, filter, remove, verb="delete", done="deleted", dry_run=dry_run))
