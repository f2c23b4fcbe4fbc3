"""Drain: one process runs a queue that was filled before, and keeps every result. Also with groups."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.baseline import reserve_and_ack
from benchmarks.bench import Bench, sqlite
from benchmarks.enqueue import PAYLOAD
from benchmarks.figures import Figure
from benchmarks.timing import Stopwatch
from omniq import AsyncOmniQ

CONCURRENCY = 10


def run(bench: Bench) -> Iterator[Figure]:
    tasks = bench.size(20_000, 5_000)
    yield measure(bench, "drain, async no-ops", tasks, lambda oq: oq.enqueue_many(jobs.nothing, [(PAYLOAD,)] * tasks), 10_000)
    rows = [(PAYLOAD,)] * tasks
    yield measure(bench, "drain, sync no-ops in threads", tasks, lambda oq: oq.enqueue_many(jobs.nothing_in_a_thread, rows))


def run_grouped(bench: Bench) -> Iterator[Figure]:
    for groups in (10, 10_000):
        tasks = bench.size(20_000, 2_000)
        yield measure(bench, f"drain, {groups:,} groups of limit 1", tasks, lambda oq, n=groups, t=tasks: fill_groups(oq, t, n))


async def fill_groups(oq: AsyncOmniQ, tasks: int, groups: int) -> None:
    for start in range(0, tasks, 1000):
        async with oq.transaction() as tx:
            for number in range(start, start + 1000):
                tx.options(group=f"group-{number % groups}").enqueue(jobs.nothing, PAYLOAD)


def measure(bench: Bench, name: str, tasks: int, fill: Callable[[AsyncOmniQ], Any], above: float | None = None) -> Figure:
    batches: list[int] = []

    def once(store: Path) -> Stopwatch:
        watch, batch = asyncio.run(drain(sqlite(store), tasks, fill))
        batches.append(max(round(batch), 1))
        return watch

    measured, baseline = bench.compare(name, once, lambda store: reserve_and_ack(store, tasks, batches[-1]))
    return Figure(
        name=name,
        unit="tasks/s",
        measured=measured,
        baseline=baseline,
        baseline_name=f"reserve + ack, {statistics.median(batches):.0f} per commit",
        above=above,
        note=f"concurrency {CONCURRENCY}, {tasks:,} tasks",
    )


async def drain(url: str, tasks: int, fill: Callable[[AsyncOmniQ], Any]) -> tuple[Stopwatch, float]:
    """From the first lease to the last completion, with the CPU of the whole; and how many tasks a lease took on average."""
    async with AsyncOmniQ.from_url(url) as oq:
        await fill(oq)
        with Stopwatch(tasks) as watch:
            async with await oq.worker(CONCURRENCY) as pool:
                await pool.drain()
        assert [c.done for c in await oq.counts()] == [tasks]
        events = await oq.storage.events(limit=10 * tasks)
        ended = [event for event in events if event.event == "succeeded"]
        assert len(await oq.storage.results([event.task_id for event in ended])) == tasks
    leases = {event.ts_us for event in events if event.event == "started"}
    watch.seconds = (max(event.ts_us for event in ended) - min(leases)) / 1e6
    return watch, tasks / len(leases)
