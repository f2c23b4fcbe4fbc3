"""Which code may run is the worker's decision."""

from typing import Any

import pytest
from support import jobs

from omniq import AsyncOmniQ, AsyncWorkerPool, BaseStorage, MemoryStorage, Settings, Task, TaskStatus
from omniq.operations import Capabilities


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("no.such.module:f", "import path"),
        ("support.jobs:no_such", "check the name"),
        ("never_registered", "@omniq.task"),
        ("support.jobs:not_callable", "not a function"),
    ],
)
async def test_a_function_that_cannot_be_found_is_a_failed_task_that_says_what_to_do(
    storage: BaseStorage, name: str, advice: str
) -> None:
    oq = AsyncOmniQ(storage, settings=Settings(unknown_function_s=0))
    async with await oq.worker():
        result = await oq.get_result(await oq.enqueue(name), wait=True, timeout=5)
    assert result.status is TaskStatus.FAILED
    assert result.attempts == 1
    assert advice in result.error.message


async def test_a_path_into_another_program_is_a_failed_task_that_says_what_to_do(oq: AsyncOmniQ) -> None:
    id = await oq.storage.enqueue(Task(id="t", func_path="__main__:gone"))
    async with await oq.worker():
        result = await oq.get_result(id, wait=True, timeout=5)
    assert result.status is TaskStatus.FAILED
    assert "move it into a module" in result.error.message


async def test_a_local_store_allows_any_importable_function(oq: AsyncOmniQ) -> None:
    async with await oq.worker():
        assert (await oq.get_result(await oq.enqueue("os.path:basename", "a/b"), wait=True, timeout=5)).result == "b"


async def test_a_worker_with_a_list_runs_those_modules_and_registered_tasks(oq: AsyncOmniQ) -> None:
    async with await oq.worker(allow=["support.jobs"]):
        good = await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)
        refused = await oq.get_result(await oq.enqueue("os.path:basename", "a/b"), wait=True, timeout=5)
        around = await oq.get_result(await oq.enqueue("support.jobs:os.getpid"), wait=True, timeout=5)
    assert good.ok
    assert refused.status is TaskStatus.FAILED
    assert "may not run" in refused.error.message
    assert around.status is TaskStatus.FAILED
    async with await oq.worker(allow=[]):
        assert (await oq.get_result(await oq.enqueue(jobs.double, 2), wait=True, timeout=5)).ok
        refused = await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)
        assert refused.status is TaskStatus.FAILED


class Remote(MemoryStorage):
    """A store that others can reach over a network."""

    capabilities = Capabilities(durability="none", push_wait=True, local=False)


async def test_a_network_store_allows_registered_tasks_only_unless_told_otherwise() -> None:
    async with AsyncOmniQ(Remote()) as oq:
        async with await oq.worker():
            assert (await oq.get_result(await oq.enqueue(jobs.double, 2), wait=True, timeout=5)).ok
            refused = await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)
            assert refused.status is TaskStatus.FAILED
        async with AsyncWorkerPool(oq.queue, allow=["support.jobs"]):
            assert (await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)).ok


async def test_an_error_is_text_and_never_becomes_a_class_again(oq: AsyncOmniQ, key: str) -> None:
    async with await oq.worker():
        result = await oq.get_result(await oq.options(max_retries=0).enqueue(jobs.fail, key), wait=True, timeout=5)
    error: Any = result.error
    assert all(isinstance(text, str) for text in (error.type, error.message, error.traceback))
