"""Cancelling tasks that wait and tasks that run."""

from datetime import timedelta
from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, Middleware, Settings, TaskContext, TaskStatus

SHORT_LEASE = 0.15  # so that a heartbeat comes every 50 ms


@pytest.fixture
def oq(storage: Any) -> AsyncOmniQ:
    return AsyncOmniQ(storage, settings=Settings(lease=SHORT_LEASE, backoff_base=0.01, grace=5))


async def test_a_waiting_task_is_cancelled_and_never_runs(oq: AsyncOmniQ, key: str) -> None:
    now = await oq.enqueue(jobs.count, key)
    later = await oq.enqueue(jobs.count, key, eta=timedelta(hours=1))
    assert await oq.cancel(now)
    assert await oq.cancel(later)
    for task_id in (now, later):
        result = await oq.get_result(task_id)
        assert result.status is TaskStatus.CANCELLED
        assert (await oq.get_task(task_id)).status is TaskStatus.CANCELLED
        assert not await oq.cancel(task_id)
    async with await oq.worker() as pool:
        await pool.drain()
    assert jobs.runs[key] == 0


async def test_what_has_ended_or_never_was_cannot_be_cancelled(oq: AsyncOmniQ) -> None:
    assert not await oq.cancel("unknown")
    task_id = await oq.enqueue(jobs.add, 1)
    async with await oq.worker():
        await oq.get_result(task_id, wait=True, timeout=5)
        assert not await oq.cancel(task_id)
    assert (await oq.get_result(task_id)).ok


@pytest.mark.parametrize("func", [jobs.forever, jobs.stubborn])
async def test_a_running_async_task_is_interrupted_within_a_heartbeat(oq: AsyncOmniQ, key: str, func: Any) -> None:
    async with await oq.worker():
        task_id = await oq.enqueue(func, key)
        await eventually(lambda: jobs.runs[key])
        assert await oq.cancel(task_id)
        result = await oq.get_result(task_id, wait=True, timeout=2)
    assert result is not None
    assert result.status is TaskStatus.CANCELLED
    assert jobs.runs[key] == 1
    assert [e.event for e in await oq.history(task_id)] == ["enqueued", "started", "cancelled"]


async def test_a_running_sync_task_is_asked_and_is_cancelled_when_it_returns(oq: AsyncOmniQ, key: str) -> None:
    running: list[TaskContext] = []

    class Looks(Middleware):
        async def before(self, task: TaskContext) -> None:
            running.append(task)

    async with await oq.worker(middleware=[Looks()]):
        task_id = await oq.enqueue(jobs.wait_for_gate, key)
        await eventually(lambda: jobs.runs[key])
        assert await oq.cancel(task_id)
        task = await oq.get_task(task_id)
        assert task.status is TaskStatus.RUNNING
        assert task.cancel_requested
        await eventually(lambda: running[0].cancelled)  # a heartbeat has told the worker
        jobs.gates[key].set()
        result = await oq.get_result(task_id, wait=True, timeout=5)
    assert result.status is TaskStatus.CANCELLED
    assert jobs.runs[key] == 1


async def test_a_sync_task_can_look_whether_it_was_cancelled(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.poll_cancel, key)
        await eventually(lambda: jobs.runs[key])
        assert await oq.cancel(task_id)
        result = await oq.get_result(task_id, wait=True, timeout=5)
    assert result is not None
    assert result.status is TaskStatus.CANCELLED
    assert jobs.runs[key] == 1


async def test_a_task_between_retries_is_cancelled(storage: Any, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(backoff_base=60))
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.fail, key)

        async def retrying() -> bool:
            return (await oq.get_task(task_id)).status is TaskStatus.RETRYING

        await eventually(retrying)
        assert await oq.cancel(task_id)
    assert (await oq.get_result(task_id)).status is TaskStatus.CANCELLED
    assert jobs.runs[key] == 1


async def test_a_cancelled_task_that_fails_is_not_retried(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.options(timeout=0.4, max_retries=3).enqueue(jobs.wait_for_gate, key)
        await eventually(lambda: jobs.runs[key])
        assert await oq.cancel(task_id)
        result = await oq.get_result(task_id, wait=True, timeout=5)
        assert result.status is TaskStatus.CANCELLED
        jobs.gates[key].set()
    assert jobs.runs[key] == 1


async def test_stopping_a_pool_with_a_cancelled_task_ends_it_as_cancelled(oq: AsyncOmniQ, key: str) -> None:
    pool = await oq.worker()
    await pool.start()
    task_id = await oq.options(lease=30).enqueue(jobs.forever, key)
    await eventually(lambda: jobs.runs[key])
    assert await oq.cancel(task_id)
    await pool.stop(grace=0)
    assert (await oq.get_task(task_id)).status is TaskStatus.CANCELLED
