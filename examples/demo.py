"""A few hundred tasks on SQLite: async and plain functions, retries, a dead letter, groups, a schedule.

    python examples/demo.py            in a temporary folder that is deleted at the end
    python examples/demo.py FOLDER     in FOLDER/demo.db, which stays for you to look at

Ends by itself after a few seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import omniq
from omniq import OmniQ, SQLiteStorage, TaskStatus, Unrecoverable, current_task

console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())

# -- the tasks -----------------------------------------------------------------------------------

_lock = threading.Lock()
_busy: Counter[str] = Counter()
_most: Counter[str] = Counter()


@omniq.task(name="fetch")
async def fetch(page: int) -> int:
    """An async task: it waits, as for a network, and lets others run meanwhile."""
    await asyncio.sleep(0.02 + page % 5 / 100)
    return page * 10


@omniq.task(name="digest")
def digest(number: int) -> str:
    """A plain function: it works in a thread."""
    return hashlib.sha256(str(number).encode() * 20_000).hexdigest()[:12]


@omniq.task(name="flaky", max_retries=3, backoff="fixed:base=400,jitter=0")
def flaky() -> str:
    """Fails twice, then succeeds."""
    attempt = current_task().attempt
    if attempt < 3:
        raise ConnectionError(f"no answer on attempt {attempt}")
    return f"answered on attempt {attempt}"


@omniq.task(name="hopeless", max_retries=5)
def hopeless() -> None:
    """Knows that a retry will not help."""
    raise Unrecoverable("the account was closed")


@omniq.task(name="charge")
async def charge(customer: str, invoice: int) -> str:
    """Runs in the customer's group. Notes how many tasks of that customer run at once."""
    with _lock:
        _busy[customer] += 1
        _most[customer] = max(_most[customer], _busy[customer])
    await asyncio.sleep(0.05)
    with _lock:
        _busy[customer] -= 1
    return f"{customer}-{invoice}"


@omniq.task(name="report")
def report() -> str:
    return "the report that was due two seconds after the start"


@omniq.task(name="tick")
def tick() -> str:
    return time.strftime("%H:%M:%S")


@omniq.task(name="publish")
def publish(parts: list[str]) -> str:
    return f"published after {len(parts)} parts were ready"


def table(title: str) -> Table:
    style = box.ROUNDED if console.is_terminal else box.ASCII
    return Table(title=title, title_justify="left", title_style="bold", box=style)


# -- the demo ------------------------------------------------------------------------------------


def main(folder: Path) -> int:
    path = folder / "demo.db"
    console.print(f"[bold]omniq {omniq.__version__}[/] on SQLite, durable: a task is on the disk when enqueue returns.")
    console.print(f"The queue is in {path}\n")
    with OmniQ(SQLiteStorage(path)) as oq:
        named, total = enqueue_all(oq)
        run_all(oq, total, named)
        show(oq, named)
        statuses = [r.status if (r := oq.get_result(named[name])) else None for name in ("flaky", "hopeless", "report")]
    return 0 if statuses == [TaskStatus.SUCCESS, TaskStatus.FAILED, TaskStatus.SUCCESS] else 1


def enqueue_all(oq: OmniQ) -> tuple[dict[str, str], int]:
    """Everything that the demo runs; the ids of the single tasks by name, and how many tasks have one end."""
    start = time.monotonic()
    fetches = oq.enqueue_many(fetch, [(n,) for n in range(200)])
    digests = oq.enqueue_many(digest, [{"number": n} for n in range(100)])
    invoices = [
        oq.options(group=customer, group_limit=limit).enqueue(charge, customer, invoice)
        for invoice in range(12)
        for customer, limit in (("ada", 1), ("ben", 2))
    ]
    named = {"flaky": oq.enqueue(flaky), "hopeless": oq.enqueue(hopeless)}
    named["report"] = oq.enqueue(report, eta=timedelta(seconds=2))
    named["publish"] = oq.options(blocked_by=digests[:3]).enqueue(publish, digests[:3])
    total = len(fetches) + len(digests) + len(invoices) + len(named)
    named["tick"] = oq.enqueue(tick, interval=timedelta(seconds=1))
    console.print(f"Enqueued {total} tasks and one that repeats, in {time.monotonic() - start:.2f} s.")
    return named, total


def run_all(oq: OmniQ, total: int, named: dict[str, str]) -> None:
    """Run a worker until all tasks but the repeating one have ended."""
    bar = Progress(
        TextColumn("[bold]running"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    start, seen, ended = time.monotonic(), 0, 0
    with bar, oq.worker(concurrency=10):
        line = bar.add_task("run", total=total)
        while ended < total and time.monotonic() - start < 15:
            time.sleep(0.05)
            for event in oq.events(after=seen):
                seen = event.seq
                ended += event.event in ("succeeded", "failed") and event.name != "tick"
            bar.update(line, completed=ended)
        took = time.monotonic() - start
        oq.cancel(named["tick"])  # a repeating task goes on until it is cancelled
    console.print(f"A worker with 10 slots ended {ended} of {total} tasks in {took:.2f} s.\n")


def show(oq: OmniQ, named: dict[str, str]) -> None:
    events = []
    while page := oq.events(after=events[-1].seq if events else 0):
        events += page

    runs = table("What ran")
    for column in ("task", "enqueued", "runs", "succeeded", "retried", "failed", "mean run"):
        runs.add_column(column, justify="left" if column == "task" else "right")
    for name in dict.fromkeys(e.name for e in events):
        kinds = Counter(e.event for e in events if e.name == name)
        times = [e.data["ran_us"] / 1000 for e in events if e.name == name and "ran_us" in e.data]
        mean = f"{sum(times) / len(times):.1f} ms" if times else "-"
        numbers = (kinds[k] for k in ("enqueued", "started", "succeeded", "retried", "failed"))
        runs.add_row(name, *map(str, numbers), mean)
    console.print(runs)

    history = table("The history of the task 'flaky', from the event log")
    for column in ("seq", "after", "event", "attempt", "error"):
        history.add_column(column, justify="left" if column in ("event", "error") else "right")
    steps = oq.history(named["flaky"])
    for event in steps:
        error = event.data.get("error")
        after = f"{(event.ts - steps[0].ts).total_seconds():.2f} s"
        said = f"{error['type']}: {error['message']}" if error else ""
        history.add_row(str(event.seq), after, event.event, str(event.attempt), said)
    console.print(history)

    console.print("[bold]Results[/]")
    for name in ("flaky", "hopeless", "publish", "report", "tick"):
        result = oq.get_result(named[name])
        if result is None:
            said = "not ended"
        elif result.status is TaskStatus.CANCELLED:
            said = f"CANCELLED at the end, after {sum(e.event == 'succeeded' for e in oq.history(named[name]))} runs"
        else:
            said = f"{result.status}: {result.error or result.result}"
        console.print(f"  {name:9} {said}")
    most = ", ".join(f"{customer} {_most[customer]}" for customer in sorted(_most))
    console.print(f"  groups    at most so many at once: {most} (the limits were ada 1, ben 2)\n")

    left = table("What the queue holds now")
    states = ("ready", "scheduled", "running", "done", "dead", "cancelled")
    for column in ("queue", *states):
        left.add_column(column, justify="left" if column == "queue" else "right")
    for count in oq.counts():
        left.add_row(count.queue, *(str(getattr(count, state)) for state in states))
    console.print(left)


if __name__ == "__main__":
    logging.getLogger("omniq").addHandler(logging.NullHandler())  # the tables below say what the log lines would
    if len(sys.argv) > 1:
        code = main(Path(sys.argv[1]))
        console.print(f"The queue stays in {sys.argv[1]}.")
    else:
        with tempfile.TemporaryDirectory(prefix="omniq-demo-") as temporary:
            code = main(Path(temporary))
        console.print("The temporary folder is deleted.")
    sys.exit(code)
