"""How many functions run, as the workers last said: a store counts leases, and a worker may hold some ahead of need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniq.operations import QueueCounts, WorkerInfo

SILENT_US = 60_000_000  # who has said nothing for so long is not counted any more


def alive(workers: Sequence[WorkerInfo], now_us: int) -> list[WorkerInfo]:
    return [worker for worker in workers if worker.seen_at_us >= now_us - SILENT_US]


def busy_in(c: QueueCounts, workers: Sequence[WorkerInfo], now_us: int) -> int | None:
    """How many functions of a queue run; None while a worker of an older version serves it, which does not say.

    Never more than the leases: a worker that was lost still says what it said last.
    """
    if not c.running:
        return 0
    said = [_of(worker, c.queue) for worker in alive(workers, now_us)]
    known = [number for number in said if number is not None]
    return None if len(known) < len(said) else min(sum(known), c.running)


def _of(worker: WorkerInfo, queue: str) -> int | None:
    if worker.busy is not None:
        return worker.busy.get(queue, 0)
    if not worker.running or (worker.queues and queue not in worker.queues):
        return 0
    return worker.running if len(worker.queues) == 1 else None
