"""Bronze: events come in by batches, each once. The manifest has every number that was ever taken in, and decides."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import Invalid
from omniq.models import to_us
from omniq.spark.lake.layout import Erasure, Lake
from omniq.spark.lake.manifest import File, Manifest, Ranges, TableDay, joined, overlap
from omniq.spark.lake.tables import TABLES
from omniq.spark.lake.writing import PARQUET, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# An event of a later release goes into quarantine: silver does not know what it means for its task.
EVENTS = (
    "enqueued",
    "started",
    "succeeded",
    "retried",
    "failed",
    "expired",
    "released",
    "cancelled",
    "progress",
    "rescheduled",
    "requeued",
    "removed",
)
_REQUIRED = ("store", "shard", "seq", "ts", "event", "task_id", "queue", "enqueued_at", "attempt")
_STATUSES = ("PENDING", "RUNNING", "SUCCESS", "FAILED", "RETRYING", "CANCELLED")
Seen = dict[str, dict[str, Ranges]]


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one batch. `known` rows had been taken in before; `erased` rows must not come back."""

    rows: int = 0
    quarantined: int = 0
    erased: int = 0
    known: int = 0
    skipped: bool = False


def take_in(lake: Lake, events: DataFrame, *, stream: str, batch: int) -> Taken:
    """Put a batch of events into bronze.

    A batch of the same stream and number is taken in only once, so that a killed run can be repeated. Rows that are no proper
    events go into quarantine. Events whose numbers are there already are left out.
    """
    if lake.manifest("events").batches.get(stream, -1) >= batch:
        return Taken(skipped=True)
    label = f"_batch={stream}-{batch:06d}"
    # It writes first and then looks for known numbers, which are rare: the driver reads the numbers from the few new files. If
    # some are known, a second try leaves them out. Nothing counts before it is published.
    without: Seen = {}
    while True:
        erased = lake.about().erased
        try:
            with settings(events.sparkSession, PARQUET):
                attempt = _write(lake, events, label, erased, without)
        # The collection after an erasure spares no file that is not named yet, as those of this batch.
        except FileNotFoundError:
            if lake.about().erased == erased:
                raise
            continue
        with lake.change() as draft:
            manifest = draft.manifest("events")
            repeated = _common(manifest.seen, attempt.seen)
            # An erasure that ended meanwhile deleted files that no manifest named, and has more events to be left out.
            stale = draft.about.erased != erased or not all(lake.folder.exists(file.path) for file in attempt.files)
            if not repeated and not stale:
                _enter(manifest, attempt, str(draft.next_number))
                manifest.batches[stream] = batch
                draft.put(manifest)
                known = sum(high - low + 1 for by in without.values() for r in by.values() for low, high in r)
                return Taken(
                    rows=sum(file.rows for files in attempt.bronze.values() for file in files),
                    quarantined=attempt.quarantined,
                    erased=attempt.erased,
                    known=known,
                )
        if repeated:
            without = _merged(without, repeated)


class _BatchFiles(msgspec.Struct, kw_only=True):
    bronze: dict[str, list[File]]
    quarantine: list[File]
    quarantined: int
    erased: int
    seen: Seen
    spans: dict[str, tuple[datetime, datetime]]

    @property
    def files(self) -> list[File]:
        return [*self.quarantine, *(file for files in self.bronze.values() for file in files)]


def _write(lake: Lake, events: DataFrame, label: str, erased: list[Erasure], without: Seen) -> _BatchFiles:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    from omniq.spark.lake.clock import day

    table = TABLES["events"]
    missing = [name for name in table.names if name != "task_date" and name not in events.columns]
    if missing:
        raise Invalid(f"the events lack the columns {', '.join(missing)}")
    rows = events.withColumn("task_date", day("enqueued_at"))
    if without:
        rows = _outside(rows, without)
    rows = rows.withColumn("reason", _reason())
    gone = is_erased(erased)
    rows = rows.withColumn("gone", gone)
    # Counted while the rows are written, since another pass would read the store again.
    told = Observation()
    kept = rows.observe(
        told,
        F.count(F.when(F.col("reason").isNotNull() & ~F.col("gone"), 1)).alias("bad"),
        F.count(F.when(F.col("gone"), 1)).alias("gone"),
    ).where("reason is null and not gone")
    bronze = write_days(lake, kept.select(*table.names), "bronze/events", "task_date", label, ("queue", "name", "ts"))
    bad, lost = (int(told.get.get(name) or 0) for name in ("bad", "gone"))
    quarantine: list[File] = []
    if bad:
        # A row without `enqueued_at` has no day, and a folder needs one.
        dated = F.coalesce("task_date", F.lit("1970-01-01").cast("date"))
        odd = rows.where("reason is not null and not gone").withColumn("task_date", dated)
        names = [*table.names, "reason"]
        for files in write_days(lake, odd.select(*names), "quarantine/events", "task_date", label).values():
            quarantine += files
    paths = [lake.folder.path(file.path) for files in (*bronze.values(), quarantine) for file in files]
    seen, spans = _numbers(paths)
    # Erased events are in no file, but count as taken in: their numbers must not look like a gap.
    if lost:
        numbers = rows.where("gone").select("store", "shard", "seq").toArrow()
        seen = _merged(seen, _ranges(numbers))
    return _BatchFiles(bronze=bronze, quarantine=quarantine, quarantined=bad, erased=lost, seen=seen, spans=spans)


def _enter(manifest: Manifest, written: _BatchFiles, stamp: str) -> None:
    for day, files in written.bronze.items():
        part = manifest.parts.setdefault(day, TableDay())
        part.files += files
        part.stamp = stamp
        first, last = written.spans[day]
        part.first = first if part.first is None else min(part.first, first)
        part.last = last if part.last is None else max(part.last, last)
    manifest.quarantine += written.quarantine
    manifest.quarantined += written.quarantined
    manifest.seen = _merged(manifest.seen, written.seen)


def _reason() -> Column:
    """Why a row is no proper event; null if it is one."""
    from pyspark.sql import functions as F

    reason = F.lit(None).cast("string")
    # Only its ends are looked at: silver reads other broken JSON as null.
    shaped = F.col("data").isNull() | (F.col("data").startswith("{") & F.col("data").endswith("}"))
    for wrong, why in (
        (~F.coalesce(shaped, F.lit(True)), F.lit("data is no JSON object")),
        (~F.coalesce(F.col("status").isin(*_STATUSES), F.lit(False)), F.lit("status is none of TaskStatus")),
        (~F.col("event").isin(*EVENTS), F.concat(F.lit("no such event: "), F.col("event"))),
        (F.col("seq") < 0, F.lit("seq is negative")),
        *[(F.col(name).isNull(), F.lit(f"{name} is missing")) for name in reversed(_REQUIRED)],
    ):
        # A later condition covers an earlier one, so that the first missing column is named before anything else.
        reason = F.when(wrong, why).otherwise(reason)
    return reason


def is_erased(erased: list[Erasure]) -> Column:
    """Whether a row with task_id, group_id and enqueued_at must not come back."""
    from pyspark.sql import functions as F

    tasks = [entry.digest for entry in erased if entry.kind == "task"]
    gone = F.sha2("task_id", 256).isin(tasks) if tasks else F.lit(False)
    for entry in erased:
        # Only tasks that were stored before: the docs let a group begin again after its erasure.
        if entry.kind == "group":
            before = F.unix_micros("enqueued_at") <= F.lit(to_us(entry.at))
            gone = gone | ((F.sha2("group_id", 256) == entry.digest) & before)
    return F.coalesce(gone, F.lit(False))


def _outside(rows: DataFrame, numbers: Seen) -> DataFrame:
    """The rows whose numbers are none of these, and rows without a number, which go into quarantine.

    A condition per range overflows Spark's stack at some 400 ranges. In this join each row looks at the few ranges of its
    stretch of numbers only.
    """
    from pyspark.sql import functions as F

    ranges, bits = _by_stretch(numbers)
    known = F.broadcast(rows.sparkSession.createDataFrame(ranges))
    same = [F.col(f"e.{name}") == F.col(f"k.{name}") for name in ("store", "shard")]
    # The equal keys make it a hash join; with `between` alone it would compare each row with each range.
    stretch = F.shiftright("e.seq", bits) == F.col("k.stretch")
    within = F.col("e.seq").between(F.col("k.low"), F.col("k.high"))
    return rows.alias("e").join(known.alias("k"), [*same, stretch, within], "left_anti")


def _by_stretch(numbers: Seen) -> tuple[Any, int]:
    """One row per range and stretch that it touches, and the number of bits that are a number's place in its stretch.

    Stretches are as long as the mean range, which makes at most three rows per range on average.
    """
    import numpy as np
    import pyarrow as pa

    every = [(store, shard, low, high) for store, by in numbers.items() for shard, ranges in by.items() for low, high in ranges]
    stores, shards, lows, highs = zip(*every, strict=True)
    low, high = np.array(lows), np.array(highs)
    bits = int((high - low).mean()).bit_length()
    first = low >> bits
    touched = (high >> bits) - first + 1
    places = np.repeat(np.arange(len(every)), touched)
    stretch = np.arange(len(places)) + np.repeat(first - np.cumsum(touched) + touched, touched)
    columns = {"stretch": stretch, "low": low[places], "high": high[places]}
    return pa.table({"store": pa.array(stores).take(places), "shard": pa.array(shards).take(places), **columns}), bits


def _numbers(paths: list[str]) -> tuple[Seen, dict[str, tuple[datetime, datetime]]]:
    """The numbers that the files hold, and the first and last moment of each day's events; read by the driver itself."""
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    arrow: Any = compute
    spans: dict[str, tuple[datetime, datetime]] = {}
    tables: list[Any] = []
    for path in paths:
        table: Any = parquet.ParquetFile(path).read(columns=["store", "shard", "seq", "ts"])
        tables.append(table.select(["store", "shard", "seq"]))
        day = path.rpartition("/task_date=")[2].partition("/")[0]
        low, high = (moment.as_py() for moment in arrow.min_max(table["ts"]).values())
        if low is not None:
            a, b = spans.get(day, (low, high))
            spans[day] = (min(a, low).astimezone(UTC), max(b, high).astimezone(UTC))
    return (_ranges(pa.concat_tables(tables)) if tables else {}), spans


def _ranges(table: Any) -> Seen:
    import numpy as np

    key = ["store", "shard", "seq"]
    table = table.select(key).drop_null().sort_by([(name, "ascending") for name in key]).combine_chunks()
    stores, shards = (np.asarray(table[name].combine_chunks().dictionary_encode().indices) for name in key[:2])
    numbers = table["seq"].to_numpy()
    ends = (np.diff(numbers) > 1) | (np.diff(stores) != 0) | (np.diff(shards) != 0)
    lasts = np.append(np.flatnonzero(ends), len(numbers) - 1)[: len(numbers)]
    firsts = np.append(0, lasts[:-1] + 1)[: len(numbers)]
    seen: Seen = {}
    names = table.select(key[:2]).take(firsts).to_pydict()
    for store, shard, low, high in zip(*names.values(), numbers[firsts].tolist(), numbers[lasts].tolist(), strict=True):
        seen.setdefault(store, {}).setdefault(shard, []).append((low, high))
    return seen


def _common(seen: Seen, other: Seen) -> Seen:
    out: Seen = {}
    for store, by_shard in other.items():
        for shard, ranges in by_shard.items():
            both = overlap(seen.get(store, {}).get(shard, []), ranges)
            if both:
                out.setdefault(store, {})[shard] = both
    return out


def _merged(seen: Seen, other: Seen) -> Seen:
    out: Seen = {store: dict(by_shard) for store, by_shard in seen.items()}
    for store, by_shard in other.items():
        mine = out.setdefault(store, {})
        for shard, ranges in by_shard.items():
            mine[shard] = joined([*mine.get(shard, []), *ranges])
    return out
