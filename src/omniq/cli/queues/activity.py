"""How fast tasks come and go, read from the end of the event log."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from omniq.errors import EventsLost

if TYPE_CHECKING:
    from omniq.operations import EventRow, Shard
    from omniq.storage.base import BaseStorage

WINDOW_S = 60.0
LEAST_S = 10.0  # what fewer seconds of a log say is chance: a store that just took in 200,000 tasks may show none of them
CHUNK = 2000
MAX_CHUNKS = 10  # of a busy store, the last seconds are enough
FIRST = 1  # the number of a shard's first event ever
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
    """None for a store that keeps no events, and where the end of its log that is read covers less than `least_s`."""
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
    """The events of a shard since a moment, as far as a few chunks reach, and the moment from which on they are all there."""
    found: list[EventRow] = []
    upto, lost = shard.last, False
    for _ in range(MAX_CHUNKS):
        after = max(upto - CHUNK, shard.first - 1)
        if after >= upto:
            break
        try:
            rows = await storage.events(shard.name, after, CHUNK, upto)
        except EventsLost:  # a worker purged meanwhile
            lost = True
            break
        found[:0] = [row for row in rows if row.ts_us >= since]
        if not rows or rows[0].ts_us < since:
            return found, since
        upto = after
    if upto < FIRST or not (found or lost):  # nothing was purged: before its first event nothing happened
        return found, since
    return found, found[0].ts_us if found else storage.clock()
