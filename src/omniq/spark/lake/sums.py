"""Whether silver counts every event of bronze, and gold every run and task of silver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import msgspec

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
    """What silver tells of the tasks that were stored on a day: counts, and from when to when."""

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
    """One pass over both tables of silver."""
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
    rows = sums.agg(
        *[F.sum(name).alias(name) for name in ("events", "runs", "attempts")],
        F.count(F.when(F.col("odd"), 1)).alias("strange"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
        F.min("open_from").alias("open_from"),
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
    """Every event is counted in one task, and every run in its task."""
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


def _utc(moment: Any) -> datetime | None:
    """What Spark gives is local time of the driver without saying so."""
    return None if moment is None else moment.astimezone(UTC)


def check_gold(
    spark: SparkSession, lake: Lake, manifests: Mapping[str, Manifest], built: Mapping[str, list[date] | None]
) -> list[CheckResult]:
    """Counts of each table of gold against silver, on these days of each; None for all."""
    from pyspark.sql import functions as F

    if not built:
        return []
    frozen = lake.about().expired_before
    wanted = {day for days in built.values() for day in days or ()}
    whole = any(days is None for days in built.values())

    def of_silver(name: str) -> DataFrame:
        manifest = manifests[name]
        telling = None if whole else [date.fromisoformat(d) for d, part in manifest.parts.items() if part.touches(wanted)]
        return lake.frame(spark, manifest, telling)

    def counted(rows: DataFrame, side: str, sums: dict[str, Column], at: str) -> DataFrame:
        names = F.array(*[F.struct(F.lit(name).alias("what"), value.alias("n")) for name, value in sums.items()])
        daily = rows.withColumn("day", F.to_date(at)).where("day is not null").select("day", F.inline(names))
        return daily.groupBy("day", "what").agg(F.sum("n").alias("n")).select("day", "what", "n", F.lit(side).alias("side"))

    def one(condition: Column | None = None) -> Column:
        return F.lit(1) if condition is None else F.when(condition, F.lit(1)).otherwise(F.lit(0))

    attempts, tasks = of_silver("attempts"), of_silver("tasks")
    in_group = F.col("group_id").isNotNull()
    failing = F.col("error_type").isNotNull() & F.col("outcome").isin("retried", "failed", "expired")
    unrun = (F.col("status") == "FAILED") & (F.col("runs") == 0)
    sides = [
        counted(
            attempts,
            "silver",
            {"queue_minute.started": one(), "retry_storm.attempts": one(), "group_hour.started": one(in_group)},
            "started_at",
        ),
        counted(attempts, "silver", {"func_hour.runs": one(), "failure_day.failures": one(failing)}, "finished_at"),
        counted(tasks, "silver", {"queue_minute.enqueued": one(), "group_hour.enqueued": one(in_group)}, "created_at"),
        counted(tasks, "silver", {"failure_day.failures": one(unrun & F.col("error_type").isNotNull())}, "finished_at"),
    ]
    for name, sums in (
        ("queue_minute", ("started", "enqueued")),
        ("func_hour", ("runs",)),
        ("group_hour", ("started", "enqueued")),
        ("failure_day", ("failures",)),
        ("retry_storm", ("attempts",)),
    ):
        rows = lake.frame(spark, manifests[name], None if whole else wanted)
        sides.append(counted(rows, "gold", {f"{name}.{column}": F.col(column) for column in sums}, "day"))
    minutes = lake.frame(spark, manifests["queue_minute"], None if whole else wanted)
    hours = lake.frame(spark, manifests["capacity_hour"], None if whole else wanted).where(~F.col("is_forecast"))
    sides.append(counted(minutes, "silver", {"capacity_hour.arrivals": F.col("enqueued") + F.col("rearmed")}, "day"))
    sides.append(counted(hours, "gold", {"capacity_hour.arrivals": F.col("arrivals")}, "day"))
    every = sides[0]
    for side in sides[1:]:
        every = every.unionByName(side)
    pairs = every.groupBy("what", "day").agg(
        F.coalesce(F.sum(F.when(F.col("side") == "silver", F.col("n"))), F.lit(0)).alias("silver"),
        F.coalesce(F.sum(F.when(F.col("side") == "gold", F.col("n"))), F.lit(0)).alias("gold"),
    )
    differ = pairs.where("silver <> gold").orderBy("what", "day").collect()
    results: list[CheckResult] = []
    for name in built:
        days = built[name]
        mine = [
            f"{row['what']} of {row['day']} is {row['gold']}, and {row['silver']} by the rows it is made of"
            for row in differ
            if row["what"].startswith(f"{name}.")
            and (days is None or row["day"] in days)
            and (frozen is None or row["day"] >= frozen)
            and row["day"].isoformat() not in manifests[name].pending
        ]
        results.append(CheckResult(name=f"sums of {name}", ok=not mine, detail=some(mine) or f"{name} agrees with silver"))
    return results


def some(found: Iterable[str]) -> str:
    texts = list(found)
    more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
