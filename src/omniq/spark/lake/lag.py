"""The lag of a lake behind a store, and what is left before the store purges events that have not come in. No Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from omniq.errors import EventsLost
from omniq.operations import Retention, Shard
from omniq.spark.lake.gaps import missing, purged, reached, settled
from omniq.spark.lake.layout import Lost

if TYPE_CHECKING:
    from omniq.spark.lake.layout import Lake
    from omniq.storage.base import BaseStorage

# With the default of a week: more than two days to mend an ingest that has stopped.
LITTLE_LEFT = 1 / 3


class Lag(msgspec.Struct, kw_only=True):
    """The lag of a lake behind a store; `known` is False if nothing ever came in from that store.

    `left` is the part that is left of the store's retention, by age or by count, until it purges the oldest event that is not
    in the lake: 1 if all events are. `lost` are events that never came in and never can, and that nobody accepted.
    """

    store: str
    known: bool
    behind: int = 0
    left: float = 1.0
    lost: list[Lost] = msgspec.field(default_factory=list[Lost])

    @property
    def late(self) -> bool:
        return self.left < LITTLE_LEFT


async def lag_of(lake: Lake, storage: BaseStorage, retention: Retention) -> Lag:
    """Compare the numbers that a lake has with those of an open store, whose workers purge by `retention`."""
    store, shards = (await storage.info()).store_id, await storage.event_shards()
    entry, seen = lake.about().stores.get(store), lake.manifest("events").seen.get(store, {})
    known = settled(seen, entry)
    lag = Lag(store=store, known=entry is not None or bool(seen))
    lag.lost = [*missing(seen, entry), *purged(seen, entry, shards)]
    for shard in shards:
        after = max(reached(known, shard.name), shard.first - 1)
        if after < shard.last:
            lag.behind += shard.last - after
            lag.left = min(lag.left, await _left(storage, shard, after, retention))
    return lag


async def _left(storage: BaseStorage, shard: Shard, after: int, retention: Retention) -> float:
    left = 1.0
    if retention.events_max is not None:
        left = 1 - (shard.last - after) / max(retention.events_max, 1)
    if retention.events_us is not None:
        try:
            rows = await storage.events(shard.name, after, 1)
        except EventsLost:  # purged since the shards were asked for
            return 0.0
        if rows:
            left = min(left, 1 - (storage.clock() - rows[0].ts_us) / retention.events_us)
    return max(left, 0.0)
