"""Offsets into the event log, and the ranges of events between two offsets. Needs neither Spark nor a store.

An offset is plain JSON, as checkpoints keep it: `{"v": 1, "store": "<id>", "shards": {"<shard>": <last seq read>}}`. A shard
that is not named did not exist yet, so all of it is still to be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omniq.errors import EventsLost, Invalid
from omniq.operations import Shard
from omniq.storage.scanning import Range, split

VERSION = 1  # of the JSON in checkpoints, which outlive releases
LENIENT = "; to go on with what is there, set failOnDataLoss to false"
# A part is a task of Spark whose Python process opens the store by itself: small parts would mostly start processes.
ROWS_PER_PART = 50_000


class Offset(msgspec.Struct, frozen=True):
    """The last event that was read of each shard of a store's log; an empty `store` fits any store."""

    store: str
    shards: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {"v": VERSION, "store": self.store, "shards": dict(sorted(self.shards.items()))}


def offset_of(given: Mapping[str, Any] | str) -> Offset:
    """The offset that a checkpoint or an option holds; raises `Invalid` for anything else."""
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except ValueError:
            found = None
    shards = found.get("shards") if isinstance(found, Mapping) else None
    if not isinstance(shards, Mapping) or not all(_is_seq(seq) for seq in shards.values()):
        raise Invalid(f"offset {given!r}: write {Offset('<store id>', {'<shard>': 7}).to_json()}")
    if found.get("v", VERSION) != VERSION:
        raise Invalid(f"offset {given!r} has version {found['v']}; this omniq knows {VERSION}: upgrade omniq")
    return Offset(str(found.get("store") or ""), {str(name): seq for name, seq in shards.items()})


def _is_seq(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def earliest(store: str, shards: Sequence[Shard]) -> Offset:
    """Before everything that is kept."""
    return Offset(store, {shard.name: shard.first - 1 for shard in shards})


def latest(store: str, shards: Sequence[Shard]) -> Offset:
    """After everything that is there."""
    return Offset(store, {shard.name: shard.last for shard in shards})


def lost(start: Offset, store: str, shards: Sequence[Shard]) -> str | None:
    """Why a query cannot go on at `start` without a gap, as a sentence that names both sides; None if it can."""
    if start.store and start.store != store:
        return f"the query goes on in the store {start.store}, but the store there now is {store}"
    for shard in shards:
        after = start.shards.get(shard.name, 0)
        where = f" of shard {shard.name!r}" if shard.name else ""
        if after < shard.first - 1:
            return f"the query goes on after event {after}{where}, but the store keeps only those from {shard.first} on"
        if after > shard.last:
            return f"the query goes on after event {after}{where}, but the store has only {shard.last}: it was set back"
    return None


def check_whole(start: Offset, store: str, shards: Sequence[Shard], lenient: bool = False) -> None:
    """Raise `EventsLost` when a query cannot go on without a gap, unless it may skip events that are gone (`lenient`)."""
    sentence = None if lenient else lost(start, store, shards)
    if sentence is not None:
        raise EventsLost(sentence + LENIENT)


def advance(start: Offset, target: Offset, shards: Sequence[Shard], limit: int | None) -> Offset:
    """The end of the next batch: towards `target`, with at most `limit` rows, shared fairly by the shards."""
    kept = {shard.name: shard.first - 1 for shard in shards}
    # Purged events count for no limit, or a lenient query would plan batches without rows until it had passed them. A target
    # that was fixed earlier may have been purged itself: then its end is where the batch ends.
    begin = {name: min(max(_after(start, target, name), kept.get(name, 0)), upto) for name, upto in target.shards.items()}
    # A shard that is gone keeps its place, since one that is not named would be read from its beginning if it came back.
    ends = dict(start.shards) if _same(start, target) else {}
    # The shortest first: a shard that does not need its share leaves the rest of it to the longer ones.
    waiting = sorted((upto - begin[name], name) for name, upto in target.shards.items())
    for n, (rows, name) in enumerate(waiting):
        take = rows if limit is None else min(rows, -(-limit // (len(waiting) - n)))
        limit = None if limit is None else limit - take
        if take or not rows:
            ends[name] = begin[name] + take
    return Offset(target.store, ends)


def between(start: Offset, end: Offset, parts: int | None = None) -> list[tuple[Range, ...]]:
    """The parts of a batch. They follow from the two offsets alone, so a batch that is repeated holds the same rows."""
    # Nothing is asked of the store here: Spark plans a batch again from its checkpoint, when the log may have grown.
    shards = [
        Shard(name=name, first=_after(start, end, name) + 1, last=upto)
        for name, upto in sorted(end.shards.items())
        if upto > _after(start, end, name)
    ]
    parts = parts or -(-sum(shard.last - shard.first + 1 for shard in shards) // ROWS_PER_PART)
    return packed(split("events", shards, parts), parts)


def packed(ranges: Sequence[Range], parts: int) -> list[tuple[Range, ...]]:
    """About `parts` parts of equal size: a store with many small shards does not need as many tasks."""
    full = -(-sum(map(size, ranges)) // max(parts, 1))
    found: list[tuple[Range, ...]] = []
    for range in ranges:
        if found and sum(map(size, found[-1])) + size(range) <= full:
            found[-1] += (range,)
        else:
            found.append((range,))
    return found


def size(range: Range) -> int:
    """About how many rows a range has; a range without numbers has few and counts as one."""
    return max(range.upto - range.after, 1)


def _after(start: Offset, end: Offset, name: str) -> int:
    """The number after which a batch of a shard begins: 0 if the store was replaced or its count was set back."""
    after = start.shards.get(name, 0) if _same(start, end) else 0
    return after if after <= end.shards[name] else 0


def _same(start: Offset, end: Offset) -> bool:
    return not start.store or not end.store or start.store == end.store


def parts_for(rows: int, cores: int, asked: int | None = None) -> int:
    """The number of parts in which a table is read: the one asked for, else up to two per core, none of them small."""
    return asked or max(min(rows // ROWS_PER_PART, 2 * cores), 1)
