"""What waits for another run although nothing is ready or running."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from omniq.models import State
from omniq.operations import Filter, QueueCounts
from omniq.policy import NOT_RUNNABLE, waits_for_function
from omniq.storage.base import BaseStorage


class Again(msgspec.Struct, frozen=True):
    """`retries`: a run failed and another will follow. `unknown`: tasks that wait for their function, and when they are due."""

    retries: bool
    unknown: dict[str, int]


async def waiting_again(storage: BaseStorage, counts: Iterable[QueueCounts]) -> Again:
    """Looks in the queues that have scheduled tasks. Those with a later `eta` that never ran do not count."""
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
    """Whether a task of the queue failed and will run again; one that waits for its function may have failed before that."""
    cursor = None
    while True:
        page = await storage.find(Filter(states=(State.SCHEDULED,), min_attempts=1, queue=queue), cursor, 100)
        if not all(waits_for_function(task) for task in page.tasks):
            return True
        cursor = page.cursor
        if cursor is None:
            return False
