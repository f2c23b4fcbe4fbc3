"""The days of gold that the rows of silver change: each fact that gold takes from a row, as a hash, with its days.

When gold takes something new from silver it must be added here, else an incremental build would miss it; a test compares.
A fact that is `open`, a task that waits or a run that goes on, fills hours of groups up to the `horizon`: the newest event of
all stores that this version of silver knows. It changes nothing else.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from omniq.models import to_us
from omniq.spark.lake.clock import days_spanned


def told_by_attempts(attempts: DataFrame, horizon: datetime | None) -> DataFrame:
    """`what`, `days`, `open` of up to three facts: a run waited and began, it went on and ended, it has not ended."""
    run = ["store", "task_id", "queue", "name", "group_id", "attempt"]
    waited = _said(
        "waited", [*run, "ready_at", "started_at", "wait_ms", "again", "previous_started_at"], "ready_at", "started_at"
    )
    ended = ["outcome", "wait_ms", "run_ms", "error_type", "error", "fingerprint", "started_at", "finished_at"]
    ran = _said("ran", [*run, *ended], "started_at", "finished_at")
    goes_on = F.when(F.col("finished_at").isNull(), _said_open("runs", [*run, "started_at"], "started_at", horizon))
    return _told(attempts, waited, ran, goes_on)


def told_by_tasks(tasks: DataFrame, horizon: datetime | None) -> DataFrame:
    """`what`, `days`, `open` of up to three facts: a task was stored, it ended without a run, it still waits."""
    stored = _said("stored", ["store", "id", "enqueued_queue", "group_id", "created_at"], "created_at", "created_at")
    unrun = (F.col("status") == "CANCELLED") | ((F.col("status") == "FAILED") & (F.col("runs") == 0))
    end = ["store", "id", "queue", "name", "status", "error_type", "error", "fingerprint", "finished_at"]
    waits = F.col("status").isin("PENDING", "RETRYING")
    since = ["store", "id", "queue", "group_id", "due_at", "last_event_at", "created_at"]
    return _told(
        tasks,
        stored,
        F.when(unrun, _said("ended", end, "finished_at", "finished_at")),
        F.when(waits, _said_open("waits", since, "last_event_at", horizon)),
    )


def _said(kind: str, columns: list[str], first: str, last: str) -> Column:
    """One fact, and the days from one moment to another; either may be missing."""
    days = days_spanned(F.least(first, last), F.greatest(first, last))
    return _thing(kind, columns, days, is_open=False)


def _said_open(kind: str, columns: list[str], first: str, horizon: datetime | None) -> Column:
    """One fact that has no end yet."""
    last = F.lit(None).cast("timestamp") if horizon is None else F.timestamp_micros(F.lit(to_us(horizon)))
    return _thing(kind, columns, F.when(F.col(first) <= last, days_spanned(F.col(first), last)), is_open=True)


def _thing(kind: str, columns: list[str], days: Column, *, is_open: bool) -> Column:
    what = F.xxhash64(F.lit(kind), *columns)
    return F.struct(what.alias("what"), days.alias("days"), F.lit(is_open).alias("open"))


def _told(rows: DataFrame, *said: Column) -> DataFrame:
    return rows.select(F.explode(F.array(*said)).alias("said")).select("said.*").where("days is not null")
