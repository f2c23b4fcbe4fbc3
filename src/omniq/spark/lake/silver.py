"""Silver: from events to one row per run and one per task. DataFrame in, DataFrame out; native functions only."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

ENDS = ("succeeded", "retried", "failed", "expired", "released", "cancelled")
# After these a task waits for its next run, if it has one.
WAITS_AFTER = ("enqueued", "retried", "expired", "requeued", "succeeded", "failed")
_DATA = "ran_us bigint, result_bytes bigint, payload_bytes bigint, to_queue string, error struct<type:string,message:string>"

# The parts that differ between two errors of the same kind: quoted words, addresses, ids, numbers. An id has a digit, so that
# plain words of eight letters a to f stay; 26 characters are a ULID, as omniq's own ids.
_QUOTED = r"""'[^']*'|"[^"]*"|`[^`]*`"""
_VARIES = (
    r"(?i)\b0x[0-9a-f]+|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b(?=[0-9a-f]*[0-9])[0-9a-f]{8,}\b|\b(?=[0-9a-z]*[0-9])[0-9a-hjkmnp-tv-z]{26}\b|[0-9]+"
)
_RUNS_OF_MARKS = r"#(?:[-.,:/_ ]*#)+"


def normalized(message: Column) -> Column:
    """An error's message without the parts that differ between two errors of a kind."""
    text = F.regexp_replace(message, F.lit(_QUOTED), F.lit("'…'"))
    text = F.regexp_replace(text, F.lit(_VARIES), F.lit("#"))
    text = F.regexp_replace(text, F.lit(_RUNS_OF_MARKS), F.lit("#"))
    return F.trim(F.regexp_replace(text, F.lit(r"\s+"), F.lit(" ")))


def fingerprint(error_type: Column, message: Column) -> Column:
    """16 hex digits of the SHA-256 of the type, a line feed and the normalized message; null without a type."""
    text = F.concat(error_type, F.lit("\n"), F.coalesce(normalized(message), F.lit("")))
    return F.when(error_type.isNotNull(), F.substring(F.sha2(text, 256), 1, 16))


def attempts(events: DataFrame) -> DataFrame:
    """One row per run. A run that was handed back unused does not count as one."""
    rows = lifecycle(events).where("is_run")
    error = F.col("end.d.error")
    return rows.select(
        "store",
        "task_id",
        "queue",
        "name",
        "group_id",
        F.col("run").cast("int").alias("run"),
        "attempt",
        "worker",
        "ready_at",
        "started_at",
        F.col("end.ts").alias("finished_at"),
        _outcome().alias("outcome"),
        "wait_ms",
        "run_ms",
        F.col("end.d.result_bytes").alias("result_bytes"),
        error.getField("type").alias("error_type"),
        error.getField("message").alias("error"),
        fingerprint(error.getField("type"), error.getField("message")).alias("fingerprint"),
        F.col("end.d.to_queue").alias("moved_to"),
        F.coalesce("ended_before", F.lit(False)).alias("again"),
        "previous_started_at",
        "task_date",
    )


def tasks(events: DataFrame) -> DataFrame:
    """One row per task, as of its last event."""
    moved = (F.col("event") == "failed") & F.col("d.to_queue").isNotNull()
    status = F.when(moved, F.lit("PENDING")).otherwise(F.col("status"))
    error = F.col("last_error")
    return (
        lifecycle(events)
        .where("is_last")
        .select(
            "store",
            F.col("task_id").alias("id"),
            F.when(moved, F.col("d.to_queue")).otherwise(F.col("queue")).alias("queue"),
            "name",
            "group_id",
            status.alias("status"),
            F.when(moved, F.lit(0)).otherwise(F.col("attempt")).alias("attempts"),
            F.col("run").cast("int").alias("runs"),
            F.col("releases").cast("int").alias("releases"),
            F.col("enqueued_at").alias("created_at"),
            F.when(moved, F.col("ts")).otherwise(F.col("due_at")).alias("due_at"),
            F.col("last_run.started_at").alias("started_at"),
            F.when(status.isin("SUCCESS", "FAILED", "CANCELLED"), F.col("ended_at")).alias("finished_at"),
            "removed_at",
            F.col("last_run.wait_ms").alias("wait_ms"),
            F.col("last_run.run_ms").alias("run_ms"),
            "total_wait_ms",
            "total_run_ms",
            F.col("last_run.worker").alias("worker"),
            error.getField("type").alias("error_type"),
            error.getField("message").alias("error"),
            fingerprint(error.getField("type"), error.getField("message")).alias("fingerprint"),
            "payload_bytes",
            "enqueued_queue",
            "events",
            "last_event_at",
            "task_date",
        )
    )


def lifecycle(events: DataFrame) -> DataFrame:
    """Events with the earlier and later events in the life of their task; all windows share one sort.

    Within a store's only shard the sequence number is the order. A task that moved to a dead queue may have events in two
    shards of Redis, whose numbers do not compare; there the server's clock orders them.
    """
    order = [F.when(F.col("shard") == "", F.lit(0)).otherwise(F.unix_micros("ts")), F.col("shard"), F.col("seq")]
    life = Window.partitionBy("store", "task_id").orderBy(*order)
    whole = life.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    before = life.rowsBetween(Window.unboundedPreceding, -1)
    upto = life.rowsBetween(Window.unboundedPreceding, 0)

    def last(value: Column, over: object) -> Column:
        return F.last(value, ignorenulls=True).over(over)  # type: ignore[arg-type]

    event = F.col("event")
    # An event that is there twice is dropped, or it would be a run of its own; the check of totals still tells of it.
    is_new = F.coalesce((F.lag("seq").over(life) != F.col("seq")) | (F.lag("shard").over(life) != F.col("shard")), F.lit(True))
    rows = events.select("*", is_new.alias("is_new")).where("is_new")
    # Progress tells nothing of a run's course and would stand between its start and its end; of a task that has nothing else it
    # stays, so that no task is without a row.
    rows = rows.select(
        "*",
        F.count(F.lit(1)).over(whole).alias("events"),
        F.count(F.when(event != "progress", 1)).over(whole).alias("telling"),
        F.max("ts").over(whole).alias("last_event_at"),
    ).where((event != "progress") | (F.col("telling") == 0))
    # Only these have data that silver uses.
    parsed = F.when(event.isin(*ENDS, "enqueued"), F.from_json("data", _DATA))
    rows = rows.select("*", parsed.alias("d"))
    rows = rows.select(
        "*",
        F.lead(F.struct("event", "ts", "d")).over(life).alias("next"),
        F.lag("event").over(life).alias("previous_event"),
        last(F.when(event.isin(*WAITS_AFTER), F.col("ts")), before).alias("waits_since"),
        last(
            F.when(event.isin("succeeded", "failed", "cancelled", "requeued"), F.lit(True)).when(
                event.isin("enqueued", "retried", "expired"), F.lit(False)
            ),
            before,
        ).alias("ended_before"),
    )
    next_event = F.col("next.event")
    starts = (event == "started") & (next_event.isNull() | (next_event != "released"))
    # A torso is an end whose beginning was purged before it was ingested.
    torso = (
        event.isin("succeeded", "retried", "failed", "expired")
        & (F.col("attempt") >= 1)
        & F.coalesce(F.col("previous_event") != "started", F.lit(True))
    )
    end = F.when(starts & next_event.isin(*ENDS), F.col("next")).when(torso, F.struct("event", "ts", "d"))
    rows = rows.select(
        "*",
        (starts | torso).alias("is_run"),
        next_event.isNull().alias("is_last"),
        F.when(starts, F.col("ts")).alias("started_at"),
        end.alias("end"),
        # A clock that was set back must not make a time negative.
        F.when(starts, F.least(F.greatest(F.col("due_at"), F.col("waits_since")), F.col("ts"))).alias("ready_at"),
    )
    measured = F.col("end.d.ran_us") / F.lit(1000.0)
    between = _ms_between("started_at", "end.ts")
    between = F.when(between < 0, F.lit(0.0)).otherwise(between)
    rows = rows.select(
        "*",
        _ms_between("ready_at", "started_at").alias("wait_ms"),
        F.coalesce(measured, between).alias("run_ms"),
    )
    run = F.when(F.col("is_run"), F.struct("started_at", "wait_ms", "run_ms", "worker"))
    return rows.select(
        "*",
        F.count(F.when(F.col("is_run"), 1)).over(upto).alias("run"),
        F.last(F.col("started_at"), ignorenulls=True).over(before).alias("previous_started_at"),
        F.count(F.when(event == "released", 1)).over(upto).alias("releases"),
        last(run, upto).alias("last_run"),
        F.sum(F.when(F.col("is_run"), F.col("wait_ms"))).over(upto).alias("total_wait_ms"),
        F.sum(F.when(F.col("is_run"), F.col("run_ms"))).over(upto).alias("total_run_ms"),
        last(F.when(F.col("d.error.type").isNotNull(), F.col("d.error")), upto).alias("last_error"),
        last(F.when(event.isin("succeeded", "failed", "cancelled"), F.col("ts")), upto).alias("ended_at"),
        last(F.when(event == "removed", F.col("ts")), upto).alias("removed_at"),
        last(F.col("d.payload_bytes"), upto).alias("payload_bytes"),
        F.first("queue").over(upto).alias("enqueued_queue"),
    )


def _outcome() -> Column:
    return (
        F.when(F.col("end").isNotNull(), F.col("end.event")).when(F.col("is_last"), F.lit("running")).otherwise(F.lit("lost"))
    )


def _ms_between(start: str, end: str) -> Column:
    return (F.unix_micros(end) - F.unix_micros(start)) / F.lit(1000.0)
