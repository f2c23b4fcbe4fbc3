"""Build: silver and gold from bronze, only the days that changed; checked before it is published, all tables at once.

A day of silver has the tasks that were stored on it, a day of gold has everything that happened on it. A new day of silver is
compared row by row with the version before to find the days of gold that it changes: exact, however late events came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING

import msgspec

from omniq.errors import CheckFailed, Invalid
from omniq.spark.causes import unwrapped
from omniq.spark.lake import models
from omniq.spark.lake.checks import check_gaps
from omniq.spark.lake.days import check_days
from omniq.spark.lake.gaps import days_of, marked, spans
from omniq.spark.lake.leftovers import collect
from omniq.spark.lake.manifest import Manifest, TableDay
from omniq.spark.lake.tables import GOLD, SILVER, TABLES
from omniq.spark.lake.totals import CheckResult, SilverDay, check_gold, check_silver, silver_days
from omniq.spark.lake.touched_days import told_by_attempts, told_by_tasks
from omniq.spark.lake.writing import PARQUET, days_between, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from omniq.spark.lake.layout import Lake

# A reader that has opened a version may go on with it for an hour, as the docs promise.
GRACE = timedelta(hours=1)
# Planning of one table overlaps with the running jobs of others.
THREADS = 3
Say = Callable[[str], None]

# Readers skip groups of rows by the least and greatest value of a column: sorted files let them skip by queue and function.
_SORTED: dict[str, tuple[str, ...]] = {
    "attempts": ("queue", "name", "started_at"),
    "tasks": ("queue", "name", "created_at"),
    "queue_minute": ("store", "queue", "minute"),
    "func_hour": ("store", "queue", "name", "hour"),
    "group_hour": ("store", "queue", "group_id", "hour"),
    "failure_day": ("store", "name", "fingerprint"),
    "retry_storm": ("store", "name", "window_start"),
    "capacity_hour": ("store", "queue", "hour"),
}


class BuildReport(msgspec.Struct, kw_only=True):
    """The result of a build. `days` are the days of each table that were written anew."""

    version: str
    days: dict[str, list[str]]
    rows: dict[str, int]
    seconds: float

    @property
    def changed(self) -> bool:
        return any(self.days.values())


def build(
    spark: SparkSession,
    lake: Lake,
    *,
    tables: Iterable[str] | None = None,
    days: Iterable[date] | None = None,
    full: bool = False,
    grace: timedelta = GRACE,
    say: Say | None = None,
) -> BuildReport:
    """Bring silver and gold up to what bronze holds.

    `tables` names the tables of gold to build (silver is always brought up to date); the others catch up in a later build.
    `days` names days on which tasks were stored, to be built anew even if nothing changed; `full` builds everything anew.
    Versions that are replaced stay for `grace`, for readers that still use them. Raises `CheckFailed`, and publishes nothing,
    if the new tables do not add up.
    """
    wanted = _gold_wanted(tables)
    with lake.writer("build"), unwrapped():
        return _Build(spark, lake, wanted, days, full, say or _silent).run(grace)


def build_locked(
    spark: SparkSession, lake: Lake, *, full: bool = False, grace: timedelta = GRACE, say: Say | None = None
) -> BuildReport:
    """The same, for a caller that holds the lake's lock of writers already."""
    return _Build(spark, lake, list(GOLD), None, full, say or _silent).run(grace)


def _gold_wanted(tables: Iterable[str] | None) -> list[str]:
    chosen = set(GOLD if tables is None else tables)
    unknown = chosen - set(GOLD) - set(SILVER)
    if unknown:
        raise Invalid(f"no such table to build: {', '.join(sorted(unknown))}; there are {', '.join((*SILVER, *GOLD))}")
    if "capacity_hour" in chosen:
        chosen.add("queue_minute")  # is made of it
    return [name for name in GOLD if name in chosen]


def _silent(_: str) -> None:
    return None


class _Build:
    def __init__(
        self, spark: SparkSession, lake: Lake, wanted: list[str], days: Iterable[date] | None, full: bool, say: Say
    ) -> None:
        self.spark, self.lake, self.wanted, self.full, self.say = spark, lake, wanted, full, say
        self.forced = {day.isoformat() for day in days or ()}
        current = lake.current()
        self.events = lake.manifest("events", current)
        self.old = {name: lake.manifest(name, current) for name in (*SILVER, *GOLD)}
        # Copies, to be changed: a build that fails leaves the old ones as they were read.
        self.new = {name: msgspec.json.decode(msgspec.json.encode(m), type=Manifest) for name, m in self.old.items()}
        self.version = f"_v={current.number + 1:06d}"
        self.about = lake.about()
        self.frozen = self.about.expired_before
        self.lost = spans(self.about)
        # Days that an unfinished task or run reached in one version and not in the other: they count for hours of groups only.
        self.reached = set[date]()
        self.written: list[str] = []
        self.report = BuildReport(version=self.version.partition("=")[2], days={}, rows={}, seconds=0.0)

    def run(self, grace: timedelta) -> BuildReport:
        begun = time.monotonic()
        try:
            with settings(self.spark, PARQUET):
                self._make()
            self._publish()
        # Files that no manifest names do no harm, but only a build that succeeds collects them.
        except BaseException:
            self.lake.folder.remove(self.written)
            raise
        collect(self.lake, grace)
        self.report.seconds = time.monotonic() - begun
        return self.report

    def _make(self) -> None:
        # A gap is known from the manifest alone, so it stops a build before any job.
        self._hold(check_gaps(self.events, self.about, self.lake.path))
        dirty = self._dirty()
        gone = [date.fromisoformat(day) for day in self.old["tasks"].parts if day not in self.events.parts]
        self._hold(check_days(self.lake, [(self.events, dirty)]))
        if dirty:
            self._build_silver(dirty)
            told = silver_days(self.spark, self.lake, self.new, dirty)
            self._hold(check_silver(self.events, dirty, told))
            self._describe(dirty, told)
        for day in gone:
            for name in SILVER:
                self.new[name].parts.pop(day.isoformat(), None)
        built = self._build_gold(self._touched(dirty, gone))
        self._hold(check_gold(self.spark, self.lake, self.new, built))
        made = {"tasks": dirty, **built}
        self._hold(check_days(self.lake, [(self.new[name], days) for name, days in made.items()]))

    def _hold(self, results: Iterable[CheckResult]) -> None:
        for result in results:
            if not result.ok:
                raise CheckFailed(f"the build of {self.lake.path} does not add up, nothing was published: {result.detail}")

    # -- silver ------------------------------------------------------------------------------------

    # With the version of the models, so that every day is built anew when they change.
    def _stamp(self, day: str) -> str:
        return f"{self.events.parts[day].stamp}/{models.VERSION}"

    def _dirty(self) -> list[date]:
        built = self.old["tasks"].parts
        return [
            date.fromisoformat(day)
            for day in sorted(self.events.parts)
            if self.full or day in self.forced or day not in built or built[day].stamp != self._stamp(day)
        ]

    def _build_silver(self, days: list[date]) -> None:
        events = self.lake.frame(self.spark, self.events, days)
        made = {"attempts": models.attempts(events), "tasks": models.tasks(events)}
        self._write_all(dict.fromkeys(made, days), lambda name: made[name])

    def _describe(self, days: list[date], told: Mapping[str, SilverDay]) -> None:
        """Note the days that the rows of each folder tell of, by which gold finds the files that it needs."""
        for day in (day.isoformat() for day in days):
            found = told.get(day, SilverDay())
            for name in SILVER:
                part = self.new[name].parts.setdefault(day, TableDay())
                part.stamp, part.first, part.last = self._stamp(day), found.first, found.last
                part.open_from = found.open_from

    def _touched(self, dirty: list[date], gone: list[date]) -> set[date] | None:
        """Days of gold to build anew; None for all."""
        if self.full or not self.old["tasks"].parts or self.old["tasks"].model != models.VERSION:
            touched = None
        else:
            touched = self._changed_days([*dirty, *gone]) if dirty or gone else set[date]()
            touched |= days_of({*self.lost} ^ {*self.old["tasks"].lost})
        horizon = self.new["tasks"].last
        for manifest in self.new.values():
            manifest.model, manifest.horizon, manifest.lost = models.VERSION, horizon, self.lost
        return touched

    def _changed_days(self, days: list[date]) -> set[date]:
        """The days of gold on which the two versions of silver differ."""
        from pyspark.sql import functions as F

        versions = ((-1, self.old, self.old["tasks"].horizon), (1, self.new, self.new["tasks"].last))
        rows = [
            told(self.lake.frame(self.spark, manifests[name], days), horizon).withColumn("sign", F.lit(sign))
            for name, told in (("attempts", told_by_attempts), ("tasks", told_by_tasks))
            for sign, manifests, horizon in versions
        ]
        # A row that is in both versions adds up to 0, and changes nothing.
        every = reduce(lambda one, other: one.unionAll(other), rows)
        differ = every.groupBy("what", "open").agg(F.sum("sign").alias("sum"), F.first("days").alias("days")).where("sum <> 0")
        changed = {
            (row["day"], row["open"]) for row in differ.select(F.explode("days").alias("day"), "open").distinct().collect()
        }
        self.reached = {day for day, is_open in changed if is_open}
        return {day for day, is_open in changed if not is_open}

    # -- gold --------------------------------------------------------------------------------------

    def _build_gold(self, touched: set[date] | None) -> dict[str, list[date] | None]:
        """Build gold and return the days of each table that were built; None for all days of a table."""
        wanted: dict[str, list[date] | None] = {}
        for name in GOLD:
            days = self._days_of(name, touched)
            if name in self.wanted:
                self.new[name].pending = []
                if days is None or days:
                    wanted[name] = days
            elif days is None:
                self.new[name].model = 0  # everything, the next time
            else:
                self.new[name].pending = sorted({*self.new[name].pending, *(day.isoformat() for day in days)})
        # It is made of the new `queue_minute`, so it has to wait for that.
        last = {name: days for name, days in wanted.items() if name == "capacity_hour"}
        for tables in ({name: days for name, days in wanted.items() if name not in last}, last):
            self._write_all(tables, lambda name: self._gold(name, wanted[name]))
        return wanted

    def _days_of(self, name: str, touched: set[date] | None) -> list[date] | None:
        old = self.old[name]
        if touched is None or (old.model != models.VERSION and self.events.parts):
            return None if self.frozen is None else self._thawed()
        days = {*touched, *(date.fromisoformat(day) for day in old.pending)}
        horizon = self.new["tasks"].horizon
        moved = old.horizon is not None and horizon is not None and horizon > old.horizon
        # Each window is compared with the 24 hours before it, which may lie on the day before.
        if name == "retry_storm":
            days |= {day + timedelta(days=1) for day in days if horizon is not None and day < horizon.date()}
        if name == "group_hour":
            days |= self.reached
        # Open tasks fill the hours of their group up to the newest event, and the forecast begins behind it.
        if name in ("group_hour", "capacity_hour") and moved and old.horizon is not None and horizon is not None:
            days |= set(days_between(old.horizon.date(), horizon.date()))
        # Means of earlier weeks carry a change into all later hours, up to the end of the forecast.
        if name == "capacity_hour" and days and horizon is not None:
            days = set(days_between(min(days), max(max(days), horizon.date()) + timedelta(days=8)))
        return sorted(day for day in days if self.frozen is None or day >= self.frozen)

    def _thawed(self) -> list[date]:
        """All days of gold that can be built anew, because their silver has not expired."""
        assert self.frozen is not None
        lasts = [part.last for part in self.new["tasks"].parts.values() if part.last is not None]
        last = max(lasts, default=datetime.now(UTC)).date() + timedelta(days=8)
        return days_between(self.frozen, last) if self.frozen <= last else []

    def _gold(self, name: str, days: list[date] | None) -> DataFrame:
        from pyspark.sql import functions as F

        if name == "capacity_hour":
            rows = self._capacity(days)
        else:
            needed = None
            # Silver lies by the day a task was stored, and a task may run on any later day: files are chosen by what they tell.
            if days is not None:
                needed = {*days, *(day - timedelta(days=1) for day in days)} if name == "retry_storm" else set(days)
            attempts, tasks = self._silver("attempts", needed), self._silver("tasks", needed)
            rows = {
                "queue_minute": lambda: models.queue_minute(attempts, tasks),
                "func_hour": lambda: models.func_hour(attempts),
                "group_hour": lambda: models.group_hour(attempts, tasks, until=self.new["tasks"].horizon),
                "failure_day": lambda: models.failure_day(attempts, tasks),
                "retry_storm": lambda: models.retry_storm(attempts),
            }[name]()
        return rows if days is None else rows.where(F.col("day").isin(days))

    def _silver(self, name: str, days: set[date] | None) -> DataFrame:
        """The rows of silver that may tell of these days."""
        manifest = self.new[name]
        if days is None:
            return self.lake.frame(self.spark, manifest)
        telling = [date.fromisoformat(day) for day, part in manifest.parts.items() if part.touches(days)]
        return self.lake.frame(self.spark, manifest, telling)

    def _capacity(self, days: list[date] | None) -> DataFrame:
        """The rows of `capacity_hour`: earlier hours from the table itself, which is small, later hours from the minutes."""
        minutes = self.new["queue_minute"]
        if days is None:
            return models.capacity_hour(self.lake.frame(self.spark, minutes))
        later = [date.fromisoformat(day) for day in minutes.parts if day >= days[0].isoformat()]
        earlier = [date.fromisoformat(day) for day in self.old["capacity_hour"].parts if day < days[0].isoformat()]
        known = self.lake.frame(self.spark, self.old["capacity_hour"], earlier)
        return models.capacity_hour(self.lake.frame(self.spark, minutes, later), known)

    # -- writing -----------------------------------------------------------------------------------

    def _write_all(self, tables: Mapping[str, list[date] | None], made: Callable[[str], DataFrame]) -> None:
        """Write tables side by side, because much of the time of a small build goes into planning."""
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._write(name, made(name), tables[name]), tables))

    def _write(self, name: str, rows: DataFrame, days: list[date] | None) -> None:
        """Write the new version of some days of a table; a day without rows is dropped."""
        self.say(f"building {name}" + ("" if days is None else f", {len(days)} day{'s' if len(days) != 1 else ''}"))
        table, parts = TABLES[name], self.new[name].parts
        # A day of gold has few rows, and each task of Spark would write a file of its own.
        if table.layer == "gold":
            rows = marked(rows, name, self.lost).coalesce(1)
        root = f"{table.layer}/{name}"
        found = write_days(self.lake, rows.select(*table.names), root, table.partition, self.version, _SORTED[name])
        self.written += [file.path for files in found.values() for file in files]
        for day in list(parts) if days is None else [day.isoformat() for day in days]:
            parts.pop(day, None)
        for day, files in found.items():
            parts[day] = TableDay(files=files, stamp=self.report.version)
        self.report.days[name] = sorted(found)
        self.report.rows[name] = sum(file.rows for files in found.values() for file in files)

    def _publish(self) -> None:
        with self.lake.change() as draft:
            for name, manifest in self.new.items():
                if manifest != self.old[name]:
                    draft.put(manifest)
