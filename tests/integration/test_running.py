"""Tasks run: arguments, results, retries, timeouts and what a task may say."""

import asyncio
import datetime as dt
import logging
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

from omniq import (
    AsyncOmniQ,
    AsyncWorkerPool,
    Invalid,
    Middleware,
    SerializationError,
    Settings,
    TaskContext,
    TaskResult,
    TaskStatus,
)
from omniq.errors import TaskIdRequired
from omniq.operations import Retry


async def ended(oq: AsyncOmniQ, task_id: str, within: float = 10) -> TaskResult:
    result = await oq.get_result(task_id, wait=True, timeout=within)
    assert result is not None, "the task did not end"
    return result


@pytest.mark.parametrize("func", [jobs.add, jobs.add_async, "support.jobs:add", jobs.Holder.static])
async def test_a_function_runs_and_its_result_is_stored(oq: AsyncOmniQ, func: Any) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.enqueue(func, 21))
    assert result.ok
    assert result.result == (42 if func is jobs.Holder.static else 21)
    assert result.status is TaskStatus.SUCCESS
    assert result.attempts == 1
    assert result.error is None
    assert abs(result.finished_at - datetime.now(UTC)) < timedelta(seconds=60)
    assert result.last_attempt_at <= result.finished_at


async def test_registered_tasks_run_by_function_by_name_and_by_their_own_enqueue(oq: AsyncOmniQ) -> None:
    async with await oq.worker(concurrency=2):
        ids = [
            await oq.enqueue(jobs.double, 4),
            await oq.enqueue("tests.double", 4),
            await jobs.double.enqueue(oq, 4),
            await oq.options(max_retries=0).enqueue(jobs.double, 4),
            await jobs.double.enqueue(oq.options(queue="other"), 4),
            await jobs.triple.enqueue(oq, 2, plus=2),
        ]
        assert [(await ended(oq, i)).result for i in ids] == [8] * 6


async def test_the_options_of_a_task_hold_unless_the_call_gives_others(oq: AsyncOmniQ) -> None:
    task = await oq.get_task(await jobs.to_mail.enqueue(oq, "a@b"))
    assert task is not None
    assert (task.queue, task.timeout, task.group, task.func_path) == ("mail", 7.5, "g", "tests.to_mail")
    task = await oq.get_task(await oq.options(queue="slow").enqueue(jobs.to_mail, "a@b"))
    assert task is not None
    assert (task.queue, task.timeout) == ("slow", 7.5)


async def test_options_never_steal_the_functions_own_arguments(oq: AsyncOmniQ) -> None:
    async with await oq.worker():
        given = {"queue": "a", "timeout": 1, "group": "b", "max_retries": 2}
        task_id = await oq.options(queue="real", max_retries=0).enqueue(jobs.options_as_arguments, **given)
        assert (await ended(oq, task_id)).result == ["a", 1, "b", 2]
        assert (await ended(oq, await oq.enqueue(jobs.options_as_arguments, **given))).result == ["a", 1, "b", 2]
        assert (await ended(oq, await oq.options().enqueue(jobs.with_eta, eta="mine"))).result == "mine"


async def test_arguments_that_do_not_fit_are_a_type_error_at_enqueue_on_all_three(oq: AsyncOmniQ) -> None:
    with pytest.raises(TypeError, match="add"):
        await oq.enqueue(jobs.add)
    with pytest.raises(TypeError, match="add"):
        await oq.options(queue="x").enqueue(jobs.add, 1, 2, 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="double"):
        await jobs.double.enqueue(oq, 1, y=2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="double"):
        await oq.enqueue("tests.double")
    assert await oq.counts() == []


async def test_arguments_that_cannot_be_stored_are_refused_at_enqueue(oq: AsyncOmniQ) -> None:
    with pytest.raises(SerializationError, match="cloudpickle"):
        await oq.enqueue(jobs.echo, object())
    with pytest.raises(SerializationError):
        await oq.enqueue(jobs.echo, float("nan"))
    assert await oq.counts() == []


@pytest.mark.parametrize("func", [lambda: None, jobs.Holder().method, 5], ids=["lambda", "method", "number"])
async def test_what_no_worker_could_find_is_refused_at_enqueue(oq: AsyncOmniQ, func: Any) -> None:
    with pytest.raises((Invalid, TypeError)):
        await oq.enqueue(func)
    with pytest.raises((Invalid, TypeError)):
        await oq.enqueue_many(func, [()])


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": -1},
        {"max_retries": 1.5},
        {"max_retries": True},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"lease": 0},
        {"lease": -5},
        {"interval": 0},
        {"interval": timedelta(seconds=-1)},
        {"eta": datetime(2030, 1, 1)},
        {"eta": timedelta(seconds=-1)},
        {"eta": 5},
        {"eta": "tomorrow"},
        {"queue": ""},
        {"queue": "two words"},
        {"queue": "x" * 129},
        {"group": ""},
        {"group": "x" * 256},
        {"group": "g", "group_limit": 0},
        {"group": "g", "group_limit": -1},
        {"group": "g", "group_limit": 1.5},
        {"idempotency_key": ""},
        {"idempotency_key": "x" * 256},
        {"blocked_by": "an id"},
        {"blocked_by": [""]},
        {"blocked_by": [5]},
        {"dead_queue": "a b"},
        {"result_ttl": -1},
        {"backoff": "linear"},
        {"task_id": ""},
        {"task_id": "x" * 256},
        {"task_id": "a\0b"},
        {"task_id": 5},
        {"headers": {"a": 5}},
        {"headers": "text"},
    ],
    ids=repr,
)
async def test_nonsense_is_refused_and_nothing_is_stored(oq: AsyncOmniQ, options: dict[str, Any]) -> None:
    with pytest.raises((Invalid, TypeError)):
        await oq.options(**options).enqueue(jobs.add, 1)
    assert sum(c.waiting for c in await oq.counts()) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": -1},
        {"concurrency": 1.5},
        {"concurrency": True},
        {"poll_interval": 0},
        {"poll_interval": -1},
        {"poll_interval": float("nan")},
        {"grace": -1},
        {"queues": "mail"},
        {"queues": []},
        {"queues": ["two words"]},
        {"allow": "support.jobs"},
    ],
    ids=repr,
)
async def test_a_nonsensical_worker_is_refused(oq: AsyncOmniQ, options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await oq.worker(**options)


async def test_a_negative_wait_is_refused(oq: AsyncOmniQ) -> None:
    with pytest.raises(Invalid):
        await oq.get_result("x", wait=True, timeout=-1)


async def test_typed_parameters_regain_their_types(oq: AsyncOmniQ) -> None:
    async with await oq.worker():
        args = (dt.date(2024, 1, 1), datetime.now(UTC), (1, 2), {"a"}, b"x")
        kinds = (await ended(oq, await oq.enqueue(jobs.typed, *args))).result
        assert kinds == ["date", "datetime", "tuple", "set", "bytes"]
        point = await oq.enqueue(jobs.take_point, point=jobs.Point(3))
        assert (await ended(oq, point)).result == "Point 3"


async def test_cloudpickle_on_both_sides_carries_any_object(storage: Any, caplog: pytest.LogCaptureFixture) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(serializer="cloudpickle"))
    async with await oq.worker():
        result = await ended(oq, await oq.enqueue(jobs.echo, {1, 2}, complex(1, 2)))
    assert result.result == {"args": [{1, 2}, complex(1, 2)], "kwargs": {}}


async def test_a_worker_that_did_not_ask_for_cloudpickle_fails_the_task_and_says_why(storage: Any, key: str) -> None:
    unsafe = AsyncOmniQ(storage, settings=Settings(serializer="cloudpickle"))
    safe = AsyncOmniQ(storage)
    task_id = await unsafe.enqueue(jobs.remember, key, {1, 2})
    async with await safe.worker():
        result = await ended(safe, task_id)
    assert result.status is TaskStatus.FAILED
    assert "OMNIQ_SERIALIZER=cloudpickle" in result.error.message
    assert jobs.runs[key] == 0
    assert result.attempts == 1


# -- failing and retrying -------------------------------------------------------------------------


async def test_a_task_is_retried_until_it_succeeds(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.enqueue(jobs.fail_until, key, 3))
    assert (result.result, result.attempts, jobs.runs[key]) == (3, 3, 3)


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_max_retries_n_means_one_and_n_runs(oq: AsyncOmniQ, key: str, retries: int) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(max_retries=retries).enqueue(jobs.fail, key))
    assert jobs.runs[key] == retries + 1
    assert result.attempts == retries + 1
    assert result.status is TaskStatus.FAILED
    assert (result.error.type, result.error.message) == ("RuntimeError", "no luck")
    assert "in fail" in result.error.traceback
    assert "site-packages/omniq" not in result.error.traceback


async def test_the_default_is_three_retries(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        await ended(oq, await oq.enqueue(jobs.fail, key))
    assert jobs.runs[key] == 4


async def test_retries_wait_longer_each_time(storage: Any, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(backoff_base=0.05))
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.fail, key)
        await ended(oq, task_id)
    events = await storage.events_of(task_id)
    first, second, third = [(e.due_us - e.ts_us) / 1e6 for e in events if e.event == "retried"]
    assert 0.05 <= first < second < third
    assert third >= 0.2
    runs = [b - a for a, b in zip(jobs.starts[key], jobs.starts[key][1:], strict=False)]
    assert all(run >= pause for run, pause in zip(runs, (first, second, third), strict=True)), "none began too early"


async def test_between_runs_a_task_is_retrying_and_shows_its_error(storage: Any, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(backoff_base=60))
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.fail, key)

        async def retrying() -> bool:
            return (await oq.get_task(task_id)).status is TaskStatus.RETRYING

        await eventually(retrying)
    task = await oq.get_task(task_id)
    assert task.attempts == 1
    assert task.last_error.message == "no luck"
    assert await oq.get_result(task_id) is None


async def test_a_task_may_choose_its_own_delay(storage: Any, key: str) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(backoff_base=60))
    async with await oq.worker():
        result = await ended(oq, await oq.enqueue(jobs.retry_after, key, 0.05))
    assert result.result == 2
    assert 0.05 <= jobs.starts[key][1] - jobs.starts[key][0] < 5


async def test_a_task_may_give_up_at_once(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(max_retries=5).enqueue(jobs.give_up, key))
    assert jobs.runs[key] == 1
    assert (result.status, result.error.type, result.error.message) == (TaskStatus.FAILED, "Unrecoverable", "hopeless")


@pytest.mark.parametrize(
    "func", [jobs.leave, jobs.stop_iteration, jobs.fail_without_text, jobs.fail_with_broken_text, jobs.unstorable]
)
async def test_whatever_a_task_raises_or_returns_the_worker_goes_on(oq: AsyncOmniQ, key: str, func: Any) -> None:
    async with await oq.worker():
        bad = await oq.options(max_retries=0).enqueue(func, key)
        good = await oq.enqueue(jobs.add, 1, 2)
        assert (await ended(oq, good, 3)).result == 3
        assert (await ended(oq, bad, 3)).status is TaskStatus.FAILED


@pytest.mark.parametrize("func", [jobs.raise_odd, jobs.raise_odd_async])
@pytest.mark.parametrize("name", jobs.ODD)
async def test_what_a_task_had_better_not_raise_ends_its_run_and_no_slot(
    oq: AsyncOmniQ, key: str, func: Any, name: str
) -> None:
    told: list[str] = []

    class Listens(Middleware):
        async def on_error(self, task: TaskContext, error: BaseException) -> None:
            told.append(type(error).__name__)

    async with await oq.worker(middleware=[Listens()]):
        bad = await ended(oq, await oq.options(max_retries=1).enqueue(func, key, name))
        assert (bad.status, bad.attempts, jobs.runs[key]) == (TaskStatus.FAILED, 2, 2)
        assert name in str(bad.error)
        assert (await ended(oq, await oq.enqueue(jobs.in_a_task_group, key))).result == 3
        if name != "CancelledError":
            assert len(told) == 2


@pytest.mark.parametrize("and_wait", [True, False])
async def test_a_task_that_cancels_itself_ends_its_run_and_nothing_else(oq: AsyncOmniQ, key: str, and_wait: bool) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(max_retries=0).enqueue(jobs.cancel_itself, key, and_wait=and_wait))
        assert (result.status == TaskStatus.FAILED, str(result.error)) == (
            (True, "CancelledError: by itself") if and_wait else (False, "None")
        )
        assert (await ended(oq, await oq.enqueue(jobs.in_a_task_group, key))).result == 3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after", ["nan", "inf", "-inf", "-1", "1e300"])
async def test_a_pause_that_is_none_fails_the_run_at_once(oq: AsyncOmniQ, key: str, after: str, late: bool) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(max_retries=1).enqueue(jobs.retry_when, key, after, late), within=5)
    assert (result.status, result.attempts, result.error.type) == (TaskStatus.FAILED, 2, "Invalid")
    assert result.error.message.startswith("Retry(after=")
    assert "seconds" in result.error.message


async def test_a_hook_that_leaves_when_it_hears_of_a_timeout_takes_no_slot_with_it(oq: AsyncOmniQ, key: str) -> None:
    class Leaves(Middleware):
        async def on_error(self, task: TaskContext, error: BaseException) -> None:
            raise SystemExit(3)

    async with await oq.worker(middleware=[Leaves()]):
        late = await ended(oq, await oq.options(timeout=0.02, max_retries=0).enqueue(jobs.forever, key))
        assert late.error.type == "TimeoutError"
        assert (await ended(oq, await oq.enqueue(jobs.add, 1, 2))).result == 3


async def test_a_result_that_cannot_be_stored_is_a_failed_run(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(max_retries=0).enqueue(jobs.unstorable, key))
        assert result.status is TaskStatus.FAILED
        assert result.error.type == "SerializationError"
        result = await ended(oq, await oq.options(max_retries=0).enqueue(jobs.not_a_number))
        assert result.error.type == "SerializationError"


async def test_a_failed_task_can_be_run_again(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.options(max_retries=0).enqueue(jobs.fail_until, key, 2)
        assert (await ended(oq, task_id)).status is TaskStatus.FAILED
        await oq.requeue(task_id, reset_attempts=True)

        async def good() -> bool:
            result = await oq.get_result(task_id)
            return result is not None and result.ok

        await eventually(good)


# -- timeouts -------------------------------------------------------------------------------------


async def test_an_async_task_that_runs_too_long_is_interrupted(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(timeout=0.05, max_retries=0).enqueue(jobs.forever, key))
    assert (result.status, result.error.type) == (TaskStatus.FAILED, "TimeoutError")
    assert "0.05 s" in result.error.message
    assert jobs.seen[key] == ["cancelled"]


async def test_a_timeout_is_a_failed_attempt_and_is_retried(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(timeout=0.02, max_retries=2).enqueue(jobs.forever, key))
    assert (jobs.runs[key], result.attempts) == (3, 3)


async def test_an_async_task_that_ignores_its_interruption_is_a_timeout_all_the_same(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(timeout=0.02, max_retries=0).enqueue(jobs.stubborn, key))
    assert result.error.type == "TimeoutError"


def task_threads(pool: AsyncWorkerPool) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"omniq-task-{pool.worker_id}-")]


async def test_a_timed_out_sync_task_frees_its_slot(oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = await oq.worker(concurrency=1)
    async with pool:
        late = await oq.options(timeout=0.05, max_retries=0).enqueue(jobs.wait_for_gate, key)
        next_one = await oq.enqueue(jobs.add, 1, 2)
        with caplog.at_level(logging.WARNING, logger="omniq"):
            assert (await ended(oq, late)).error.type == "TimeoutError"
        assert (await ended(oq, next_one)).result == 3
        assert len(task_threads(pool)) == 2, "the one that is left behind, and the one in its place"
        said = [r for r in caplog.records if "left to finish" in r.getMessage()]
        assert len(said) == 1
        assert "support.jobs:wait_for_gate" in said[0].getMessage()
        assert said[0].task_id == late
        jobs.gates[key].set()
        await eventually(lambda: len(task_threads(pool)) == 1)
    assert (await oq.get_result(late)).status is TaskStatus.FAILED


async def test_a_sync_task_within_its_timeout_is_left_alone(oq: AsyncOmniQ, key: str) -> None:
    jobs.gates[key].set()
    async with await oq.worker():
        assert (await ended(oq, await oq.options(timeout=5).enqueue(jobs.wait_for_gate, key))).result == "through"


# -- when ------------------------------------------------------------------------------------------


async def test_a_task_does_not_run_before_its_eta(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker(poll_interval=30):
        before = time.monotonic()
        await ended(oq, await oq.enqueue(jobs.count, key, eta=timedelta(seconds=0.15)))
        assert 0.14 <= jobs.starts[key][0] - before < 2
        at = datetime.now(UTC) + timedelta(seconds=0.1)
        task_id = await oq.enqueue(jobs.count, key, eta=at)
        assert (await oq.get_task(task_id)).eta == at
        result = await ended(oq, task_id)
        assert result.last_attempt_at >= at


async def test_an_eta_in_the_past_runs_at_once(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        assert (await ended(oq, await oq.enqueue(jobs.count, key, eta=datetime(2020, 1, 1, tzinfo=UTC)))).ok


async def test_tasks_of_a_queue_start_by_due_time_and_then_in_enqueue_order(oq: AsyncOmniQ, key: str) -> None:
    now = datetime.now(UTC)
    for n, eta in enumerate([None, None, now - timedelta(hours=1), now - timedelta(hours=2), None]):
        await oq.enqueue(jobs.order, key, n, eta=eta)
    async with await oq.worker() as pool:
        await pool.drain()
    assert jobs.seen[key] == [3, 2, 0, 1, 4]


# -- the context of a task -------------------------------------------------------------------------


@pytest.mark.parametrize("func", [jobs.about_me, jobs.about_me_async])
async def test_a_task_knows_who_it_is(oq: AsyncOmniQ, func: Any) -> None:
    async with await oq.worker():
        task_id = await oq.options(queue="mail", max_retries=2, headers={"trace": "1"}).enqueue(func)
        said = (await ended(oq, task_id)).result
    assert said.pop("thread") is (func is jobs.about_me)
    assert said == {
        "id": task_id,
        "name": f"support.jobs:{func.__name__}",
        "queue": "mail",
        "attempt": 1,
        "max_attempts": 3,
        "headers": {"trace": "1"},
    }


def test_outside_of_a_task_there_is_no_current_one() -> None:
    import omniq

    with pytest.raises(LookupError, match="inside a running task"):
        omniq.current_task()


@pytest.mark.parametrize("func", [jobs.report_progress, jobs.report_progress_from_a_thread])
async def test_progress_is_visible_on_the_task_and_among_the_events(oq: AsyncOmniQ, key: str, func: Any) -> None:
    async with await oq.worker():
        task_id = await oq.enqueue(func, key)

        async def reported() -> Any:
            return (await oq.get_task(task_id)).progress

        progress = await eventually(reported)
        jobs.gates[key].set()
        await ended(oq, task_id)
    expected = {"done": 1, "total": 3, "note": "one"} if func is jobs.report_progress else {"done": 2, "total": 4}
    assert progress == expected
    assert [e.data["progress"] for e in await oq.history(task_id) if e.event == "progress"] == [expected]


async def test_too_much_progress_is_an_error_of_the_task(oq: AsyncOmniQ) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.options(max_retries=0).enqueue(jobs.report_too_much))
    assert "4096" in result.error.message


async def test_the_logger_of_a_task_carries_its_fields(oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture) -> None:
    async with await oq.worker() as pool:
        task_id = await oq.enqueue(jobs.log_something, key)
        with caplog.at_level(logging.WARNING, logger="omniq"):
            await ended(oq, task_id)
        assert isinstance(pool, AsyncWorkerPool)
    (line,) = [r for r in caplog.records if r.getMessage() == "hello from inside"]
    assert (line.task_id, line.queue, line.attempt) == (task_id, "default", 1)
    assert line.worker


# -- results ---------------------------------------------------------------------------------------


async def test_there_is_no_result_before_the_end_for_an_unknown_id_and_when_time_is_up(oq: AsyncOmniQ) -> None:
    assert await oq.get_result("unknown") is None
    assert await asyncio.wait_for(oq.get_result("unknown", wait=True), 1) is None
    task_id = await oq.enqueue(jobs.nothing)
    assert await oq.get_result(task_id) is None
    before = time.monotonic()
    assert await oq.get_result(task_id, wait=True, timeout=0.05) is None
    assert 0.04 <= time.monotonic() - before < 1
    assert await oq.get_result(task_id, wait=True, timeout=0) is None


async def test_waiting_ends_as_soon_as_the_task_has(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.wait_async, key)
        waiting = asyncio.create_task(oq.get_result(task_id, wait=True, timeout=10))
        await eventually(lambda: jobs.runs[key])
        before = time.monotonic()
        jobs.gates[key].set()
        assert (await waiting).result == "through"
        assert time.monotonic() - before < 0.5


async def test_a_result_of_none_is_a_result(oq: AsyncOmniQ) -> None:
    async with await oq.worker():
        result = await ended(oq, await oq.enqueue(jobs.nothing))
    assert result.ok
    assert result.result is None


async def test_the_result_ttl_comes_from_the_settings_or_the_call(storage: Any) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(result_ttl_seconds=60))
    assert (await oq.get_task(await oq.enqueue(jobs.nothing))).result_ttl == 60
    assert (await oq.get_task(await oq.options(result_ttl=5).enqueue(jobs.nothing))).result_ttl == 5


# -- many, same ids, keys --------------------------------------------------------------------------


async def test_many_rows_become_many_tasks_in_order(oq: AsyncOmniQ) -> None:
    rows: list[Any] = [(1,), (2, 3), {"a": 4}, {"a": 5, "b": 6}, [7]]
    ids = await oq.enqueue_many(jobs.add, rows)
    assert len(set(ids)) == 5
    async with await oq.worker(concurrency=2):
        assert [(await ended(oq, i)).result for i in ids] == [1, 5, 4, 11, 7]
    assert await oq.enqueue_many(jobs.add, []) == []
    assert len(await oq.options(queue="bulk").enqueue_many(jobs.add, ((n,) for n in range(2500)))) == 2500
    (count,) = [c for c in await oq.counts() if c.queue == "bulk"]
    assert count.ready == 2500


@pytest.mark.parametrize("row", [5, "text", None, (), (1, 2, 3), {"c": 1}, (object(),)])
async def test_a_bad_row_is_an_error(oq: AsyncOmniQ, row: Any) -> None:
    with pytest.raises(TypeError):
        await oq.enqueue_many(jobs.add, [(1,), row])
    assert sum(c.ready for c in await oq.counts()) == 0


async def test_a_key_or_an_id_belongs_to_one_task_not_to_many(oq: AsyncOmniQ) -> None:
    for options in ({"idempotency_key": "k"}, {"task_id": "t"}):
        with pytest.raises(Invalid):
            await oq.options(**options).enqueue_many(jobs.add, [(1,)])


async def test_the_same_key_gives_the_first_task_and_another_body_is_an_error(oq: AsyncOmniQ) -> None:
    from omniq import IdempotencyConflict

    once = oq.options(idempotency_key="order-7")
    first = await once.enqueue(jobs.add, 1, b=2)
    assert await once.enqueue(jobs.add, 1, b=2) == first
    with pytest.raises(IdempotencyConflict):
        await once.enqueue(jobs.add, 1, b=3)
    elsewhere = await oq.options(idempotency_key="order-7", queue="other").enqueue(jobs.add, 1, b=2)
    assert elsewhere != first
    async with await oq.worker():
        await ended(oq, first)
        assert await once.enqueue(jobs.add, 1, b=2) == first
    assert sum(c.ready + c.done for c in await oq.counts()) == 2


async def test_the_same_id_again_is_safe_and_another_body_is_an_error(oq: AsyncOmniQ) -> None:
    from omniq import DuplicateId

    named = oq.options(task_id="mine")
    assert await named.enqueue(jobs.add, 1) == "mine"
    assert await named.enqueue(jobs.add, 1) == "mine"
    with pytest.raises(DuplicateId):
        await named.enqueue(jobs.add, 2)
    with pytest.raises(TaskIdRequired):
        await oq.options(task_id="").enqueue(jobs.add, 1)


async def test_the_calls_of_a_storage_without_tokens_use_the_token_that_dequeue_got(storage: Any) -> None:
    from omniq import NotActive, Task, TaskError

    task = Task(func_path="support.jobs:add", args=[1, 2])
    assert await storage.enqueue(task) == task.id
    assert await storage.enqueue(task) == task.id
    with pytest.raises(NotActive):
        await storage.mark_running(task.id)
    now = datetime.now(UTC)
    taken = await storage.dequeue(now)
    assert (taken.id, taken.args, taken.status) == (task.id, [1, 2], TaskStatus.RUNNING)
    assert await storage.dequeue(now) is None
    await storage.mark_running(task.id)
    await storage.mark_failed(task.id, TaskError("E", "once"), will_retry=True)
    with pytest.raises(NotActive):
        await storage.mark_done(task.id, TaskResult(task_id=task.id, status=TaskStatus.SUCCESS))
    assert (await storage.dequeue(datetime.now(UTC))).id == task.id
    await storage.mark_done(task.id, TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, result=3))
    result = await storage.get_result(task.id)
    assert (result.status, result.result) == (TaskStatus.SUCCESS, 3)
    assert await storage.purge_results(datetime.now(UTC) + timedelta(seconds=1)) == 1
    assert await storage.get_result(task.id) is None


async def test_a_worker_may_hold_a_task_again_while_its_first_run_goes_on(
    oq: AsyncOmniQ, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that was frozen longer than a lease is taken for dead; thawed, it may be the one that leases the task anew."""
    flag = tmp_path / "held"
    with caplog.at_level(logging.ERROR):
        async with await oq.worker(concurrency=2):
            task_id = await oq.enqueue(jobs.hold_then_write, str(flag))
            await eventually(flag.exists)
            flag.unlink()
            first = await oq.storage.get(task_id)
            assert first is not None
            lost = Retry(queue=first.queue, id=first.id, token=first.token or "", delay_us=0, lost="worker_lost")
            assert isinstance((await oq.storage.apply([(lost,)]))[0], list)
            await eventually(flag.exists)
            (tmp_path / "held-go").touch()
            assert (await ended(oq, task_id)).ok
    assert "could not be ended" not in caplog.text
