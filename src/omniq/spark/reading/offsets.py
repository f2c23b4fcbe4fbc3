"""Words, times and JSON as offsets into the event log of a store."""

from __future__ import annotations

from omniq.errors import EventsLost
from omniq.models import to_us
from omniq.operations import Shard
from omniq.spark.reading.filters import moment
from omniq.spark.reading.plan import Offset, earliest, latest, offset_of
from omniq.storage.bulk import Bulk
from omniq.storage.scanning import Range


def position(bulk: Bulk, text: str) -> Offset:
    """The offset that `earliest`, `latest`, a time or the JSON of an offset stands for now."""
    store, shards = bulk.info().store_id, bulk.event_shards()
    if text == "earliest":
        return earliest(store, shards)
    if text == "latest":
        return latest(store, shards)
    if text.startswith("{"):
        given = offset_of(text)
        return Offset(given.store or store, given.shards)
    us = to_us(moment(text))
    return Offset(store, {shard.name: before(bulk, shard, us) for shard in shards})


def before(bulk: Bulk, shard: Shard, us: int) -> int:
    """The last number of a shard whose event is older than a moment, by halving: as exact as the clocks that wrote the log."""
    # The log has no index by time; halving reads some twenty events of a million.
    low, high = shard.first - 1, shard.last
    while low < high:
        middle = (low + high + 1) // 2
        if _time_of(bulk, shard, middle) < us:
            low = middle
        else:
            high = middle - 1
    return low


def _time_of(bulk: Bulk, shard: Shard, seq: int) -> int:
    for batch in bulk.scan(Range("events", shard.name, seq - 1, seq), ["ts"], (), 1):
        return batch["ts"][0]
    raise EventsLost(f"event {seq} of shard {shard.name!r} is not there; name an offset instead of a time")
