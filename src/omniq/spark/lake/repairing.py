"""Repair of a lake whose days and hours were made in other time zones than UTC."""

from __future__ import annotations

import time
from datetime import date, timedelta
from typing import TYPE_CHECKING

import msgspec

from omniq.errors import LakeError
from omniq.models import from_us
from omniq.spark.causes import unwrapped
from omniq.spark.lake.build import GRACE, BuildReport, Say, build_locked
from omniq.spark.lake.days import is_frozen, misplaced, moments, span_us
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.manifest import File, Manifest, TableDay
from omniq.spark.lake.tables import GOLD, SILVER, TABLES
from omniq.spark.lake.writing import PARQUET, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BRONZE = ("events", "payloads")


class RepairReport(msgspec.Struct, kw_only=True):
    """The findings and effects of a repair.

    `events` and `payloads` were moved to another day; `days` are the days whose folders, of any table, held rows of other days.
    The days in `frozen` stay wrong: gold whose events have expired, as far as moving its rows does not help. `built` is None if
    there was nothing to repair.
    """

    events: int = 0
    payloads: int = 0
    days: list[str]
    frozen: list[str]
    built: BuildReport | None = None
    seconds: float = 0.0


def repair(spark: SparkSession, lake: Lake, *, grace: timedelta = GRACE, say: Say | None = None) -> RepairReport:
    """Repair a lake that was taken in or built in other time zones than UTC, as releases before this one did.

    Events and payloads go to the folder of their day, all in one step, and with them gold if some of it cannot be built anew;
    then silver and gold are built, whole. It may be killed at any moment and repeated; ingest may go on beside it. Replaced
    files stay for `grace`. Raises `LakeError` while another process changes the lake, and `CheckFailed` if the new tables do
    not add up.
    """
    begun = time.monotonic()
    tell = say or _silent
    with lake.writer("repair"), unwrapped():
        tell("looking for rows in the folders of other days")
        current, edge = lake.current(), lake.about().expired_before
        manifests = {name: lake.manifest(name, current) for name in TABLES}
        wrong = {name: misplaced(lake, manifest) for name, manifest in manifests.items()}
        report = _report(wrong, edge)
        # A repair that was killed between its two steps has left no misplaced event, and manifests of silver without a model.
        begun_before = bool(manifests["tasks"].parts) and not manifests["tasks"].model
        if report.days or begun_before:
            # Gold before the edge stays, and new gold begins there: no hour may be on both sides of the edge, or on neither.
            movable = _BRONZE if edge is None else (*_BRONZE, *GOLD)
            moves = {name: _Move(spark, lake, name, wrong[name], tell) for name in movable if wrong[name]}
            _publish(lake, moves)
            report.events, report.payloads = (moves[name].rows if name in moves else 0 for name in _BRONZE)
            report.built = build_locked(spark, lake, full=True, grace=grace, say=tell)
            if edge is not None:
                report.frozen = _report({name: misplaced(lake, lake.manifest(name)) for name in GOLD}, edge).frozen
    report.seconds = time.monotonic() - begun
    return report


def _report(wrong: dict[str, dict[str, list[File]]], edge: date | None) -> RepairReport:
    frozen = {day for name, days in wrong.items() for day in days if is_frozen(name, day, edge)}
    others = {day for name, days in wrong.items() for day in days if not is_frozen(name, day, edge)}
    return RepairReport(days=sorted(others), frozen=sorted(frozen))


def _silent(_: str) -> None:
    return None


class _Move:
    """Files of a table, written anew in the folders where their rows belong; they do not count yet."""

    def __init__(self, spark: SparkSession, lake: Lake, name: str, wrong: dict[str, list[File]], say: Say) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        from omniq.spark.lake.clock import day

        say(f"moving {name} of {len(wrong)} {'day' if len(wrong) == 1 else 'days'}")
        self.name, table = name, TABLES[name]
        self.old = {file.path for files in wrong.values() for file in files}
        told, right = Observation(), day(moments(name)[0])
        rows = lake.read_files(spark, name, [file for files in wrong.values() for file in files])
        rows = rows.observe(told, F.count(F.when(right != F.col(table.partition), 1)).alias("moved"))
        rows = rows.withColumn(table.partition, right).repartition(table.partition)
        version = f"{'_batch' if table.layer == 'bronze' else '_v'}=repair-{lake.current().number + 1:06d}"
        with settings(spark, PARQUET):
            self.new = write_days(lake, rows, f"{table.layer}/{name}", table.partition, version)
        self.rows = int(told.get["moved"] or 0)
        self.days = sorted({*wrong, *self.new})
        there, expected = (sum(f.rows for files in by.values() for f in files) for by in (self.new, wrong))
        # The old files are about to be dropped, and nothing else has these rows.
        if there != expected:
            lake.folder.remove([file.path for files in self.new.values() for file in files])
            raise LakeError(
                f"{name}: {expected} rows became {there} when they were moved; run omniq lake check --lake {lake.path}"
            )


def _publish(lake: Lake, moves: dict[str, _Move]) -> None:
    """Publish all moves at once. Silver and gold get model 0, since no version of them fits the moved events."""
    with lake.change() as draft:
        for name in dict.fromkeys((*moves, *SILVER, *GOLD)):
            manifest = draft.manifest(name)
            if name in moves:
                _enter(lake, manifest, moves[name], str(draft.next_number))
            elif not manifest.model:
                continue
            if name not in _BRONZE:
                manifest.model = 0
            draft.put(manifest)


def _enter(lake: Lake, manifest: Manifest, move: _Move, stamp: str) -> None:
    for day in move.days:
        part = manifest.parts.setdefault(day, TableDay())
        part.files = [*move.new.get(day, []), *(file for file in part.files if file.path not in move.old)]
        part.stamp = stamp
        if not part.files:
            del manifest.parts[day]
        elif manifest.table == "events":
            spans = [span for file in part.files if (span := span_us(lake, file, "ts")) is not None]
            part.first, part.last = from_us(min(low for low, _ in spans)), from_us(max(high for _, high in spans))
