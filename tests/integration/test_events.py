"""Events of every transition, hooks around tasks, and log lines."""

import logging
from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

from omniq import (
    AsyncOmniQ,
    BaseStorage,
    FileStorage,
    MemoryStorage,
    Middleware,
    Settings,
    SQLiteStorage,
    TaskContext,
    TaskStatus,
)


async def test_each_transition_is_one_event_with_its_fields(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker() as pool:
        task_id = await oq.options(group="g", queue="mail").enqueue(jobs.fail_until, key, 2)
        await oq.get_result(task_id, wait=True, timeout=5)
        history = await oq.history(task_id)
    assert [e.event for e in history] == ["enqueued", "started", "retried", "started", "succeeded"]
    assert [e.attempt for e in history] == [0, 1, 1, 2, 2]
    for event in history:
        assert (event.task_id, event.queue, event.name, event.group) == (
            task_id,
            "mail",
            "support.jobs:fail_until",
            "g",
        )
        assert event.ts.tzinfo is not None
    assert {e.worker for e in history if e.event == "started"} == {pool.worker_id}
    assert [e.seq for e in history] == sorted(e.seq for e in history)


async def test_events_are_read_on_from_the_last_one_seen(oq: AsyncOmniQ) -> None:
    await oq.enqueue_many(jobs.add, [(n,) for n in range(5)])
    first = await oq.events(limit=3)
    rest = await oq.events(after=first[-1].seq)
    assert [e.seq for e in first + rest] == list(range(first[0].seq, first[0].seq + 5))
    assert await oq.events(after=rest[-1].seq) == []


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{}/q.db?durability=process", "file://{}/q?durability=process"])
async def test_events_can_be_switched_off(store: str, tmp_path: Any, key: str) -> None:
    url = store.format(tmp_path)
    async with AsyncOmniQ.from_url(url, settings=Settings(events=False)) as oq:
        async with await oq.worker():
            task_id = await oq.enqueue(jobs.count, key)
            assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
        assert await oq.events() == []
        assert await oq.history(task_id) == []


async def test_switching_events_off_holds_for_a_storage_object_too(tmp_path: Any) -> None:
    for storage in (
        MemoryStorage(events=False),
        SQLiteStorage(tmp_path / "q.db", durability="process", events=False),
        FileStorage(tmp_path / "q", durability="process", events=False),
    ):
        async with AsyncOmniQ(storage) as oq:
            await oq.enqueue(jobs.add, 1)
            assert await oq.events() == []


# -- hooks -----------------------------------------------------------------------------------------


class Recorder(Middleware):
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    async def before(self, task: TaskContext) -> None:
        self.said.append(f"{self.name} before {task.attempt}")

    async def after(self, task: TaskContext, result: Any) -> None:
        self.said.append(f"{self.name} after {result}")

    async def on_error(self, task: TaskContext, error: BaseException) -> None:
        self.said.append(f"{self.name} error {type(error).__name__}")


async def test_hooks_go_in_in_order_and_out_in_reverse(oq: AsyncOmniQ) -> None:
    said: list[str] = []
    async with await oq.worker(middleware=[Recorder("a", said), Recorder("b", said)]):
        await oq.get_result(await oq.enqueue(jobs.add, 1, 2), wait=True, timeout=5)
    assert said == ["a before 1", "b before 1", "b after 3", "a after 3"]


async def test_hooks_hear_of_errors_in_reverse(oq: AsyncOmniQ, key: str) -> None:
    said: list[str] = []
    async with await oq.worker(middleware=[Recorder("a", said), Recorder("b", said)]):
        await oq.get_result(await oq.options(max_retries=1).enqueue(jobs.fail, key), wait=True, timeout=5)
    once = ["b error RuntimeError", "a error RuntimeError"]
    assert said == ["a before 1", "b before 1", *once, "a before 2", "b before 2", *once]


@pytest.mark.parametrize("func", [jobs.forever, jobs.wait_for_gate])
async def test_hooks_hear_of_a_timeout(oq: AsyncOmniQ, key: str, func: Any) -> None:
    said: list[str] = []
    async with await oq.worker(middleware=[Recorder("a", said)]):
        await oq.get_result(await oq.options(max_retries=0, timeout=0.05).enqueue(func, key), wait=True, timeout=5)
        jobs.gates[key].set()
    assert said == ["a before 1", "a error TimeoutError"]


@pytest.mark.parametrize("hook", ["before", "after"])
async def test_a_hook_that_raises_fails_the_run(oq: AsyncOmniQ, key: str, hook: str) -> None:
    class Breaks(Middleware):
        pass

    async def broken(self: Any, *args: Any) -> None:
        raise RuntimeError("the hook broke")

    setattr(Breaks, hook, broken)
    async with await oq.worker(middleware=[Breaks()]):
        result = await oq.get_result(await oq.options(max_retries=0).enqueue(jobs.count, key), wait=True, timeout=5)
    assert (result.status, result.error.message) == (TaskStatus.FAILED, "the hook broke")
    assert jobs.runs[key] == (hook == "after")


async def test_an_error_hook_that_raises_is_logged_and_changes_nothing(
    oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(Middleware):
        async def on_error(self, task: TaskContext, error: BaseException) -> None:
            raise KeyError("the hook broke")

    async with await oq.worker(middleware=[Breaks()]):
        result = await oq.get_result(await oq.options(max_retries=0).enqueue(jobs.fail, key), wait=True, timeout=5)
    assert result.error.message == "no luck"
    assert "Breaks.on_error failed" in caplog.text


# -- log lines -------------------------------------------------------------------------------------


async def test_arguments_and_results_are_never_logged(storage: BaseStorage, key: str, caplog: pytest.LogCaptureFixture) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(backoff_base=0.01, lease=0.15, unknown_function_s=0))
    caplog.set_level(logging.DEBUG)
    async with await oq.worker() as pool:
        for options in ({}, {"group": "g"}, {"queue": "other"}):
            task_id = await oq.options(**options).enqueue(jobs.echo, "s3cret", token="t0ken")
            assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
        for func in (jobs.fail, jobs.unstorable, jobs.give_up, jobs.leave):
            task_id = await oq.options(max_retries=1).enqueue(func, "s3cret-" + key)
            await oq.get_result(task_id, wait=True, timeout=5)
        late = await oq.options(timeout=0.02, max_retries=0).enqueue(jobs.wait_for_gate, "s3cret-" + key)
        await oq.get_result(late, wait=True, timeout=5)
        jobs.gates["s3cret-" + key].set()
        await oq.get_result(await oq.enqueue("no.such:function", "s3cret"), wait=True, timeout=5)
        stopped = await oq.enqueue(jobs.forever, "s3cret-stop-" + key)
        await eventually(lambda: jobs.runs["s3cret-stop-" + key])
        await pool.stop(grace=0)
        assert (await oq.get_task(stopped)).status is TaskStatus.PENDING
    assert caplog.records
    lines = [r for r in caplog.records if r.name.startswith("omniq")]
    assert lines
    for line in lines:
        whole = logging.Formatter("%(message)s").format(line) + repr(vars(line))
        assert "s3cret" not in whole
        assert "t0ken" not in whole


async def test_a_line_about_a_task_carries_its_fields(oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture) -> None:
    async with await oq.worker():
        task_id = await oq.options(max_retries=0).enqueue(jobs.fail, key)
        await oq.get_result(task_id, wait=True, timeout=5)
    (line,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert (line.task_id, line.queue, line.task_name, line.attempt) == (task_id, "default", "support.jobs:fail", 1)
    assert line.worker
