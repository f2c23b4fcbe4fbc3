"""Payloads: the encoded arguments of tasks, taken in only on demand, from the tasks that the store still has."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from omniq.spark.causes import unwrapped
from omniq.spark.lake.bronze import is_erased
from omniq.spark.lake.manifest import TableDay
from omniq.spark.lake.tables import TABLES
from omniq.spark.lake.writing import PARQUET, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omniq.spark.lake.layout import Lake

# Tasks of a run that was staged for long are older than the moment at which they became visible.
LOOK_BACK = timedelta(days=1)


def take_payloads(spark: SparkSession, url: str, lake: Lake, store: str) -> int:
    """Add the payloads of tasks whose payload the lake does not have, and return their number."""
    from pyspark.sql import functions as F

    from omniq.spark.lake.clock import day
    from omniq.spark.reading.reading import read

    table, manifest = TABLES["payloads"], lake.manifest("payloads")
    until = manifest.batches.get(store)
    where = None
    if until is not None:
        since = datetime.fromtimestamp(until / 1e6, UTC) - LOOK_BACK
        where = f"created_at >= '{since.isoformat()}'"
    columns = ["id", "queue", "name", "group_id", "created_at", "encoding", "payload"]
    rows = read(spark, url, "tasks", columns=columns, where=where)
    rows = rows.where(F.col("payload").isNotNull()).withColumns(
        {"store": F.lit(store), "task_date": day("created_at"), "enqueued_at": F.col("created_at")}
    )
    erased = lake.about().erased
    rows = rows.withColumn("task_id", F.col("id")).where(~is_erased(erased)).select(*table.names)
    there = lake.frame(spark, manifest).select("store", "id")
    version = f"_batch=payloads-{uuid.uuid4().hex[:12]}"
    with unwrapped(), settings(spark, PARQUET):
        # The looks overlap by a day, and on Redis a task that moves while it is read may be read twice.
        new = rows.join(there, ["store", "id"], "left_anti").dropDuplicates(["id"]).select(*table.names)
        found = write_days(lake, new, "bronze/payloads", "task_date", version)
        written = [file for files in found.values() for file in files]
        latest = lake.read_files(spark, "payloads", written).agg(F.max(F.unix_micros("created_at"))).collect()[0][0]
    if not written:
        return 0
    with lake.change() as draft:
        manifest = draft.manifest("payloads")
        for date, files in found.items():
            part = manifest.parts.setdefault(date, TableDay())
            part.files += files
            part.stamp = str(draft.next_number)
        manifest.batches[store] = max(latest, manifest.batches.get(store, 0))
        draft.put(manifest)
    return sum(file.rows for file in written)
