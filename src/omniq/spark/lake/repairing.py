"""Repair: a lake whose days and hours were made in other time zones than UTC is put right."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from omniq.errors import LakeError
from omniq.models import from_us
from omniq.spark.causes import unwrapped
from omniq.spark.lake.build import GRACE, BuildReport, Say, build_locked
from omniq.spark.lake.days import is_frozen, misplaced, span_us
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.manifest import File, Part
from omniq.spark.lake.tables import GOLD, SILVER, TABLES
from omniq.spark.lake.writing import PARQUET, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Whose day the folders of bronze tell.
_DATED = {"events": "enqueued_at", "payloads": "created_at"}


class RepairReport(msgspec.Struct, kw_only=True):
    """What a repair found and did.

    `events` and `payloads` were moved to another day; `days` are those whose folders, of any table, held rows of other days.
    Those in `frozen` stay wrong: gold of days whose events have expired. `built` is None if there was nothing to repair.
    """

    events: int = 0
    payloads: int = 0
    days: list[str]
    frozen: list[str]
    built: BuildReport | None = None
    seconds: float = 0.0


def repair(spark: SparkSession, lake: Lake, *, grace: timedelta = GRACE, say: Say | None = None) -> RepairReport:
    """Put a lake right that was taken in or built in other time zones than UTC, as releases before this one did.

    Events and payloads go to the folder of their day, all in one step; then silver and gold are built anew, whole. It may be
    killed at any moment and repeated; ingest may go on beside it. What it replaced stays for `grace`. Raises `LakeError` while
    another process changes the lake, and `CheckFailed` if what was built does not add up.
    """
    begun = time.monotonic()
    tell = say or _silent
    with lake.writer("repair"), unwrapped():
        tell("looking for rows in the folders of other days")
        current, edge = lake.current(), lake.about().expired_before
        manifests = {name: lake.manifest(name, current) for name in TABLES}
        wrong = {name: misplaced(lake, manifest) for name, manifest in manifests.items()}
        found = [(day, is_frozen(manifests[name], day, edge)) for name, days in wrong.items() for day in days]
        report = RepairReport(
            days=sorted({day for day, frozen in found if not frozen}), frozen=sorted({day for day, frozen in found if frozen})
        )
        # A repair that was killed between its two steps has left no misplaced event, and silver of no version.
        begun_before = bool(manifests["tasks"].parts) and not manifests["tasks"].model
        if report.days or begun_before:
            moves = {name: _Move(spark, lake, name, wrong[name], tell) for name in _DATED if wrong[name]}
            _publish(lake, moves)
            report.events, report.payloads = (moves[name].rows if name in moves else 0 for name in _DATED)
            report.built = build_locked(spark, lake, full=True, grace=grace, say=tell)
    report.seconds = time.monotonic() - begun
    return report


def _silent(_: str) -> None:
    return None


class _Move:
    """Files of a table of bronze, written anew to where their rows belong; nothing counts yet."""

    def __init__(self, spark: SparkSession, lake: Lake, name: str, wrong: dict[str, list[File]], say: Say) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        from omniq.spark.lake.clock import day

        say(f"moving {name} of {len(wrong)} {'day' if len(wrong) == 1 else 'days'}")
        self.name = name
        self.old = {file.path for files in wrong.values() for file in files}
        told, right = Observation(), day(_DATED[name])
        rows = lake.read_files(spark, name, [file for files in wrong.values() for file in files])
        rows = rows.observe(told, F.count(F.when(right != F.col("task_date"), 1)).alias("moved"))
        rows = rows.withColumn("task_date", right).repartition("task_date")
        version = f"_batch=repair-{lake.current().number + 1:06d}"
        with settings(spark, PARQUET):
            self.new = write_days(lake, rows, f"bronze/{name}", "task_date", version)
        self.rows = int(told.get["moved"] or 0)
        self.days = sorted({*wrong, *self.new})
        there, expected = (sum(f.rows for files in by.values() for f in files) for by in (self.new, wrong))
        if there != expected:
            lake.folder.remove([file.path for files in self.new.values() for file in files])
            raise LakeError(
                f"{name}: {expected} rows became {there} when they were moved; run omniq lake check --lake {lake.path}"
            )


def _publish(lake: Lake, moves: dict[str, _Move]) -> None:
    """All moves at once; until it is built anew no version of silver and gold fits to what bronze now is."""
    with lake.change() as draft:
        for name, move in moves.items():
            manifest = draft.manifest(name)
            for day in move.days:
                part = manifest.parts.setdefault(day, Part())
                part.files = [*move.new.get(day, []), *(file for file in part.files if file.path not in move.old)]
                part.stamp = str(draft.next_number)
                if not part.files:
                    del manifest.parts[day]
                elif name == "events":
                    spans = [span for file in part.files if (span := span_us(lake, file, "ts")) is not None]
                    part.first, part.last = from_us(min(low for low, _ in spans)), from_us(max(high for _, high in spans))
            draft.put(manifest)
        for name in (*SILVER, *GOLD):
            manifest = draft.manifest(name)
            if manifest.model:
                manifest.model = 0
                draft.put(manifest)
