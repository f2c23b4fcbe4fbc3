"""What comes late, twice, broken or in the middle of a crash: one small lake, followed through its builds."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from lake_rows import Log

from omniq.errors import CheckFailed, Invalid
from omniq.spark import Lake, build, check
from omniq.spark.lake.bronze import take_in
from omniq.spark.lake.build import BuildReport, _Build
from omniq.spark.lake.checks import check_gaps
from omniq.spark.lake.layout import About, StoreEntry
from omniq.spark.lake.manifest import Manifest
from omniq.spark.lake.tables import GOLD, SILVER, TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = 86_400.0

pytestmark = pytest.mark.slow  # many builds

BAD: list[dict[str, Any]] = [
    {"event": "exploded"},
    {"task_id": None},
    {"data": "no json"},
    {"status": "DONE"},
    {"enqueued_at": None},
]


class Story:
    """The lake after its last build, and what was seen on the way."""

    lake: Lake
    first: dict[str, Manifest]
    died: dict[str, list[str]]
    late: BuildReport
    after_late: dict[str, Manifest]
    replaced: list[str]
    kept: list[bool]
    caught_up: BuildReport


@pytest.fixture(scope="module")
def story(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story()
    lake = story.lake = Lake.init(tmp_path_factory.mktemp("lakes") / "a lake")
    log, other = Log("s1", datetime(2026, 3, 1, tzinfo=UTC)), Log("s2", datetime(2026, 3, 1, tzinfo=UTC))
    late = log.task("late").started(DAY + 5)
    for n in range(5):
        log.task(f"t{n}", queue="other", at=n * DAY).started(n * DAY + 1).succeeded(n * DAY + 2)
    for change in BAD:
        log.task("bad", at=5)
        log.rows[-1].update(change)
    other.task("t0", queue="other").started(3).failed(9)
    take_in(lake, log.frame(spark), stream="one", batch=0)
    take_in(lake, other.frame(spark), stream="other", batch=0)
    build(spark, lake)
    story.first = {name: lake.manifest(name) for name in TABLES}
    before = {name: lake.files(name) for name in TABLES}
    count = len(log.rows)
    late.succeeded(3 * DAY + 10)
    take_in(lake, log.frame(spark, count), stream="one", batch=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Build, "_publish", _die)
        with pytest.raises(KeyboardInterrupt):
            build(spark, lake, tables=[])
    after = {name: lake.files(name) for name in TABLES}
    story.died = {name: after[name] for name in TABLES if after[name] != before[name]}
    story.replaced = before["tasks"]
    story.late = build(spark, lake, tables=["queue_minute", "func_hour"])
    story.after_late = {name: lake.manifest(name) for name in TABLES}
    story.kept = [Path(path).exists() for path in story.replaced]
    story.caught_up = build(spark, lake, grace=timedelta(0))
    return story


def _die(self: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def changed(lake: Lake, name: str) -> Iterator[Manifest]:
    """The manifest of a table as a broken tool might leave it, until the end of the block."""
    with lake.change() as draft:
        manifest = draft.manifest(name)
    whole = lake.manifest(name)
    try:
        yield manifest
    finally:
        publish(lake, whole)


def publish(lake: Lake, manifest: Manifest) -> None:
    with lake.change() as draft:
        draft.put(manifest)


def test_a_late_event_changes_the_day_of_its_task_and_the_days_it_tells_of(spark: "SparkSession", story: Story) -> None:
    assert story.late.days["tasks"] == story.late.days["attempts"] == ["2026-03-01"]
    assert story.late.days["queue_minute"] == ["2026-03-02", "2026-03-03", "2026-03-04"]  # busy all the time between
    old, new = story.first["func_hour"].parts, story.after_late["func_hour"].parts
    assert [day for day in new if old[day] == new[day]] == ["2026-03-01", "2026-03-05"]
    (row,) = story.lake.table(spark, "tasks").where("id = 'late'").collect()
    assert (row["status"], row["wait_ms"]) == ("SUCCESS", 86_405_000.0)
    busy: dict[str, float] = {}
    for minute in story.lake.table(spark, "queue_minute").where("queue = 'mail'").collect():
        busy[minute["day"].isoformat()] = busy.get(minute["day"].isoformat(), 0.0) + minute["busy_ms"]
    assert busy == {"2026-03-01": 0.0, "2026-03-02": 86_395_000.0, "2026-03-03": 86_400_000.0, "2026-03-04": 10_000.0}


def test_tables_left_out_catch_up_in_a_later_build(spark: "SparkSession", story: Story) -> None:
    assert story.after_late["group_hour"].parts == story.first["group_hour"].parts
    assert story.after_late["retry_storm"].pending == ["2026-03-02", "2026-03-03", "2026-03-04", "2026-03-05"]
    assert story.caught_up.days["retry_storm"] == ["2026-03-02", "2026-03-03", "2026-03-04", "2026-03-05"]
    assert "tasks" not in story.caught_up.days
    assert all(story.lake.manifest(name).pending == [] for name in GOLD)
    with pytest.raises(Invalid, match="no such table to build: nonsense"):
        build(spark, story.lake, tables=["nonsense"])


def test_a_build_that_dies_before_it_publishes_leaves_the_lake_as_it_was(story: Story) -> None:
    assert set(story.died) == {"events"}


def test_replaced_versions_stay_for_the_grace_and_go_after_it(story: Story) -> None:
    assert all(story.kept)
    there = sorted(str(path) for path in story.lake.path.glob("silver/tasks/**/*.parquet"))
    assert there == story.lake.files("tasks")


def test_two_stores_share_a_lake_and_not_their_tasks(spark: "SparkSession", story: Story) -> None:
    found = story.lake.table(spark, "tasks").where("id = 't0'").orderBy("store").collect()
    assert [(row["store"], row["queue"], row["status"]) for row in found] == [
        ("s1", "other", "SUCCESS"),
        ("s2", "other", "FAILED"),
    ]
    minutes = story.lake.table(spark, "queue_minute").where("queue = 'other' and enqueued > 0 and day = '2026-03-01'").collect()
    assert sorted((row["store"], row["enqueued"]) for row in minutes) == [("s1", 1), ("s2", 1)]


def test_rows_that_are_no_events_are_put_aside_with_the_reason(spark: "SparkSession", story: Story) -> None:
    import pyarrow.parquet as parquet

    manifest = story.lake.manifest("events")
    assert manifest.quarantined == len(BAD)
    assert manifest.seen == {"s1": {"": [(1, 23)]}, "s2": {"": [(1, 3)]}}  # they are no gap
    reasons: list[str] = []
    for file in manifest.quarantine:
        reasons += parquet.ParquetFile(story.lake.folder.path(file.path)).read(["reason"])["reason"].to_pylist()
    assert sorted(reasons) == [
        "data is no JSON object",
        "enqueued_at is missing",
        "no such event: exploded",
        "status is none of TaskStatus",
        "task_id is missing",
    ]


def test_the_whole_passes_its_checks_and_notes_the_quarantine(spark: "SparkSession", story: Story) -> None:
    assert [result.detail for result in check(spark, story.lake) if result.note] == ["5 rows are in quarantine"]


def test_a_batch_that_was_taken_in_is_not_taken_again(spark: "SparkSession", story: Story) -> None:
    before = story.lake.current()
    events = story.lake.table(spark, "events").where("store = 's2'")
    assert take_in(story.lake, events, stream="other", batch=0).skipped
    taken = take_in(story.lake, events, stream="a new checkpoint", batch=0)
    assert (taken.rows, taken.known) == (0, 3)
    assert story.lake.manifest("events").rows == story.after_late["events"].rows
    assert story.lake.current().number == before.number + 1


def test_an_event_that_is_there_twice_fails_the_build_and_nothing_is_published(spark: "SparkSession", story: Story) -> None:
    with changed(story.lake, "events") as events:
        part = events.parts["2026-03-02"]
        (file,) = part.files
        copy = file.path.replace("part-", "copy-")
        shutil.copy(story.lake.path / file.path, story.lake.path / copy)
        part.files.append(msgspec.structs.replace(file, path=copy))
        part.stamp = "changed"
        publish(story.lake, events)
        before = story.lake.files("tasks")
        with pytest.raises(CheckFailed, match="3 of 6 events of 2026-03-02 are there twice or belong to no task"):
            build(spark, story.lake)
        found = {result.name: result.detail for result in check(spark, story.lake, fail=False) if not result.ok}
        assert "of store s1 is there 2 times" in found["duplicates"]
        assert story.lake.files("tasks") == before
        assert sorted(str(path) for path in story.lake.path.glob("silver/tasks/**/*.parquet")) == before


def test_sums_that_disagree_and_files_that_are_gone_are_found(spark: "SparkSession", story: Story) -> None:
    with changed(story.lake, "func_hour") as hours:
        del hours.parts["2026-03-02"]
        publish(story.lake, hours)
        failed = [result for result in check(spark, story.lake, fail=False) if not result.ok]
        assert [result.name for result in failed] == ["sums of func_hour"]
        assert failed[0].detail == "func_hour.runs of 2026-03-02 is 0, and 1 by the rows it is made of"
    with changed(story.lake, "func_hour") as hours:
        lost = hours.parts["2026-03-02"].files[0].path
        hours.parts["2026-03-02"].files = [*hours.parts["2026-03-02"].files[:0], *_renamed(hours, lost)]
        publish(story.lake, hours)
        with pytest.raises(CheckFailed, match=r"files are missing: gold/func_hour/day=2026-03-02/gone\.parquet"):
            check(spark, story.lake)


def _renamed(manifest: Manifest, path: str) -> list[Any]:
    (file,) = [file for file in manifest.files if file.path == path]
    return [msgspec.structs.replace(file, path="gold/func_hour/day=2026-03-02/gone.parquet")]


def test_a_gap_fails_the_build_before_it_begins(spark: "SparkSession", story: Story) -> None:
    with changed(story.lake, "events") as events:
        events.seen["s1"][""] = [(1, 3), (11, 24)]
        publish(story.lake, events)
        with pytest.raises(CheckFailed, match="events 4 to 10 of store s1 are missing"):
            build(spark, story.lake, full=True)


def test_a_gap_is_none_where_the_store_promises_no_whole_log() -> None:
    events = Manifest(table="events", seen={"s1": {"": [(1, 3), (11, 24)], "mail": [(1, 2)]}})
    now = datetime.now(UTC)
    about = About(id="x", created_at=now)
    (gaps,) = check_gaps(events, about)
    assert not gaps.ok
    assert gaps.detail.startswith("events 4 to 10 of store s1 are missing; omniq lake ingest --accept-gap ")
    about.stores["s1"] = StoreEntry(url="redis://", events_gapless=False, since=now)
    assert check_gaps(events, about)[0].ok


def test_days_can_be_built_anew_by_name(spark: "SparkSession", story: Story) -> None:
    assert build(spark, story.lake, days=[date(2026, 3, 5)]).days == {name: ["2026-03-05"] for name in ("attempts", "tasks")}
    assert set(SILVER) == {"attempts", "tasks"}
