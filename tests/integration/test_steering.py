"""What operators do with a queue from Python: groups, workers, removing, checking, finishing."""

import asyncio

import pytest
from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, OmniQ, SQLiteStorage, TaskNotFound, TaskStatus
from omniq.errors import NotWaiting


async def test_groups_and_workers_are_listed(oq: AsyncOmniQ) -> None:
    async with oq:
        for group in ("a", "b", "c"):
            await oq.options(group=group).enqueue(jobs.add, 1)
        first, cursor = await oq.groups("default", limit=2)
        rest, end = await oq.groups("default", cursor=cursor, limit=2)
        assert [g.group for g in first + rest] == ["a", "b", "c"]
        assert end is None
        assert await oq.workers() == []
        async with await oq.worker(2) as pool:
            assert [w.worker for w in await oq.workers()] == [pool.worker_id]
        assert await oq.workers() == []
        assert await oq.check() == []


async def test_a_task_is_removed_with_its_result(oq: AsyncOmniQ, key: str) -> None:
    async with oq:
        id = await oq.enqueue(jobs.wait_async, key)
        async with await oq.worker():
            await eventually(lambda: jobs.runs[key])
            with pytest.raises(NotWaiting):
                await oq.remove(id)
            jobs.gates[key].set()
            assert await oq.get_result(id, wait=True, timeout=10)
        await oq.remove(id)
        assert await oq.get_task(id) is None
        assert await oq.get_result(id) is None
        with pytest.raises(TaskNotFound):
            await oq.remove(id)


async def test_a_pool_that_finishes_takes_no_more_and_waits_for_what_runs(oq: AsyncOmniQ, key: str) -> None:
    async with oq:
        first = await oq.enqueue(jobs.wait_async, key)
        pool = await oq.worker(2)
        await pool.finish()  # harmless before the start
        await pool.start()
        await eventually(lambda: jobs.runs[key])
        finishing = asyncio.ensure_future(pool.finish())
        await asyncio.sleep(0)
        second = await oq.enqueue(jobs.add, 1)
        assert not finishing.done()
        jobs.gates[key].set()
        await finishing
        assert pool.running == 0
        await pool.stop()
        ended, waiting = await oq.get_task(first), await oq.get_task(second)
        assert ended is not None
        assert waiting is not None
        assert (ended.status, waiting.status) == (TaskStatus.SUCCESS, TaskStatus.PENDING)


def test_the_blocking_twin_has_them_too(tmp_path) -> None:
    with OmniQ(SQLiteStorage(tmp_path / "q.db")) as oq:
        id = oq.options(group="g").enqueue(jobs.add, 1)
        assert [g.group for g in oq.groups("default")[0]] == ["g"]
        assert oq.workers() == []
        assert oq.check(repair=True) == []
        oq.remove(id)
        assert oq.get_task(id) is None
