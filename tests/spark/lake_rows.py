"""Events of a lake's tests, written by hand: `Life` tells what a store would have written of one task."""

import json
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from omniq.spark import Lake

# The history that tests share: how many days from which on, and what a function of it is called.
FIRST, DAYS = date(2026, 1, 5), 3
EVIL = "shop</code><script>alert(1)</script>$x^2$"
START = datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
_STATUS = {
    "enqueued": "PENDING",
    "started": "RUNNING",
    "progress": "RUNNING",
    "succeeded": "SUCCESS",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
    "retried": "RETRYING",
    "expired": "RETRYING",
    "released": "PENDING",
    "requeued": "PENDING",
    "rescheduled": "PENDING",
    "removed": "SUCCESS",
}


class Log:
    """The log of one store; numbers grow by one in each shard."""

    def __init__(self, store: str = "s1", start: datetime = START) -> None:
        self.store, self.start = store, start
        self.rows: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}

    def task(self, id: str, queue: str = "mail", name: str = "app:send", group: str | None = None, at: float = 0.0) -> "Life":
        return Life(self, id, queue, name, group, at)

    def add(self, shard: str, **row: Any) -> None:
        seq = self.numbers[shard] = self.numbers.get(shard, 0) + 1
        self.rows.append({"store": self.store, "shard": shard, "seq": seq, **row})

    def frame(self, spark: "SparkSession", after: int = 0) -> "DataFrame":
        """The events from a place of the log on."""
        from omniq.spark.lake.tables import TABLES

        names = TABLES["events"].names[:-1]
        ddl = ", ".join(f"{column.name} {column.type}" for column in TABLES["events"].columns[:-1])
        return spark.createDataFrame([tuple(row[name] for name in names) for row in self.rows[after:]], ddl)


class Life:
    """One task; seconds count from the log's start."""

    def __init__(self, log: Log, id: str, queue: str, name: str, group: str | None, at: float) -> None:
        self.log, self.id, self.queue, self.name, self.group = log, id, queue, name, group
        self.enqueued_at = self.due_at = log.start + timedelta(seconds=at)
        self.attempt, self.worker, self.shard = 0, None, ""
        self.event(at, "enqueued", payload_bytes=7)

    def event(self, at: float, event: str, **data: Any) -> "Life":
        self.log.add(
            self.shard,
            ts=self.log.start + timedelta(seconds=at),
            event=event,
            task_id=self.id,
            queue=self.queue,
            name=self.name,
            group_id=self.group,
            attempt=self.attempt,
            worker=self.worker,
            enqueued_at=self.enqueued_at,
            due_at=self.due_at,
            status=data.pop("status", _STATUS[event]),
            data=json.dumps(data) if data else None,
        )
        return self

    def started(self, at: float, worker: str = "w1") -> "Life":
        self.attempt += 1
        self.worker = worker
        return self.event(at, "started")

    def succeeded(self, at: float, ran_us: int | None = None) -> "Life":
        return self.event(at, "succeeded", **({} if ran_us is None else {"ran_us": ran_us}), result_bytes=3)

    def retried(self, at: float, due: float, error: str = "ValueError: no") -> "Life":
        self.due_at = self.log.start + timedelta(seconds=due)
        return self.event(at, "retried", error=_error(error), ran_us=1000)

    def failed(self, at: float, error: str = "ValueError: no", **data: Any) -> "Life":
        return self.event(at, "failed", error=_error(error), ran_us=1000, **data)


def _error(text: str) -> dict[str, str]:
    kind, _, message = text.partition(": ")
    return {"type": kind, "message": message}


def second(moment: datetime | None) -> float | None:
    """A moment that Spark gave, as seconds after the log's start."""
    return None if moment is None else (moment.astimezone(UTC) - START).total_seconds()


def rows(lake: "Lake", name: str) -> list[str]:
    """What a table holds, as DuckDB reads it, without what depends on the order of additions."""
    import duckdb

    from omniq.spark.lake.tables import TABLES

    told = {"double": "round({}, 3)", "timestamp": "epoch_us({})"}
    kinds = {c.name: c.type for c in TABLES[name].columns if "sketch" not in c.name and "_p" not in c.name}
    chosen = [told.get(kind, "{}").format(n) for n, kind in kinds.items()]
    return sorted(map(str, duckdb.sql(f"select {', '.join(chosen)} from read_parquet({lake.files(name)!r})").fetchall()))


def filed_by(spark: "SparkSession", lake: "Lake", *zones: str) -> None:
    """Events as releases before filed them that asked the session for the day: each batch in the next zone."""
    from pyspark.sql import functions as F

    from omniq.spark.lake.manifest import TableDay
    from omniq.spark.lake.writing import PARQUET, settings, write_days

    parts: dict[str, TableDay] = {}
    events = lake.table(spark, "events")
    for n, zone in enumerate(zones):
        with settings(spark, {**PARQUET, "spark.sql.session.timeZone": zone}):
            batch = events.where(F.col("seq") % len(zones) == n).withColumn("task_date", F.to_date("enqueued_at"))
            for day, files in write_days(lake, batch, "bronze/events", "task_date", f"_batch=old-{n}").items():
                parts.setdefault(day, TableDay(stamp="old")).files += files
    with lake.change() as draft:
        manifest = draft.manifest("events")
        manifest.parts = parts
        draft.put(manifest)


def gold_filed_by(spark: "SparkSession", lake: "Lake", zone: str) -> None:
    """The same for gold: the days of its rows, and the hours that were made with `date_trunc`."""
    from pyspark.sql import functions as F

    from omniq.spark.lake.days import moments
    from omniq.spark.lake.manifest import TableDay
    from omniq.spark.lake.tables import GOLD
    from omniq.spark.lake.writing import PARQUET, settings, write_days

    for name in GOLD:
        at = moments(name)[0]
        with settings(spark, {**PARQUET, "spark.sql.session.timeZone": zone}):
            made = lake.table(spark, name)
            if name in ("func_hour", "capacity_hour"):
                made = made.withColumn(at, F.date_trunc("hour", at))
            found = write_days(lake, made.withColumn("day", F.to_date(at)), f"gold/{name}", "day", "_v=old")
        with lake.change() as draft:
            manifest = draft.manifest(name)
            manifest.parts = {day: TableDay(files=files, stamp="old") for day, files in found.items()}
            draft.put(manifest)
