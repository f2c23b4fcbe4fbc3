"""Ingest: the event log of a store becomes bronze, as a stream that may be killed at any moment.

The checkpoint of the stream has the position to go on from; the manifest has the events that are in the lake. A batch that was
published before its checkpoint was written is recognised by its number and left alone. A checkpoint that was lost is replaced
by a new one that begins after the last event in the manifest.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import ConfigError, EventsLost
from omniq.models import from_us
from omniq.spark.causes import unwrapped
from omniq.spark.lake.bronze import Taken, take_in
from omniq.spark.lake.gaps import ADVICE, accept, must_not_be_set_back, purged, settled, told
from omniq.spark.lake.layout import Gap, Lake, Lost, StoreEntry
from omniq.spark.reading.plan import LENIENT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from omniq.storage.bulk import Bulk

# A batch is published whole: larger ones make fewer and larger files, smaller ones lose less work to a kill.
MAX_ROWS = 100_000
AVAILABLE_NOW = "available_now"


class IngestReport(msgspec.Struct, kw_only=True):
    """The counts of an ingest. `known` events were there already; `erased` ones must not come back; `gaps` are new."""

    store: str
    batches: int = 0
    rows: int = 0
    quarantined: int = 0
    erased: int = 0
    known: int = 0
    gaps: list[Gap] = msgspec.field(default_factory=list[Gap])
    seconds: float = 0.0


def ingest(
    spark: SparkSession,
    url: str,
    lake: Lake,
    *,
    trigger: str = AVAILABLE_NOW,
    max_rows: int = MAX_ROWS,
    payloads: bool = False,
    accept_gap: bool = False,
    stop: threading.Event | None = None,
    on_batch: Callable[[Taken], None] | None = None,
) -> IngestReport:
    """Take the events of a store into the lake, each once, up to the last event of the log.

    `trigger` may also be a time such as `"30 seconds"`: then it takes in a batch that often, until `stop` is set. A batch
    has at most `max_rows` events. With `payloads` the encoded arguments of the tasks come in too.

    Raises `EventsLost` when the store purged events that were not taken in. With `accept_gap` it goes on with the rest, and
    writes into the lake which events it lacks, those of earlier gaps too. Raises `EventsLost` in any case for a store that was
    set back, and `LakeError` while another process ingests the same store.
    """
    from omniq.spark.address import existing
    from omniq.spark.reading.reading import read_stream

    with existing(url) as bulk:
        info = bulk.info()
    store = info.store_id

    def settle() -> list[Gap]:
        with existing(url) as bulk:
            return _settle(spark, bulk, lake, store, accept_gap)

    def tell(taken: Taken) -> None:
        # After each batch, so that a process that is killed later leaves no gap that nobody has accepted.
        if accept_gap:
            gaps.extend(accept(spark, lake, store))
        if on_batch is not None:
            on_batch(taken)

    with lake.folder.lock(f"ingest-{info.store_id}", f"ingest of {info.store_id}"):
        checkpoint, fresh = _register(lake, info.store_id, info.url, info.capabilities.events_gapless)
        gaps = settle()
        # Spark looks at the start of a new stream only; the other one is in its checkpoint.
        start = _resume_at(lake, store) if fresh else "earliest"
        events = read_stream(spark, url, start=start, max_rows=max_rows, fail_on_data_loss=not accept_gap)
        try:
            report = follow(events, lake, checkpoint, trigger=trigger, stop=stop, on_batch=tell)
        except EventsLost as exc:
            raise EventsLost(f"{str(exc).removesuffix(LENIENT)}; {ADVICE}") from exc
        # Once more: events may have been purged while the stream was reading.
        report.store, report.gaps = store, [*gaps, *(settle() if accept_gap else ())]
        if payloads:
            from omniq.spark.lake.payloads import take_payloads

            take_payloads(spark, url, lake, store)
        return report


def follow(
    events: DataFrame,
    lake: Lake,
    checkpoint: str,
    *,
    trigger: str = AVAILABLE_NOW,
    stop: threading.Event | None = None,
    on_batch: Callable[[Taken], None] | None = None,
) -> IngestReport:
    """Take in any stream with the columns of the table `events`; its position is kept under the name of the checkpoint."""
    report = IngestReport(store="")
    begun = time.monotonic()

    def take(batch: Any, number: int) -> None:
        taken = take_in(lake, batch, stream=checkpoint, batch=number)
        if not taken.skipped:
            report.batches += 1
            report.rows += taken.rows
            report.quarantined += taken.quarantined
            report.erased += taken.erased
            report.known += taken.known
        if on_batch is not None:
            on_batch(taken)

    writer = events.writeStream.foreachBatch(take).option(
        "checkpointLocation", lake.folder.address(f"_checkpoints/{checkpoint}")
    )
    with unwrapped():
        query = _triggered(writer, trigger).start()
        try:
            # By the second: a wait without an end could not be ended by `stop`.
            while not query.awaitTermination(1):
                if stop is not None and stop.is_set():
                    break
        finally:
            if query.isActive:
                query.stop()
        failure = query.exception()
        if failure is not None:
            raise failure
    report.seconds = time.monotonic() - begun
    return report


def _triggered(writer: Any, trigger: str) -> Any:
    if trigger == AVAILABLE_NOW:
        return writer.trigger(availableNow=True)
    number, _, unit = trigger.partition(" ")
    if not number.isdecimal() or unit.rstrip("s") not in ("second", "minute", "hour"):
        raise ConfigError(f"trigger {trigger!r}: say {AVAILABLE_NOW!r}, or a time such as '30 seconds'")
    return writer.trigger(processingTime=trigger)


def _register(lake: Lake, store: str, url: str, gapless: bool) -> tuple[str, bool]:
    """The checkpoint of this store's stream, and whether it is new."""
    with lake.change() as draft:
        entry = draft.about.stores.get(store)
        if entry is None:
            entry = draft.about.stores[store] = StoreEntry(url=url, since=datetime.now(UTC))
        entry.url, entry.events_gapless = url, gapless
        # Spark writes this file when a query starts: without it the checkpoint was lost, or never used.
        fresh = not entry.checkpoint or not lake.folder.exists(f"_checkpoints/{entry.checkpoint}/metadata")
        # A name of its own, since batches are recognised by it and the numbers of a new stream begin at 0 again.
        if fresh:
            entry.checkpoint = f"{store[:8]}-{uuid.uuid4().hex[:8]}"
        return entry.checkpoint, fresh


def _resume_at(lake: Lake, store: str) -> dict[str, Any] | str:
    """The start of a stream without a checkpoint: after the last event that the lake has of each shard."""
    seen = lake.manifest("events").seen.get(store)
    if not seen:
        return "earliest"
    known = settled(seen, lake.about().stores.get(store))
    return {"v": 1, "store": store, "shards": {shard: ranges[-1][1] for shard, ranges in known.items()}}


def _settle(spark: SparkSession, bulk: Bulk, lake: Lake, store: str, accept_gap: bool) -> list[Gap]:
    """Check that the store still has all events that are to come in. Purged ones are accepted, or raise `EventsLost`."""
    shards = bulk.event_shards()
    must_not_be_set_back(lake, store, shards)
    if accept_gap:
        return accept(spark, lake, store, shards, partial(_next_at, bulk))
    entry = lake.about().stores[store]
    seen = lake.manifest("events").seen.get(store, {})
    lost = purged(seen, entry, shards)
    if lost:
        more = f", and events of {len(lost) - 1} more {'shard' if len(lost) == 2 else 'shards'}," if len(lost) > 1 else ""
        raise EventsLost(f"{told(store, lost[0])}{more} were purged before they came into the lake {lake.path}; {ADVICE}")
    return []


def _next_at(bulk: Bulk, lost: Lost) -> datetime | None:
    """The time of the event after some lost ones; None if there is no such event yet."""
    with suppress(EventsLost):  # it went meanwhile
        for row in bulk.call(bulk.storage.events(lost.shard, lost.last, 1)):
            return from_us(row.ts_us)
    return None
