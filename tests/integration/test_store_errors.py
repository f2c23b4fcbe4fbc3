"""A store that fails: the worker backs off, says so, and goes on."""

import asyncio
import logging
import time
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, BaseStorage, FileStorage, Settings, SQLiteStorage, TaskStatus
from omniq.errors import OutcomeUnknown, StoreError, StoreUnavailable
from omniq.models import new_token
from omniq.operations import Enqueue, Reserve
from omniq.storage.bell import Bell
from omniq.storage.file import writer as file_writer
from omniq.storage.sending import Sending, Unsendable
from omniq.storage.sqlite import writer as sqlite_writer
from omniq.testing import FaultyStorage


async def test_a_store_that_is_away_for_a_while_does_not_end_the_worker(
    storage: BaseStorage, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStorage(storage)
    working = AsyncOmniQ(storage)
    async with AsyncOmniQ(faulty) as oq, await oq.worker():
        faulty.strike("unavailable", "unavailable", "unavailable")
        task_id = await working.enqueue(jobs.count, key)
        result = await working.get_result(task_id, wait=True, timeout=10)
        assert result.ok
        assert faulty.done["unavailable"] == 3
    assert jobs.runs[key] == 1
    assert "the store failed" in caplog.text


async def test_a_lost_answer_neither_loses_nor_repeats_a_task(storage: BaseStorage, key: str) -> None:
    faulty = FaultyStorage(storage, unavailable=0.1, unknown=0.2, seed=5)
    working = AsyncOmniQ(storage)
    ids = await working.enqueue_many(jobs.remember, [(key, n) for n in range(30)])
    oq = AsyncOmniQ(faulty, settings=Settings(lease=30))
    async with await oq.worker(concurrency=3) as pool:
        for task_id in ids:
            result = await working.get_result(task_id, wait=True, timeout=20)
            assert result is not None
            assert result.ok
        faulty.odds = dict.fromkeys(faulty.odds, 0.0)
        assert pool.done == 30
    assert sorted(jobs.seen[key]) == list(range(30))


async def test_a_caller_hears_of_a_store_that_fails(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.storage.sending.PAUSES_S", (0.001,))
    faulty = FaultyStorage(storage, ["unavailable", "unknown", "unknown"])
    oq = AsyncOmniQ(faulty)
    with pytest.raises(StoreUnavailable):
        await oq.enqueue(jobs.add, 1)
    with pytest.raises(OutcomeUnknown):
        await oq.options(task_id="once").enqueue(jobs.add, 1)
    assert await oq.options(task_id="once").enqueue(jobs.add, 1) == "once"


async def test_a_failed_heartbeat_does_not_cost_the_lease(
    storage: BaseStorage, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStorage(storage)
    oq = AsyncOmniQ(faulty, settings=Settings(lease=0.6))
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.wait_async, key)
        await eventually(lambda: jobs.runs[key])
        faulty.strike("unavailable")
        await eventually(lambda: faulty.done["unavailable"])
        before = time.monotonic()
        await eventually(lambda: time.monotonic() - before > 0.8)
        jobs.gates[key].set()
        assert (await oq.get_result(task_id, wait=True, timeout=5)).attempts == 1
    assert "heartbeat failed" in caplog.text


async def test_a_pool_whose_store_is_away_can_be_stopped(storage: BaseStorage, key: str) -> None:
    faulty = FaultyStorage(storage)
    oq = AsyncOmniQ(faulty, settings=Settings(lease=30))
    pool = await oq.worker()
    await pool.start()
    task_id = await oq.enqueue(jobs.wait_async, key)
    await eventually(lambda: jobs.runs[key])
    faulty.odds = {"unavailable": 1.0}
    jobs.gates[key].set()
    await asyncio.wait_for(pool.stop(grace=0.1), 12)
    faulty.odds = {"unavailable": 0.0}
    assert (await oq.get_task(task_id)).status in (TaskStatus.RUNNING, TaskStatus.SUCCESS)


async def test_a_start_that_fails_leaves_nothing_running(storage: BaseStorage, tmp_path: Path) -> None:
    class Refusing(FaultyStorage):
        async def hold_worker(self, worker: str) -> None:
            raise StoreUnavailable("no lock today")

    oq = AsyncOmniQ(Refusing(storage))
    pool = await oq.worker()
    with pytest.raises(StoreUnavailable):
        await pool.start()
    assert not pool.started
    await pool.stop()


async def test_a_start_on_a_store_that_comes_late_waits_for_it(storage: BaseStorage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="omniq")
    faulty = FaultyStorage(storage, ["unavailable", "unavailable"])
    oq = AsyncOmniQ(faulty)
    async with await oq.worker() as pool:
        assert pool.started
        assert faulty.done["unavailable"] == 2
    assert "the store failed" in caplog.text


async def test_a_store_that_cannot_be_read_for_a_while_loses_nothing(storage: BaseStorage, key: str) -> None:
    class Unreadable(FaultyStorage):
        broken = 0

        async def queues(self, fed: bool = False) -> list[str]:
            if self.broken:
                self.broken -= 1
                raise StoreUnavailable("cannot read now")
            return await super().queues(fed)

    faulty = Unreadable(storage)
    oq = AsyncOmniQ(faulty)
    async with await oq.worker(concurrency=2):
        first = await oq.enqueue(jobs.wait_async, key)
        await eventually(lambda: jobs.runs[key])
        faulty.broken = 3
        jobs.gates[key].set()  # its end gathers in the outbox while the queues cannot be read
        second = await oq.enqueue(jobs.add, 1)
        for task_id in (first, second):
            result = await oq.get_result(task_id, wait=True, timeout=10)
            assert result is not None
            assert result.ok


async def test_a_paused_queue_with_overdue_tasks_lets_its_worker_sleep(storage: BaseStorage) -> None:
    faulty = FaultyStorage(storage)
    oq = AsyncOmniQ(faulty)
    await oq.enqueue(jobs.add, 1, eta=timedelta(milliseconds=20))
    await oq.pause("default")
    async with await oq.worker(poll_interval=30):
        await asyncio.sleep(0.3)  # time in which nothing should happen
        calls = faulty.done.total()
        await asyncio.sleep(0.5)
        assert faulty.done.total() - calls <= 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
@pytest.mark.parametrize("kind", [SQLiteStorage, FileStorage])
async def test_calls_that_wake_nobody_have_happened_once_all_the_same(
    tmp_path: Path,
    kind: type[SQLiteStorage] | type[FileStorage],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for writer in (sqlite_writer, file_writer):
        monkeypatch.setattr(writer, "Bell", lambda path: Bell(Path("/dev/full")))
    async with kind(tmp_path / "q", durability="process") as storage:
        await storage.apply([(Enqueue(id="first", name="job"),)])
        tokens = [new_token() for _ in range(3)]
        answers = await asyncio.gather(
            *(storage.apply([(Reserve(queues=("default",), token=token),)]) for token in tokens),
            *(storage.apply([(Enqueue(id=id, name="job"),)]) for id in ("second", "third")),
        )
        granted = [[task.id for task in answer[0][0].tasks] for answer in answers[:3]]
        assert granted == [["first"], [], []]
        assert [answer[0][0].existed for answer in answers[3:]] == [False, False]
        assert [(c.running, c.ready) for c in await storage.counts()] == [(1, 2)]
    assert "other processes could not be woken" in caplog.text


async def test_a_value_that_sqlite_cannot_take_is_not_a_store_that_is_away(tmp_path: Path) -> None:
    async with SQLiteStorage(tmp_path / "q.db", durability="process") as storage:
        wrong: Any = Decimal(5)
        tasks = [Enqueue(id="a", name="job"), Enqueue(id="b", name="job", max_attempts=wrong), Enqueue(id="c", name="job")]
        call = [(task,) for task in tasks]
        with pytest.raises(StoreError) as raised:
            await storage.apply(call)
        assert not isinstance(raised.value, StoreUnavailable)
        answers = await Sending(call).send(storage)
        assert [isinstance(answer, Unsendable) for answer in answers] == [False, True, False]
        assert (await storage.counts())[0].ready == 2
