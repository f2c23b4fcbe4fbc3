"""Enqueue: one by one, in bulk, and by many callers at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import jobs
from benchmarks.baseline import inserts_per_second
from benchmarks.bench import Bench
from benchmarks.figures import Figure
from omniq import AsyncOmniQ, OmniQ

CALLERS = 100
PAYLOAD = "x" * 80


def run(bench: Bench) -> Iterator[Figure]:
    one, many, shared = bench.size(2_000, 100), bench.size(100_000, 10_000), bench.size(20_000, 2_000)
    yield Figure(
        name="enqueue one by one (OmniQ)",
        unit="tasks/s",
        measured=bench.series("enqueue one by one", lambda store: one_by_one(store, one)),
        baseline=bench.series("baseline: 1 row per commit", lambda store: inserts_per_second(store, one, 1)),
        baseline_name="insert, 1 per commit",
    )
    yield Figure(
        name="enqueue_many",
        unit="tasks/s",
        measured=bench.series("enqueue_many", lambda store: in_bulk(store, many)),
        baseline=bench.series("baseline: 1,000 rows per commit", lambda store: inserts_per_second(store, many, 1000)),
        baseline_name="insert, 1,000 per commit",
        above=50_000,
    )
    yield Figure(
        name=f"enqueue by {CALLERS} async callers",
        unit="tasks/s",
        measured=bench.series(f"enqueue by {CALLERS} callers", lambda store: asyncio.run(by_callers(store, shared))),
        baseline=bench.series("baseline: 100 rows per commit", lambda store: inserts_per_second(store, shared, CALLERS)),
        baseline_name="insert, 100 per commit",
    )


def one_by_one(store: Path, tasks: int) -> float:
    with OmniQ.from_url(f"sqlite:///{store}") as oq:
        begun = time.perf_counter()
        for _ in range(tasks):
            oq.enqueue(jobs.nothing, PAYLOAD)
        return tasks / (time.perf_counter() - begun)


def in_bulk(store: Path, tasks: int) -> float:
    rows = [(PAYLOAD,)] * tasks
    with OmniQ.from_url(f"sqlite:///{store}") as oq:
        begun = time.perf_counter()
        oq.enqueue_many(jobs.nothing, rows)
        return tasks / (time.perf_counter() - begun)


async def by_callers(store: Path, tasks: int) -> float:
    async def call(oq: AsyncOmniQ) -> None:
        for _ in range(tasks // CALLERS):
            await oq.enqueue(jobs.nothing, PAYLOAD)

    async with AsyncOmniQ.from_url(f"sqlite:///{store}") as oq:
        begun = time.perf_counter()
        await asyncio.gather(*(call(oq) for _ in range(CALLERS)))
        return tasks / (time.perf_counter() - begun)
