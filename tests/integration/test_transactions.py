"""Several tasks written together, or none of them."""

from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, BaseStorage, DuplicateId, OmniQ, TaskStatus
from omniq.errors import DuplicateTarget


async def test_ids_come_at_once_and_tasks_at_the_end(oq: AsyncOmniQ) -> None:
    async with oq.transaction() as tx:
        one = tx.enqueue(jobs.add, 1)
        two = tx.options(queue="other").enqueue(jobs.add, 2)
        many = tx.enqueue_many(jobs.add, [(3,), {"a": 4}])
        assert await oq.get_task(one) is None
    for task_id in (one, two, *many):
        assert await oq.get_task(task_id) is not None
    assert tx.ids == [one, two, *many]
    assert (await oq.get_task(two)).queue == "other"


async def test_an_exception_in_the_block_writes_nothing(oq: AsyncOmniQ) -> None:
    ids: list[str] = []

    async def broken() -> None:
        async with oq.transaction() as tx:
            ids.append(tx.enqueue(jobs.add, 1))
            raise KeyError

    with pytest.raises(KeyError):
        await broken()
    assert await oq.get_task(ids[0]) is None
    assert sum(c.ready for c in await oq.counts()) == 0


async def test_a_refused_task_takes_the_others_with_it(oq: AsyncOmniQ) -> None:
    good: list[str] = []

    async def store(*ids: str) -> None:
        async with oq.transaction() as tx:
            good.append(tx.enqueue(jobs.add, 5))
            for n, task_id in enumerate(ids):
                tx.options(task_id=task_id).enqueue(jobs.add, n + 2)

    await oq.options(task_id="taken").enqueue(jobs.add, 1)
    with pytest.raises(DuplicateId):
        await store("taken")
    with pytest.raises(DuplicateTarget):
        await store("twice", "twice")
    for task_id in (*good, "twice"):
        assert await oq.get_task(task_id) is None


async def test_an_empty_transaction_is_fine(oq: AsyncOmniQ) -> None:
    async with oq.transaction() as tx:
        pass
    assert tx.ids == []


async def test_a_key_that_is_taken_shows_the_first_task_afterwards(oq: AsyncOmniQ) -> None:
    first = await oq.options(idempotency_key="k").enqueue(jobs.add, 1)
    async with oq.transaction() as tx:
        tx.options(idempotency_key="k").enqueue(jobs.add, 1)
    assert tx.ids == [first]


async def test_a_task_may_wait_for_another_of_its_transaction(oq: AsyncOmniQ, key: str) -> None:
    async with oq.transaction() as tx:
        first = tx.enqueue(jobs.order, key, 1)
        tx.options(blocked_by=[first]).enqueue(jobs.order, key, 2)
    async with await oq.worker(concurrency=2):
        await eventually(lambda: len(jobs.seen[key]) == 2)
    assert jobs.seen[key] == [1, 2]


async def test_arguments_are_checked_in_the_block(oq: AsyncOmniQ) -> None:
    with pytest.raises(TypeError, match="add"):
        async with oq.transaction() as tx:
            tx.enqueue(jobs.add)


def test_the_blocking_class_has_the_same(storage: BaseStorage) -> None:
    oq = OmniQ(storage)
    with oq.transaction() as tx:
        task_id = tx.enqueue(jobs.add, 1)
        assert oq.get_task(task_id) is None
    assert oq.get_task(task_id) is not None
    lost: list[str] = []

    def broken() -> None:
        with oq.transaction() as tx:
            lost.append(tx.enqueue(jobs.add, 1))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert oq.get_task(lost[0]) is None
    oq.close()


# -- inside a task ---------------------------------------------------------------------------------


@pytest.mark.parametrize("func", [jobs.spawn, jobs.spawn_from_a_thread])
async def test_what_a_task_enqueues_is_stored_with_its_own_success(oq: AsyncOmniQ, key: str, func: Any) -> None:
    async with await oq.worker():
        parent = await oq.enqueue(func, key)
        assert (await oq.get_result(parent, wait=True, timeout=5)).result == "parent"
        (child,) = jobs.seen[key]
        assert (await oq.get_result(child, wait=True, timeout=5)).result == 3
    events = await oq.events()
    seq = {(e.task_id, e.event): e.seq for e in events}
    assert abs(seq[parent, "succeeded"] - seq[child, "enqueued"]) == 1


async def test_what_a_failing_task_enqueued_is_not_stored(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        parent = await oq.options(max_retries=1).enqueue(jobs.spawn_and_fail, key)
        assert (await oq.get_result(parent, wait=True, timeout=5)).status is TaskStatus.FAILED
    assert len(jobs.seen[key]) == 2
    for child in jobs.seen[key]:
        assert await oq.get_task(child) is None


async def test_a_block_that_raises_is_forgotten_though_the_task_succeeds(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        parent = await oq.enqueue(jobs.spawn_and_roll_back, key)
        assert (await oq.get_result(parent, wait=True, timeout=5)).result == "went on"
    assert await oq.get_task(jobs.seen[key][0]) is None


async def test_a_transaction_that_the_store_cannot_take_fails_the_task_and_not_the_worker(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        parent = await oq.options(max_retries=0).enqueue(jobs.spawn_the_same_id_twice, key)
        other = await oq.enqueue(jobs.add, 1, 2)
        assert (await oq.get_result(other, wait=True, timeout=3)) is not None, "the worker stopped working"
        result = await oq.get_result(parent, wait=True, timeout=3)
        assert result is not None
        assert (result.status, result.error.type) == (TaskStatus.FAILED, "DuplicateTarget")


async def test_a_transaction_that_the_store_refuses_is_a_failed_run_that_says_why(oq: AsyncOmniQ, key: str) -> None:
    await oq.options(task_id="taken", queue="elsewhere").enqueue(jobs.add, 1)
    async with await oq.worker(queues=["default"]):
        parent = await oq.options(max_retries=1).enqueue(jobs.spawn_another_body, key, "taken")
        result = await oq.get_result(parent, wait=True, timeout=3)
        assert result is not None, "the task neither succeeded nor failed"
    assert (result.status, result.error.type) == (TaskStatus.FAILED, "DuplicateId")
    assert jobs.runs[key] == 2
