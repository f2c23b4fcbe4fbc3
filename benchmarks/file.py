"""The file store beside SQLite and beside Huey's file store, and what a process pays for tasks that wait in a folder."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import jobs, rival
from benchmarks.bench import Bench, folder, sqlite
from benchmarks.drain import drain
from benchmarks.enqueue import CALLERS, PAYLOAD, by_callers, in_bulk
from benchmarks.figures import Figure, Series
from benchmarks.timing import Stopwatch
from omniq import FileStorage, OmniQ
from omniq.models import new_token
from omniq.operations import Release, Reserve, Reserved

RESERVES = 200

OPEN = """
import asyncio, json, sys, time
from pathlib import Path
from omniq import FileStorage

def rss_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

async def main():
    before, begun = rss_kib(), time.perf_counter()
    async with FileStorage(sys.argv[1]) as storage:
        await storage.counts()
        print(json.dumps([time.perf_counter() - begun, (rss_kib() - before) * 1024]))

asyncio.run(main())
"""


def run(bench: Bench) -> Iterator[Figure]:
    shared, many, drained = bench.size(20_000, 2_000), bench.size(100_000, 10_000), bench.size(20_000, 2_000)
    small = bench.size(2_000, 300)
    measured, baseline = bench.compare(
        f"file: enqueue by {CALLERS} callers",
        lambda store: asyncio.run(by_callers(folder(store), shared)),
        lambda store: asyncio.run(by_callers(sqlite(store), shared)),
    )
    yield beside_sqlite(f"file: enqueue by {CALLERS} async callers", measured, baseline, 5_000)
    measured, baseline = bench.compare(
        "file: enqueue_many", lambda store: in_bulk(folder(store), many), lambda store: in_bulk(sqlite(store), many)
    )
    yield beside_sqlite("file: enqueue_many", measured, baseline, 20_000)
    measured, baseline = bench.compare(
        "file: drain", lambda store: drain_all(folder(store), drained), lambda store: drain_all(sqlite(store), drained)
    )
    yield beside_sqlite("file: drain, async no-ops", measured, baseline, 3_000)
    measured, baseline = bench.compare(
        "file: enqueue, and Huey's",
        lambda store: asyncio.run(by_callers(folder(store), small)),
        lambda store: rival.enqueues(store, small, PAYLOAD),
    )
    yield beside_huey(f"file: enqueue {small:,} tasks by {CALLERS} callers", measured, baseline)
    measured, baseline = bench.compare(
        "file: drain, and Huey's",
        lambda store: drain_all(folder(store), small),
        lambda store: rival.drain(store, small, PAYLOAD),
    )
    yield beside_huey(f"file: drain {small:,} tasks", measured, baseline)


def beside_sqlite(name: str, measured: Series, baseline: Series, above: float) -> Figure:
    return Figure(
        name=name, unit="tasks/s", measured=measured, baseline=baseline, baseline_name="the same on SQLite", above=above
    )


def beside_huey(name: str, measured: Series, baseline: Series) -> Figure:
    return Figure(
        name=name, unit="tasks/s", measured=measured, baseline=baseline, baseline_name="FileHuey, one caller, syncs nothing"
    )


def drain_all(url: str, tasks: int) -> Stopwatch:
    watch, _ = asyncio.run(drain(url, tasks, lambda oq: oq.enqueue_many(jobs.nothing, [(PAYLOAD,)] * tasks)))
    return watch


def run_waiting(bench: Bench) -> Iterator[Figure]:
    """One store that grows; at each size the same questions."""
    store = bench.fresh()
    first: Series | None = None
    waiting = 0
    for size in (1_000, 10_000, 100_000, *(() if bench.quick else (1_000_000,))):
        fill(bench, store, size - waiting)
        waiting = size
        reserves, opened, memory = [], [], []
        for _ in bench.steps(f"file: {size:,} waiting tasks", bench.runs):
            reserves.append(asyncio.run(reserve_us(store)))
            seconds, grown = opening(store)
            opened.append(seconds)
            memory.append(grown / size)
        first = first or Series(reserves)
        yield Figure(
            name=f"file: reserve among {size:,} waiting tasks",
            unit="µs",
            measured=Series(reserves),
            baseline=first,
            baseline_name="among 1,000",
            note=f"median of {RESERVES}, durability process; flat: ratio near 1",
        )
        yield Figure(name=f"file: open with {size:,} waiting tasks", unit="s", measured=Series(opened))
        yield Figure(name=f"file: memory per task of {size:,}", unit="bytes", measured=Series(memory))
    bench.drop(store)


def fill(bench: Bench, store: Path, tasks: int) -> None:
    chunk = min(tasks, 50_000)
    with OmniQ.from_url(f"{folder(store)}?durability=process") as oq:
        for start in bench.steps(f"file: storing {tasks:,} tasks, {chunk:,} at a time", -(-tasks // chunk)):
            oq.enqueue_many(jobs.nothing, [(PAYLOAD,)] * min(chunk, tasks - start * chunk))


async def reserve_us(store: Path) -> float:
    """The median of some reserves of one task each, all given back in the end."""
    took: list[float] = []
    held: list[tuple[Release]] = []
    async with FileStorage(store, durability="process") as storage:
        for _ in range(RESERVES):
            token = new_token()
            begun = time.perf_counter()
            (answer,) = await storage.apply([(Reserve(queues=("default",), token=token, worker="benchmark"),)])
            took.append((time.perf_counter() - begun) * 1e6)
            assert isinstance(answer, list)
            assert isinstance(answer[0], Reserved)
            held += [(Release(queue="default", id=task.id, token=token),) for task in answer[0].tasks]
        assert len(held) == RESERVES
        await storage.apply(held)
    return statistics.median(took)


def opening(store: Path) -> tuple[float, float]:
    """Seconds until a new process has opened the folder, and the bytes by which it grew."""
    done = subprocess.run([sys.executable, "-c", OPEN, str(store)], capture_output=True, text=True, check=True)
    seconds, grown = json.loads(done.stdout)
    return seconds, grown
