"""`omniq tasks`: look at tasks, cancel them, run failed ones again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniq.cli.commands import command, run
from omniq.cli.output import (
    AfterOption,
    JsonOption,
    LimitOption,
    compact_json,
    count,
    print_indented,
    print_json,
    print_line,
    print_table,
    when,
)
from omniq.cli.parsing import short
from omniq.cli.stores import StoreOption, opened
from omniq.cli.tasks import dlq
from omniq.cli.tasks.selection import (
    AllOption,
    DryRunOption,
    Filters,
    IdsArgument,
    StatusOption,
    YesOption,
    must_be_sure,
    must_select,
)
from omniq.errors import TaskNotFound
from omniq.models import State

if TYPE_CHECKING:
    from omniq.models import Event, Record, Task, TaskResult
    from omniq.operations import Cancel

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at tasks, cancel them, run failed ones again.")

UNENDED = tuple(state for state in State if not state.final)


@app.command("list")
@command
async def list_command(
    *,
    status: StatusOption = None,
    filters: Filters,
    limit: LimitOption = 50,
    after: AfterOption = None,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """List tasks, newest first.

    Example: omniq tasks list --status FAILED --queue mail --since 2h

    Example: omniq tasks list --json --limit 1000 | jq -r '.[].id'
    """
    from omniq.cli.tasks.listing import list_tasks

    filter = filters.filter(status)
    async with opened(store) as oq:
        await list_tasks(oq, filter, limit, after, json)


@app.command("show")
@command
async def show_command(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of a task.")],
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Show everything about one task: its arguments, its timeline, its attempts and the traceback of its last error.

    Example: omniq tasks show 01JAB3Y8Z0000000000000000
    """
    from omniq.cli.tasks.listing import with_error

    async with opened(store) as oq:
        task = await oq.get_task(id)
        if task is None:
            raise TaskNotFound(f"no task {id!r} in this store")
        result, events = await oq.get_result(id), await oq.history(id)
    if json:
        print_json({**with_error(task), "result": None if result is None else result.result, "events": events})
    else:
        _show(task, result, events)


@app.command("cancel")
@command
def cancel_command(
    *,
    ids: IdsArgument = None,
    status: StatusOption = None,
    filters: Filters,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    store: StoreOption = None,
) -> None:
    """Cancel waiting tasks, and ask running ones to end.

    With --all it asks first on a terminal; elsewhere it wants --yes, and without it cancels nothing and ends with code 2.

    Example: omniq tasks cancel 01JAB3Y8Z0000000000000000

    Example: omniq tasks cancel --queue mail --status PENDING --dry-run
    """
    from omniq.cli.tasks.acting import act
    from omniq.operations import Cancel

    filter = filters.filter(status, UNENDED)
    must_select(ids, filter, everything)
    if everything and not (yes or dry_run):
        must_be_sure("cancel", "task", lambda c: c.waiting + c.running, store)
    running = 0

    def cancel(record: Record) -> Cancel | str:
        nonlocal running
        if record.state.final:
            return f"task {record.id!r} has ended already: it is {record.status}"
        running += record.state is State.RUNNING
        return Cancel(queue=record.queue, id=record.id)

    def asked() -> str:
        return f"; {count(running, 'running one is', 'running ones are')} asked to end" if running else ""

    run(act(store, ids, filter, cancel, verb="cancel", done="cancelled", dry_run=dry_run, more=asked))


# For who looks beside `cancel` and does not think of a failed task as a dead letter.
app.command(
    "retry",
    help="Run FAILED tasks again; the same as omniq dlq requeue.\n\n"
    "Example: omniq tasks retry 01JAB3Y8Z0000000000000000 --reset-attempts",
)(dlq.requeue_command)


def _show(task: Task, result: TaskResult | None, events: list[Event]) -> None:
    print_line(f"{task.func_path}  {task.id}")
    print_line()
    for label, value in _facts(task, result):
        print_line(f"{label:<12}{value}")
    if events:
        print_line()
        print_line("timeline")
        first = events[0].ts
        print_table(
            ["=WHEN", ">AFTER", "=EVENT", ">ATTEMPT", "WORKER", "WHAT"],
            [
                (when(e.ts), short((e.ts - first).total_seconds()), e.event, e.attempt or None, e.worker, _detail(e.data))
                for e in events
            ],
            fold=True,
        )
    if task.last_error is not None:
        print_line()
        print_line(f"last error: {task.last_error}")
        if task.last_error.traceback:
            print_indented(task.last_error.traceback)


def _facts(task: Task, result: TaskResult | None) -> list[tuple[str, object]]:
    """The lines about a task, without those for which it has nothing."""
    progress = None if task.progress is None else compact_json(task.progress)
    found: list[tuple[str, object]] = [
        ("status", task.status.value + (", asked to end" if task.cancel_requested else "")),
        ("queue", task.queue),
        ("group", task.group),
        ("args", compact_json(task.args)),
        ("kwargs", compact_json(task.kwargs)),
        ("attempts", f"{task.attempts} of {task.max_retries + 1}"),
        ("eta", when(task.eta)),
        ("interval", None if task.interval is None else short(task.interval.total_seconds())),
        ("timeout", None if task.timeout is None else short(task.timeout)),
        ("key", task.idempotency_key),
        ("blocked by", ", ".join(task.blocked_by) or None),
        ("dead queue", task.dead_queue),
        ("headers", None if task.headers is None else compact_json(task.headers)),
        ("worker", task.worker),
        ("progress", progress),
        ("created", when(task.created_at)),
        ("started", when(task.started_at)),
        ("finished", when(task.finished_at)),
        ("result", None if result is None or result.error is not None else compact_json(result.result)),
    ]
    return [(label, value) for label, value in found if value is not None]


def _detail(data: dict[str, Any]) -> str:
    """The few words of an event: its error, how long it ran, where it went."""
    words: list[str] = []
    if (ran := data.get("ran_us")) is not None:
        words.append(f"ran {short(ran / 1e6)}")
    if (lost := data.get("lost")) is not None:
        words.append(f"lost ({lost})")
    if (error := data.get("error")) is not None:
        words.append(f"{error.get('type')}: {error.get('message')}".replace("\n", " "))
    if (queue := data.get("to_queue")) is not None:
        words.append(f"to queue {queue}")
    return "; ".join(words)
