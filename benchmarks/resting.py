"""What a worker costs that has nothing to do: CPU of an idle one, memory of one beside a million tasks of next month."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from benchmarks import jobs
from benchmarks.bench import Bench
from benchmarks.figures import Figure, Series
from omniq import OmniQ

MIB = 1024


def run_idle(bench: Bench) -> Iterator[Figure]:
    seconds = bench.size(10, 3)
    values: list[float] = []
    for _ in bench.steps(f"idle CPU over {seconds} s", 3):
        store = bench.fresh()
        with bench.worker(store) as process:
            wait_until_it_works(store, 10)
            time.sleep(1.0)
            begun, before = time.monotonic(), cpu_s(process)
            time.sleep(seconds)
            values.append(100 * (cpu_s(process) - before) / (time.monotonic() - begun))
        bench.drop(store)
    yield Figure(name=f"idle CPU of a worker over {seconds} s", unit="%", measured=Series(values), below=1.0)


def run_memory(bench: Bench) -> Iterator[Figure]:
    tasks = bench.size(1_000_000, 50_000)
    empty, full = bench.fresh(), bench.fresh()
    fill(bench, full, tasks)
    before: list[float] = []
    after: list[float] = []
    for _ in bench.steps("memory of a worker, empty and full store", 3):
        before.append(rss_mib(bench, empty))
        after.append(rss_mib(bench, full))
    bench.drop(full)
    yield Figure(
        name=f"memory of a worker beside {tasks:,} later tasks",
        unit="MiB",
        measured=Series(after),
        baseline=Series(before),
        baseline_name="the same on an empty store",
        note="flat: ratio near 1",
    )


def fill(bench: Bench, store: Path, tasks: int) -> None:
    chunk = 50_000
    with OmniQ.from_url(f"sqlite:///{store}") as oq:
        later = oq.options(eta=timedelta(days=30))
        for _ in bench.steps(f"storing {tasks:,} tasks for next month, {chunk:,} at a time", tasks // chunk):
            later.enqueue_many(jobs.nothing, [("x" * 80,)] * chunk)


def rss_mib(bench: Bench, store: Path) -> float:
    """Of a worker that has run some tasks and looked around for two seconds."""
    with bench.worker(store) as process:
        wait_until_it_works(store, 200)
        time.sleep(2.0)
        return _status(process, "VmRSS") / MIB


def wait_until_it_works(store: Path, tasks: int) -> None:
    with OmniQ.from_url(f"sqlite:///{store}") as oq:
        for task_id in oq.enqueue_many(jobs.nothing, [()] * tasks):
            assert oq.get_result(task_id, wait=True, timeout=60), "the worker process does not work"


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Of all its threads, to the nanosecond; /proc/PID/stat counts hundredths of a second."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def _status(process: subprocess.Popen[bytes], name: str) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
