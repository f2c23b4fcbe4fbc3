"""The picture of `omniq top`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
from rich.console import ConsoleDimensions, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.text import Text

from omniq.cli.output import count, one_line
from omniq.cli.parsing import short
from omniq.cli.queues.activity import SILENT_US, alive, busy_in
from omniq.cli.table import Fitted
from omniq.models import from_us

if TYPE_CHECKING:
    from omniq.cli.queues.activity import Rates
    from omniq.models import Task
    from omniq.operations import QueueCounts, WorkerInfo

# Columns from which running tasks show everything, and from which workers and failures stand side by side.
WIDE = 110
VERY_WIDE = 160
# Lines of a panel besides its rows: two borders and the titles; and columns of a panel besides its table.
FRAME = 3
BORDERS = 4
BAR = 10


class View(msgspec.Struct, kw_only=True):
    """The state of the store at one look."""

    url: str
    now_us: int = 0
    queues: list[QueueCounts] = []
    rates: Rates | None = None
    running: list[Task] = []
    failed: list[Task] = []
    workers: list[WorkerInfo] = []
    away: str = ""


def draw(view: View, size: ConsoleDimensions) -> RenderableType:
    """The whole screen: a line on top, queues, leased tasks, then workers and failures."""
    body, wide = size.height - 1, size.width >= WIDE
    queues = min(len(view.queues) + FRAME, max(body // 3, body - 3 * (FRAME + 2)))
    running = min(len(view.running) + FRAME, max((body - queues) // 2, FRAME + 1))
    left = body - queues - running
    layout, below = Layout(), Layout()
    layout.split_column(
        Layout(_head(view), size=1),
        Layout(_queues(view, queues - FRAME, size.width), size=queues),
        Layout(_running(view, running - FRAME, wide), size=running),
        below,
    )
    if size.width >= VERY_WIDE:
        below.split_row(Layout(_workers(view, left - FRAME), ratio=2), Layout(_failures(view, left - FRAME), ratio=3))
    else:
        workers = min(len(view.workers) + FRAME, max(left // 2, FRAME + 1))
        below.split_column(
            Layout(_workers(view, workers - FRAME), size=workers), Layout(_failures(view, left - workers - FRAME))
        )
    return layout


def _head(view: View) -> Text:
    line = Text(" omniq top ", style="bold reverse", no_wrap=True, overflow="ellipsis")
    line.append(" q quits ", style="dim")
    if view.away:
        line.append(f" the store is away: {one_line(view.away, 200)}", style="bold white on red")
        return line
    running, dead = sum(_busy(view, c) or 0 for c in view.queues), sum(c.dead for c in view.queues)
    there = len(alive(view.workers, view.now_us))
    line.append(f" {running} running  {sum(c.ready for c in view.queues)} ready  ")
    line.append(f"{dead} failed", style="red" if dead else "")
    line.append(f"  {count(there, 'worker')}", style="" if there else "yellow")
    line.append(f"  {_clock(from_us(view.now_us))}  {view.url}", style="dim")
    return line


def _clock(moment: datetime) -> str:
    return moment.strftime("%H:%M:%SZ")


def _busy(view: View, c: QueueCounts) -> int | None:
    return busy_in(c, view.workers, view.now_us)


# Left out of a terminal too narrow for all, in this order: what somebody must act on stays.
LESS_TELLING = (">BLOCK", ">SCHED", ">LEASED", ">DONE", ">OUT/S", ">IN/S")
QUEUES = ("QUEUE", ">READY", ">SCHED", ">BLOCK", ">RUN", ">LEASED", ">DONE", ">FAIL", ">IN/S", ">OUT/S", ">OLDEST", "=")


def _queues(view: View, room: int, width: int) -> Panel:
    busiest = sorted(view.queues, key=lambda c: (-(c.ready + c.running), c.queue))
    rows = [(c, _queue_cells(view, c)) for c in busiest[: max(room, 1)]]
    table = _queue_table(rows, QUEUES)
    for number in range(1, len(LESS_TELLING) + 1):
        if table.readable_from() <= width - BORDERS:
            break
        table = _queue_table(rows, [column for column in QUEUES if column not in LESS_TELLING[:number]])
    return _panel("queues", table, len(view.queues))


def _queue_table(rows: Sequence[tuple[QueueCounts, Sequence[object]]], columns: Sequence[str]) -> Fitted:
    table = _table(*columns)
    for c, cells in rows:
        shown = [cell for column, cell in zip(QUEUES, cells, strict=True) if column in columns]
        table.add(*shown, style="yellow" if c.paused else "")
    return table


def _queue_cells(view: View, c: QueueCounts) -> Sequence[object]:
    rates = view.rates
    oldest = "" if c.oldest_ready_us is None else short((view.now_us - c.oldest_ready_us) / 1e6)
    speeds = (None, None) if rates is None else (f"{rates.into(c.queue):.1f}", f"{rates.out_of(c.queue):.1f}")
    dead = Text(str(c.dead), style="red" if c.dead else "")
    counts = (c.ready, c.scheduled, c.blocked, _busy(view, c), c.running, c.done)
    return (c.queue, *counts, dead, *speeds, oldest, "paused" if c.paused else "")


def _running(view: View, room: int, wide: bool) -> Panel:
    table = _table("=TASK", "NAME", ">AGE", "PROGRESS", *(("QUEUE", ">TRY", "WORKER") if wide else ()))
    oldest_first = sorted(view.running, key=lambda t: t.started_at or t.created_at)
    now = from_us(view.now_us) if view.now_us else None
    for task in oldest_first[: max(room, 1)]:
        age = "" if now is None or task.started_at is None else short((now - task.started_at).total_seconds())
        ending = " (asked to end)" if task.cancel_requested else ""
        more = (task.queue, task.attempts, task.worker or "") if wide else ()
        table.add(task.id, task.func_path + ending, age, _progress(task), *more)
    return _panel("leased", table, sum(c.running for c in view.queues))


def _progress(task: Task) -> str:
    """`task.progress(done, total, note)` as a bar; anything else as it is."""
    progress: Any = task.progress
    if not isinstance(progress, dict):
        return ""
    said = cast("dict[str, Any]", progress)
    done, total, note = said.get("done"), said.get("total"), str(said.get("note") or "")
    if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
        share = min(max(done / total, 0), 1)
        full = round(share * BAR)
        return f"{'█' * full}{'░' * (BAR - full)} {share:4.0%} {note}".rstrip()
    return f"{done if done is not None else ''} {note}".strip()


def _workers(view: View, room: int) -> Panel:
    table = _table("WORKER", "QUEUES", ">RUNS", ">SEEN")
    for worker in view.workers[: max(room, 1)]:
        silent = view.now_us - worker.seen_at_us
        busy = f"{worker.running}/{worker.concurrency}"
        cells = (worker.worker, ", ".join(worker.queues), busy, f"{short(silent / 1e6)} ago")
        table.add(*cells, style="dim" if silent > SILENT_US else "")
    return _panel("workers", table, len(view.workers))


def _failures(view: View, room: int) -> Panel:
    table = _table("=ENDED", "=TASK", "NAME", "ERROR")
    latest_first = sorted(view.failed, key=lambda t: t.finished_at or t.created_at, reverse=True)
    for task in latest_first[: max(room, 1)]:
        ended = "" if task.finished_at is None else f"{short((from_us(view.now_us) - task.finished_at).total_seconds())} ago"
        table.add(ended, task.id, task.func_path, one_line(str(task.last_error or ""), 200))
    return _panel("failures", table, sum(c.dead for c in view.queues))


def _table(*columns: str) -> Fitted:
    return Fitted(columns, expand=True, header_style="dim")


def _panel(title: str, table: Fitted, there: int) -> Panel:
    shown = len(table)
    more = f" · {there - shown} more" if there > shown else ""
    return Panel(table, title=f"{title} {there}{more}", title_align="left", border_style="cyan", padding=(0, 1))
