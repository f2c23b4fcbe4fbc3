"""Enqueue: one by one, in bulk, and by many callers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.baseline import inserts
from benchmarks.bench import Bench, sqlite
from benchmarks.figures import Figure
from benchmarks.timing import Stopwatch
from omniq import AsyncOmniQ, OmniQ

CALLERS = 100
PAYLOAD = "x" * 80


def run(bench: Bench) -> Iterator[Figure]:
    one, many, shared = bench.size(2_000, 100), bench.size(100_000, 10_000), bench.size(20_000, 2_000)
    measured, baseline = bench.compare(
        "enqueue one by one", lambda store: one_by_one(sqlite(store), one), lambda store: inserts(store, one, 1)
    )
    yield Figure(
        name="enqueue one by one (OmniQ)",
        unit="tasks/s",
        measured=measured,
        baseline=baseline,
        baseline_name="insert, 1 per commit",
    )
    measured, baseline = bench.compare(
        "enqueue_many", lambda store: in_bulk(sqlite(store), many), lambda store: inserts(store, many, 1000)
    )
    yield Figure(
        name="enqueue_many",
        unit="tasks/s",
        measured=measured,
        baseline=baseline,
        baseline_name="insert, 1,000 per commit",
        above=50_000,
    )
    measured, baseline = bench.compare(
        f"enqueue by {CALLERS} callers",
        lambda store: asyncio.run(by_callers(sqlite(store), shared)),
        lambda store: inserts(store, shared, CALLERS),
    )
    yield Figure(
        name=f"enqueue by {CALLERS} async callers",
        unit="tasks/s",
        measured=measured,
        baseline=baseline,
        baseline_name=f"insert, {CALLERS} per commit",
    )


def one_by_one(url: str, tasks: int) -> Stopwatch:
    with OmniQ.from_url(url) as oq, Stopwatch(tasks) as watch:
        for _ in range(tasks):
            oq.enqueue(jobs.nothing, PAYLOAD)
    return watch


def in_bulk(url: str, tasks: int) -> Stopwatch:
    rows = [(PAYLOAD,)] * tasks
    with OmniQ.from_url(url) as oq, Stopwatch(tasks) as watch:
        oq.enqueue_many(jobs.nothing, rows)
    return watch


async def by_callers(url: str, tasks: int) -> Stopwatch:
    async def call(oq: AsyncOmniQ) -> None:
        for _ in range(tasks // CALLERS):
            await oq.enqueue(jobs.nothing, PAYLOAD)

    async with AsyncOmniQ.from_url(url) as oq:
        with Stopwatch(tasks) as watch:
            await asyncio.gather(*(call(oq) for _ in range(CALLERS)))
    return watch
