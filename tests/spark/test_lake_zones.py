"""A lake is the same in every time zone, of the session and of the process; one that was made otherwise can be repaired."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lake_rows import Log, filed_by, gold_filed_by, rows
from typer.testing import CliRunner

from omniq import OmniQ, SQLiteStorage
from omniq.cli.app import app
from omniq.errors import CheckFailed, Invalid
from omniq.spark import Lake, build, check, expire, ingest, repair
from omniq.spark.lake import clock, models, repairing
from omniq.spark.lake.bronze import take_in
from omniq.spark.lake.manifest import TableDay
from omniq.spark.lake.plain_rows import plain_rows
from omniq.spark.lake.report.queries import gather
from omniq.spark.lake.tables import GOLD, SILVER, TABLES
from omniq.spark.lake.writing import PARQUET, settings, write_days

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ZONE = "spark.sql.session.timeZone"
NEW_YORK, KOLKATA = "America/New_York", "Asia/Kolkata"
# The clocks of New York go forward on March 8 at 7:00 UTC.
FIRST, DAYS = date(2026, 3, 7), 3
DATES = ["2026-03-07", "2026-03-08", "2026-03-09"]
MADE = ("events", *SILVER, *GOLD)


@contextmanager
def local(zone: str) -> Iterator[None]:
    """The zone of this process, which is not the session's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="module")
def batches(spark: "SparkSession") -> "list[DataFrame]":
    """Three days in two parts: the second continues tasks of the first, and some of its own are never done."""
    from omniq.spark.lake.generator import history

    made = history(spark, events=300, days=DAYS, start=FIRST, seed=3).cache()
    log = Log("s1", datetime(2026, 3, 7, tzinfo=UTC))
    slow = [log.task(f"slow{n}", group="g", at=21_600 * n).started(21_600 * n + 5) for n in range(10)]
    early = log.frame(spark)
    begun = len(log.rows)
    for n, life in enumerate(slow[:8]):
        life.retried(21_600 * n + 4000, due=21_600 * n + 9000).started(21_600 * n + 9001).succeeded(21_600 * n + 30_000)
    log.task("waits", group="g", at=150_000)
    half = made.count() // 2
    return [made.where(f"seq <= {half}").unionByName(early), made.where(f"seq > {half}").unionByName(log.frame(spark, begun))]


def made_in(spark: "SparkSession", path: Path, batches: "list[DataFrame]", *zones: str, by_steps: bool = False) -> Lake:
    """A lake that is taken in and built, each batch in the next zone."""
    lake = Lake.init(path)
    for n, events in enumerate(batches):
        with settings(spark, {ZONE: zones[n % len(zones)]}):
            take_in(lake, events, stream="test", batch=n)
            if by_steps or n == len(batches) - 1:
                build(spark, lake)
    return lake


@pytest.fixture(scope="module")
def right(spark: "SparkSession", batches: "list[DataFrame]", tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return made_in(spark, tmp_path_factory.mktemp("lakes") / "utc", batches, "UTC")


def counts(lake: Lake) -> dict[str, dict[str, int]]:
    """How many rows each day of each table has."""
    return {name: {day: part.rows for day, part in lake.manifest(name).parts.items()} for name in MADE}


def spans(lake: Lake, name: str) -> dict[str, tuple[Any, ...]]:
    return {day: (part.first, part.last, part.open_from) for day, part in lake.manifest(name).parts.items()}


def assert_same(lake: Lake, right: Lake) -> None:
    assert counts(lake) == counts(right)
    for name in MADE:
        assert rows(lake, name) == rows(right, name), name
    for name in ("events", *SILVER):
        assert spans(lake, name) == spans(right, name), name


# -- the same in every zone ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zones", "by_steps"),
    [
        ((KOLKATA, NEW_YORK), False),
        ((NEW_YORK, KOLKATA), True),
        pytest.param((NEW_YORK,), True, marks=pytest.mark.costly),
        pytest.param((KOLKATA,), True, marks=pytest.mark.costly),
    ],
)
def test_a_lake_is_the_same_in_every_zone(
    spark: "SparkSession", batches: "list[DataFrame]", right: Lake, tmp_path: Path, zones: tuple[str, ...], by_steps: bool
) -> None:
    with local(zones[-1]):
        lake = made_in(spark, tmp_path / "lake", batches, *zones, by_steps=by_steps)
        with settings(spark, {ZONE: zones[0]}):
            assert [result for result in check(spark, lake) if not result.ok] == []
    assert set(counts(lake)["events"]) == set(DATES)
    assert_same(lake, right)


@pytest.mark.slow
@pytest.mark.parametrize("zone", [NEW_YORK, KOLKATA])
def test_models_called_in_a_session_of_the_users_do_not_ask_for_its_zone(spark: "SparkSession", right: Lake, zone: str) -> None:
    until = right.manifest("tasks").horizon
    assert until is not None

    def found() -> dict[str, list[Any]]:
        events = right.table(spark, "events")
        runs, tasks = right.table(spark, "attempts"), right.table(spark, "tasks")
        made = {
            "queue_minute": models.queue_minute(runs, tasks),
            "func_hour": models.func_hour(runs),
            "group_hour": models.group_hour(runs, tasks, until=until),
            "failure_day": models.failure_day(runs, tasks),
            "retry_storm": models.retry_storm(runs),
            "capacity_hour": models.capacity_hour(right.table(spark, "queue_minute")),
            "day": events.select("seq", models.day("enqueued_at").alias("day")),
        }
        return {name: _plain(frame) for name, frame in made.items()}

    expected = found()
    with settings(spark, {ZONE: zone}):
        assert found() == expected
    assert {row["day"] for row in expected["day"]} == {date.fromisoformat(day) for day in DATES}


def _plain(frame: "DataFrame") -> list[dict[str, Any]]:
    """The rows with moments as microseconds and sums without what depends on their order."""
    found = frame.toArrow().to_pylist()
    for row in found:
        for name, value in row.items():
            if isinstance(value, datetime):
                row[name] = value.timestamp()
            elif isinstance(value, float):
                row[name] = round(value, 3)
            elif isinstance(value, bytes):
                row[name] = None
    return sorted(found, key=str)


def test_days_and_hours_are_exact_long_ago_and_far_ahead(spark: "SparkSession") -> None:
    from pyspark.sql import functions as F

    edges = [-clock.DAY_US * 30_000, -clock.DAY_US, 0, 1_772_953_200_000_000, 253_402_300_799_999_999 + 1 - clock.DAY_US]
    moments = sorted({edge + off for edge in edges for off in (-1, 0, 1, clock.HOUR_US - 1, clock.HOUR_US)})
    frame = spark.createDataFrame([(us,) for us in moments], "us bigint")
    at = F.timestamp_micros("us")
    with settings(spark, {ZONE: KOLKATA}):
        found = frame.select(
            "us",
            F.unix_date(clock.day(at)).alias("day"),
            F.unix_micros(clock.beginning(at, clock.HOUR_US)).alias("hour"),
            F.size(clock.days_spanned(at, F.timestamp_micros(F.col("us") + 2 * clock.DAY_US))).alias("days"),
        ).collect()
    assert [tuple(row) for row in found] == [(us, us // clock.DAY_US, us // clock.HOUR_US * clock.HOUR_US, 3) for us in moments]


def test_a_moment_without_a_zone_is_refused_as_the_end_of_groups(spark: "SparkSession", built: Lake) -> None:
    runs, tasks = built.table(spark, "attempts"), built.table(spark, "tasks")
    with pytest.raises(Invalid, match="has no time zone"):
        models.group_hour(runs, tasks, until=datetime(2026, 3, 8))


def test_a_store_is_taken_in_by_the_days_of_utc(spark: "SparkSession", tmp_path: Path) -> None:
    """With its payloads; at any time of the day one of these zones has another date."""
    with OmniQ(SQLiteStorage(tmp_path / "q.db")) as oq:
        task = oq.get_task(oq.enqueue("app:send", 1))
    assert task is not None
    today = task.created_at.date().isoformat()
    zone = "Etc/GMT+12" if task.created_at.hour < 12 else "Pacific/Kiritimati"
    lake = Lake.init(tmp_path / "lake")
    with local(zone), settings(spark, {ZONE: zone}):
        ingest(spark, f"sqlite:///{tmp_path / 'q.db'}", lake, payloads=True)
    assert {name: (list(lake.manifest(name).parts), lake.manifest(name).rows) for name in ("events", "payloads")} == {
        "events": ([today], 1),
        "payloads": ([today], 1),
    }


# -- what comes back to Python -------------------------------------------------------------------------


@pytest.mark.slow  # the report's own tests ask in two zones
def test_the_report_has_the_same_figures_in_every_zone(spark: "SparkSession", right: Lake) -> None:
    expected = gather(spark, right, FIRST)
    arrow = "spark.sql.execution.arrow.pyspark.enabled"
    with local(NEW_YORK), settings(spark, {ZONE: KOLKATA, arrow: "false"}):
        assert gather(spark, right, FIRST) == expected


def test_answers_are_in_utc_also_in_the_hour_that_the_clocks_repeat(spark: "SparkSession") -> None:
    """At 5:30 and at 6:30 it was half past one in New York."""
    query = """SELECT timestamp_seconds(s) AS at, array(named_struct('at', timestamp_seconds(s))) AS nested,
        map('at', timestamp_seconds(s)) AS named, timestamp_ntz'2026-11-01 01:30:00' AS plain
        FROM VALUES (1793511000), (1793514600) AS t(s) ORDER BY s"""
    with local(NEW_YORK), settings(spark, {ZONE: KOLKATA}):
        found = list(plain_rows(spark.sql(query)))
    moments = ["2026-11-01T05:30:00Z", "2026-11-01T06:30:00Z"]
    assert found == [{"at": at, "nested": [{"at": at}], "named": {"at": at}, "plain": "2026-11-01T01:30:00"} for at in moments]


# -- repair --------------------------------------------------------------------------------------------


def filed_under(lake: Lake, name: str, day: str, other: str) -> None:
    """A day of gold as it is, in the place of another."""
    with lake.change() as draft:
        manifest = draft.manifest(name)
        part = manifest.parts.pop(day)
        moved = [type(file)(file.path.replace(day, other), file.rows, file.bytes) for file in part.files]
        for old, new in zip(part.files, moved, strict=True):
            (lake.path / new.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(lake.path / old.path, lake.path / new.path)
        part.files = moved
        manifest.parts[other] = part
        draft.put(manifest)


@pytest.fixture
def wrong(spark: "SparkSession", right: Lake, tmp_path: Path) -> Lake:
    """Taken in under two zones, with tables of before and a payload of March 8 in the folder of March 7."""
    lake = Lake(shutil.copytree(right.path, tmp_path / "my lake"))
    filed_by(spark, lake, NEW_YORK, KOLKATA)
    filed_under(lake, "retry_storm", "2026-03-08", "2026-03-05")
    row = ("s1", "slow4", "mail", "app:send", "g", datetime(2026, 3, 8, tzinfo=UTC), "json", b"[]", date(2026, 3, 7))
    with settings(spark, PARQUET):
        payloads = spark.createDataFrame([row], TABLES["payloads"].ddl)
        files = write_days(lake, payloads, "bronze/payloads", "task_date", "_batch=old")
    with lake.change() as draft:
        manifest = draft.manifest("payloads")
        manifest.parts = {day: TableDay(files=found) for day, found in files.items()}
        draft.put(manifest)
    return lake


@pytest.mark.slow
def test_a_lake_that_was_made_in_other_zones_is_found_refused_and_repaired(
    spark: "SparkSession", right: Lake, wrong: Lake
) -> None:
    command = f"omniq lake repair --lake '{wrong.path}'"
    assert set(counts(wrong)["events"]) == {"2026-03-06", *DATES, "2026-03-10"}
    (days,) = [result for result in check(spark, wrong, fail=False) if result.name == "days"]
    assert not days.ok
    assert (
        "2026-03-05, 2026-03-06, 2026-03-07, 2026-03-08, 2026-03-09 and 1 more (events, payloads, retry_storm)" in days.detail
    )
    assert days.detail.endswith(f": run {command}")
    before = wrong.current()
    with pytest.raises(CheckFailed, match=r"nothing was published: .* 2026-03-06, .* run omniq lake repair"):
        build(spark, wrong)
    assert wrong.current() == before

    report = repair(spark, wrong)
    assert report.events > counts(right)["events"]["2026-03-07"] / 10
    assert (report.payloads, report.days, report.frozen) == (1, ["2026-03-05", "2026-03-06", *DATES, "2026-03-10"], [])
    assert list(wrong.manifest("payloads").parts) == ["2026-03-08"]
    assert_same(wrong, right)
    assert [result for result in check(spark, wrong) if not result.ok] == []
    number = wrong.current().number
    assert repair(spark, wrong).built is None
    assert wrong.current().number == number


@pytest.mark.slow
def test_a_repair_that_dies_leaves_the_old_days_or_the_new_ones_and_is_repeated(
    spark: "SparkSession", right: Lake, wrong: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    old = (counts(wrong), wrong.current())
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "_publish", die)
        with pytest.raises(KeyboardInterrupt):
            repair(spark, wrong)
    assert (counts(wrong), wrong.current()) == old
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "build_locked", die)
        with pytest.raises(KeyboardInterrupt):
            repair(spark, wrong)
    assert counts(wrong)["events"] == counts(right)["events"]
    assert list(wrong.manifest("payloads").parts) == ["2026-03-08"]
    assert "wait for the next build" in next(result.detail for result in check(spark, wrong, fail=False) if result.note)
    again = asked("repair", "--lake", str(wrong.path))
    assert again.startswith("moved 0 events and 0 payloads to the folders of their days, and built all tables anew in ")
    assert_same(wrong, right)
    filed_by(spark, wrong, NEW_YORK)
    again = json.loads(asked("repair", "--lake", str(wrong.path), "--json"))
    assert again["events"] > 0
    assert set(again["built"]["days"]) == {*SILVER, *GOLD}
    assert_same(wrong, right)
    assert asked("repair", "--lake", str(wrong.path)) == "nothing to repair\n"


def asked(*words: str) -> str:
    done = CliRunner().invoke(app, ["lake", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_what_comes_in_beside_a_repair_is_there_after_it(spark: "SparkSession", right: Lake, wrong: Lake) -> None:
    late = Log("s2", datetime(2026, 3, 8, 1, tzinfo=UTC))
    late.task("late").started(1).succeeded(2)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("moving events"):
            take_in(wrong, late.frame(spark), stream="beside", batch=0)

    repair(spark, wrong, say=say)
    assert "moving events of 5 days" in said
    assert wrong.table(spark, "tasks").where("store = 's2' and task_date = '2026-03-08'").count() == 1
    expected = counts(right)["events"]
    assert counts(wrong)["events"] == {**expected, "2026-03-08": expected["2026-03-08"] + 3}
    assert [result for result in check(spark, wrong) if not result.ok] == []


@pytest.mark.slow
def test_gold_of_expired_events_stays_as_it_is_and_is_told(spark: "SparkSession", right: Lake, tmp_path: Path) -> None:
    lake = Lake(shutil.copytree(right.path, tmp_path / "lake"))
    later = datetime(2026, 3, 31, tzinfo=UTC)
    expire(None, lake, keep_days=1, now=later)
    assert lake.manifest("events").rows == 0
    filed_under(lake, "func_hour", "2026-03-08", "2026-03-06")
    (note,) = [result for result in check(spark, lake) if result.note]
    assert note.detail.endswith("its events have expired: 2026-03-06")
    report = repair(spark, lake)
    assert (report.frozen, report.days, report.built) == (["2026-03-06"], [], None)


@pytest.mark.slow
@pytest.mark.parametrize("zone", [NEW_YORK, KOLKATA])
def test_a_repair_loses_and_doubles_nothing_where_gold_without_events_meets_what_is_built_anew(
    spark: "SparkSession", right: Lake, tmp_path: Path, zone: str
) -> None:
    lake = Lake(shutil.copytree(right.path, tmp_path / "lake"))
    edge = date(2026, 3, 9)
    expire(None, lake, keep_days=1, now=datetime(2026, 3, 10, tzinfo=UTC))
    assert min(lake.manifest("events").parts) == "2026-03-08"
    filed_by(spark, lake, zone)
    gold_filed_by(spark, lake, zone)
    with pytest.raises(CheckFailed, match="folders hold days or hours of another time zone"):
        check(spark, lake)

    report = repair(spark, lake)
    assert [result for result in check(spark, lake) if not result.ok] == []
    assert not build(spark, lake).changed
    assert all(day < edge.isoformat() for day in report.frozen)

    def since_edge(made: Lake, name: str) -> list[str]:
        return [row for row in rows(made, name) if row.endswith("datetime.date(2026, 3, 9))")]

    # Hours that begin at half past stay so, and forecasts are made of them; the failures of a day cannot be told apart.
    half = {"failure_day", "func_hour", "capacity_hour"} if zone == KOLKATA else {"failure_day"}
    for name in GOLD:
        if name not in half:
            assert rows(lake, name) == rows(right, name), name
            assert counts(lake)[name] == counts(right)[name], name
        elif name != "capacity_hour":
            assert since_edge(lake, name) == since_edge(right, name), name
