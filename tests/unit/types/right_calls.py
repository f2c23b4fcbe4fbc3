"""Calls that a type checker must accept."""

from datetime import timedelta
from typing import assert_type

import omniq


def plain(a: int, *, b: str = "") -> float:
    return a / len(b)


async def plain_async(a: int) -> str:
    return str(a)


@omniq.task
def bare(a: int, b: str = "") -> float:
    return a / len(b)


@omniq.task(name="named", queue="mail", max_retries=3)
async def named(a: int, *, queue: str) -> None: ...


async def on_the_async_class(oq: omniq.AsyncOmniQ) -> None:
    assert_type(await bare.enqueue(oq, 1), str)
    assert_type(await bare.enqueue(oq, 1, b="x"), str)
    assert_type(await named.enqueue(oq, 1, queue="an argument, not an option"), str)
    assert_type(await oq.options(queue="mail", eta=timedelta(seconds=5)).enqueue(plain, 1, b="x"), str)
    assert_type(await oq.options(timeout=5).enqueue(plain_async, 1), str)
    assert_type(await oq.options().enqueue(named, 1, queue="x"), str)
    assert_type(await bare.enqueue(oq.options(group="g"), 1), str)
    assert_type(await oq.enqueue(plain, 1, b="x", eta=timedelta(seconds=1)), str)
    assert_type(await oq.enqueue("module:function", 1), str)
    assert_type(await oq.enqueue_many(plain, [(1,), {"a": 1}]), list[str])
    async with oq.transaction() as tx:
        assert_type(tx.enqueue(plain, 1), str)
    async with await oq.worker(concurrency=2) as pool:
        assert_type(pool, omniq.AsyncWorkerPool)
    result = await oq.get_result("id", wait=True, timeout=5)
    assert_type(result, omniq.TaskResult | None)


def on_the_blocking_class(oq: omniq.OmniQ) -> None:
    assert_type(bare.enqueue(oq, 1), str)
    assert_type(bare.enqueue(oq, 1, "x"), str)
    assert_type(named.enqueue(oq, 1, queue="x"), str)
    assert_type(oq.options(max_retries=0).enqueue(plain, 1), str)
    assert_type(oq.options().enqueue(bare, 1, b="x"), str)
    assert_type(bare.enqueue(oq.options(group="g"), 1), str)
    assert_type(oq.enqueue(plain, 1), str)
    with oq.transaction() as tx:
        assert_type(tx.enqueue(plain, 1), str)
    with oq.worker() as pool:
        assert_type(pool, omniq.WorkerPool)


def calling_a_task_calls_its_function() -> None:
    assert_type(bare(1, b="x"), float)
