"""The parts of `omniq bench`. For comparisons with a baseline there is the folder benchmarks/ of the repository."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from omniq.cli.output import bar, count
from omniq.cli.paging import task_pages
from omniq.cli.queues.activity import AT_WORK_US, alive
from omniq.core import AsyncOmniQ
from omniq.errors import Refused
from omniq.models import State, TaskStatus
from omniq.operations import Filter, Remove

QUEUE = "omniq.bench"
CALLERS = 50
PAYLOAD = "x" * 80
# When tasks began, by their mark: worker and caller are one process, so one clock measures both ends.
_started: dict[str, float] = {}


class Figure(msgspec.Struct, kw_only=True):
    """The result of one part."""

    what: str
    tasks: int
    per_second: float
    median_ms: float | None = None
    p99_ms: float | None = None


class Busy(Refused):
    """Workers would take part in the measurement."""


async def nothing(payload: str = "") -> None:
    """A task that does nothing."""


async def note(mark: str) -> None:
    """A task that says when it began."""
    _started[mark] = time.perf_counter()


async def measure(oq: AsyncOmniQ, tasks: int) -> list[Figure]:
    """Every part in turn; the tasks are deleted whatever happens."""
    others = alive(await oq.workers(), oq.storage.clock(), AT_WORK_US)
    if others:
        raise Busy(f"{count(len(others), 'worker')} are on this store and would take part: stop them, or use another store")
    parts: list[Callable[[], Awaitable[Figure]]] = [
        lambda: _one_by_one(oq, max(tasks // 20, 10)),
        lambda: _by_callers(oq, max(tasks // 5, CALLERS)),
        lambda: _in_bulk(oq, tasks),
        lambda: _pick_up(oq, max(tasks // 50, 10)),
        lambda: _drain(oq, tasks),
    ]
    figures: list[Figure] = []
    try:
        with bar("measuring", len(parts)) as advance:
            for part in parts:
                figures.append(await part())
                await _clear(oq)
                advance(1)
    finally:
        await _clear(oq)
    return figures


async def _one_by_one(oq: AsyncOmniQ, tasks: int) -> Figure:
    times: list[float] = []
    enqueuer = oq.options(queue=QUEUE, result_ttl=0)
    for _ in range(tasks):
        begun = time.perf_counter()
        await enqueuer.enqueue(nothing, PAYLOAD)
        times.append(time.perf_counter() - begun)
    return _figure("enqueue, one after another", tasks, sum(times), times)


async def _by_callers(oq: AsyncOmniQ, tasks: int) -> Figure:
    enqueuer, each = oq.options(queue=QUEUE, result_ttl=0), tasks // CALLERS

    async def call() -> None:
        for _ in range(each):
            await enqueuer.enqueue(nothing, PAYLOAD)

    begun = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return _figure(f"enqueue, {CALLERS} callers at once", each * CALLERS, time.perf_counter() - begun)


async def _in_bulk(oq: AsyncOmniQ, tasks: int) -> Figure:
    begun = time.perf_counter()
    await oq.options(queue=QUEUE, result_ttl=0).enqueue_many(nothing, [(PAYLOAD,)] * tasks)
    return _figure("enqueue_many", tasks, time.perf_counter() - begun)


async def _pick_up(oq: AsyncOmniQ, tasks: int) -> Figure:
    """From the call of enqueue to the first line of the task, on an idle worker."""
    enqueuer = oq.options(queue=QUEUE, result_ttl=60)
    times: list[float] = []
    async with await oq.worker(1, queues=[QUEUE], allow=[__name__]):
        for number in range(tasks):
            begun = time.perf_counter()
            result = await oq.get_result(await enqueuer.enqueue(note, str(number)), wait=True, timeout=30)
            if result is None or result.status is not TaskStatus.SUCCESS:
                raise Busy("a task of the benchmark did not end well: is another worker on this store?")
            times.append(_started.pop(str(number)) - begun)
    return _figure("pick up, idle worker", tasks, sum(times), times)


async def _drain(oq: AsyncOmniQ, tasks: int) -> Figure:
    await oq.options(queue=QUEUE, result_ttl=0).enqueue_many(nothing, [(PAYLOAD,)] * tasks)
    begun = time.perf_counter()
    async with await oq.worker(10, queues=[QUEUE], allow=[__name__]) as pool:
        await pool.drain()
        took = time.perf_counter() - begun
    return _figure("run, 10 at once", tasks, took)


async def _clear(oq: AsyncOmniQ) -> None:
    """Nothing of the benchmark stays but its events."""
    # Waits for what a call that was interrupted has left on its way.
    await oq.storage.promote(QUEUE)
    resting = tuple(state for state in State if state is not State.RUNNING)
    async for tasks in task_pages(oq.storage, Filter(queue=QUEUE, states=resting), 1000):
        await oq.storage.send([tuple(Remove(queue=QUEUE, id=task.id) for task in tasks)])


def _figure(what: str, tasks: int, took: float, times: list[float] | None = None) -> Figure:
    ordered = sorted(times or ())
    return Figure(
        what=what,
        tasks=tasks,
        per_second=round(tasks / max(took, 1e-9), 1),
        median_ms=round(ordered[len(ordered) // 2] * 1000, 3) if ordered else None,
        p99_ms=round(ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)] * 1000, 3) if ordered else None,
    )
