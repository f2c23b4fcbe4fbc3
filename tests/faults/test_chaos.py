"""Several real processes on one store, killed and frozen at random; afterwards every promise is checked."""

import asyncio
import os
import random
import time

import pytest
from fault_checker import broken_promises
from fault_processes import Fleet, Process, on_each_store, until
from fault_producer import GROUP_LIMITS

from omniq import OmniQ

LEASE_S = 1.5
ROUNDS = int(os.environ.get("ROUNDS") or 20)


def hurt_at_random(fleet: Fleet, workers: int, producers: int, seconds: float, per_second: float, seed: int) -> None:
    """Keep so many processes going for a while; one after another is killed, or frozen past its lease."""
    dice = random.Random(seed)
    working = [fleet.worker(concurrency=4) for _ in range(workers)]
    producing = [fleet.producer(dice.random(), per_second, LEASE_S) for _ in range(producers)]
    for worker in working:
        worker.ready()
    thaw_at: list[tuple[float, Process]] = []
    end = time.monotonic() + seconds
    next_fault = time.monotonic() + 0.5
    while (now := time.monotonic()) < end:
        for moment, worker in [pair for pair in thaw_at if pair[0] <= now]:
            thaw_at.remove((moment, worker))
            worker.thaw()
        if now >= next_fault:
            next_fault = now + dice.uniform(0.2, 0.8)
            awake = [n for n, worker in enumerate(working) if not worker.frozen]
            what = dice.random()
            if what < 0.6 and awake:
                number = dice.choice(awake)
                working[number].kill()
                working[number] = fleet.worker(concurrency=4)
            elif what < 0.85 and len(awake) > 1:
                victim = working[dice.choice(awake)]
                victim.freeze()
                thaw_at.append((now + LEASE_S * dice.uniform(1.2, 2.0), victim))
            elif what >= 0.85:
                number = dice.randrange(producers)
                producing[number].kill()
                producing[number] = fleet.producer(dice.random(), per_second, LEASE_S)
        time.sleep(0.01)
    for _, worker in thaw_at:
        worker.thaw()
    for producer in producing:
        assert producer.finish() == 0, producer.errors


def wait_until_all_have_ended(fleet: Fleet, seconds: float) -> None:
    with OmniQ.from_url(fleet.url) as oq:
        until(lambda: not any(c.waiting or c.running for c in oq.counts()), "all tasks to end", seconds)


def acknowledged(fleet: Fleet) -> list[str]:
    return [i for p in fleet.all if p.name.startswith("producer") for line in p.lines for i in line.split()]


async def check(fleet: Fleet, ids: list[str]) -> None:
    async with fleet.storage() as storage:
        assert await broken_promises(storage, ids, fleet.noted(), GROUP_LIMITS) == []
        assert await storage.lost_workers() == []
    assert fleet.worker_locks() == []
    assert list(fleet.store.glob("corrupt/*")) == [], "a crash damages nothing"


def survive(fleet: Fleet, *, workers: int, producers: int, seconds: float, per_second: float, seed: int) -> None:
    hurt_at_random(fleet, workers, producers, seconds, per_second, seed)
    wait_until_all_have_ended(fleet, 60)
    for process in fleet.all:
        if not process.killed:
            assert process.finish() == 0, process.errors
        assert "Traceback" not in process.noise, f"{process.name}: {process.errors}"
        assert "store failed" not in process.noise, f"{process.name}: {process.errors}"
    ids = acknowledged(fleet)
    print(f"{len(ids)} tasks acknowledged, {len(fleet.noted())} runs, {sum(p.killed for p in fleet.all)} kills")
    assert len(ids) > seconds * per_second * 0.2
    asyncio.run(check(fleet, ids))


@pytest.mark.parametrize(
    ("fleet", "workers", "producers"),
    [("sqlite", 3, 1), pytest.param("file", 5, 3, marks=pytest.mark.slow)],
    indirect=["fleet"],
)
def test_processes_killed_and_frozen_at_random_lose_nothing(fleet: Fleet, seed: int, workers: int, producers: int) -> None:
    survive(fleet, workers=workers, producers=producers, seconds=5, per_second=100 / producers, seed=seed)


@pytest.mark.slow
@on_each_store
@pytest.mark.parametrize("_round", range(ROUNDS))
def test_eight_processes_killed_and_frozen_at_random_lose_nothing(fleet: Fleet, seed: int, _round: int) -> None:
    survive(fleet, workers=6, producers=2, seconds=30, per_second=60, seed=seed)
