"""Threads for synchronous tasks."""

import asyncio
import contextvars
import threading

import pytest
from support.waiting import eventually

from omniq.functions import TaskThreads

word: contextvars.ContextVar[str] = contextvars.ContextVar("word")


async def test_a_call_runs_in_a_daemon_thread_with_the_callers_context() -> None:
    threads = TaskThreads("t")
    word.set("hello")
    thread, said = await threads.run(lambda: (threading.current_thread(), word.get()))
    assert thread.daemon
    assert thread is not threading.current_thread()
    assert said == "hello"
    threads.close()


async def test_threads_are_reused_and_grow_only_with_the_calls_at_once() -> None:
    threads = TaskThreads("t")
    names = {await threads.run(lambda: threading.current_thread().name) for _ in range(20)}
    assert len(names) == 1
    barrier = threading.Barrier(3)
    await asyncio.gather(*(threads.run(lambda: barrier.wait(5)) for _ in range(3)))
    threads.close()


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
async def test_what_a_call_raises_arrives(error: BaseException) -> None:
    threads = TaskThreads("t")

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await threads.run(fail)
    assert caught.value is error
    threads.close()


async def test_stop_iteration_becomes_a_runtime_error() -> None:
    threads = TaskThreads("t")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(threads.run(lambda: next(iter([]))), 5)
    threads.close()


async def test_a_thread_that_overstays_is_counted_and_replaced() -> None:
    threads = TaskThreads("t")
    begun, gate = threading.Event(), threading.Event()

    def overstay() -> None:
        begun.set()
        gate.wait(5)

    late = asyncio.create_task(threads.run(overstay))
    await eventually(begun.is_set)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert threads.abandoned == 1
    assert await threads.run(lambda: "next") == "next"
    gate.set()
    await eventually(lambda: threads.abandoned == 0)
    assert await threads.run(lambda: "still good") == "still good"
    threads.close()
