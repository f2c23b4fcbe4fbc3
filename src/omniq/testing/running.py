"""For tests of code that enqueues: run all tasks now, and look at the tasks that were enqueued."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, overload

from omniq.core import AsyncOmniQ, OmniQ
from omniq.following import waiting_again
from omniq.models import State, Task
from omniq.operations import Filter
from omniq.policy import waits_for_function
from omniq.tasks import callee
from omniq.testing.clock import FakeClock
from omniq.worker import AsyncWorkerPool


@overload
def run_until_idle(oq: AsyncOmniQ, *, timeout: float = 30.0) -> Awaitable[int]: ...
@overload
def run_until_idle(oq: OmniQ, *, timeout: float = 30.0) -> int: ...
def run_until_idle(oq: AsyncOmniQ | OmniQ, *, timeout: float = 30.0) -> Awaitable[int] | int:
    """Runs tasks until none is ready, running or waiting for a retry. Returns how many runs succeeded or failed for good.

    A `FakeClock` is moved to the next retry, so that nothing waits for it. Tasks with a later `eta` stay in the store.
    Raises `TimeoutError` after `timeout` real seconds.
    """
    if isinstance(oq, AsyncOmniQ):
        return _run(oq, timeout)
    return asyncio.run(_run(AsyncOmniQ(oq.storage, settings=oq.settings), timeout))


async def _run(oq: AsyncOmniQ, timeout: float) -> int:
    pool = await oq.worker(concurrency=10, poll_interval=0.01)
    async with asyncio.timeout(timeout), pool:
        while not await _idle(oq, pool):
            await oq.storage.wait(timeout=0.01)
    return pool.done + pool.failed


async def _idle(oq: AsyncOmniQ, pool: AsyncWorkerPool) -> bool:
    seen = oq.storage.changes
    served = set(
        await oq.storage.queues(fed=True)
    )  # without `fed`, dead queues would be among them, whose letters stay for people
    counts = [c for c in await oq.counts() if c.queue in served and not c.paused]
    if pool.running or any(c.ready + c.running for c in counts):
        return False
    retrying = Filter(states=(State.SCHEDULED,), min_attempts=1)
    found = (await oq.storage.find(retrying, limit=1000)).tasks
    due = [t.due_us for t in found if t.queue in served and not waits_for_function(t)]
    if not due:
        # Nothing else is left: this worker is the only one, so that a function which it lacks will not come.
        unknown = (await waiting_again(oq.storage, counts)).unknown
        pool._give_up(unknown)  # pyright: ignore[reportPrivateUsage]
        due = list(unknown.values())
    if due and isinstance(oq.storage.clock, FakeClock):
        oq.storage.clock.advance(max(min(due) - oq.storage.clock(), 0) / 1e6)
    return not due and oq.storage.changes == seen  # otherwise something changed between the first look and the last


@overload
def assert_enqueued(
    oq: AsyncOmniQ,
    func: Callable[..., Any] | str,
    *,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    queue: str | None = None,
    count: int | None = None,
) -> Awaitable[list[Task]]: ...
@overload
def assert_enqueued(
    oq: OmniQ,
    func: Callable[..., Any] | str,
    *,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    queue: str | None = None,
    count: int | None = None,
) -> list[Task]: ...
def assert_enqueued(
    oq: AsyncOmniQ | OmniQ,
    func: Callable[..., Any] | str,
    *,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    queue: str | None = None,
    count: int | None = None,
) -> Awaitable[list[Task]] | list[Task]:
    """Returns the tasks of this function that are in the store, in any state. Fails if there are none, or not `count`.

    `args` and `kwargs` are compared as they come back from the store, where a tuple is a list.
    """
    name = callee(func).name
    filter = Filter(name=name, queue=queue)

    def check(tasks: list[Task]) -> list[Task]:
        found = [t for t in tasks if (args is None or t.args == list(args)) and (kwargs is None or t.kwargs == kwargs)]
        if (count is None and not found) or (count is not None and len(found) != count):
            others = "\n".join(f"  {t.func_path} args={t.args!r} kwargs={t.kwargs!r} queue={t.queue}" for t in tasks)
            wanted = "at least one" if count is None else str(count)
            raise AssertionError(
                f"{wanted} task of {name} (args={args!r}, kwargs={kwargs!r}, queue={queue!r}) expected, {len(found)} found; "
                f"tasks of that name:\n{others or '  none'}"
            )
        return found

    async def look(oq: AsyncOmniQ) -> list[Task]:
        tasks, _ = await oq.find(filter, limit=10_000)
        return check(tasks)

    if isinstance(oq, AsyncOmniQ):
        return look(oq)
    return check(oq.find(filter, limit=10_000)[0])
