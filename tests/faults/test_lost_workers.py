"""What follows when a worker dies or stops: others notice the death at once, silence only when the lease has run out."""

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import fault_jobs
import pytest
from fault_processes import Fleet, on_each_store, until

from omniq import BaseStorage, OmniQ, TaskStatus
from omniq.models import new_token, now_us
from omniq.operations import Enqueue, EventRow, Reserve

LONG_LEASE_S = 30.0
SHORT_LEASE_S = 1.5


@pytest.fixture
def oq(fleet: Fleet) -> Iterator[OmniQ]:
    with OmniQ.from_url(fleet.url) as made:
        yield made


def seconds_until_a_killed_workers_task_starts_again(fleet: Fleet, oq: OmniQ, function: object) -> float:
    dying = fleet.worker().ready()
    task_id = oq.options(lease=LONG_LEASE_S).enqueue(function, str(fleet.side))
    until(lambda: (task_id, 1, dying.pid) in fleet.noted(), "the first attempt")
    if function is fault_jobs.fork_and_hang_at_first:
        until(lambda: any(word.startswith("child-") for word in fleet.words()), "the child")
    other = fleet.worker().ready()
    dying.kill()
    killed_at = time.time()
    result = oq.get_result(task_id, wait=True, timeout=20)
    assert result is not None, "the task never came back"
    assert (result.status, result.attempts) == (TaskStatus.SUCCESS, 2)
    assert result.result == f"2-{other.pid}"
    other.kill()
    return oq.history(task_id)[-2].ts.timestamp() - killed_at


@pytest.mark.parametrize(
    ("fleet", "function"),
    [
        ("sqlite", fault_jobs.hang_at_first),
        ("sqlite", fault_jobs.fork_and_hang_at_first),
        ("file", fault_jobs.fork_and_hang_at_first),
    ],
    indirect=["fleet"],
)
def test_a_killed_workers_task_runs_again_within_a_second(fleet: Fleet, oq: OmniQ, function: object) -> None:
    """Also when the worker had forked a child that lives on. The median of three, since the machine may be busy."""
    took = [seconds_until_a_killed_workers_task_starts_again(fleet, oq, function) for _ in range(3)]
    print("seconds:", took)
    assert statistics.median(took) < 1.0


@on_each_store
def test_all_tasks_that_a_killed_worker_held_run_again(fleet: Fleet, oq: OmniQ) -> None:
    dying = fleet.worker(concurrency=8).ready()
    ids = [oq.enqueue(fault_jobs.hang_at_first, str(fleet.side)) for _ in range(8)]
    until(lambda: len(fleet.noted()) == 8, "eight first attempts")
    dying.kill()
    fleet.worker(concurrency=8).ready()
    results = [oq.get_result(i, wait=True, timeout=20) for i in ids]
    assert [(r.status, r.attempts) for r in results if r] == [(TaskStatus.SUCCESS, 2)] * 8


@on_each_store
def test_a_frozen_workers_task_waits_for_its_lease_and_its_late_end_is_refused(fleet: Fleet, oq: OmniQ, tmp_path: Path) -> None:
    frozen = fleet.worker().ready()
    gate = tmp_path / "gate"
    task_id = oq.options(lease=SHORT_LEASE_S).enqueue(fault_jobs.wait_for_file_at_first, str(fleet.side), str(gate))
    until(lambda: fleet.noted(), "the first attempt")
    other = fleet.worker().ready()
    frozen.freeze_outside_a_write(fleet)
    lease_until_us = asyncio.run(lease_end(fleet, task_id))

    result = oq.get_result(task_id, wait=True, timeout=20)
    assert result is not None
    assert result.result == f"2-{other.pid}"
    second_start = [e for e in oq.history(task_id) if e.event == "started"][1]
    assert second_start.ts.timestamp() * 1e6 >= lease_until_us

    gate.touch()
    frozen.thaw()
    until(lambda: (task_id, 1, frozen.pid) in fleet.noted("end"), "the first attempt to end")
    until(lambda: "refused" in frozen.errors or "was lost" in frozen.errors, "the frozen worker to hear that it was late")
    assert frozen.finish() == 0
    assert oq.get_result(task_id) == result
    assert [e.event for e in oq.history(task_id)] == ["enqueued", "started", "expired", "started", "succeeded"]


async def lease_end(fleet: Fleet, task_id: str) -> int:
    async with fleet.storage() as storage:
        record = await storage.get(task_id)
    assert record is not None
    assert record.lease_until_us is not None
    return record.lease_until_us


@on_each_store
async def test_a_clock_that_is_an_hour_ahead_takes_nothing_from_a_worker_that_renews(
    fleet: Fleet, oq: OmniQ, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    working = fleet.worker().ready()
    task_id = oq.options(lease=SHORT_LEASE_S).enqueue(fault_jobs.wait_for_file_at_first, str(fleet.side), str(gate))
    until(lambda: fleet.noted(), "the first attempt")

    async def look(storage: BaseStorage, seconds: float) -> int:
        """How many leases were taken until one was, or until the time is up."""
        end = time.monotonic() + seconds
        taken = 0
        while not taken and time.monotonic() < end:
            taken = await storage.reclaim(lost_workers=await storage.lost_workers())
            await asyncio.sleep(0.1)
        return taken

    async with BaseStorage.from_url(fleet.url, clock=lambda: now_us() + 3_600_000_000) as ahead:
        assert await look(ahead, 2 * SHORT_LEASE_S) == 0
        working.freeze_outside_a_write(fleet)
        assert await look(ahead, 10 * SHORT_LEASE_S) == 1, "one that renews nothing loses its tasks"
    gate.touch()
    working.thaw()
    result = oq.get_result(task_id, wait=True, timeout=20)
    assert result is not None
    assert result.attempts == 2


def test_a_thawed_worker_goes_on_with_other_tasks(fleet: Fleet, oq: OmniQ, tmp_path: Path) -> None:
    frozen = fleet.worker().ready()
    gate = tmp_path / "gate"
    first = oq.options(lease=SHORT_LEASE_S).enqueue(fault_jobs.wait_for_file_at_first, str(fleet.side), str(gate))
    until(lambda: fleet.noted(), "the first attempt")
    frozen.freeze_outside_a_write(fleet)
    other = fleet.worker().ready()
    assert oq.get_result(first, wait=True, timeout=20) is not None
    assert other.finish() == 0
    gate.touch()
    frozen.thaw()
    second = oq.enqueue(fault_jobs.work, str(fleet.side), 0.0)
    result = oq.get_result(second, wait=True, timeout=20)
    assert result is not None
    assert result.result == f"1-{frozen.pid}"


def test_a_task_that_kills_its_worker_every_time_ends_as_worker_lost(fleet: Fleet, oq: OmniQ) -> None:
    before = oq.enqueue_many(fault_jobs.work, [(str(fleet.side), 0.0)] * 20)
    poison = oq.options(max_retries=2).enqueue(fault_jobs.die, str(fleet.side))
    after = oq.enqueue_many(fault_jobs.work, [(str(fleet.side), 0.0)] * 20)
    worker = fleet.worker()

    def ended() -> bool:
        nonlocal worker
        if not worker.running:
            assert worker.popen.returncode == 7, worker.errors
            worker = fleet.worker()
        return not any(c.waiting or c.running for c in oq.counts())

    until(ended, "all tasks to end", 60)
    result = oq.get_result(poison)
    assert result is not None
    assert result.error is not None
    assert (result.status, result.error.type, result.attempts) == (TaskStatus.FAILED, "WorkerLost", 3)
    assert "died during attempt 3 of 3" in result.error.message
    assert [task for task, _, _ in fleet.noted()].count(poison) == 3
    others = [oq.get_result(i) for i in [*before, *after]]
    assert [r.status for r in others if r] == [TaskStatus.SUCCESS] * 40


def test_neighbours_of_a_task_that_kills_its_worker_are_parted_from_it(fleet: Fleet, oq: OmniQ) -> None:
    """All four are leased together at first; from their second loss on they come back at different times.

    Each loss is an attempt for all of them, so only attempts to spare are a promise to survive: the poison kills four times.
    """
    poison = oq.options(max_retries=3).enqueue(fault_jobs.die, str(fleet.side))
    neighbours = [oq.options(max_retries=5).enqueue(fault_jobs.work, str(fleet.side), 0.5) for _ in range(3)]
    worker = fleet.worker(concurrency=4)

    def ended() -> bool:
        nonlocal worker
        if not worker.running:
            worker = fleet.worker(concurrency=4)
        return not any(c.waiting or c.running for c in oq.counts())

    until(ended, "all tasks to end", 90)
    results = [oq.get_result(i) for i in neighbours]
    assert [r.status for r in results if r] == [TaskStatus.SUCCESS] * 3
    failed = oq.get_result(poison)
    assert failed is not None
    assert failed.status is TaskStatus.FAILED
    events = asyncio.run(all_events(fleet))
    second_losses = [e.due_us for e in events if e.event == "expired" and e.attempt == 2]
    assert len(second_losses) == len(set(second_losses)) > 0


async def all_events(fleet: Fleet) -> list[EventRow]:
    async with fleet.storage() as storage:
        return await storage.events(limit=10_000)


@on_each_store
async def test_a_worker_is_not_taken_for_dead_by_a_store_of_its_own_process_with_another_path(fleet: Fleet) -> None:
    """Closing any descriptor of a lock file drops the lock, so the same file must be known under every spelling."""
    other_name = fleet.folder / "other-name"
    other_name.symlink_to(fleet.folder, target_is_directory=True)
    other_url = fleet.url.replace(str(fleet.folder), str(other_name))
    async with fleet.storage() as first, BaseStorage.from_url(other_url) as second:
        await first.hold_worker("host:1:me")
        await first.apply([(Enqueue(id="t", name="job"),)])
        await first.apply([(Reserve(queues=("default",), token=new_token(), worker="host:1:me"),)])
        try:
            assert await second.lost_workers() == []
            assert await asyncio.to_thread(lost_by_another_process, fleet) == ["[]"]
        finally:
            await first.release_worker("host:1:me")


def lost_by_another_process(fleet: Fleet) -> list[str]:
    code = """
import asyncio, sys
from omniq import BaseStorage
print(asyncio.run(BaseStorage.from_url(sys.argv[1]).lost_workers()))
"""
    process = fleet.start("looker", "-c", code, fleet.url)
    assert process.finish() == 0, process.errors
    return process.lines
