"""Capacity: the load of each queue's hours, and a forecast from the same hours of earlier weeks."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from omniq.spark.lake.clock import HOUR_US, beginning, day

FORECAST_DAYS = 7
# Load follows the hours of the week, so an hour is forecast from the same hour of earlier weeks.
FORECAST_WEEKS = 4
_HOUR_S = 3600
_DAY_S = 86_400
_WEEK_S = 7 * _DAY_S


def capacity_hour(queue_minute: DataFrame, earlier: DataFrame | None = None) -> DataFrame:
    """Load and slots of each queue by the hour, with a forecast of the next seven days.

    One row per queue and hour, from its first hour to seven days after the last hour of its store. `earlier` are rows of this
    table itself, for the hours before the first minute.
    """
    key = ["store", "queue"]
    sums = queue_minute.groupBy(*key, F.unix_seconds(beginning("minute", HOUR_US)).alias("h")).agg(
        F.sum(F.col("enqueued") + F.col("rearmed")).alias("arrivals"),
        F.sum(F.col("succeeded") + F.col("failed") + F.col("cancelled")).alias("finished"),
        (F.sum("busy_ms") / 1000.0).alias("busy_s"),
        (F.max("busy_ms") / 60_000.0).alias("peak_slots"),
    )
    if earlier is not None:
        known = earlier.where(~F.col("is_forecast"))
        # Made in a zone with half an hour more, the first of them would set the beginning of all hours that follow.
        hour = F.unix_seconds(beginning("hour", HOUR_US)).alias("h")
        sums = sums.unionByName(known.select(*key, hour, "arrivals", "finished", "busy_s", "peak_slots"))
    # The end is that of the store: a queue without work for days has hours of nothing, and a forecast from them.
    ends = sums.groupBy("store").agg(F.max("h").alias("now"))
    spans = sums.groupBy(*key).agg(F.min("h").alias("first")).join(F.broadcast(ends), "store")
    every = F.explode(F.sequence("first", F.col("now") + FORECAST_DAYS * _DAY_S, F.lit(_HOUR_S).cast("bigint")))
    grid = spans.select(*key, "now", every.alias("h"))
    future = F.col("h") > F.col("now")
    # An hour without a row had nothing in it; one that has not come has no measure.
    filled = grid.join(sums, [*key, "h"], "left").select(
        *key,
        "h",
        "now",
        future.alias("is_forecast"),
        *[
            F.when(~future, F.coalesce(F.col(name), F.lit(0).cast(kind))).alias(name)
            for name, kind in (("arrivals", "bigint"), ("finished", "bigint"), ("busy_s", "double"), ("peak_slots", "double"))
        ],
    )
    by_hour = Window.partitionBy(*key, F.col("h") % _WEEK_S).orderBy("h")
    by_clock = Window.partitionBy(*key, F.col("h") % _DAY_S).orderBy("h")
    weeks = by_hour.rangeBetween(-FORECAST_WEEKS * _WEEK_S, -_WEEK_S)
    days = by_clock.rangeBetween(-7 * _DAY_S, -_DAY_S)
    week = Window.partitionBy(*key).orderBy("h").rangeBetween(-7 * _DAY_S, 0)
    lately = F.when(F.col("h") >= F.col("now") - 7 * _DAY_S, F.col("peak_slots"))
    seen = F.when(F.col("is_forecast"), F.max(lately).over(Window.partitionBy(*key))).otherwise(F.max("peak_slots").over(week))

    def forecast(name: str) -> Column:
        return F.coalesce(F.avg(name).over(weeks), F.avg(name).over(days)).alias(f"forecast_{name}")

    rows = filled.select(
        "*",
        forecast("arrivals"),
        forecast("busy_s"),
        F.ceil(seen).alias("slots_seen"),
    )
    load = F.coalesce("forecast_busy_s", "busy_s") / _HOUR_S
    # Work that comes at random swings by the root of its mean: twice that is room for nearly all of its swings.
    rows = rows.select("*", F.ceil(load + 2 * F.sqrt(load)).alias("slots_needed"))
    hour = F.timestamp_seconds("h")
    return rows.select(
        *key,
        hour.alias("hour"),
        "is_forecast",
        "arrivals",
        "finished",
        "busy_s",
        "peak_slots",
        "slots_seen",
        F.when(F.col("slots_seen") > 0, F.col("busy_s") / (F.col("slots_seen") * _HOUR_S)).alias("utilisation"),
        "forecast_arrivals",
        "forecast_busy_s",
        "slots_needed",
        (F.col("slots_needed") > F.col("slots_seen")).alias("short"),
        day(hour).alias("day"),
    )
