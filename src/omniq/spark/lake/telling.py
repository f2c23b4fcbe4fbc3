"""Of which days the rows of silver tell: each thing that gold takes from a row, as a hash, with the days that it changes.

When gold takes something new from silver it must be added here, else an incremental build would miss it; a test compares.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from omniq.spark.lake.clock import days_spanned


def told_by_attempts(attempts: DataFrame) -> DataFrame:
    """`what`, `days`: that a run waited and began, and that it went on and ended."""
    run = ["store", "task_id", "queue", "name", "group_id", "attempt"]
    waited = _said(
        "waited", [*run, "ready_at", "started_at", "wait_ms", "again", "previous_started_at"], "ready_at", "started_at"
    )
    ended = ["outcome", "wait_ms", "run_ms", "error_type", "error", "fingerprint", "started_at", "finished_at"]
    ran = _said("ran", [*run, *ended], "started_at", "finished_at")
    return _told(attempts, waited, ran)


def told_by_tasks(tasks: DataFrame) -> DataFrame:
    """`what`, `days`: that a task was stored, that it ended without a run, and that it still waits."""
    stored = _said("stored", ["store", "id", "enqueued_queue", "group_id", "created_at"], "created_at", "created_at")
    unrun = (F.col("status") == "CANCELLED") | ((F.col("status") == "FAILED") & (F.col("runs") == 0))
    end = ["store", "id", "queue", "name", "status", "error_type", "error", "fingerprint", "finished_at"]
    waits = F.col("status").isin("PENDING", "RETRYING")
    since = ["store", "id", "queue", "group_id", "due_at", "last_event_at", "created_at"]
    return _told(
        tasks,
        stored,
        F.when(unrun, _said("ended", end, "finished_at", "finished_at")),
        F.when(waits, _said("waits", since, "due_at", "last_event_at")),
    )


def _said(kind: str, columns: list[str], first: str, last: str) -> Column:
    """One thing, and the days from one moment to another; either may be missing."""
    start, end = F.least(first, last), F.greatest(first, last)
    days = days_spanned(start, end)
    return F.struct(F.xxhash64(F.lit(kind), *columns).alias("what"), days.alias("days"))


def _told(rows: DataFrame, *said: Column) -> DataFrame:
    return rows.select(F.explode(F.array(*said)).alias("said")).select("said.*").where("days is not null")
