"""Tasks that a worker does not have: they wait for one that does, and are not spent on those that do not."""

import asyncio
import importlib
import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

import omniq
from omniq import AsyncOmniQ, BaseStorage, FileStorage, MemoryStorage, OmniQ, Settings, SQLiteStorage, TaskStatus
from omniq.contract import AsyncContractClient
from omniq.operations import Enqueue
from omniq.tasks import HANDLERS, REGISTRY
from omniq.testing import FakeClock, run_until_idle

LATER = "deployed.later"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "sqlite", "file"])
def oq(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[AsyncOmniQ]:
    """On a clock that only the test moves."""
    if request.param == "memory":
        storage: BaseStorage = MemoryStorage(clock=clock)
    elif request.param == "sqlite":
        storage = SQLiteStorage(tmp_path / "q.db", durability="process", clock=clock)
    else:
        storage = FileStorage(tmp_path / "q", durability="process", clock=clock)
    yield AsyncOmniQ(storage, settings=Settings(grace=5))
    asyncio.run(storage.close())


@pytest.fixture
def deploy() -> Iterator[Callable[[], None]]:
    """Registers what was missing before; undone afterwards."""
    tasks, handlers = dict(REGISTRY), dict(HANDLERS)

    def register() -> None:
        omniq.task(name=LATER)(jobs.add)
        omniq.handler("q")(jobs.echo)

    yield register
    for kept, before in ((REGISTRY, tasks), (HANDLERS, handlers)):
        kept.clear()
        kept.update(before)


async def refused(oq: AsyncOmniQ, task_id: str, times: int) -> bool:
    """Whether workers handed a task back so often."""
    return [e.event for e in await oq.history(task_id)].count("retried") >= times


async def test_a_task_waits_until_the_worker_has_its_function_and_runs_as_if_nothing_had_been(
    oq: AsyncOmniQ, clock: FakeClock, deploy: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omniq")
    async with await oq.worker(poll_interval=0.01) as pool:
        task_id = await oq.options(max_retries=0).enqueue(LATER, 2, b=3)
        for n, seconds in enumerate((1, 2, 4, 8), 1):
            await eventually(lambda n=n: refused(oq, task_id, n))
            task: Any = await oq.get_task(task_id)
            assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
            assert str(task.last_error).startswith("NotRunnable: waits since ")
            assert f"@omniq.task(name='{LATER}')" in task.last_error.message
            clock.advance(seconds)
        await eventually(lambda: refused(oq, task_id, 5))
        deploy()
        clock.advance(16)
        result = await oq.get_result(task_id, wait=True, timeout=5)
        assert (result.status, result.result, result.attempts) == (TaskStatus.SUCCESS, 5, 1)
        assert (pool.done, pool.failed, pool.retried) == (1, 0, 0)
    warnings = [r for r in caplog.records if r.levelname == "WARNING" and r.name == "omniq.worker"]
    (line,) = [r.getMessage() for r in warnings]  # though it was refused five times
    assert line.startswith(f"task {LATER} is left to another worker: no task named")


async def test_a_task_that_failed_before_keeps_the_attempts_that_it_has_left(
    oq: AsyncOmniQ, clock: FakeClock, deploy: Callable[[], None], key: str
) -> None:
    task_id = await oq.options(max_retries=1).enqueue(LATER)
    deploy()
    async with await oq.worker(poll_interval=0.01):  # a TypeError: it wants an argument
        await eventually(lambda: refused(oq, task_id, 1))
    del REGISTRY[LATER]
    clock.advance(2)
    async with await oq.worker(poll_interval=0.01):
        await eventually(lambda: refused(oq, task_id, 2))
        task: Any = await oq.get_task(task_id)
        assert (task.status, task.attempts) == (TaskStatus.RETRYING, 1)
    deploy()
    clock.advance(2)
    async with await oq.worker(poll_interval=0.01):
        result = await oq.get_result(task_id, wait=True, timeout=5)
    assert (result.status, result.attempts, result.error.type) == (TaskStatus.FAILED, 2, "TypeError")


async def test_arguments_of_a_class_that_a_worker_does_not_have_wait_for_one_that_does(
    oq: AsyncOmniQ, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle names its classes, and a deploy brings new ones."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"newer_{uuid.uuid4().hex}"
    there, away = tmp_path / f"{name}.py", tmp_path / "away"
    there.write_text("class Point:\n    x = 7\n")
    pickling = AsyncOmniQ(oq.storage, settings=Settings(serializer="cloudpickle", grace=5))
    task_id = await pickling.options(max_retries=0).enqueue(jobs.x_of, importlib.import_module(name).Point())
    del sys.modules[name]
    there.rename(away)
    async with await pickling.worker(poll_interval=0.01):
        await eventually(lambda: refused(oq, task_id, 1))
        task: Any = await oq.get_task(task_id)
        assert (task.attempts, task.last_error.type) == (0, "NotRunnable")
        assert name in task.last_error.message
        away.rename(there)
        importlib.invalidate_caches()
        clock.advance(1)
        assert (await pickling.get_result(task_id, wait=True, timeout=5)).result == 7
    sys.modules.pop(name, None)


async def test_after_an_hour_it_fails_and_says_what_to_do(oq: AsyncOmniQ, clock: FakeClock) -> None:
    begun = clock()
    async with await oq.worker(poll_interval=0.01) as pool:
        task_id = await oq.enqueue("no.such.module:f")
        seen = 0
        while await oq.get_result(task_id) is None:
            record = await oq.storage.get(task_id)
            if record is not None and record.due_us > clock():
                seen += 1
                clock.advance((record.due_us - clock()) / 1e6)
            await asyncio.sleep(0)
        result: Any = await oq.get_result(task_id)
        assert pool.failed == 1
    assert (clock() - begun) / 1e6 == 3600
    assert seen == 20
    assert (result.status, result.error.type) == (TaskStatus.FAILED, "NotRunnable")
    assert result.error.message.startswith("no worker had its function for 1h0m0s: cannot import 'no.such.module'")


@pytest.mark.parametrize("name", ["os:getpid", "support.jobs:os.getpid", "support.jobs:add", "__main__:f"])
async def test_what_is_not_allowed_fails_at_once(oq: AsyncOmniQ, name: str) -> None:
    """Also what `enqueue` would refuse: another program may have stored it."""
    allow = [] if name.startswith("support.jobs:add") else ["support.jobs"]
    async with await oq.worker(allow=allow):
        await oq.storage.apply([(Enqueue(id="a", name=name),)])
        result: Any = await oq.get_result("a", wait=True, timeout=5)
    assert (result.status, result.attempts, result.error.type) == (TaskStatus.FAILED, 1, "NotRunnable")


async def test_a_task_that_raises_the_same_error_has_failed(oq: AsyncOmniQ) -> None:
    async with await oq.worker():
        result: Any = await oq.get_result(await oq.enqueue(jobs.not_runnable_inside), wait=True, timeout=5)
    assert (result.status, result.attempts, result.error.message) == (TaskStatus.FAILED, 1, "raised by the task")


async def test_drain_gives_up_what_nobody_has_only_when_nothing_else_is_left(
    oq: AsyncOmniQ, clock: FakeClock, key: str
) -> None:
    async with await oq.worker(poll_interval=0.01, concurrency=2) as pool:
        missing = [await oq.options(queue="a").enqueue("never.registered"), await oq.enqueue("no.such.module:f")]
        busy = await oq.enqueue(jobs.wait_async, key)
        await eventually(lambda: jobs.runs[key])
        drained = asyncio.ensure_future(pool.drain())
        for n in range(1, 6):
            for task_id in missing:
                await eventually(lambda n=n, task_id=task_id: refused(oq, task_id, n))
            clock.advance(2 ** (n - 1))
        assert not drained.done()
        assert [await oq.get_result(task_id) for task_id in missing] == [None, None]
        jobs.gates[key].set()
        while not drained.done():
            clock.advance(1)
            await asyncio.sleep(0.005)
        assert (await oq.get_result(busy)).ok
        for task_id in missing:
            result: Any = await oq.get_result(task_id)
            assert (result.status, result.error.type) == (TaskStatus.FAILED, "NotRunnable")
        assert pool.failed == 2


async def test_drain_runs_what_another_worker_did_not_have(
    oq: AsyncOmniQ, clock: FakeClock, deploy: Callable[[], None]
) -> None:
    """Handed back by an old worker, it is work that is left to do, although no run of it has failed."""
    task_id = await oq.enqueue(LATER, 1)
    async with await oq.worker(poll_interval=0.01):
        await eventually(lambda: refused(oq, task_id, 1))
    deploy()
    later = await oq.enqueue(jobs.add, 1, eta=timedelta(days=1))
    async with await oq.worker(poll_interval=0.01) as pool:
        drained = asyncio.ensure_future(pool.drain())
        while not drained.done():
            clock.advance(0.1)
            await asyncio.sleep(0.005)
        assert (await oq.get_result(task_id)).result == 1
        assert await oq.get_result(later) is None


async def test_drain_waits_for_a_retry_before_it_gives_anything_up(oq: AsyncOmniQ, clock: FakeClock, key: str) -> None:
    missing = await oq.enqueue("never.registered")
    async with await oq.worker(poll_interval=0.01) as pool:
        failing = await oq.options(backoff="fixed:base=20000,jitter=0").enqueue(jobs.fail_until, key, 2)
        drained = asyncio.ensure_future(pool.drain())
        await eventually(lambda: refused(oq, failing, 1))
        for _ in range(19):
            clock.advance(1)
            await asyncio.sleep(0.01)
            assert await oq.get_result(missing) is None
        while not drained.done():
            clock.advance(1)
            await asyncio.sleep(0.005)
        assert (await oq.get_result(failing)).ok
        assert (await oq.get_result(missing)).status is TaskStatus.FAILED


async def test_drain_does_not_wait_for_what_is_in_a_paused_queue(oq: AsyncOmniQ) -> None:
    task_id = await oq.enqueue("never.registered")
    async with await oq.worker(poll_interval=0.01) as pool:
        await eventually(lambda: refused(oq, task_id, 1))
        await oq.pause("default")
        await asyncio.wait_for(pool.drain(), 5)
    assert await oq.get_result(task_id) is None


async def test_an_interval_task_whose_ticks_nobody_had_goes_on_with_the_next(
    oq: AsyncOmniQ, clock: FakeClock, deploy: Callable[[], None]
) -> None:
    async with await oq.worker(poll_interval=0.01):
        task_id = await oq.enqueue(LATER, 1, interval=10)
        for n, seconds in enumerate((1, 2, 4, 8), 1):
            await eventually(lambda n=n: refused(oq, task_id, n))
            clock.advance(seconds)
        await eventually(lambda: refused(oq, task_id, 5))
        deploy()
        clock.advance(16)
        assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
        record: Any = await oq.storage.get(task_id)
        assert (record.attempts, (record.due_us - record.created_at_us) / 1e6) == (0, 40)


async def test_running_until_idle_ends_although_nobody_has_a_function(oq: AsyncOmniQ) -> None:
    missing = await oq.enqueue("never.registered")
    good = await oq.enqueue(jobs.add, 1)
    assert await run_until_idle(oq, timeout=10) == 2
    assert (await oq.get_result(good)).ok
    assert (await oq.get_result(missing)).error.type == "NotRunnable"


async def test_a_job_of_the_contract_waits_for_a_worker_with_a_handler(
    every_storage: BaseStorage, deploy: Callable[[], None]
) -> None:
    oq, client = AsyncOmniQ(every_storage), AsyncContractClient(every_storage)
    job_id = await client.publish("q", {"page": 1}, max_attempts=1)
    async with await oq.worker():
        await eventually(lambda: refused(oq, job_id, 1))
        task: Any = await oq.get_task(job_id)
        assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
        assert "@omniq.handler('q')" in task.last_error.message
        deploy()
        result: Any = await oq.get_result(job_id, wait=True, timeout=20)
    assert (result.status, result.attempts) == (TaskStatus.SUCCESS, 1)


async def test_a_job_that_no_worker_has_is_still_there_for_a_consumer(every_storage: BaseStorage) -> None:
    oq, client = AsyncOmniQ(every_storage), AsyncContractClient(every_storage)
    job_id = await client.publish("q", {"page": 1}, max_attempts=1)
    async with await oq.worker():
        await eventually(lambda: refused(oq, job_id, 1))
    stop, attempts = asyncio.Event(), []

    async def handler(job: Any) -> None:
        attempts.append(job.attempt)
        stop.set()

    await asyncio.wait_for(client.consume("q", handler, stop=stop, poll_interval=0.05), 20)
    assert attempts == [1]
    assert (await oq.get_result(job_id)).ok


def test_without_patience_it_fails_at_once(every_storage: BaseStorage) -> None:
    with OmniQ(every_storage, settings=Settings(unknown_function_s=0)) as oq, oq.worker():
        result: Any = oq.get_result(oq.enqueue("never.registered"), wait=True, timeout=5)
    assert (result.status, result.attempts, result.error.type) == (TaskStatus.FAILED, 1, "NotRunnable")
