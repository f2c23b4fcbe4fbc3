"""Erasure: a task or a group is deleted from every table of a lake, and does not come back."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from omniq.errors import Invalid
from omniq.spark.causes import unwrapped
from omniq.spark.lake.build import build_locked
from omniq.spark.lake.layout import Erasure, Lake, swap
from omniq.spark.lake.leftovers import collect
from omniq.spark.lake.manifest import File, Manifest
from omniq.spark.lake.tables import TABLES
from omniq.spark.lake.writing import PARQUET, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


class EraseReport(msgspec.Struct, kw_only=True):
    """The rows that were deleted from bronze, and the days on which their tasks had been stored."""

    rows: int = 0
    payloads: int = 0
    days: list[str]


def erase(spark: SparkSession, lake: Lake, *, task: str | None = None, group: str | None = None) -> EraseReport:
    """Delete everything that the lake holds of one task, or of all tasks of a group, in every table; it does not come back.

    Its events that are ingested later are dropped: for a task always, for a group if the task was stored before now. The lake
    keeps a hash of the id for that. The files that held it are deleted at once, so a query that reads them may fail.
    """
    if (task is None) == (group is None):
        raise Invalid("erase one task or one group: give task= or group=")
    kind, value = ("task", task) if task is not None else ("group", group)
    assert value is not None
    entry = Erasure(kind=kind, digest=hashlib.sha256(value.encode()).hexdigest(), at=datetime.now(UTC))
    # Noted before anything is deleted: ingest goes on meanwhile, and must not bring in what was just looked for.
    with lake.writer("erase"), unwrapped():
        with lake.change() as draft:
            known = [e for e in draft.about.erased if (e.kind, e.digest) != (entry.kind, entry.digest)]
            draft.about.erased = [*known, entry]
        report = EraseReport(days=[])
        with settings(spark, PARQUET):
            events = "task_id" if task is not None else "group_id"
            report.rows, days, doomed = _without(spark, lake, "events", lake.manifest("events"), events, value)
            report.days = sorted(days)
            own = "id" if task is not None else "group_id"
            report.payloads, _, more = _without(spark, lake, "payloads", lake.manifest("payloads"), own, value)
            doomed += more + _quarantine_without(lake, events, value)
            doomed += _frozen_gold_without(spark, lake, task, group)
        # The old files go last: until the build is published the tables are made of them.
        build_locked(spark, lake)
        lake.folder.remove(doomed)
        collect(lake, timedelta(0), thorough=True)
    return report


def _without(
    spark: SparkSession, lake: Lake, name: str, manifest: Manifest, column: str, value: str
) -> tuple[int, set[str], list[str]]:
    """Rewrite the files of a bronze table in which a column has the value.

    Returns the number of rows that were left out, their days, and the paths of the old files.
    """
    from pyspark.sql import functions as F

    table = TABLES[name]
    if not manifest.files:
        return 0, set(), []
    paths = [lake.folder.address(file.path) for file in manifest.files]
    hits = spark.read.parquet(*paths).where(F.col(column) == value).groupBy(F.col("_metadata.file_path").alias("p")).count()
    found = {os.path.relpath(unquote(urlsplit(row["p"]).path), lake.path): row["count"] for row in hits.collect()}
    days: set[str] = set()
    doomed: list[str] = []
    for day, part in manifest.parts.items():
        old = [file for file in part.files if file.path in found]
        if not old:
            continue
        days.add(day)
        doomed += [file.path for file in old]
        # Rows without a group compare to null, and stay.
        rows = lake.read_files(spark, name, old).where(~F.coalesce(F.col(column) == value, F.lit(False)))
        version = f"_batch=erase-{lake.current().number + 1:06d}"
        files = write_days(lake, rows.coalesce(1), f"bronze/{name}", table.partition, version).get(day, [])
        swap(lake, name, day, old, files, stamp=True)
    return sum(found.values()), days, doomed


def _quarantine_without(lake: Lake, column: str, value: str) -> list[str]:
    """Drop the quarantine files that hold the value, and return their paths. Whole files: their rows are in no other table."""
    import pyarrow.parquet as parquet

    def concerns(file: File) -> bool:
        return value in parquet.ParquetFile(lake.folder.path(file.path)).read([column])[column].to_pylist()

    doomed = [file for file in lake.manifest("events").quarantine if concerns(file)]
    if doomed:
        with lake.change() as draft:
            manifest = draft.manifest("events")
            gone = {file.path for file in doomed}
            manifest.quarantine = [file for file in manifest.quarantine if file.path not in gone]
            draft.put(manifest)
    return [file.path for file in doomed]


def _frozen_gold_without(spark: SparkSession, lake: Lake, task: str | None, group: str | None) -> list[str]:
    """Take ids and error texts out of the days of gold whose silver has expired, since those cannot be built anew."""
    from pyspark.sql import functions as F

    frozen = lake.about().expired_before
    name = "failure_day" if task is not None else "group_hour"
    manifest = lake.manifest(name)
    if frozen is None:
        return []
    doomed: list[str] = []
    for day in [day for day in manifest.parts if day < frozen.isoformat()]:
        old = manifest.parts[day].files
        rows = lake.read_files(spark, name, old)
        concerns: Column = F.array_contains("sample_ids", task) if task is not None else F.col("group_id") == group
        if rows.where(concerns).isEmpty():
            continue
        if task is not None:
            rows = rows.withColumns(
                {
                    "sample_error": F.when(~concerns, F.col("sample_error")),
                    "sample_ids": F.array_remove("sample_ids", task),
                }
            )
        else:
            rows = rows.where(~concerns)
        version = f"_v=erase-{lake.current().number + 1:06d}"
        files = write_days(lake, rows.select(*TABLES[name].names).coalesce(1), f"gold/{name}", "day", version).get(day, [])
        swap(lake, name, day, old, files)
        doomed += [file.path for file in old]
    return doomed
