"""The numbers of a report: small tables that Spark makes from gold and silver, for people to look at."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from omniq.errors import LakeError
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.writing import settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOP = 10
_STEPS = (60, 300, 900, 3600, 6 * 3600, 86_400)  # seconds
_POINTS = 300  # a line of more has no room on a page
FINE = timedelta(days=2)  # up to here percentiles come from single runs, beyond from the sketches of each hour


class Figures(msgspec.Struct, kw_only=True, frozen=True):
    """What a report shows. Times are UTC; every table is small enough for a page."""

    first: datetime
    last: datetime
    step: timedelta
    totals: dict[str, Any]
    throughput: Any  # bucket, succeeded, retried, failed, expired, cancelled, enqueued, backlog
    percentiles: Any  # bucket, wait_p50, wait_p95, wait_p99, run_p50, run_p95, run_p99 (milliseconds)
    hours: Any  # weekday (0 is Monday), hour, started, wait_ms
    failures: Any  # fingerprint, name, error_type, failures, final, first_seen, last_seen, sample_error, sample_ids
    failures_by_day: Any  # day, fingerprint, failures
    storms: Any  # window_start, name, retries, attempts_per_task, baseline, storm
    slowest: Any  # name, queue, runs, failed, run_p50, run_p95, run_p99, total_run_ms
    groups: Any  # queue, group_id, started, blocked_ms, waiting_ms, max_wait_ms, share_blocked
    capacity: Any  # queue, hour, slots_needed, slots_seen, is_forecast, short


def gather(spark: SparkSession, lake: Lake, since: date | None = None) -> Figures:
    """Everything, from the tables of one build."""
    # Hours of the day, and the naive times of pandas, are in the session's zone.
    with settings(spark, {"spark.sql.session.timeZone": "UTC", "spark.sql.execution.arrow.pyspark.enabled": "true"}):
        return _gathered(spark, lake, since)


def _gathered(spark: SparkSession, lake: Lake, since: date | None) -> Figures:
    current = lake.current()

    def ask(query: str, *tables: str, **more: Any) -> pd.DataFrame:
        frames = {name: lake.frame(spark, lake.manifest(name, current)) for name in tables}
        given = {name: frame if since is None else frame.where(f"{_day(name)} >= '{since}'") for name, frame in frames.items()}
        return spark.sql(query, args=more, **given).toPandas()

    span = ask("SELECT min(minute) AS first, max(minute) AS last FROM {queue_minute}", "queue_minute").iloc[0]
    if pd.isna(span["first"]):
        raise LakeError(f"the lake {lake.path} has nothing to report on: run omniq lake ingest and omniq lake build first")
    first, last = span["first"].to_pydatetime(), span["last"].to_pydatetime() + timedelta(minutes=1)
    step = next((s for s in _STEPS if (last - first).total_seconds() / s <= _POINTS), _STEPS[-1])
    bucket = f"timestamp_seconds(floor(unix_timestamp({{}}) / {step}) * {step})"
    throughput = ask(
        f"""SELECT {bucket.format("minute")} AS bucket, sum(enqueued) AS enqueued, sum(started) AS started,
        sum(succeeded) AS succeeded, sum(retried) AS retried, sum(failed) AS failed, sum(expired) AS expired,
        sum(cancelled) AS cancelled, sum(backlog_delta) AS delta
        FROM {{queue_minute}} GROUP BY 1 ORDER BY 1""",
        "queue_minute",
    )
    throughput["backlog"] = throughput.pop("delta").cumsum().clip(lower=0)
    return Figures(
        first=first,
        last=last,
        step=timedelta(seconds=step),
        totals=ask(_TOTALS, "tasks", "attempts").iloc[0].to_dict(),
        throughput=throughput,
        percentiles=ask(_fine(bucket), "attempts") if last - first <= FINE else ask(_merged(bucket, step), "func_hour"),
        hours=ask(
            """SELECT weekday(minute) AS weekday, hour(minute) AS hour, sum(started) AS started,
            sum(total_wait_ms) / nullif(sum(started), 0) AS wait_ms FROM {queue_minute} GROUP BY 1, 2""",
            "queue_minute",
        ),
        failures=ask(_FAILURES.format(limit=TOP, failure_day="{failure_day}"), "failure_day"),
        failures_by_day=ask(
            "SELECT day, fingerprint, sum(failures) AS failures FROM {failure_day} GROUP BY 1, 2 ORDER BY 1", "failure_day"
        ),
        storms=ask(
            """SELECT window_start, name, retries, attempts_per_task, baseline, storm FROM {retry_storm}
            WHERE name IN (SELECT name FROM {retry_storm} GROUP BY name ORDER BY sum(retries) DESC LIMIT 5)
            ORDER BY window_start""",
            "retry_storm",
        ),
        slowest=ask(_SLOWEST.format(limit=TOP, func_hour="{func_hour}"), "func_hour"),
        groups=ask(_GROUPS.format(limit=TOP, group_hour="{group_hour}"), "group_hour"),
        capacity=ask(
            """SELECT queue, hour, slots_needed, slots_seen, is_forecast, short FROM {capacity_hour}
            WHERE queue IN (SELECT queue FROM {capacity_hour} GROUP BY queue ORDER BY sum(busy_s) DESC NULLS LAST LIMIT 3)
            ORDER BY queue, hour""",
            "capacity_hour",
        ),
    )


def _day(table: str) -> str:
    return "task_date" if table in ("tasks", "attempts", "events") else "day"


_TOTALS = """SELECT t.*, a.* FROM
    (SELECT count(*) AS tasks, count_if(status = 'SUCCESS') AS succeeded, count_if(status = 'FAILED') AS failed,
        count_if(status = 'CANCELLED') AS cancelled, count_if(finished_at IS NULL) AS unfinished,
        count(DISTINCT queue) AS queues, count(DISTINCT name) AS functions FROM {tasks}) t,
    (SELECT count(*) AS runs, count_if(outcome = 'retried') AS retried, count_if(outcome = 'expired') AS expired,
        percentile_approx(wait_ms, 0.95, 1000) AS wait_p95, percentile_approx(run_ms, 0.95, 1000) AS run_p95,
        count(DISTINCT worker) AS workers FROM {attempts}) a"""

_FAILURES = """SELECT fingerprint, name, first(error_type) AS error_type, sum(failures) AS failures, sum(final) AS final,
    min(first_seen) AS first_seen, max(last_seen) AS last_seen, max_by(sample_error, last_seen) AS sample_error,
    max_by(sample_ids, last_seen) AS sample_ids
    FROM {failure_day} GROUP BY fingerprint, name ORDER BY failures DESC, fingerprint LIMIT {limit}"""

_SLOWEST = """SELECT name, queue, sum(runs) AS runs, sum(failed) AS failed, sum(total_run_ms) AS total_run_ms,
    kll_sketch_get_quantile_double(kll_merge_agg_double(run_sketch), 0.5D) AS run_p50,
    kll_sketch_get_quantile_double(kll_merge_agg_double(run_sketch), 0.95D) AS run_p95,
    kll_sketch_get_quantile_double(kll_merge_agg_double(run_sketch), 0.99D) AS run_p99
    FROM {func_hour} WHERE run_sketch IS NOT NULL GROUP BY name, queue ORDER BY run_p95 DESC LIMIT {limit}"""

_GROUPS = """SELECT queue, group_id, sum(started) AS started, sum(blocked_ms) AS blocked_ms, sum(waiting_ms) AS waiting_ms,
    max(max_wait_ms) AS max_wait_ms, sum(blocked_ms) / nullif(sum(waiting_ms), 0) AS share_blocked, max(stuck) AS stuck
    FROM {group_hour} GROUP BY queue, group_id HAVING sum(waiting_ms) > 0
    ORDER BY blocked_ms DESC, waiting_ms DESC LIMIT {limit}"""


def _fine(bucket: str) -> str:
    """Percentiles of the single runs of a short span."""
    columns = ", ".join(
        f"percentile_approx({kind}_ms, {share}, 1000) AS {kind}_p{round(share * 100)}"
        for kind in ("wait", "run")
        for share in (0.5, 0.95, 0.99)
    )
    moment = bucket.format("coalesce(finished_at, started_at)")
    return f"SELECT {moment} AS bucket, {columns} FROM {{attempts}} WHERE started_at IS NOT NULL GROUP BY 1 ORDER BY 1"


def _merged(bucket: str, step: int) -> str:
    """Percentiles of a long span, from the sketches of its hours."""
    columns = ", ".join(
        f"kll_sketch_get_quantile_double(kll_merge_agg_double({kind}_sketch), {share}D) AS {kind}_p{round(share * 100)}"
        for kind in ("wait", "run")
        for share in (0.5, 0.95, 0.99)
    )
    wanted = "wait_sketch IS NOT NULL AND run_sketch IS NOT NULL"
    return f"SELECT {bucket.format('hour')} AS bucket, {columns} FROM {{func_hour}} WHERE {wanted} GROUP BY 1 ORDER BY 1"
