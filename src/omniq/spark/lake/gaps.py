"""Gaps: events that a store purged before they came in. When a gap is accepted, the lake notes what it lacks and when."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from omniq.errors import EventsLost
from omniq.models import from_us, to_us
from omniq.operations import Shard
from omniq.spark.lake.layout import About, Gap, Lake, Lost, StoreEntry
from omniq.spark.lake.manifest import Ranges, Span, holes, joined
from omniq.spark.lake.writing import days_between

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ADVICE = "to go on without them, ingest with accept_gap=True (omniq lake ingest --accept-gap)"
# The column with the beginning of a row's time in each table of gold, and how many seconds that time lasts.
_BUCKETS = {
    "queue_minute": ("minute", 60),
    "func_hour": ("hour", 3600),
    "group_hour": ("hour", 3600),
    "failure_day": ("day", 86_400),
    "retry_storm": ("window_start", 300),
    "capacity_hour": ("hour", 3600),
}


def settled(seen: Mapping[str, Ranges], entry: StoreEntry | None) -> dict[str, Ranges]:
    """The numbers of a store that came in or lie in an accepted gap, by shard."""
    found = {shard: list(ranges) for shard, ranges in seen.items()}
    for gap in entry.gaps if entry else ():
        found.setdefault(gap.shard, []).append((gap.first, gap.last))
    return {shard: joined(ranges) for shard, ranges in sorted(found.items())}


def missing(seen: Mapping[str, Ranges], entry: StoreEntry | None) -> list[Lost]:
    """The numbers between those of a store that came in, which never came in themselves and which nobody accepted."""
    # A store without `events_gapless` leaves numbers out by itself, so a hole in them tells nothing.
    if entry is not None and not entry.events_gapless:
        return []
    known = settled(seen, entry)
    return [Lost(shard=name, first=low, last=high) for name, ranges in known.items() for low, high in holes(ranges)]


def purged(seen: Mapping[str, Ranges], entry: StoreEntry | None, shards: Iterable[Shard]) -> list[Lost]:
    """The numbers after the last that came in which the store has purged; none for a store from which nothing came in yet."""
    known = settled(seen, entry)
    afters = [(shard, reached(known, shard.name)) for shard in shards] if seen else []
    return [Lost(shard=shard.name, first=after + 1, last=shard.first - 1) for shard, after in afters if after < shard.first - 1]


def reached(known: Mapping[str, Ranges], shard: str) -> int:
    """The last number of a shard that is settled."""
    ranges = known.get(shard)
    return ranges[-1][1] if ranges else 0


def told(store: str, lost: Lost) -> str:
    return f"events {lost.first} to {lost.last} of store {store}" + (f", shard {lost.shard}" if lost.shard else "")


def must_not_be_set_back(lake: Lake, store: str, shards: Iterable[Shard]) -> None:
    """Raise `EventsLost` for a store that was set back: it gives numbers again, and its new events would pass for old ones."""
    known = settled(lake.manifest("events").seen.get(store, {}), lake.about().stores.get(store))
    for shard in shards:
        after = reached(known, shard.name)
        if after > shard.last:
            where = f"store {store}" + (f", shard {shard.name}" if shard.name else "")
            raise EventsLost(
                f"the lake {lake.path} has the events up to {after} of {where}, but there are only {shard.last}: it was set "
                "back, and its new events cannot be told from the old ones; begin a new lake and keep this one to read from"
            )


def accept(
    spark: SparkSession,
    lake: Lake,
    store: str,
    shards: Iterable[Shard] = (),
    next_at: Callable[[Lost], datetime | None] = lambda _: None,
) -> list[Gap]:
    """Write into the lake the gaps of a store that it has now, and return those that are new.

    `next_at` returns the time of the event after some lost ones, where the lake has not taken that event in yet.
    """
    seen, entry = lake.manifest("events").seen.get(store, {}), lake.about().stores[store]
    lost = [*missing(seen, entry), *purged(seen, entry, shards)]
    if not lost:
        return []
    now = datetime.now(UTC)
    befores, afters, latest = _moments(spark, lake, store, lost)
    gaps: list[Gap] = []
    for one in lost:
        # The best that is known: the event before, else the newest of all, else when the lake began with this store.
        since = befores.get(one) or latest or entry.since
        until = afters.get(one) or next_at(one) or now
        gaps.append(
            Gap(
                shard=one.shard,
                first=one.first,
                last=one.last,
                since=min(since, until),  # clocks of two workers may disagree
                until=max(since, until),
                accepted_at=now,
            )
        )
    with lake.change() as draft:
        draft.about.stores[store].gaps += gaps
    return gaps


def _moments(
    spark: SparkSession, lake: Lake, store: str, lost: list[Lost]
) -> tuple[dict[Lost, datetime], dict[Lost, datetime], datetime | None]:
    """The times of the events before and after each of these, as far as the lake has any, and the time of the latest event.

    The direct neighbours may be in quarantine, or erased: then the nearest events are found, by a scan of all.
    """
    from pyspark.sql import functions as F

    events = lake.table(spark, "events").where(F.col("store") == store).select("shard", "seq", F.unix_micros("ts").alias("us"))
    edges = {(one.shard, seq) for one in lost for seq in (one.first - 1, one.last + 1)}
    wanted = F.broadcast(spark.createDataFrame(sorted(edges), "shard string, seq bigint"))
    near = {(row["shard"], row["seq"]): from_us(row["us"]) for row in events.join(wanted, ["shard", "seq"]).collect()}
    befores = {one: near[one.shard, one.first - 1] for one in lost if (one.shard, one.first - 1) in near}
    afters = {one: near[one.shard, one.last + 1] for one in lost if (one.shard, one.last + 1) in near}
    if len(befores) == len(lost):
        return befores, afters, None
    odd = {(one.shard, one.first): one for one in lost}
    rows = spark.createDataFrame(
        [(one.shard, one.first, one.last) for one in lost if one not in befores], "shard string, first bigint, last bigint"
    )
    seq, us = F.col("seq"), F.col("us")
    nearest = (
        events.join(F.broadcast(rows), "shard")
        .groupBy("shard", "first")
        .agg(
            F.max_by(us, F.when(seq < F.col("first"), seq)).alias("before"),
            F.min_by(us, F.when(seq > F.col("last"), seq)).alias("after"),
        )
    )
    for row in nearest.collect():
        one = odd[row["shard"], row["first"]]
        if row["before"] is not None:
            befores[one] = from_us(row["before"])
        if row["after"] is not None:
            afters.setdefault(one, from_us(row["after"]))
    newest = events.agg(F.max("us").alias("us")).collect()[0]["us"]
    return befores, afters, None if newest is None else from_us(newest)


# -- marks in the tables of gold -------------------------------------------------------------------


def spans(about: About) -> list[Span]:
    """The spans of time, in microseconds, in which events of each store are missing and accepted; as few as possible."""
    return [
        (store, since, until)
        for store, entry in sorted(about.stores.items())
        for since, until in joined((to_us(gap.since), to_us(gap.until)) for gap in entry.gaps)
    ]


def days_of(spans: Iterable[Span]) -> set[date]:
    return {day for _, since, until in spans for day in days_between(from_us(since).date(), from_us(until).date())}


def marked(rows: DataFrame, name: str, spans: Sequence[Span]) -> DataFrame:
    """The rows of a table of gold, with `incomplete`: whether some of the events of their time never came in."""
    from pyspark.sql import functions as F

    # Nearly every lake has no gap, and its rows need no comparison.
    if not spans:
        return rows.select("*", F.lit(False).alias("incomplete"))
    column, length_s = _BUCKETS[name]
    day = column == "day"
    start = F.unix_date(column).cast("bigint") * 86_400_000_000 if day else F.unix_micros(column)
    # One text, whatever the number of gaps: a condition for each would make a plan as deep as there are gaps.
    known = json.dumps([{"store": store, "since": since, "until": until} for store, since, until in spans])
    each = F.from_json(F.lit(known), "array<struct<store: string, since: bigint, until: bigint>>")
    touched = F.exists(
        each,
        lambda span: (
            (span["store"] == F.col("store")) & (start <= span["until"]) & (start + length_s * 1_000_000 > span["since"])
        ),
    )
    return rows.select("*", touched.alias("incomplete"))
