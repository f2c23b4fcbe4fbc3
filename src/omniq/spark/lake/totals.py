"""Checks that silver counts every event of bronze, and gold every run and task of silver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.models import from_us
from omniq.spark.lake.manifest import Manifest
from omniq.spark.lake.tables import OUTCOMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from omniq.spark.lake.layout import Lake

SHOWN = 5
STATUSES = ("PENDING", "RUNNING", "SUCCESS", "FAILED", "RETRYING", "CANCELLED")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer. A check that is not `ok` fails the build; a `note` is worth a look and fails nothing."""

    name: str
    ok: bool
    detail: str
    note: bool = False


class SilverDay(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of silver over the tasks that were stored on a day, and the first and last moment that they tell of."""

    events: int = 0
    runs: int = 0
    attempts: int = 0
    strange: int = 0
    first: datetime | None = None
    last: datetime | None = None
    open_from: datetime | None = None


def silver_days(
    spark: SparkSession, lake: Lake, manifests: Mapping[str, Manifest], days: Iterable[date]
) -> dict[str, SilverDay]:
    """The sums of each day, in one pass over both tables of silver."""
    from pyspark.sql import functions as F

    wanted = list(days)
    waits = F.col("status").isin("PENDING", "RETRYING")
    tasks = lake.frame(spark, manifests["tasks"], wanted).select(
        "task_date",
        "events",
        "runs",
        F.lit(0).alias("attempts"),
        (~F.coalesce(F.col("status").isin(*STATUSES), F.lit(False))).alias("odd"),
        F.least("created_at", "due_at", "last_event_at").alias("first"),
        F.greatest("created_at", "finished_at", "last_event_at").alias("last"),
        F.when(waits, F.least("due_at", "last_event_at")).alias("open_from"),
    )
    attempts = lake.frame(spark, manifests["attempts"], wanted).select(
        "task_date",
        F.lit(0).alias("events"),
        F.lit(0).alias("runs"),
        F.lit(1).alias("attempts"),
        (~F.col("outcome").isin(*OUTCOMES) | (F.col("wait_ms") < 0) | (F.col("run_ms") < 0)).alias("odd"),
        F.coalesce("ready_at", "started_at", "finished_at").alias("first"),
        F.greatest("started_at", "finished_at").alias("last"),
        F.when(F.col("finished_at").isNull(), F.col("started_at")).alias("open_from"),
    )
    sums = tasks.unionByName(attempts).groupBy("task_date")
    moments = {"first": F.min("first"), "last": F.max("last"), "open_from": F.min("open_from")}
    rows = sums.agg(
        *[F.sum(name).alias(name) for name in ("events", "runs", "attempts")],
        F.count(F.when(F.col("odd"), 1)).alias("strange"),
        *[F.unix_micros(moment).alias(name) for name, moment in moments.items()],
    ).collect()
    return {
        row["task_date"].isoformat(): SilverDay(
            events=row["events"],
            runs=row["runs"],
            attempts=row["attempts"],
            strange=row["strange"],
            first=_utc(row["first"]),
            last=_utc(row["last"]),
            open_from=_utc(row["open_from"]),
        )
        for row in rows
    }


def check_silver(events: Manifest, days: Iterable[date], told: Mapping[str, SilverDay]) -> list[CheckResult]:
    """Check that every event is counted in one task, and every run in its task."""
    wrong: list[str] = []
    runs: list[str] = []
    strange = 0
    for day in (day.isoformat() for day in days):
        there = events.parts[day].rows if day in events.parts else 0
        found = told.get(day, SilverDay())
        if there > found.events:
            wrong.append(f"{there - found.events} of {there} events of {day} are there twice or belong to no task")
        elif there < found.events:
            wrong.append(f"the tasks of {day} count {found.events} events, bronze has {there}")
        if found.runs != found.attempts:
            runs.append(f"the tasks of {day} count {found.runs} runs, there are {found.attempts}")
        strange += found.strange
    return [
        CheckResult(name="events in silver", ok=not wrong, detail=some(wrong) or "every event is in a task"),
        CheckResult(name="runs in silver", ok=not runs, detail=some(runs) or "every run is in a task"),
        CheckResult(name="values in silver", ok=not strange, detail=f"{strange} rows with a strange status or a negative time"),
    ]


def _utc(us: int | None) -> datetime | None:
    """The moment of microseconds: a timestamp itself would arrive in the driver's local time, without a zone."""
    return None if us is None else from_us(us)


# The columns of each table of gold whose sums are compared with counts of the rows that the table is made of.
_GOLD_SUMS = {
    "queue_minute": ("enqueued", "started"),
    "func_hour": ("runs",),
    "group_hour": ("enqueued", "started"),
    "failure_day": ("failures",),
    "retry_storm": ("attempts",),
    "capacity_hour": ("arrivals",),
}


def check_gold(
    spark: SparkSession, lake: Lake, manifests: Mapping[str, Manifest], built: Mapping[str, list[date] | None]
) -> list[CheckResult]:
    """Compare the sums of each table of gold with silver, on these days of each table; None for all days."""
    if not built:
        return []
    wanted = None if any(days is None for days in built.values()) else {day for days in built.values() for day in days or ()}
    frozen = lake.about().expired_before
    should = _silver_sums(spark, lake, manifests, wanted)
    results: list[CheckResult] = []
    for name, days in built.items():
        known = {*manifests[name].parts, *(day for day, _, _ in should)}
        looked_at = sorted(
            day
            for day in (known if days is None else {day.isoformat() for day in days})
            if (frozen is None or day >= frozen.isoformat()) and day not in manifests[name].pending
        )
        wrong: list[str] = []
        for day in looked_at:
            there = _gold_sums(lake, manifests[name], day)
            # It is made of the minutes, so it is compared with them.
            if name == "capacity_hour":
                arrived = _gold_sums(lake, manifests["queue_minute"], day, ("enqueued", "rearmed"))
                expected = {"arrivals": sum(arrived.values())}
            else:
                expected = {column: should.get((day, name, column), 0) for column in _GOLD_SUMS[name]}
            wrong += [
                f"{name}.{column} of {day} is {there[column]}, and {count} by the rows it is made of"
                for column, count in expected.items()
                if there[column] != count
            ]
        results.append(CheckResult(name=f"sums of {name}", ok=not wrong, detail=some(wrong) or f"{name} agrees with silver"))
    return results


def _silver_sums(
    spark: SparkSession, lake: Lake, manifests: Mapping[str, Manifest], wanted: set[date] | None
) -> dict[tuple[str, str, str], int]:
    """The counts that gold must have, by day, table and column."""
    from pyspark.sql import functions as F

    from omniq.spark.lake.clock import day

    def telling(name: str) -> DataFrame:
        parts = manifests[name].parts
        days = None if wanted is None else [date.fromisoformat(day) for day, part in parts.items() if part.touches(wanted)]
        return lake.frame(spark, manifests[name], days)

    def counted(rows: DataFrame, *kinds: tuple[str, dict[tuple[str, str], Column]]) -> DataFrame:
        """The number of rows by day for which each condition holds, at the moment that belongs to the condition."""
        columns = [pair for _, conditions in kinds for pair in conditions]
        moments: list[Column] = []
        for at, conditions in kinds:
            flags = [conditions.get(pair, F.lit(False)).cast("int").alias("__".join(pair)) for pair in columns]
            moments.append(F.struct(day(at).alias("day"), *flags))
        spread = rows.select(F.inline(F.array(*moments))).where("day is not null")
        sums = [F.coalesce(F.sum("__".join(pair)), F.lit(0)).alias("__".join(pair)) for pair in columns]
        return spread.groupBy("day").agg(*sums)

    always, in_group = F.lit(True), F.col("group_id").isNotNull()
    failing = F.col("error_type").isNotNull() & F.col("outcome").isin("retried", "failed", "expired")
    unrun = (F.col("status") == "FAILED") & (F.col("runs") == 0) & F.col("error_type").isNotNull()
    started = {("queue_minute", "started"): always, ("retry_storm", "attempts"): always, ("group_hour", "started"): in_group}
    ended = {("func_hour", "runs"): always, ("failure_day", "failures"): F.coalesce(failing, F.lit(False))}
    stored = {("queue_minute", "enqueued"): always, ("group_hour", "enqueued"): in_group}
    of_tasks = {("failure_day", "failures"): F.coalesce(unrun, F.lit(False))}
    found: dict[tuple[str, str, str], int] = {}
    for frame in (
        counted(telling("attempts"), ("started_at", started), ("finished_at", ended)),
        counted(telling("tasks"), ("created_at", stored), ("finished_at", of_tasks)),
    ):
        for row in frame.collect():
            for column, count in row.asDict().items():
                if column != "day":
                    table, _, name = column.partition("__")
                    key = (row["day"].isoformat(), table, name)
                    found[key] = found.get(key, 0) + count
    return found


def _gold_sums(lake: Lake, manifest: Manifest, day: str, columns: tuple[str, ...] = ()) -> dict[str, int]:
    """The sums of one day's files, which are few and small: the driver reads them itself."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    arrow: Any = compute
    names = columns or _GOLD_SUMS[manifest.table]
    sums = dict.fromkeys(names, 0)
    for file in manifest.parts[day].files if day in manifest.parts else ():
        table: Any = parquet.ParquetFile(lake.folder.path(file.path)).read(columns=list(names))
        for name in names:
            sums[name] += arrow.sum(table[name]).as_py() or 0
    return sums


def some(found: Iterable[str]) -> str:
    texts = list(found)
    more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
