"""Pick-up: from just before the enqueue call in this process to the start of the function in another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import jobs
from benchmarks.baseline import commit_ms
from benchmarks.bench import Bench
from benchmarks.figures import Figure, Series, percentile
from omniq import AsyncOmniQ

PER_SECOND = 20


def run(bench: Bench) -> Iterator[Figure]:
    tasks = bench.size(100, 30)
    samples: list[list[float]] = []
    commits: list[list[float]] = []
    for _ in bench.steps(f"pick-up, {tasks} tasks at {PER_SECOND}/s", bench.runs):
        store = bench.fresh()
        with bench.worker(store):
            samples.append(asyncio.run(latencies(store, tasks)))
        bench.drop(store)
        commits.append(commit_ms(store := bench.fresh(), tasks))
        bench.drop(store)
    for name, share, below in (("p50", 0.5, 10.0), ("p99", 0.99, None)):
        yield Figure(
            name=f"pick-up from another process, {name}",
            unit="ms",
            measured=Series([percentile(sample, share) for sample in samples]),
            baseline=Series([percentile(sample, share) for sample in commits]),
            baseline_name="one commit",
            below=below,
        )


async def latencies(store: Path, tasks: int) -> list[float]:
    async with AsyncOmniQ.from_url(f"sqlite:///{store}") as oq:
        ready = await oq.enqueue(jobs.when)
        assert await oq.get_result(ready, wait=True, timeout=60), "the worker process does not work"
        sent: dict[str, float] = {}
        for _ in range(tasks):
            begun = time.monotonic()
            sent[await oq.enqueue(jobs.when)] = begun
            await asyncio.sleep(1 / PER_SECOND)
        took: list[float] = []
        for task_id, begun in sent.items():
            result = await oq.get_result(task_id, wait=True, timeout=60)
            assert result is not None
            took.append((result.result - begun) * 1000)
        return took
