"""Several writers on one store: nobody sees "locked", nobody wins twice, and no process can take the lock to its grave."""

import asyncio
import os
import signal
import sqlite3
import sys
import threading
import time
from pathlib import Path

import fault_jobs
import pytest
from fault_processes import Fleet, on_each_store, until

from omniq import BaseStorage, OmniQ
from omniq.models import new_token
from omniq.operations import Enqueue, Reserve, Reserved

RACERS = 32


@pytest.mark.slow
def test_a_storm_of_writers_beside_an_open_snapshot_shows_nobody_an_error(fleet: Fleet, seed: int) -> None:
    with OmniQ.from_url(fleet.url) as oq:
        oq.enqueue(fault_jobs.nothing)
        reader = sqlite3.connect(fleet.store, isolation_level=None)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM tasks").fetchone() == (1,)
        workers = [fleet.worker(concurrency=4) for _ in range(4)]
        producers = [fleet.producer(f"{seed}-{n}", per_second=1000, lease=30) for n in range(4)]
        for worker in workers:
            worker.ready()
        end = time.monotonic() + 2.5
        until(lambda: time.monotonic() > end, "the storm to pass")
        assert reader.execute("SELECT count(*) FROM tasks").fetchone() == (1,)
        sqlite3.connect(fleet.store, timeout=30).execute("VACUUM").connection.close()
        for producer in producers:
            assert producer.finish() == 0, producer.errors
        until(lambda: not any(c.waiting or c.running for c in oq.counts()), "all tasks to end", 60)
        reader.close()
        ids = [i for p in producers for line in p.lines for i in line.split()]
        assert sum(c.done for c in oq.counts()) == len(ids) + 1
    for worker in workers:
        assert worker.finish() == 0
    assert "".join(p.noise for p in fleet.all) == ""
    assert (fleet.folder / "queue.db-wal").exists() is False, "the last one to close folds the log into the database"


async def one_expired_task(fleet: Fleet) -> None:
    async with fleet.storage() as storage:
        await storage.apply([(Enqueue(id="prize", name="job", max_attempts=4),)], 1_000_000)
        op = Reserve(queues=("default",), token=new_token(), lease_us=1_000_000, worker="gone")
        assert await storage.apply([(op,)], 1_000_000)


async def race(storage: BaseStorage) -> tuple[int, int]:
    """How many leases this racer took back, and how many tasks it got."""
    taken = await storage.reclaim()
    (answer,) = await storage.apply([(Reserve(queues=("default",), token=new_token(), worker="racer"),)])
    assert isinstance(answer, list)
    assert isinstance(answer[0], Reserved)
    return taken, len(answer[0].tasks)


@on_each_store
def test_of_many_threads_racing_for_an_expired_lease_exactly_one_wins(fleet: Fleet) -> None:
    asyncio.run(one_expired_task(fleet))
    barrier = threading.Barrier(RACERS)
    outcomes: list[tuple[int, int]] = []

    async def run() -> None:
        async with fleet.storage() as storage:
            barrier.wait(30)
            outcomes.append(await race(storage))

    threads = [threading.Thread(target=lambda: asyncio.run(run())) for _ in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == RACERS
    assert [sum(column) for column in zip(*outcomes, strict=True)] == [1, 1]


@on_each_store
def test_of_many_processes_racing_for_an_expired_lease_exactly_one_wins(fleet: Fleet) -> None:
    asyncio.run(one_expired_task(fleet))
    runner = fleet.start("race", str(Path(__file__)), fleet.url, str(RACERS))
    assert runner.finish(60) == 0, runner.errors
    outcomes = [tuple(map(int, line.split())) for line in runner.lines]
    assert len(outcomes) == RACERS
    assert [sum(column) for column in zip(*outcomes, strict=True)] == [1, 1]


def fork_racers(url: str, racers: int) -> None:
    """Fork the racers, let them go at once, and print what each of them got."""
    gate_out, gate_in = os.pipe()
    for _ in range(racers):
        if os.fork() == 0:
            os.close(gate_in)
            os.read(gate_out, 1)
            taken, got = asyncio.run(race(BaseStorage.from_url(url)))
            os.write(1, f"{taken} {got}\n".encode())
            os._exit(0)
    os.close(gate_in)
    for _ in range(racers):
        _, status = os.wait()
        assert status == 0


@on_each_store
@pytest.mark.timeout(60)
def test_a_writer_killed_in_its_transaction_leaves_the_lock_to_others_though_its_child_lives(fleet: Fleet) -> None:
    """A `flock` belongs to the open file, which a forked child shares: the child must not keep it."""
    victim = fleet.start("victim", str(Path(__file__)), fleet.url)
    assert victim.finish() == -signal.SIGKILL, victim.errors
    child = int(victim.lines[0])
    try:
        os.kill(child, 0)
        after = fleet.start("after", str(Path(__file__)), fleet.url, "1")
        until(lambda: not after.running, "another process to write", 10)
        assert after.lines == ["0 0"], after.errors
    finally:
        os.kill(child, signal.SIGKILL)


def fork_and_die_in_a_transaction(url: str) -> None:
    def die() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    async def main() -> None:
        storage = BaseStorage.from_url(url, clock=die)
        await storage.open()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            while True:
                signal.pause()
        print(child, flush=True)
        await storage.promote("default")  # asks for the time in its transaction

    asyncio.run(main())


@on_each_store
def test_a_forked_child_and_its_parent_both_write(fleet: Fleet) -> None:
    with OmniQ.from_url(fleet.url) as oq:
        oq.enqueue(fault_jobs.nothing)
        child = os.fork()
        if child == 0:
            try:
                for _ in range(50):
                    oq.enqueue(fault_jobs.nothing)
                os._exit(0)
            finally:
                os._exit(1)
        for _ in range(50):
            oq.enqueue(fault_jobs.nothing)
        until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0), "the child to end well")
        assert sum(c.ready for c in oq.counts()) == 101


if __name__ == "__main__":
    if len(sys.argv) == 2:
        fork_and_die_in_a_transaction(sys.argv[1])
    else:
        fork_racers(sys.argv[1], int(sys.argv[2]))
