"""Gold: from silver to counts, percentiles, clusters and forecasts. DataFrame in, DataFrame out; native functions only."""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from omniq.models import to_us
from omniq.spark.lake.clock import DAY_US, HOUR_US, MINUTE_US, SECOND_US, beginning, day, floored

SLO_MS = 60_000
SKETCH_K = 200  # rank error about 1.3 %
SAMPLES = 5
# Both must hold: few retries can be many times the usual, and a busy function always has some.
STORM_RETRIES = 10
STORM_RATIO = 2.0
_SLOT_S = 300
_COUNTED = ("succeeded", "retried", "failed", "expired", "cancelled")
_OPEN = ("PENDING", "RETRYING")


def queue_minute(attempts: DataFrame, tasks: DataFrame) -> DataFrame:
    """Arrivals and ends of each queue, minute by minute."""
    zero, one = F.lit(0).cast("bigint"), F.lit(1).cast("bigint")
    names = ("enqueued", "rearmed", "started", *_COUNTED, "in_time")

    # A row of silver becomes several moments, in one pass over it: silver is many times as large as the minutes.
    def happened(at: str, what: str | None, queue: str = "queue", when: Column | None = None) -> Column:
        wait = F.col("wait_ms") if what == "started" else F.lit(None).cast("double")
        counts = [(one if name == what else zero).alias(name) for name in names[:-1]]
        if what is None:
            counts = [F.when(F.col("outcome") == n, one).otherwise(zero).alias(n) for n in names[:-1]]
        in_time = F.when(wait <= SLO_MS, one).otherwise(zero).alias("in_time")
        minute = F.unix_micros(at).alias("us")
        row = F.struct(F.col(queue).alias("queue"), minute, *counts, in_time, wait.alias("wait_ms"))
        return row if when is None else F.when(when, row)

    # A cancelled task is counted once, from `tasks`, whether it ran or not.
    of_runs = attempts.select(
        "store",
        F.explode(
            F.array(
                happened("started_at", "started"),
                happened("finished_at", None, when=F.col("outcome").isin(*_COUNTED[:-1])),
                happened("ready_at", "rearmed", when=F.col("again")),
            )
        ).alias("e"),
    )
    of_tasks = tasks.select(
        "store",
        F.explode(
            F.array(
                happened("created_at", "enqueued", queue="enqueued_queue"),
                happened("finished_at", "cancelled", when=F.col("status") == "CANCELLED"),
                happened("finished_at", "failed", when=(F.col("status") == "FAILED") & (F.col("runs") == 0)),
            )
        ).alias("e"),
    )
    busy = _busy(attempts, MINUTE_US).select(
        "store",
        "queue",
        F.col("bucket").alias("minute_no"),
        *[zero.alias(n) for n in names],
        F.lit(None).cast("double").alias("wait_ms"),
        "busy_ms",
    )
    counted = (
        of_runs.unionByName(of_tasks)
        .select("store", "e.*")
        .where(F.col("us").isNotNull())
        .select(
            "store",
            "queue",
            floored(F.col("us"), MINUTE_US).alias("minute_no"),
            *names,
            "wait_ms",
            F.lit(0.0).alias("busy_ms"),
        )
    )
    rows = counted.unionByName(busy).groupBy("store", "queue", "minute_no")
    sums = rows.agg(
        *[F.sum(name).alias(name) for name in names],
        F.max("wait_ms").alias("max_wait_ms"),
        F.coalesce(F.sum("wait_ms"), F.lit(0.0)).alias("total_wait_ms"),
        F.sum("busy_ms").alias("busy_ms"),
    )
    arrived = F.col("enqueued") + F.col("rearmed")
    left = F.col("succeeded") + F.col("failed") + F.col("cancelled")
    return sums.select(
        "store",
        "queue",
        _time("minute_no", MINUTE_US).alias("minute"),
        *names[:-1],
        (arrived - left).alias("backlog_delta"),
        "max_wait_ms",
        "total_wait_ms",
        "in_time",
        "busy_ms",
        day(_time("minute_no", MINUTE_US)).alias("day"),
    )


def func_hour(attempts: DataFrame) -> DataFrame:
    """Counts and times of each function's runs, by the hour in which they ended; sketches merge into any longer time."""
    ended = attempts.where(F.col("finished_at").isNotNull())
    hour = beginning("finished_at", HOUR_US)
    sums = ended.groupBy("store", "queue", "name", hour.alias("hour")).agg(
        F.count(F.lit(1)).alias("runs"),
        *[F.count(F.when(F.col("outcome") == name, 1)).alias(name) for name in _COUNTED],
        F.coalesce(F.sum("wait_ms"), F.lit(0.0)).alias("total_wait_ms"),
        F.coalesce(F.sum("run_ms"), F.lit(0.0)).alias("total_run_ms"),
        F.kll_sketch_agg_double("wait_ms", SKETCH_K).alias("wait_sketch"),
        F.kll_sketch_agg_double("run_ms", SKETCH_K).alias("run_sketch"),
    )
    return sums.select(
        "store",
        "queue",
        "name",
        "hour",
        "runs",
        *_COUNTED,
        "total_wait_ms",
        "total_run_ms",
        *percentiles("wait"),
        *percentiles("run"),
        "wait_sketch",
        "run_sketch",
        day("hour").alias("day"),
    )


def percentiles(what: str) -> list[Column]:
    """`wait_p50_ms`, `wait_p95_ms`, `wait_p99_ms` from a column `wait_sketch`; null for a sketch without values."""
    # Asked first, because Spark raises for a quantile of nothing.
    sketch = F.col(f"{what}_sketch")
    some = F.kll_sketch_get_n_double(sketch) > 0
    return [
        F.when(some, F.kll_sketch_get_quantile_double(sketch, F.lit(p / 100))).alias(f"{what}_p{p}_ms") for p in (50, 95, 99)
    ]


def group_hour(attempts: DataFrame, tasks: DataFrame, until: datetime | None = None) -> DataFrame:
    """Counts and times of each queue's groups by the hour, and how long their tasks waited at the limit of their group.

    Tasks that still wait or run are followed to the end of the hour of `until`, else of the last moment in the rows.
    """
    key = ["store", "queue", "group_id", "hour"]
    sums = ("enqueued", "started", "finished", "failed", "total_wait_ms", "busy_ms", "waiting_ms", "blocked_ms")
    peaks = ("peak_running", "max_wait_ms", "waiting_end")

    def part(rows: DataFrame, at: Column, **values: Column) -> DataFrame:
        """Rows with some of the columns, the others empty; they are added up below."""
        empty = F.lit(None).cast("double")
        columns = [values.get(name, empty).cast("double").alias(name) for name in (*sums, *peaks)]
        return rows.select("store", values.get("queue", F.col("queue")).alias("queue"), "group_id", at.alias("hour"), *columns)

    one, in_group = F.lit(1), F.col("group_id").isNotNull()
    starts = attempts.where(F.col("started_at").isNotNull())
    ends = attempts.where(in_group & F.col("finished_at").isNotNull())
    wait = F.col("wait_ms")
    rows = (
        part(starts, _hour("started_at"), started=one, max_wait_ms=wait, total_wait_ms=wait)
        .unionAll(
            part(ends, _hour("finished_at"), finished=one, failed=F.when(F.col("outcome") == "failed", one).otherwise(F.lit(0)))
        )
        .unionAll(part(tasks.where(in_group), _hour("created_at"), enqueued=one, queue=F.col("enqueued_queue")))
    )
    occupied = _occupancy(attempts.where(in_group), tasks.where(in_group), until)
    known = {name: F.col(name) for name in ("busy_ms", "peak_running", "waiting_ms", "blocked_ms", "waiting_end")}
    rows = rows.unionAll(part(occupied, F.col("hour"), **known)).groupBy(*key)
    totals = [F.coalesce(F.sum(name), F.lit(0.0)).alias(name) for name in sums]
    # Runs of tasks without a group count in the queue's total, and go after that.
    of_queue = Window.partitionBy("store", "queue", "hour")
    grouped = (
        rows.agg(*totals, *[F.max(name).alias(name) for name in peaks])
        .select("*", F.coalesce(F.try_divide("started", F.sum("started").over(of_queue)), F.lit(0.0)).alias("share"))
        .where(in_group)
    )

    def count(name: str) -> Column:
        return F.coalesce(F.col(name), F.lit(0)).cast("bigint").alias(name)

    return grouped.select(
        *key,
        count("enqueued"),
        count("started"),
        count("finished"),
        count("failed"),
        "share",
        "busy_ms",
        count("peak_running"),
        "max_wait_ms",
        "total_wait_ms",
        "waiting_ms",
        "blocked_ms",
        count("waiting_end"),
        F.coalesce((F.col("waiting_end") > 0) & (F.col("started") == 0), F.lit(False)).alias("stuck"),
        day("hour").alias("day"),
    )


def _occupancy(attempts: DataFrame, tasks: DataFrame, until: datetime | None) -> DataFrame:
    """Per group and hour the tasks that ran and waited, from a walk along the moments at which their number changed."""
    nothing, more, fewer = F.lit(0), F.lit(1), F.lit(-1)

    def moment(at: Column, waiting: Column, running: Column) -> Column:
        return F.when(at.isNotNull(), F.struct(at.alias("us"), waiting.alias("waiting"), running.alias("running")))

    us = F.unix_micros
    of_runs = attempts.where(F.col("started_at").isNotNull()).select(
        "store",
        "queue",
        "group_id",
        F.inline(
            F.filter(
                F.array(
                    moment(us("ready_at"), more, nothing),
                    moment(us("started_at"), fewer, more),
                    moment(us("finished_at"), nothing, fewer),
                ),
                lambda m: m.isNotNull(),
            )
        ),
    )
    of_tasks = tasks.where(F.col("status").isin(*_OPEN)).select(
        "store",
        "queue",
        "group_id",
        us(F.coalesce(F.greatest("due_at", "last_event_at"), "created_at")).alias("us"),
        F.lit(1).alias("waiting"),
        F.lit(0).alias("running"),
    )
    group = ["store", "queue", "group_id"]
    walk = Window.partitionBy(*group).orderBy("us")
    upto = walk.rangeBetween(Window.unboundedPreceding, 0)
    horizon = F.max("us").over(Window.partitionBy("store")) if until is None else F.lit(to_us(until))
    the_end = (floored(horizon, HOUR_US) + 1) * HOUR_US
    steps = of_runs.unionByName(of_tasks).select(
        *group,
        "us",
        F.sum("waiting").over(upto).alias("waiting"),
        F.sum("running").over(upto).alias("running"),
        F.coalesce(F.lead("us").over(walk), the_end).alias("end"),
    )
    hour_of, last_hour = floored(F.col("us"), HOUR_US), floored(F.col("end") - 1, HOUR_US)
    spread = steps.where("(waiting > 0 or running > 0) and end > us").select(
        "*", F.explode(F.sequence(hour_of, last_hour)).alias("hour_no")
    )
    hour_end = (F.col("hour_no") + 1) * HOUR_US
    left = F.greatest(F.col("us"), F.col("hour_no") * HOUR_US)
    of_day = Window.partitionBy(*group, floored(F.col("hour_no"), DAY_US // HOUR_US))
    spread = spread.select(
        *group,
        "hour_no",
        "waiting",
        "running",
        ((F.least(F.col("end"), hour_end) - left) / 1000.0).alias("ms"),
        F.when(F.col("end") >= hour_end, F.col("waiting")).otherwise(F.lit(0)).alias("at_end"),
        F.max("running").over(of_day).alias("peak"),
    )
    some_wait = F.col("waiting") > 0
    full = some_wait & (F.col("running") >= F.col("peak")) & (F.col("peak") > 0)
    return spread.groupBy(*group, _time("hour_no", HOUR_US).alias("hour")).agg(
        F.sum(F.col("running") * F.col("ms")).alias("busy_ms"),
        F.max("running").alias("peak_running"),
        F.sum(F.when(some_wait, F.col("ms")).otherwise(0.0)).alias("waiting_ms"),
        F.sum(F.when(full, F.col("ms")).otherwise(0.0)).alias("blocked_ms"),
        F.max("at_end").alias("waiting_end"),
    )


def failure_day(attempts: DataFrame, tasks: DataFrame) -> DataFrame:
    """Failures of a day that are alike, with a few ids to look at."""
    same = ("store", "fingerprint", "name", "error_type", "error", "finished_at")
    of_runs = attempts.where(F.col("error_type").isNotNull() & F.col("outcome").isin("retried", "failed", "expired"))
    # Tasks that failed without having run, because a task that they waited for had failed.
    of_tasks = tasks.where((F.col("status") == "FAILED") & (F.col("runs") == 0) & F.col("error_type").isNotNull())
    failures = (
        of_runs.select(*same, "task_id", (F.col("outcome") == "failed").alias("final"))
        .unionAll(of_tasks.select(*same, "id", F.lit(True)))
        .select("*", day("finished_at").alias("day"))
        .where(F.col("day").isNotNull())
    )
    key = ["store", "fingerprint", "name", "error_type", "day"]
    newest = Window.partitionBy(*key).orderBy(F.desc("finished_at"), "task_id")
    ranked = failures.select("*", F.row_number().over(newest).alias("rank"))
    # More than are shown, because the last failures may all be of one task; a fixed number, because a day can have millions.
    ids = F.sort_array(F.collect_list(F.when(F.col("rank") <= 4 * SAMPLES, F.struct("rank", "task_id"))))
    return (
        ranked.groupBy(*key)
        .agg(
            F.count(F.lit(1)).alias("failures"),
            F.count(F.when(F.col("final"), 1)).alias("final"),
            # An exact count would keep every id of a group in memory.
            F.approx_count_distinct("task_id", 0.02).alias("tasks"),
            F.min("finished_at").alias("first_seen"),
            F.max("finished_at").alias("last_seen"),
            F.max(F.when(F.col("rank") == 1, F.col("error"))).alias("sample_error"),
            F.slice(F.array_distinct(F.transform(ids, lambda row: row["task_id"])), 1, SAMPLES).alias("sample_ids"),
        )
        .select(
            "store",
            "fingerprint",
            "name",
            "error_type",
            "failures",
            "final",
            "tasks",
            "first_seen",
            "last_seen",
            "sample_error",
            "sample_ids",
            "day",
        )
    )


def retry_storm(attempts: DataFrame) -> DataFrame:
    """Retries of each function in five minutes, against its own last 24 hours."""
    slot = floored(F.unix_seconds("started_at"), _SLOT_S) * _SLOT_S
    before = floored(F.unix_seconds("previous_started_at"), _SLOT_S) * _SLOT_S
    begun = attempts.where(F.col("started_at").isNotNull()).select(
        "store", "name", slot.alias("slot"), F.coalesce(before != slot, F.lit(True)).alias("first_here"), "attempt"
    )
    sums = begun.groupBy("store", "name", "slot").agg(
        F.count(F.lit(1)).alias("attempts"),
        F.count(F.when(F.col("first_here"), 1)).alias("tasks"),
        F.count(F.when(F.col("attempt") > 1, 1)).alias("retries"),
    )
    lately = Window.partitionBy("store", "name").orderBy("slot").rangeBetween(-DAY_US // SECOND_US, -1)
    own = sums.select(
        "*",
        (F.col("attempts") / F.col("tasks")).alias("attempts_per_task"),
        (F.sum("attempts").over(lately) / F.sum("tasks").over(lately)).alias("baseline"),
        (F.sum("retries").over(lately) / F.sum("tasks").over(lately)).alias("usual"),
    )
    # A function that never failed before has no rate to compare with: one retry in a hundred tasks is taken as usual.
    ratio = (F.col("retries") / F.col("tasks")) / F.greatest(F.col("usual"), F.lit(0.01))
    start = F.timestamp_seconds("slot")
    return own.select("*", ratio.alias("ratio")).select(
        "store",
        "name",
        start.alias("window_start"),
        "attempts",
        "tasks",
        "retries",
        "attempts_per_task",
        "baseline",
        "ratio",
        F.coalesce((F.col("retries") >= STORM_RETRIES) & (F.col("ratio") >= STORM_RATIO), F.lit(False)).alias("storm"),
        day(start).alias("day"),
    )


def _busy(attempts: DataFrame, bucket_us: int) -> DataFrame:
    """The time of runs, split over the buckets in which it was spent."""
    start, end = F.unix_micros("started_at"), F.unix_micros("finished_at")
    runs = attempts.where(F.col("started_at").isNotNull() & (F.col("finished_at") >= F.col("started_at")))
    # A worker may hold a task for a moment before it runs it: only the time at the end, as long as the run took, is busy.
    ran = F.least(F.col("run_ms") * 1000, (end - start).cast("double")).cast("bigint")
    spread = runs.select("store", "queue", (end - ran).alias("s"), end.alias("e")).select(
        "*", F.explode(F.sequence(floored(F.col("s"), bucket_us), floored(F.col("e"), bucket_us))).alias("bucket")
    )
    left = F.greatest(F.col("s"), F.col("bucket") * bucket_us)
    right = F.least(F.col("e"), (F.col("bucket") + 1) * bucket_us)
    return spread.select("store", "queue", "bucket", ((right - left) / 1000.0).alias("busy_ms"))


def _time(number: str, bucket_us: int) -> Column:
    return F.timestamp_micros(F.col(number) * bucket_us)


def _hour(at: str) -> Column:
    return beginning(at, HOUR_US)
