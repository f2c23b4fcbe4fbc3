"""Checks: whether bronze has every event once, and whether silver and gold add up to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import CheckFailed
from omniq.spark.lake.manifest import Manifest, holes
from omniq.spark.lake.tables import GOLD, OUTCOMES, SILVER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from omniq.spark.lake.layout import About, Lake

SHOWN = 5
AHEAD_S = 300
STATUSES = ("PENDING", "RUNNING", "SUCCESS", "FAILED", "RETRYING", "CANCELLED")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer. A check that is not `ok` fails the build; a `note` is worth a look and fails nothing."""

    name: str
    ok: bool
    detail: str
    note: bool = False


def check(spark: SparkSession, lake: Lake, *, fail: bool = True) -> list[CheckResult]:
    """Look at everything that the lake holds. Raises `CheckFailed` with the first thing found, unless told not to `fail`."""
    current = lake.current()
    manifests = {name: lake.manifest(name, current) for name in ("events", *SILVER, *GOLD)}
    about = lake.about()
    results = [*_gaps(manifests["events"], about), _files(lake, manifests)]
    if results[-1].ok:
        results += _bronze(spark, lake, manifests["events"])
        if manifests["tasks"].parts:
            fresh = [
                date.fromisoformat(day) for day, part in manifests["tasks"].parts.items() if _fresh(day, part.stamp, manifests)
            ]
            results += _silver(spark, lake, manifests, fresh)
            results += _gold(spark, lake, manifests, dict.fromkeys(GOLD), about.expired_before)
    failed = [result for result in results if not result.ok]
    if failed and fail:
        raise CheckFailed(f"the lake {lake.path} fails {len(failed)} of {len(results)} checks: {failed[0].detail}")
    return results


def check_build(
    spark: SparkSession,
    lake: Lake,
    manifests: Mapping[str, Manifest],
    days: list[date],
    built: Mapping[str, list[date] | None],
) -> list[CheckResult]:
    """The same, of what a build is about to publish: these days of silver, and these of each table of gold."""
    about = lake.about()
    results = _gaps(manifests["events"], about)
    if days:
        results += _silver(spark, lake, manifests, days)
    if built:
        results += _gold(spark, lake, manifests, built, about.expired_before)
    return results


def _fresh(day: str, stamp: str, manifests: Mapping[str, Manifest]) -> bool:
    """Whether silver was built from what bronze holds now."""
    part = manifests["events"].parts.get(day)
    return part is not None and stamp.rpartition("/")[0] == part.stamp


# -- bronze --------------------------------------------------------------------------------------------


def _gaps(events: Manifest, about: About) -> list[CheckResult]:
    """Numbers that are missing between the first and the last of a shard."""
    found: list[str] = []
    shards = 0
    for store, by_shard in sorted(events.seen.items()):
        entry = about.stores.get(store)
        if entry is not None and not entry.events_gapless:
            continue
        for shard, ranges in sorted(by_shard.items()):
            shards += 1
            where = f"store {store}" + (f", shard {shard}" if shard else "")
            found += [f"events {low} to {high} of {where} are missing" for low, high in holes(ranges)]
    detail = _some(found) if found else f"no gap in the numbers of {shards} {'shard' if shards == 1 else 'shards'}"
    return [CheckResult(name="gaps", ok=not found, detail=detail)]


def _files(lake: Lake, manifests: Mapping[str, Manifest]) -> CheckResult:
    missing = [file.path for m in manifests.values() for file in m.files if not lake.folder.exists(file.path)]
    detail = (
        f"files are missing: {_some(missing)}"
        if missing
        else f"{sum(len(m.files) for m in manifests.values())} files are there"
    )
    return CheckResult(name="files", ok=not missing, detail=detail)


def _bronze(spark: SparkSession, lake: Lake, events: Manifest) -> list[CheckResult]:
    from pyspark.sql import functions as F

    rows = lake.frame(spark, events)
    twice = rows.groupBy("store", "shard", "seq").count().where("count > 1").orderBy("store", "shard", "seq")
    found = [f"event {r['seq']} of store {r['store']} is there {r['count']} times" for r in twice.limit(SHOWN).collect()]
    results = [CheckResult(name="duplicates", ok=not found, detail=_some(found) if found else "every event is there once")]
    strange = rows.agg(
        F.count(F.lit(1)).alias("rows"),
        F.count(F.when(F.to_date("enqueued_at") != F.col("task_date"), 1)).alias("misplaced"),
        F.count(F.when(F.col("ts") > F.current_timestamp() + F.expr(f"interval {AHEAD_S} seconds"), 1)).alias("ahead"),
    ).collect()[0]
    same = strange["rows"] == events.rows
    results.append(
        CheckResult(name="bronze rows", ok=same, detail=f"{strange['rows']} rows in the files, {events.rows} in the manifest")
    )
    results.append(
        CheckResult(
            name="bronze days",
            ok=not strange["misplaced"],
            detail=f"{strange['misplaced']} events lie in the folder of another day",
        )
    )
    notes = [
        (strange["ahead"], f"{strange['ahead']} events are more than {AHEAD_S // 60} minutes ahead of this machine's clock"),
        (events.quarantined, f"{events.quarantined} rows are in quarantine"),
    ]
    results += [CheckResult(name="note", ok=True, detail=text, note=True) for count, text in notes if count]
    return results


# -- silver and gold ------------------------------------------------------------------------------------


def _silver(spark: SparkSession, lake: Lake, manifests: Mapping[str, Manifest], days: list[date]) -> list[CheckResult]:
    """Every event is counted in one task, and every run in its task."""
    from pyspark.sql import functions as F

    tasks = (
        lake.frame(spark, manifests["tasks"], days)
        .groupBy("task_date")
        .agg(
            F.sum("events").alias("events"),
            F.sum("runs").alias("runs"),
            F.count(F.when(~F.coalesce(F.col("status").isin(*STATUSES), F.lit(False)), 1)).alias("strange"),
            F.lit(0).cast("bigint").alias("ran"),
        )
    )
    attempts = (
        lake.frame(spark, manifests["attempts"], days)
        .groupBy("task_date")
        .agg(
            F.lit(0).cast("bigint").alias("events"),
            F.lit(0).cast("bigint").alias("runs"),
            F.count(F.when(~F.col("outcome").isin(*OUTCOMES) | (F.col("wait_ms") < 0) | (F.col("run_ms") < 0), 1)).alias(
                "strange"
            ),
            F.count(F.lit(1)).alias("ran"),
        )
    )
    sums = (
        tasks.unionByName(attempts).groupBy("task_date").agg(*[F.sum(n).alias(n) for n in ("events", "runs", "strange", "ran")])
    )
    of_day: dict[str, Any] = {row["task_date"].isoformat(): row for row in sums.collect()}
    events: list[str] = []
    runs: list[str] = []
    strange = 0
    for day in (day.isoformat() for day in days):
        there = manifests["events"].parts[day].rows if day in manifests["events"].parts else 0
        row = of_day.get(day)
        counted = row["events"] if row is not None else 0
        if there > counted:
            events.append(f"{there - counted} of {there} events of {day} are there twice or belong to no task")
        elif there < counted:
            events.append(f"the tasks of {day} count {counted} events, bronze has {there}")
        if row is not None and row["runs"] != row["ran"]:
            runs.append(f"the tasks of {day} count {row['runs']} runs, there are {row['ran']}")
        strange += row["strange"] if row is not None else 0
    return [
        CheckResult(
            name="events in silver", ok=not events, detail=_some(events) or f"all events of {len(days)} days are in a task"
        ),
        CheckResult(name="runs in silver", ok=not runs, detail=_some(runs) or f"all runs of {len(days)} days are in a task"),
        CheckResult(
            name="values in silver", ok=not strange, detail=f"{strange} rows with an unknown status or a negative time"
        ),
    ]


def _gold(
    spark: SparkSession,
    lake: Lake,
    manifests: Mapping[str, Manifest],
    built: Mapping[str, list[date] | None],
    frozen: date | None,
) -> list[CheckResult]:
    """Counts of each table of gold against silver, day by day."""
    from pyspark.sql import functions as F

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
        results.append(CheckResult(name=f"sums of {name}", ok=not mine, detail=_some(mine) or f"{name} agrees with silver"))
    return results


def _some(found: Iterable[str]) -> str:
    texts = list(found)
    more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
