"""On Redis, beside the published client of the same contract, in turns on the same server: publish, publish in bulk, drain."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import jobs
from benchmarks.bench import Bench
from benchmarks.enqueue import PAYLOAD
from benchmarks.figures import Figure
from benchmarks.timing import Stopwatch
from omniq import AsyncOmniQ
from omniq.contract import ContractClient
from tests.support.guest import NoGuest, make_guest
from tests.support.redis_server import Server, running

QUEUE = "bench"
BULK_RATIO = 5  # aims: times what the published client does in the same minutes
DRAIN_RATIO = 10
CONCURRENCY = 10


def run(bench: Bench, appendfsync: str | None = None) -> Iterator[Figure]:
    """In memory, or with an append-only file that is synced as said."""
    label, note = ("redis", "in memory") if appendfsync is None else (f"redis-{appendfsync}", f"appendfsync {appendfsync}")
    options = {} if appendfsync is None else {"appendonly": "yes", "appendfsync": appendfsync}
    one, many, drained = bench.size(3_000, 500), bench.size(30_000, 5_000), bench.size(20_000, 5_000)
    with running(bench.fresh(), **options) as server:
        guest = Guest(bench, server, bench.size(2_000, 500))
        for name, run_ours, run_theirs, ratio in (
            (f"{label}: publish one by one", lambda: one_by_one(server, one), guest.publish, None),
            (f"{label}: publish_many", lambda: in_bulk(server, many), guest.publish, BULK_RATIO),
            (f"{label}: drain with results", lambda: asyncio.run(drain(server, drained)), guest.drain, DRAIN_RATIO),
        ):
            measured, baseline = bench.compare(name, _on(server, run_ours), _on(server, run_theirs))
            yield Figure(
                name=name,
                unit="tasks/s",
                measured=measured,
                baseline=baseline,
                baseline_name="the published client, 4.0.0",
                above=None if ratio is None else ratio * baseline.median,
                note=f"{note}, concurrency {CONCURRENCY}",
            )


def _on(server: Server, run: Callable[[], Stopwatch]) -> Callable[[Path], Stopwatch]:
    def once(_: Path) -> Stopwatch:
        with server.client() as client:
            client.flushall()
        return run()

    return once


def one_by_one(server: Server, tasks: int) -> Stopwatch:
    with ContractClient.from_url(server.url) as client:
        client.publish(QUEUE, {"payload": PAYLOAD})
        with Stopwatch(tasks) as watch:
            for _ in range(tasks):
                client.publish(QUEUE, {"payload": PAYLOAD})
    return watch


def in_bulk(server: Server, tasks: int) -> Stopwatch:
    payload = {"payload": PAYLOAD}
    with ContractClient.from_url(server.url) as client:
        client.publish(QUEUE, payload)
        with Stopwatch(tasks) as watch:
            client.publish_many(QUEUE, [payload] * tasks)
    return watch


async def drain(server: Server, tasks: int) -> Stopwatch:
    """From the first lease to the last completion of a queue that was filled before; every result is kept."""
    async with AsyncOmniQ.from_url(server.url) as oq:
        await oq.enqueue_many(jobs.nothing, [(PAYLOAD,)] * tasks)
        with Stopwatch(tasks) as watch:
            async with await oq.worker(CONCURRENCY, allow=["benchmarks.jobs"]) as pool:
                await pool.drain()
        assert [c.done for c in await oq.counts()] == [tasks]
        storage = oq.queue.storage
        events = [e for e in await storage.events("default", 0, 4 * tasks) if e.event in ("started", "succeeded")]
        watch.seconds = (events[-1].ts_us - events[0].ts_us) / 1e6
    return watch


class Guest:
    """The published client, in an environment and a process of its own."""

    def __init__(self, bench: Bench, server: Server, jobs: int) -> None:
        try:
            self._python = make_guest(bench.fresh())
        except NoGuest as exc:
            raise SystemExit(f"the published client, which is compared with, cannot be installed: {exc}") from exc
        self._server, self._jobs = server, jobs

    def _run(self, what: str) -> Stopwatch:
        script = str(Path(__file__).parent / "guest.py")
        command = [self._python, "-E", script, str(self._server.port), what, str(self._jobs), str(len(PAYLOAD))]
        watch = Stopwatch(self._jobs)
        watch.seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return watch

    def publish(self) -> Stopwatch:
        return self._run("publish")

    def drain(self) -> Stopwatch:
        self._run("publish")
        return self._run("drain")
