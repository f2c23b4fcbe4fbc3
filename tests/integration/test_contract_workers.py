"""An ordinary worker and the contract's jobs: it runs those whose name it knows."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support import jobs

import omniq
from omniq import AsyncOmniQ, BaseStorage, Settings, TaskStatus
from omniq.contract import AsyncContractClient, JobContext
from omniq.errors import Invalid
from omniq.tasks import HANDLERS


@pytest.fixture
def storage(every_storage: BaseStorage) -> BaseStorage:
    return every_storage


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    before = dict(HANDLERS)
    yield
    HANDLERS.clear()
    HANDLERS.update(before)


async def run(storage: BaseStorage, payload: Any, *, allow: list[str] | None = None, **options: Any) -> omniq.TaskResult:
    """Publish a job and let a worker run it to its end."""
    oq = AsyncOmniQ(storage, settings=Settings(grace=5, unknown_function_s=0))
    client = AsyncContractClient(storage)
    job_id = await client.publish("q", payload, backoff_ms=1, **options)
    async with await oq.worker(allow=allow):
        result = await oq.get_result(job_id, wait=True, timeout=10)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        ({"func": "tests.double", "args": [4]}, 8),
        ({"func": "tests.double", "kwargs": {"x": 5}}, 10),
        ({"func": "support.jobs:add", "args": [1], "kwargs": {"b": 2}, "sent_by": "another language"}, 3),
        ({"func": "support.jobs:nothing"}, None),
        ({"func": "support.jobs:add_async", "args": [1, 2]}, 3),
    ],
)
async def test_a_function_named_in_the_payload_is_called(storage: BaseStorage, payload: Any, answer: Any) -> None:
    result = await run(storage, payload, allow=["support.jobs"])
    assert (result.status, result.result) == (TaskStatus.SUCCESS, answer)


@pytest.mark.parametrize("payload", [{"page": 1}, [1, 2], {"func": 7}, {"func": None, "page": 1}, {}])
async def test_the_handler_of_the_queue_gets_the_payload(storage: BaseStorage, payload: Any) -> None:
    @omniq.handler("q")
    async def handle(payload: Any) -> Any:
        return {"got": payload, "name": omniq.current_task().name}

    assert (await run(storage, payload)).result == {"got": payload, "name": "*"}


async def test_a_plain_handler_runs_in_a_thread_and_may_fail(storage: BaseStorage) -> None:
    @omniq.handler("q")
    def handle(payload: dict[str, Any]) -> None:
        raise ValueError(f"page {payload['page']}")

    result = await run(storage, {"page": 3}, max_attempts=2)
    assert (result.status, result.attempts, str(result.error)) == (TaskStatus.FAILED, 2, "ValueError: page 3")


async def test_a_task_without_name_and_handler_fails_in_the_end_and_is_told_about_consume(storage: BaseStorage) -> None:
    result = await run(storage, {"page": 1})
    assert (result.status, result.attempts, result.error.type) == (TaskStatus.FAILED, 1, "NotRunnable")
    assert "consume()" in result.error.message
    assert "@omniq.handler('q')" in result.error.message


async def test_a_function_that_this_worker_may_not_run_is_refused(storage: BaseStorage) -> None:
    """Also where a handler is registered: a job that names its function is meant for that function."""

    @omniq.handler("q")
    def handle(payload: Any) -> None: ...

    result = await run(storage, {"func": "os:getpid"}, allow=["support.jobs"])
    assert result.status is TaskStatus.FAILED
    assert "may not run 'os:getpid'" in result.error.message


async def test_a_call_with_strange_arguments_fails_at_once(storage: BaseStorage) -> None:
    result = await run(storage, {"func": "tests.double", "args": {"x": 1}})
    assert (result.status, result.attempts) == (TaskStatus.FAILED, 1)
    assert "not a list" in result.error.message


def test_a_queue_has_one_handler() -> None:
    def one(payload: Any) -> None: ...
    def other(payload: Any) -> None: ...

    assert omniq.handler("q")(one) is one
    assert omniq.handler("q")(one) is one
    with pytest.raises(Invalid, match="already"):
        omniq.handler("q")(other)
    with pytest.raises(ValueError, match="queue name"):
        omniq.handler("a b")


async def test_a_registered_task_can_be_a_handler_too(storage: BaseStorage) -> None:
    omniq.handler("q")(jobs.double)
    assert (await run(storage, [21], max_attempts=1)).status is TaskStatus.SUCCESS


async def test_consume_runs_tasks_of_the_library_as_jobs(storage: BaseStorage) -> None:
    oq, client = AsyncOmniQ(storage), AsyncContractClient(storage)
    task_id = await oq.options(queue="q").enqueue(jobs.add, 1, b=2)
    seen: list[JobContext] = []
    stop = asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        seen.append(ctx)
        stop.set()

    await client.consume("q", handler, stop=stop)
    assert [(c.job_id, c.payload) for c in seen] == [(task_id, {"args": [1], "kwargs": {"b": 2}})]
    assert (await oq.get_result(task_id)).ok
