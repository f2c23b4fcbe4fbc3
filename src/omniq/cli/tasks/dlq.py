"""`omniq dlq`: the dead letters, tasks that failed for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer

from omniq.cli.output import AfterOption, JsonOption, LimitOption
from omniq.cli.stores import StoreOption, opened, run
from omniq.cli.tasks.selection import (
    AllOption,
    DryRunOption,
    ErrorOption,
    GroupOption,
    IdsArgument,
    NameOption,
    QueueOption,
    SinceOption,
    Tally,
    YesOption,
    act,
    make_filter,
    must_be_sure,
    must_select,
)
from omniq.cli.tasks.tasks import ResetOption
from omniq.models import State

if TYPE_CHECKING:
    from omniq.models import Record
    from omniq.operations import Filter, Operation

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Dead letters: list them, run them again, delete them.")


@app.command("list")
def list_command(
    queue: QueueOption = None,
    name: NameOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    error_contains: ErrorOption = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """List dead letters with their errors, newest first.

    Example: omniq dlq list --error-contains Timeout
    """
    import msgspec

    from omniq.cli.tasks.listing import list_tasks

    filter = msgspec.structs.replace(make_filter(None, queue, name, group, since, error_contains), states=(State.DEAD,))

    async def work() -> None:
        async with opened(store) as oq:
            await list_tasks(oq, filter, limit, after, json)

    run(work)


@app.command("requeue")
def requeue_command(
    ids: IdsArgument = None,
    queue: QueueOption = None,
    name: NameOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    error_contains: ErrorOption = None,
    everything: AllOption = False,
    reset_attempts: ResetOption = False,
    dry_run: DryRunOption = False,
    store: StoreOption = None,
) -> None:
    """Run dead letters again. Without --reset-attempts each has one attempt: it is out of retries.

    Example: omniq dlq requeue --queue mail --error-contains Timeout --reset-attempts

    Example: omniq dlq requeue --all --dry-run
    """
    filter = make_filter(None, queue, name, group, since, error_contains)
    requeue(ids, filter, everything, reset_attempts, dry_run, store)


@app.command("purge")
def purge_command(
    ids: IdsArgument = None,
    queue: QueueOption = None,
    name: NameOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    error_contains: ErrorOption = None,
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
    from omniq.operations import Remove

    filter = make_filter(None, queue, name, group, since, error_contains)
    must_select(ids, filter, everything)
    if everything and not (yes or dry_run):
        must_be_sure("delete", "dead letter", lambda c: c.dead, store)

    def remove(record: Record) -> Remove | str:
        if record.state is not State.DEAD:
            return f"task {record.id!r} is {record.status}; only a FAILED task is a dead letter"
        return Remove(queue=record.queue, id=record.id, if_state=State.DEAD)

    _act_on_dead(ids, filter, everything, remove, "deleted", "would delete", dry_run, store)


def requeue(
    ids: Sequence[str] | None,
    filter: Filter,
    everything: bool,
    reset_attempts: bool,
    dry_run: bool,
    store: str | None,
) -> None:
    from omniq.operations import Requeue

    def again(record: Record) -> Requeue | str:
        if record.state is not State.DEAD:
            return f"task {record.id!r} is {record.status}; only a FAILED task can be requeued"
        return Requeue(queue=record.queue, id=record.id, reset_attempts=reset_attempts)

    _act_on_dead(ids, filter, everything, again, "requeued", "would requeue", dry_run, store)


def _act_on_dead(
    ids: Sequence[str] | None,
    filter: Filter,
    everything: bool,
    make: Callable[[Record], Operation | str],
    done: str,
    would: str,
    dry_run: bool,
    store: str | None,
) -> None:
    from omniq.cli.tasks.listing import report

    must_select(ids, filter, everything)
    tally = Tally()

    async def work() -> None:
        async with opened(store) as oq:
            await act(oq, ids, filter, (State.DEAD,), make, tally, dry_run=dry_run)
            report(tally, done, would, dry_run=dry_run, oq=oq)

    run(work)
