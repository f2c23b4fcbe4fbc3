"""Groups, pause, dependencies, dead queues and tasks that repeat."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, BaseStorage, Settings, TaskStatus
from omniq.models import State
from omniq.operations import Filter


async def test_a_group_never_runs_more_than_its_limit_at_once(oq: AsyncOmniQ, key: str) -> None:
    limited = oq.options(group="tenant", group_limit=2)
    for _ in range(12):
        await limited.enqueue(jobs.crowd, key)
    async with await oq.worker(concurrency=4), await oq.worker(concurrency=4):
        await eventually(lambda: jobs.runs[key] == 12)
    assert jobs.most_inside[key] == 2


async def test_a_group_without_a_limit_runs_one_at_a_time_in_order(oq: AsyncOmniQ, key: str) -> None:
    for n in range(10):
        await oq.options(group="serial").enqueue(jobs.order_async, key, n)
    async with await oq.worker(concurrency=4) as pool:
        await pool.drain()
    assert jobs.seen[key] == list(range(10))


async def test_the_first_writer_sets_the_limit_and_a_call_changes_it(oq: AsyncOmniQ, key: str) -> None:
    await oq.options(group="g", group_limit=3).enqueue(jobs.crowd, key)
    await oq.options(group="g", group_limit=9).enqueue(jobs.crowd, key)
    groups, _ = await oq.storage.groups("default")
    assert groups[0].limit == 3
    await oq.set_group_limit("default", "g", 1)
    for _ in range(6):
        await oq.options(group="g").enqueue(jobs.crowd, key)
    async with await oq.worker(concurrency=8):
        await eventually(lambda: jobs.runs[key] == 8)
    assert jobs.most_inside[key] == 1


async def test_groups_and_ungrouped_work_take_turns(oq: AsyncOmniQ, key: str) -> None:
    for n in range(20):
        await oq.options(group="busy").enqueue(jobs.order_async, key, n)
    await oq.options(group="small").enqueue(jobs.order_async, key, 100)
    await oq.enqueue(jobs.order_async, key, 200)
    async with await oq.worker() as pool:
        await pool.drain()
    assert jobs.seen[key].index(100) < 6
    assert jobs.seen[key].index(200) < 6


async def test_a_paused_queue_hands_out_nothing_until_it_is_resumed(oq: AsyncOmniQ, key: str) -> None:
    await oq.pause("default")
    assert await oq.is_paused("default")
    async with await oq.worker(poll_interval=30):
        task_id = await oq.enqueue(jobs.count, key)
        other = await oq.options(queue="other").enqueue(jobs.add, 1)
        assert await oq.get_result(other, wait=True, timeout=5) is not None
        assert jobs.runs[key] == 0
        before = time.monotonic()
        assert await oq.resume("default")
        assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
        assert time.monotonic() - before < 2
        assert not await oq.resume("default")
        assert not await oq.is_paused("default")


async def test_a_pause_leaves_running_tasks_alone(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.wait_async, key)
        await eventually(lambda: jobs.runs[key])
        await oq.pause("default")
        jobs.gates[key].set()
        assert (await oq.get_result(task_id, wait=True, timeout=5)).ok


async def test_a_chain_of_dependencies_runs_in_order(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker(concurrency=4):
        previous: list[str] = []
        for n in range(5):
            previous = [await oq.options(blocked_by=previous).enqueue(jobs.order_async, key, n)]
        assert (await oq.get_result(previous[0], wait=True, timeout=5)).ok
    assert jobs.seen[key] == [0, 1, 2, 3, 4]


async def test_a_task_waits_for_all_its_blockers(oq: AsyncOmniQ, key: str) -> None:
    one = await oq.enqueue(jobs.wait_async, key)
    two = await oq.enqueue(jobs.add, 1)
    last = await oq.options(blocked_by=[one, two, "unknown"]).enqueue(jobs.add, 5)
    async with await oq.worker(concurrency=2):
        await oq.get_result(two, wait=True, timeout=5)
        await eventually(lambda: jobs.runs[key])
        assert (await oq.get_task(last)).status is TaskStatus.PENDING
        assert await oq.get_result(last) is None
        jobs.gates[key].set()
        assert (await oq.get_result(last, wait=True, timeout=5)).result == 5


async def test_a_task_whose_blocker_failed_or_was_cancelled_fails_too(oq: AsyncOmniQ, key: str) -> None:
    failing = await oq.options(max_retries=0).enqueue(jobs.fail, key)
    after = await oq.options(blocked_by=[failing]).enqueue(jobs.count, key)
    after_that = await oq.options(blocked_by=[after]).enqueue(jobs.count, key)
    async with await oq.worker():
        result = await oq.get_result(after_that, wait=True, timeout=5)
        assert result.status is TaskStatus.FAILED
        assert failing in result.error.message or after in result.error.message
        too_late = await oq.options(blocked_by=[failing]).enqueue(jobs.count, key)
        assert (await oq.get_result(too_late, wait=True, timeout=5)).status is TaskStatus.FAILED
        cancelled = await oq.enqueue(jobs.count, key, eta=timedelta(hours=1))
        behind = await oq.options(blocked_by=[cancelled]).enqueue(jobs.count, key)
        await oq.cancel(cancelled)
        assert (await oq.get_result(behind, wait=True, timeout=5)).status is TaskStatus.FAILED
    assert jobs.runs[key] == 1


async def test_a_task_that_fails_for_good_moves_to_its_dead_queue_and_waits_there(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.options(max_retries=1, dead_queue="broken").enqueue(jobs.fail_until, key, 3)

        async def moved() -> bool:
            return (await oq.get_task(task_id)).queue == "broken"

        await eventually(moved)
        assert (await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)).ok
    assert jobs.runs[key] == 2
    (count,) = [c for c in await oq.counts() if c.queue == "broken"]
    assert count.ready == 1
    async with await oq.worker(queues=["broken"]):

        async def good() -> bool:
            result = await oq.get_result(task_id)
            return result is not None and result.ok

        await eventually(good)
    assert jobs.runs[key] == 3


async def test_a_worker_serves_the_queues_it_was_given_in_order_of_preference(oq: AsyncOmniQ, key: str) -> None:
    for n in range(3):
        await oq.options(queue="low").enqueue(jobs.order, key, n)
        await oq.options(queue="high").enqueue(jobs.order, key, 10 + n)
        await oq.options(queue="none").enqueue(jobs.order, key, 20 + n)
    async with await oq.worker(queues=["high", "low"]) as pool:
        await pool.drain()
    assert jobs.seen[key] == [10, 11, 12, 0, 1, 2]


# -- tasks that repeat -----------------------------------------------------------------------------


async def test_an_interval_task_repeats_under_one_id_without_drift(oq: AsyncOmniQ, key: str) -> None:
    first = datetime.now(UTC) + timedelta(seconds=0.05)
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.count, key, eta=first, interval=timedelta(seconds=0.1))
        await eventually(lambda: jobs.runs[key] >= 4)
        result = await oq.get_result(task_id)
        assert result.task_id == task_id
        assert result.ok
        assert await oq.cancel(task_id)
    history = await oq.history(task_id)
    assert {e.task_id for e in history} == {task_id}
    assert len([e for e in history if e.event == "succeeded"]) >= 3
    begun = [e.ts for e in history if e.event == "started"]
    for n, moment in enumerate(begun[:4]):
        assert timedelta(0) <= moment - (first + n * timedelta(seconds=0.1)) < timedelta(seconds=0.09)


async def test_cancel_ends_a_series(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.count, key, interval=0.02)
        await eventually(lambda: jobs.runs[key] >= 2)
        assert await oq.cancel(task_id)

        async def over() -> bool:  # a run that ended before it heard of it was a success
            return (await oq.get_task(task_id)).status in (TaskStatus.CANCELLED, TaskStatus.SUCCESS)

        await eventually(over)
        runs = jobs.runs[key]
        before = time.monotonic()
        await eventually(lambda: time.monotonic() - before > 0.1)
        assert jobs.runs[key] == runs


async def test_ticks_do_not_pile_up_while_no_worker_runs(oq: AsyncOmniQ, key: str) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=1)
    task_id = await oq.enqueue(jobs.count, key, eta=long_ago, interval=timedelta(hours=1))
    async with await oq.worker() as pool:
        await eventually(lambda: jobs.runs[key] == 1)
        await pool.drain()
    assert jobs.runs[key] == 1
    task = await oq.get_task(task_id)
    assert datetime.now(UTC) < task.eta <= datetime.now(UTC) + timedelta(hours=1)
    assert (task.eta - long_ago) % timedelta(hours=1) == timedelta(0)
    await oq.cancel(task_id)


async def test_a_run_that_fails_for_good_is_recorded_and_the_next_tick_comes(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.options(interval=0.05, max_retries=0).enqueue(jobs.fail_until, key, 3)
        await eventually(lambda: jobs.runs[key] >= 2)
        history = [e.event for e in await oq.history(task_id)]
        assert "failed" in history

        async def good() -> bool:
            result = await oq.get_result(task_id)
            return result is not None and result.ok

        await eventually(good)
        await oq.cancel(task_id)
    assert "failed" in [e.event for e in await oq.history(task_id)]


async def test_a_retry_inside_a_series_does_not_shift_its_grid(storage: BaseStorage, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(backoff_base=0.05))
    async with await oq.worker():
        task_id = await oq.options(interval=3600, max_retries=1).enqueue(jobs.fail_until, key, 2)
        created = (await oq.get_task(task_id)).created_at
        await eventually(lambda: jobs.runs[key] == 2)

        async def again() -> Any:
            return (await storage.get(task_id)).state is State.SCHEDULED and await oq.get_result(task_id)

        assert (await eventually(again)).ok
    record = await storage.get(task_id)
    assert record.due_us == int(created.timestamp() * 1e6) + 3_600_000_000
    assert record.attempts == 0
    await oq.cancel(task_id)


async def test_found_tasks_come_newest_first_and_page_by_page(oq: AsyncOmniQ) -> None:
    ids = await oq.enqueue_many(jobs.add, [(n,) for n in range(5)])
    found, cursor = await oq.find(limit=3)
    rest, end = await oq.find(cursor=cursor, limit=3)
    assert [t.id for t in found + rest] == ids[::-1]
    assert end is None
    assert found[0].args == [4]
    named, _ = await oq.find(Filter(name="support.jobs:add", states=(State.READY,)))
    assert len(named) == 5
