"""`omniq tasks`: look at tasks, cancel them, run failed ones again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    StatusOption,
    Tally,
    YesOption,
    act,
    make_filter,
    must_be_sure,
    must_select,
)
from omniq.errors import TaskNotFound
from omniq.models import State

if TYPE_CHECKING:
    from omniq.models import Event, Record, Task, TaskResult

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at tasks, cancel them, run failed ones again.")

ResetOption = Annotated[
    bool, typer.Option("--reset-attempts", help="Begin to count attempts anew, so that all retries are there again.")
]
UNENDED = tuple(state for state in State if not state.final)


@app.command("list")
def list_command(
    status: StatusOption = None,
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
    """List tasks, newest first.

    Example: omniq tasks list --status FAILED --queue mail --since 2h

    Example: omniq tasks list --json --limit 1000 | jq -r '.[].id'
    """
    from omniq.cli.tasks.listing import list_tasks

    filter = make_filter(status, queue, name, group, since, error_contains)

    async def work() -> None:
        async with opened(store) as oq:
            await list_tasks(oq, filter, limit, after, json)

    run(work)


@app.command("show")
def show_command(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of a task.")],
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Show everything about one task: its arguments, its timeline, its attempts and the traceback of its last error.

    Example: omniq tasks show 01JAB3Y8Z0000000000000000
    """

    async def work() -> None:
        async with opened(store) as oq:
            task = await oq.get_task(id)
            if task is None:
                raise TaskNotFound(f"no task {id!r} in this store")
            result, events = await oq.get_result(id), await oq.history(id)
        if json:
            _show_json(task, result, events)
        else:
            _show(task, result, events)

    run(work)


@app.command("cancel")
def cancel_command(
    ids: IdsArgument = None,
    status: StatusOption = None,
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
    """Cancel waiting tasks, and ask running ones to end.

    With --all it asks first on a terminal; elsewhere it wants --yes, and without it cancels nothing and ends with code 2.

    Example: omniq tasks cancel 01JAB3Y8Z0000000000000000

    Example: omniq tasks cancel --queue mail --status PENDING --dry-run
    """
    from omniq.cli.tasks.listing import report
    from omniq.operations import Cancel

    filter = make_filter(status, queue, name, group, since, error_contains)
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

    tally = Tally()

    async def work() -> None:
        async with opened(store) as oq:
            await act(oq, ids, filter, UNENDED, cancel, tally, dry_run=dry_run)
            asked = f"; {count(running, 'running one is', 'running ones are')} asked to end" if running else ""
            report(tally, "cancelled", "would cancel", dry_run=dry_run, oq=oq, more=asked)

    run(work)


@app.command("retry")
def retry_command(
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
    """Run FAILED tasks again; the same as omniq dlq requeue.

    Example: omniq tasks retry 01JAB3Y8Z0000000000000000 --reset-attempts
    """
    from omniq.cli.tasks.dlq import requeue

    filter = make_filter(None, queue, name, group, since, error_contains)
    requeue(ids, filter, everything, reset_attempts, dry_run, store)


def _show_json(task: Task, result: TaskResult | None, events: list[Event]) -> None:
    from omniq.cli.tasks.listing import with_error

    print_json({**with_error(task), "result": None if result is None else result.result, "events": events})


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
    """What is worth a line; what a task does not have is left out."""
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
