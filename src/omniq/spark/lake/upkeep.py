"""Upkeep of a lake: fewer and larger files, and an end for old days."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from omniq.errors import Invalid
from omniq.spark.lake.build import GRACE
from omniq.spark.lake.layout import Lake, swap
from omniq.spark.lake.leftovers import collect
from omniq.spark.lake.manifest import File, TableDay
from omniq.spark.lake.tables import SILVER, TABLES
from omniq.spark.lake.writing import PARQUET, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TARGET_MB = 128
_SORTED = {
    "events": ("queue", "name", "ts"),
    "attempts": ("queue", "name", "started_at"),
    "tasks": ("queue", "name", "created_at"),
}


class CompactReport(msgspec.Struct, kw_only=True):
    """The number of days that were rewritten, and of their files before and after."""

    days: int = 0
    before: int = 0
    after: int = 0


class ExpireReport(msgspec.Struct, kw_only=True):
    """The numbers of days and rows that were dropped, by table, and the first day that is kept whole."""

    kept_from: date
    days: dict[str, int]
    rows: dict[str, int]


def compact(
    spark: SparkSession, lake: Lake, *, before: date | None = None, target_mb: int = TARGET_MB, grace: timedelta = GRACE
) -> CompactReport:
    """Rewrite the days of bronze and silver that have more files than their size needs; the rows stay the same.

    Only days before `before`, by default today: late events are still likely to come for the newest day.
    """
    edge = (before or datetime.now(UTC).date()).isoformat()
    report = CompactReport()
    with lake.writer("compact"), settings(spark, PARQUET):
        for name in ("events", *SILVER):
            manifest = lake.manifest(name)
            for day, part in sorted(manifest.parts.items()):
                wanted = max(1, -(-sum(file.bytes for file in part.files) // (target_mb * 1024 * 1024)))
                if day < edge and len(part.files) > wanted:
                    files = _rewritten(spark, lake, name, day, part.files, wanted)
                    report.days += 1
                    report.before += len(part.files)
                    report.after += len(files)
        collect(lake, grace)
    return report


def _rewritten(spark: SparkSession, lake: Lake, name: str, day: str, old: list[File], wanted: int) -> list[File]:
    table = TABLES[name]
    rows = lake.read_files(spark, name, old).repartition(wanted)
    kind = "_batch" if table.layer == "bronze" else "_v"
    version = f"{kind}=compact-{lake.current().number + 1:06d}"
    files = write_days(lake, rows, f"{table.layer}/{name}", table.partition, version, _SORTED[name]).get(day, [])
    # Bronze cannot be made again from anything else.
    if sum(file.rows for file in files) != sum(file.rows for file in old):
        lake.folder.remove([file.path for file in files])
        raise Invalid(f"{name} of {day}: {len(old)} files hold other rows than the manifest says; run omniq lake check")
    # Without a new stamp: the rows are the same, so nothing has to be built anew.
    swap(lake, name, day, old, files)
    return files


def expire(
    spark: SparkSession | None,
    lake: Lake,
    *,
    keep_days: int,
    gold_days: int | None = None,
    now: datetime | None = None,
    grace: timedelta = GRACE,
) -> ExpireReport:
    """Drop the days of bronze and silver without an event for `keep_days`; gold stays, or is dropped after `gold_days`.

    A day that holds a task which still runs now and then, such as one with an interval, stays as long as that goes on. Needs no
    Spark session: `spark` may be None. Days of gold before the edge are not built anew any more.
    """
    if keep_days < 1 or (gold_days is not None and gold_days < keep_days):
        raise Invalid(f"keep at least 1 day, and gold no shorter than the rest: keep_days={keep_days}, gold_days={gold_days}")
    today = (now or datetime.now(UTC)).date()
    edge = today - timedelta(days=keep_days)
    report = ExpireReport(kept_from=edge, days={}, rows={})
    with lake.writer("expire"):
        with lake.change() as draft:
            old = [day for day, part in draft.manifest("events").parts.items() if part.last is None or part.last.date() < edge]
            for name, table in TABLES.items():
                manifest = draft.manifest(name)
                doomed = old
                if table.layer == "gold":
                    limit = "" if gold_days is None else (today - timedelta(days=gold_days)).isoformat()
                    doomed = [day for day in manifest.parts if day < limit]
                gone = [part for part in (manifest.parts.pop(day, None) for day in doomed) if part is not None]
                if name == "events":
                    # No task is behind these rows, so they expire by the day of their folder.
                    quarantined = [file for file in manifest.quarantine if _day_of(file) >= edge.isoformat()]
                    gone += [TableDay(files=[])] if len(quarantined) < len(manifest.quarantine) else []
                    manifest.quarantine = quarantined
                if gone:
                    report.days[name] = len([part for part in gone if part.files])
                    report.rows[name] = sum(part.rows for part in gone)
                    draft.put(manifest)
            if old and (draft.about.expired_before is None or draft.about.expired_before < edge):
                draft.about.expired_before = edge
        collect(lake, grace)
    return report


def _day_of(file: File) -> str:
    return file.path.partition("task_date=")[2].partition("/")[0]
