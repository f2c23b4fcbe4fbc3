"""Tasks, followed wherever they go: cancel one, wait for its end, and see which wait for another run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import msgspec

from omniq.errors import Refused, TaskNotFound
from omniq.models import Record, State, StoredResult
from omniq.operations import Cancel, Cancelled, Filter, QueueCounts
from omniq.policy import NOT_RUNNABLE, waits_for_function
from omniq.storage.base import BaseStorage

MOVES = 3  # a task may move to its dead queue between the look and the call, and be brought back
LOOK_S = 1.0  # a wait is cut up, so that a server that stops and a client that goes are noticed, and a wake-up that got lost


async def cancel(storage: BaseStorage, task_id: str) -> tuple[Record, State] | None:
    """End a waiting task, or ask a running one to end. Returns its earlier record and its state now, or None if it is gone."""
    for _ in range(MOVES):
        record = await storage.get(task_id)
        if record is None:
            break
        if record.state.final:
            return record, record.state
        (answer,) = await storage.send([(Cancel(queue=record.queue, id=task_id),)])
        if isinstance(answer, TaskNotFound):
            continue
        if isinstance(answer, Refused):
            raise answer
        return record, cast(Cancelled, answer[0]).state
    return None


async def until_ended(
    storage: BaseStorage, task_id: str, timeout: float | None, unwanted: Callable[[], bool] = lambda: False
) -> StoredResult | Record | None:
    """Returns the result of a task, or its record if it has not ended in time or the wait is `unwanted`. None if unknown."""
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    while True:
        # Before the looks: what changes between them and the wait ends the wait at once.
        seen = storage.changes
        stored = await _result(storage, task_id)
        if stored is not None:
            return stored
        record = await storage.get(task_id)
        if record is None:
            return await _result(storage, task_id)  # it may have ended, and gone, in between
        left = LOOK_S if deadline is None else min(deadline - loop.time(), LOOK_S)
        if left <= 0 or unwanted():
            return record
        await storage.wait(tasks=[task_id], timeout=left, after=seen)


async def _result(storage: BaseStorage, task_id: str) -> StoredResult | None:
    return (await storage.results([task_id])).get(task_id)


class Again(msgspec.Struct, frozen=True):
    """`retries`: a run failed and another will follow. `unknown`: tasks that wait for their function, and when they are due."""

    retries: bool
    unknown: dict[str, int]


async def waiting_again(storage: BaseStorage, counts: Iterable[QueueCounts]) -> Again:
    """Look in the queues that have scheduled tasks. Tasks with a later `eta` that never ran do not count."""
    queues = [c.queue for c in counts if c.scheduled]
    for queue in queues:
        if await _retries(storage, queue):
            return Again(retries=True, unknown={})
    unknown: dict[str, int] = {}
    for queue in queues:
        wanted = Filter(states=(State.SCHEDULED,), queue=queue, error_contains=NOT_RUNNABLE)
        cursor = None
        while True:
            page = await storage.find(wanted, cursor, 1000)
            unknown.update((task.id, task.due_us) for task in page.tasks if waits_for_function(task))
            cursor = page.cursor
            if cursor is None:
                break
    return Again(retries=False, unknown=unknown)


async def _retries(storage: BaseStorage, queue: str) -> bool:
    """Whether a task of the queue failed and will run again. A task that waits for its function does not count."""
    cursor = None
    while True:
        page = await storage.find(Filter(states=(State.SCHEDULED,), min_attempts=1, queue=queue), cursor, 100)
        if not all(waits_for_function(task) for task in page.tasks):
            return True
        cursor = page.cursor
        if cursor is None:
            return False
