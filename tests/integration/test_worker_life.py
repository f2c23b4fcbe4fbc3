"""How a pool starts, works, keeps its leases, and stops."""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, AsyncWorkerPool, BaseStorage, Invalid, MemoryStorage, Settings, TaskStatus, presence
from omniq.models import new_token
from omniq.operations import Cancel, Reserve


async def test_a_pool_starts_once_stops_twice_and_starts_again(oq: AsyncOmniQ, key: str) -> None:
    pool = await oq.worker()
    assert not pool.started
    await pool.stop()
    for n in (1, 2):
        await pool.start()
        assert pool.started
        with pytest.raises(Invalid, match="already"):
            await pool.start()
        assert (await oq.get_result(await oq.enqueue(jobs.count, key), wait=True, timeout=5)).result == n
        await pool.stop()
        assert not pool.started
        await pool.stop()
    waiting = await oq.enqueue(jobs.count, key)
    assert await oq.get_result(waiting, wait=True, timeout=0.05) is None


async def test_a_pool_tells_the_registry_how_many_functions_run_in_each_queue(
    oq: AsyncOmniQ, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "TELL_S", 0.02)

    async def busy(wanted: dict[str, int]) -> bool:
        return [worker.busy for worker in await oq.workers()] == [wanted]

    async with await oq.worker(concurrency=3):
        for queue in ("one", "two", "two"):
            await oq.options(queue=queue).enqueue(jobs.wait_for_gate, key)
        await eventually(lambda: busy({"one": 1, "two": 2}))
        (worker,) = await oq.workers()
        assert (set(worker.queues), worker.running, worker.concurrency) == ({"one", "two"}, 3, 3)
        jobs.gates[key].set()
        await eventually(lambda: busy({}))


async def test_an_idle_pool_says_nothing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "TELL_S", 0.02)
    storage = MemoryStorage()
    async with AsyncWorkerPool(storage, queues=["mail"]):
        (first,) = await storage.workers()
        assert (first.queues, first.busy) == (("mail",), {})
        await asyncio.sleep(0.2)
        assert [worker.seen_at_us for worker in await storage.workers()] == [first.seen_at_us]


async def test_a_pool_with_long_leases_gives_signs_of_life_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 0.02)
    storage = MemoryStorage()
    async with AsyncWorkerPool(storage, queues=["mail"], lease=3600):
        (first,) = await storage.workers()

        async def heard_again() -> bool:
            return (await storage.workers())[0].seen_at_us > first.seen_at_us

        await eventually(heard_again)


async def test_a_pool_is_a_context_manager_and_takes_a_bare_storage(storage: BaseStorage) -> None:
    oq = AsyncOmniQ(storage)
    task_id = await oq.enqueue(jobs.add, 1)
    async with AsyncWorkerPool(storage, concurrency=2) as pool:
        assert pool.started
        assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
    assert not pool.started


async def test_a_started_pool_is_registered_and_a_stopped_one_is_not(oq: AsyncOmniQ) -> None:
    async with await oq.worker(concurrency=3) as pool:
        (info,) = await oq.storage.workers()
        assert (info.worker, info.concurrency) == (pool.worker_id, 3)
    assert await oq.storage.workers() == []


async def test_concurrency_is_how_many_run_at_once(oq: AsyncOmniQ, key: str) -> None:
    await oq.enqueue_many(jobs.crowd, [(key,)] * 12)
    async with await oq.worker(concurrency=3) as pool:
        await pool.drain()
    assert jobs.most_inside[key] == 3


async def test_sync_tasks_run_beside_each_other(oq: AsyncOmniQ, key: str) -> None:
    ids = [await oq.enqueue(jobs.wait_for_gate, key) for _ in range(3)]
    async with await oq.worker(concurrency=3):
        await eventually(lambda: jobs.runs[key] == 3)
        jobs.gates[key].set()
        for task_id in ids:
            assert (await oq.get_result(task_id, wait=True, timeout=5)).ok


async def test_a_task_of_the_same_process_starts_at_once(oq: AsyncOmniQ) -> None:
    async with await oq.worker(poll_interval=30):
        for _ in range(5):
            before = time.monotonic()
            await oq.get_result(await oq.enqueue(jobs.add_async, 1), wait=True, timeout=5)
            assert time.monotonic() - before < 1
        other = oq.options(queue="a-queue-that-is-new")
        before = time.monotonic()
        assert (await oq.get_result(await other.enqueue(jobs.add, 1), wait=True, timeout=5)).ok
        assert time.monotonic() - before < 1


async def test_a_queue_that_is_new_is_served_at_once(oq: AsyncOmniQ) -> None:
    async with await oq.worker(poll_interval=30):
        for n in range(25):
            assert (await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=3)).ok
            task_id = await oq.options(queue=f"new-{n}").enqueue(jobs.add_async, 1)
            assert await oq.get_result(task_id, wait=True, timeout=3) is not None, f"queue {n} was overlooked"


async def test_a_queue_that_is_new_is_served_at_once_by_a_worker_that_was_busy(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker(poll_interval=30):
        for queue in ("a", "b", "a", "b"):
            task_id = await oq.options(queue=queue).enqueue(jobs.add, 1)
            assert (await oq.get_result(task_id, wait=True, timeout=3)).ok
        await oq.options(queue="a").enqueue(jobs.wait_async, key)
        await eventually(lambda: jobs.runs[key])
        task_id = await oq.options(queue="c").enqueue(jobs.add, 1)
        jobs.gates[key].set()
        assert await oq.get_result(task_id, wait=True, timeout=3) is not None, "the new queue was overlooked"


async def test_drain_waits_for_work_and_retries_but_not_for_later_etas(oq: AsyncOmniQ, key: str) -> None:
    from datetime import timedelta

    async with await oq.worker() as pool:
        await pool.drain()
        await oq.enqueue(jobs.fail_until, key, 3)
        await oq.enqueue(jobs.count, key + "later", eta=timedelta(hours=1))
        await pool.drain()
        assert jobs.runs[key] == 3
        assert jobs.runs[key + "later"] == 0


# -- leases ----------------------------------------------------------------------------------------


async def test_a_function_that_blocks_the_loop_for_several_leases_keeps_its_lease(storage: BaseStorage, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(lease=0.15, backoff_base=0.01))
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.block_the_loop, key, 0.6)
        result = await oq.get_result(task_id, wait=True, timeout=5)
    assert (result.result, result.attempts, jobs.runs[key]) == (1, 1, 1)
    assert "expired" not in [e.event for e in await oq.history(task_id)]


@pytest.mark.parametrize("func", [jobs.wait_async, jobs.wait_for_gate])
async def test_a_long_task_keeps_its_lease_while_others_reap(storage: BaseStorage, key: str, func: Any) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(lease=0.15))
    async with await oq.worker(), await oq.worker():
        task_id = await oq.enqueue(func, key)
        before = time.monotonic()
        await eventually(lambda: time.monotonic() - before > 0.6)
        jobs.gates[key].set()
        assert (await oq.get_result(task_id, wait=True, timeout=5)).attempts == 1
    assert jobs.runs[key] == 1


async def test_a_pool_with_a_lease_of_its_own_uses_and_keeps_it_whatever_tasks_say(storage: BaseStorage, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(lease=3600))
    async with await oq.worker(lease=0.15), await oq.worker(lease=0.15):
        task_id = await oq.enqueue(jobs.wait_async, key)
        await eventually(lambda: jobs.runs[key])
        first = (await storage.get(task_id)).lease_until_us
        assert first - storage.clock() < 1_000_000

        async def kept() -> bool:
            return (await storage.get(task_id)).lease_until_us > first + 600_000

        while not await kept():  # noqa: ASYNC110 - the store says it, and nobody rings
            await asyncio.sleep(0.01)
        jobs.gates[key].set()
        assert (await oq.get_result(task_id, wait=True, timeout=5)).attempts == 1
    assert jobs.runs[key] == 1


async def test_a_pool_leases_no_more_at_once_than_its_batch(storage: BaseStorage, key: str) -> None:
    oq = AsyncOmniQ(storage)
    ids = await oq.enqueue_many(jobs.wait_async, [(key,)] * 10)
    async with await oq.worker(10, batch=3):
        await eventually(lambda: jobs.runs[key] == 10)
        tokens = Counter([(await storage.get(task_id)).token for task_id in ids])  # one for each time it took some
        jobs.gates[key].set()
    assert max(tokens.values()) == 3


async def test_a_task_whose_heartbeat_is_refused_is_interrupted_and_its_result_is_not_stored(
    storage: BaseStorage, key: str
) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(lease=0.15))
    async with await oq.worker() as pool:
        task_id = await oq.enqueue(jobs.forever, key)
        await eventually(lambda: jobs.runs[key])
        record = await storage.get(task_id)
        await storage.apply([(Cancel(queue="default", id=task_id, token=record.token),)])
        await eventually(lambda: jobs.seen[key] == ["cancelled"])
        await eventually(lambda: pool.running == 0)
        assert (await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)).ok
    assert (await oq.get_result(task_id)).status is TaskStatus.CANCELLED


async def test_a_task_of_a_silent_worker_runs_again_after_its_lease(storage: BaseStorage, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(lease=0.1))
    task_id = await oq.enqueue(jobs.count, key)
    await storage.apply([(Reserve(queues=("default",), token=new_token(), worker="elsewhere:1:gone"),)])
    async with await oq.worker():
        result = await oq.get_result(task_id, wait=True, timeout=5)
    assert (result.ok, result.attempts, jobs.runs[key]) == (True, 2, 1)
    assert "expired" in [e.event for e in await oq.history(task_id)]


async def test_a_silent_worker_of_a_task_without_retries_is_a_failure_that_says_so(storage: BaseStorage, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(lease=0.1))
    task_id = await oq.options(max_retries=0).enqueue(jobs.count, key)
    await storage.apply([(Reserve(queues=("default",), token=new_token(), worker="elsewhere:1:gone"),)])
    async with await oq.worker():
        result = await oq.get_result(task_id, wait=True, timeout=5)
    assert (result.status, result.error.type, jobs.runs[key]) == (TaskStatus.FAILED, "WorkerLost", 0)


# -- not hoarding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("func", [jobs.wait_async, jobs.wait_for_gate])
async def test_a_long_task_never_delays_others_that_an_idle_worker_could_run(storage: BaseStorage, key: str, func: Any) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(grace=5))
    async with await oq.worker() as first, await oq.worker() as second:
        # many short tasks teach both pools to lease ahead
        await oq.enqueue_many(jobs.add_async, [(n,) for n in range(300)])
        await first.drain()
        long_one = await oq.enqueue(func, key)
        await eventually(lambda: jobs.runs[key] == 1)
        before = time.monotonic()
        ids = await oq.enqueue_many(jobs.add, [(n,) for n in range(50)])
        for task_id in ids:
            assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
        assert time.monotonic() - before < 2
        assert first.running + second.running == 1
        jobs.gates[key].set()
        assert (await oq.get_result(long_one, wait=True, timeout=5)).ok


async def test_short_tasks_behind_a_long_one_are_handed_to_an_idle_pool(storage: BaseStorage, key: str) -> None:
    """One transaction brings a long task and short ones; the pool that took them all must give the rest back."""
    oq = AsyncOmniQ(storage, settings=Settings(grace=5))
    async with await oq.worker() as first:
        await oq.enqueue_many(jobs.add_async, [(n,) for n in range(300)])
        await first.drain()
        async with oq.transaction() as tx:
            tx.enqueue(jobs.wait_async, key)
            short = tx.enqueue_many(jobs.add, [(n,) for n in range(20)])
        await eventually(lambda: jobs.runs[key] == 1)
        async with await oq.worker():
            before = time.monotonic()
            for task_id in short:
                result = await oq.get_result(task_id, wait=True, timeout=5)
                assert result is not None
                assert result.attempts == 1
            assert time.monotonic() - before < 2
            jobs.gates[key].set()


async def test_a_pool_holds_no_more_than_its_slots_while_tasks_are_long(oq: AsyncOmniQ, key: str) -> None:
    for _ in range(6):
        await oq.enqueue(jobs.wait_async, key)
    async with await oq.worker(concurrency=2):
        await eventually(lambda: jobs.runs[key] == 2)
        (count,) = await oq.counts()
        assert (count.running, count.ready) == (2, 4)
        jobs.gates[key].set()


# -- stopping --------------------------------------------------------------------------------------


async def test_stop_lets_a_running_task_finish_within_the_grace_time(oq: AsyncOmniQ, key: str) -> None:
    pool = await oq.worker()
    await pool.start()
    task_id = await oq.enqueue(jobs.wait_async, key)
    behind = await oq.enqueue(jobs.add, 1)
    await eventually(lambda: jobs.runs[key])
    stopping = asyncio.create_task(pool.stop(grace=10))
    await asyncio.sleep(0)  # its first step: from then on the pool takes no more, or it would take the one behind
    jobs.gates[key].set()
    await stopping
    assert (await oq.get_result(task_id)).result == "through"
    assert (await oq.get_task(behind)).status is TaskStatus.PENDING


@pytest.mark.parametrize("func", [jobs.forever, jobs.wait_for_gate])
async def test_stop_hands_back_what_still_runs_with_the_attempt_not_spent(oq: AsyncOmniQ, key: str, func: Any) -> None:
    pool = await oq.worker()
    await pool.start()
    task_id = await oq.enqueue(func, key)
    await eventually(lambda: jobs.runs[key])
    before = time.monotonic()
    await pool.stop(grace=0.05)
    assert time.monotonic() - before < 2
    task = await oq.get_task(task_id)
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    assert [e.event for e in await oq.history(task_id)] == ["enqueued", "started", "released"]
    jobs.gates[key].set()


async def test_stop_does_not_block_the_loop_while_one_of_two_tasks_still_runs(oq: AsyncOmniQ, key: str) -> None:
    pool = await oq.worker(concurrency=2)
    await pool.start()
    first = await oq.enqueue(jobs.wait_async, key)
    second = await oq.enqueue(jobs.wait_async, key + "2")
    await eventually(lambda: jobs.runs[key] + jobs.runs[key + "2"] == 2)
    before = time.monotonic()
    stopping = asyncio.create_task(pool.stop(grace=10))
    behind = await oq.enqueue(jobs.add, 1)
    jobs.gates[key].set()
    assert (await oq.get_result(first, wait=True, timeout=5)).ok
    assert not stopping.done()
    jobs.gates[key + "2"].set()
    await stopping
    assert (await oq.get_result(second)).ok
    assert (await oq.get_task(behind)).status is TaskStatus.PENDING, "the first ended while the pool stopped"
    assert time.monotonic() - before < 5


async def test_a_pool_that_leaves_a_task_gives_it_to_the_next_one(oq: AsyncOmniQ, key: str) -> None:
    pool = await oq.worker()
    await pool.start()
    task_id = await oq.options(max_retries=0).enqueue(jobs.wait_async, key)
    await eventually(lambda: jobs.runs[key] == 1)
    await pool.stop(grace=0)
    jobs.gates[key].set()
    async with await oq.worker():
        result = await oq.get_result(task_id, wait=True, timeout=5)
    assert (result.ok, result.attempts, jobs.runs[key]) == (True, 1, 2)


async def test_an_idle_pool_stops_at_once(oq: AsyncOmniQ) -> None:
    pool = await oq.worker(concurrency=8, poll_interval=30)
    await pool.start()
    before = time.monotonic()
    await pool.stop()
    assert time.monotonic() - before < 0.5


async def test_a_pool_on_a_closed_storage_says_so() -> None:
    from omniq import DriverClosed

    storage = MemoryStorage()
    await storage.close()
    pool = AsyncWorkerPool(storage)
    with pytest.raises(DriverClosed):
        await asyncio.wait_for(pool.start(), 2)
    await pool.stop()


async def test_a_pool_whose_storage_is_closed_under_it_can_still_be_stopped(storage: BaseStorage) -> None:
    pool = AsyncWorkerPool(storage)
    await pool.start()
    await storage.close()
    await asyncio.wait_for(pool.stop(grace=0), 8)
