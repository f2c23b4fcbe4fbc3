"""The activity of queues: how fast tasks come and go, and how many functions run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from omniq.errors import EventsLost

if TYPE_CHECKING:
    from omniq.operations import EventRow, QueueCounts, Shard, WorkerInfo
    from omniq.storage.base import BaseStorage

# Workers say something every ten seconds at least. Who has missed that six times is not counted any more;
# who has missed it three times does not keep anybody from work that needs a store without workers.
SILENT_US = 60_000_000
AT_WORK_US = 30_000_000

WINDOW_S = 60.0
# What fewer seconds of a log say is chance: a store that just took in 200,000 tasks may show none of them.
LEAST_S = 10.0
# Of a busy store, the last seconds are enough: at most so many pages are read of each shard.
CHUNK = 2000
MAX_CHUNKS = 10
# The number of a shard's first event ever: a log that reaches back to it lacks nothing.
FIRST = 1
_OUT = frozenset({"succeeded", "failed", "cancelled"})


class Rates(msgspec.Struct):
    """Tasks per second that came in and that ended, by queue, over the last `span_s` seconds."""

    span_s: float
    came: Counter[str]
    ended: Counter[str]

    def into(self, queue: str) -> float:
        return self.came[queue] / self.span_s

    def out_of(self, queue: str) -> float:
        return self.ended[queue] / self.span_s


async def read_rates(storage: BaseStorage, window_s: float = WINDOW_S, least_s: float = LEAST_S) -> Rates | None:
    """Returns None for a store without events, and when the part of its log that is read covers less than `least_s`."""
    now = storage.clock()
    since = now - round(window_s * 1e6)
    shards = await storage.event_shards()
    if not any(shard.last >= shard.first for shard in shards):
        return None
    covered = since
    recent: list[EventRow] = []
    for shard in shards:
        rows, reached = await _tail(storage, shard, since)
        covered = max(covered, reached)
        recent += rows
    span_s = (now - covered) / 1e6
    if span_s < least_s:
        return None
    came: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for row in recent:
        if row.ts_us >= covered:
            came[row.queue] += row.event == "enqueued"
            ended[row.queue] += row.event in _OUT
    return Rates(span_s=span_s, came=came, ended=ended)


async def _tail(storage: BaseStorage, shard: Shard, since: int) -> tuple[list[EventRow], int]:
    """Returns the last events of a shard, and the moment since which they are complete: `since`, or later on a busy store."""
    found: list[EventRow] = []
    upto, lost = shard.last, False
    for _ in range(MAX_CHUNKS):
        after = max(upto - CHUNK, shard.first - 1)
        if after >= upto:
            break
        try:
            rows = await storage.events(shard.name, after, CHUNK, upto)
        except EventsLost:
            # A worker purged meanwhile.
            lost = True
            break
        found[:0] = [row for row in rows if row.ts_us >= since]
        if not rows or rows[0].ts_us < since:
            return found, since
        upto = after
    # Nothing was purged: before its first event nothing happened.
    if upto < FIRST or not (found or lost):
        return found, since
    return found, found[0].ts_us if found else storage.clock()


def alive(workers: Sequence[WorkerInfo], now_us: int, within_us: int = SILENT_US) -> list[WorkerInfo]:
    return [worker for worker in workers if worker.seen_at_us >= now_us - within_us]


def busy_in(c: QueueCounts, workers: Sequence[WorkerInfo], now_us: int) -> int | None:
    """How many functions of a queue run, as the workers last said; None while a worker of an older version, which does not
    say, serves it.

    The store counts leases, and a worker may hold some ahead of need. Never more than those: a worker that was lost still says
    what it said last.
    """
    if not c.running:
        return 0
    said = [_of(worker, c.queue) for worker in alive(workers, now_us)]
    known = [number for number in said if number is not None]
    return None if len(known) < len(said) else min(sum(known), c.running)


def _of(worker: WorkerInfo, queue: str) -> int | None:
    if worker.busy is not None:
        return worker.busy.get(queue, 0)
    # A worker of an older version tells one number for all of its queues: it says something of a queue only if it has no other.
    if not worker.running or (worker.queues and queue not in worker.queues):
        return 0
    return worker.running if len(worker.queues) == 1 else None
