"""Events that were purged before they came in: refused at first, accepted on demand, and marked from then on."""

import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lake_rows import START, Log

from omniq import OmniQ, SQLiteStorage
from omniq.errors import CheckFailed, EventsLost
from omniq.models import to_us
from omniq.operations import Retention, Shard
from omniq.spark import Lake, build, check, ingest, read_stream
from omniq.spark.lake.bronze import take_in
from omniq.spark.lake.build import BuildReport
from omniq.spark.lake.checks import check_gaps
from omniq.spark.lake.gaps import _BUCKETS, accept, marked
from omniq.spark.lake.ingest import IngestReport, follow
from omniq.spark.lake.layout import Lost, StoreEntry
from omniq.spark.lake.tables import GOLD
from omniq.storage.bulk import open_bulk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEN = (datetime.now(UTC) - timedelta(days=5)).replace(hour=10, minute=0, second=0, microsecond=0)
DAY = timedelta(days=1)
MARKED = ("queue_minute", "group_hour", "capacity_hour")  # one for each length of time that a mark covers


def job(n: int) -> int:
    return n


class Yard:
    """A SQLite store in which two tasks are stored at a time, each of which is one event; and a lake."""

    def __init__(self, folder: Path) -> None:
        self.path, self.url = folder / "yard.db", f"sqlite:///{folder / 'yard.db'}"
        self.lake = Lake.init(folder / "lake")

    def stored(self, *moments: datetime) -> None:
        for at in moments:
            with OmniQ(SQLiteStorage(self.path, clock=lambda at=at: to_us(at))) as oq:
                oq.options(group="g").enqueue_many(job, [(1,), (2,)])

    def purged(self, keep: int) -> None:
        with open_bulk(self.url) as bulk:
            bulk.call(bulk.storage.purge(Retention(dead_us=None, events_us=None, events_max=keep), limit=1000))

    def numbers(self) -> dict[str, Any]:
        (found,) = self.lake.manifest("events").seen.values()
        return dict(found)


class Story(Yard):
    """A lake that fell behind twice: once events came after the lost ones, once none did."""

    refused: str
    first: IngestReport
    second: IngestReport
    built: BuildReport
    marks: dict[str, list[tuple[datetime, bool]]]


@pytest.fixture(scope="module")
def story(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("yard"))
    story.stored(TEN)
    ingest(spark, story.url, story.lake)
    story.stored(TEN + DAY, TEN + DAY + timedelta(hours=2), TEN + 2 * DAY)
    story.purged(keep=3)
    with pytest.raises(EventsLost) as refused:
        ingest(spark, story.url, story.lake)
    story.refused = str(refused.value)
    story.first = ingest(spark, story.url, story.lake, accept_gap=True)
    build(spark, story.lake, tables=MARKED)
    story.stored(TEN + 3 * DAY)
    story.purged(keep=0)
    story.second = ingest(spark, story.url, story.lake, accept_gap=True)
    story.marks = marks(spark, story.lake)
    story.built = build(spark, story.lake)
    return story


def marks(spark: "SparkSession", lake: Lake) -> dict[str, list[tuple[datetime, bool]]]:
    """What the tables say of each of their times, forecasts left out."""
    found: dict[str, list[tuple[datetime, bool]]] = {}
    for name in MARKED:
        at = _BUCKETS[name][0]
        where = "not is_forecast and arrivals > 0" if name == "capacity_hour" else "enqueued > 0"
        rows = (
            lake.table(spark, name).where(where).selectExpr(f"unix_seconds({at}) AS at", "incomplete").distinct().orderBy("at")
        )
        found[name] = [(datetime.fromtimestamp(row["at"], UTC), row["incomplete"]) for row in rows.collect()]
    return found


@pytest.mark.slow
def test_lost_events_are_refused_with_the_numbers_and_the_way_on(story: Story) -> None:
    assert "events 3 to 5 of store " in story.refused
    assert "purged before they came into the lake" in story.refused
    assert "accept_gap=True (omniq lake ingest --accept-gap)" in story.refused


@pytest.mark.slow
def test_an_accepted_gap_is_noted_with_its_numbers_and_the_times_of_its_neighbours(story: Story) -> None:
    (first,), (second,) = story.first.gaps, story.second.gaps
    assert (story.first.rows, story.second.rows) == (3, 0)
    assert (first.first, first.last, first.since, first.until) == (3, 5, TEN, TEN + DAY + timedelta(hours=2))
    assert (second.first, second.last, second.since) == (9, 10, TEN + 2 * DAY)
    assert second.until == second.accepted_at  # nothing came after it yet
    (entry,) = story.lake.about().stores.values()
    assert entry.gaps == [first, second]


@pytest.mark.slow
def test_tables_mark_the_time_of_a_gap_also_one_that_is_accepted_after_they_were_built(
    spark: "SparkSession", story: Story
) -> None:
    before = [(TEN, True), (TEN + DAY + timedelta(hours=2), True), (TEN + 2 * DAY, False)]
    assert set(map(tuple, story.marks.values())) == {tuple(before)}
    assert not {"tasks", "attempts"} & set(story.built.days)  # nothing came in
    assert set(map(tuple, marks(spark, story.lake).values())) == {tuple((at, True) for at, _ in before)}
    assert not build(spark, story.lake).changed


@pytest.mark.slow
def test_checks_note_accepted_gaps_and_the_lake_goes_on(spark: "SparkSession", story: Story) -> None:
    story.stored(TEN + 4 * DAY)
    assert ingest(spark, story.url, story.lake).rows == 2
    assert story.numbers() == {"": [(1, 2), (6, 8), (11, 12)]}
    results = check(spark, story.lake)
    (note,) = [result.detail for result in results if "purged before they came in" in result.detail]
    assert "events 3 to 5 of store" in note
    assert "events 9 to 10 of store" in note
    shutil.rmtree(story.lake.path / "_checkpoints")
    assert ingest(spark, story.url, story.lake).rows == 0


@pytest.mark.slow
def test_files_of_gold_from_before_gaps_could_be_accepted_say_no(spark: "SparkSession", story: Story, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    old = Lake(shutil.copytree(story.lake.path, tmp_path / "old"))
    for file in old.files("queue_minute"):
        parquet.write_table(parquet.ParquetFile(file).read().drop_columns(["incomplete"]), file)
    rows = old.table(spark, "queue_minute").select("incomplete").distinct().collect()
    assert [row["incomplete"] for row in rows] == [False]


@pytest.mark.slow
def test_a_page_about_the_lake_names_the_gaps(spark: "SparkSession", story: Story, tmp_path: Path) -> None:
    from omniq.spark import report  # imports matplotlib

    def told(since: date | None) -> list[str]:
        written = report(spark, story.lake, tmp_path / "report.html", since=since)
        assert all(sentence in (tmp_path / "report.html").read_text() for sentence in written.findings)
        return [sentence for sentence in written.findings if "were purged before they came in" in sentence]

    (entry,) = story.lake.about().stores.values()
    sentences = told(None)
    assert len(sentences) == len(entry.gaps) == 2
    assert f"3 events between {TEN:%Y-%m-%d %H:%M} and " in sentences[0]
    assert told((TEN + 2 * DAY).date()) == sentences[1:]


def test_a_gap_that_nobody_accepted_stops_the_build_until_somebody_does(spark: "SparkSession", tmp_path: Path) -> None:
    """As after a kill between a batch and its gap, and as lakes are that were fed by a stream of their own."""
    yard = Yard(tmp_path)
    yard.stored(TEN)
    ingest(spark, yard.url, yard.lake)
    yard.stored(TEN + DAY, TEN + 2 * DAY)
    yard.purged(keep=2)
    (entry,) = yard.lake.about().stores.values()
    follow(read_stream(spark, yard.url, fail_on_data_loss=False), yard.lake, entry.checkpoint)
    assert yard.numbers() == {"": [(1, 2), (5, 6)]}
    with pytest.raises(
        CheckFailed, match=r"events 3 to 4 of store \w+ are missing; omniq lake ingest --accept-gap --lake \S+ --store sqlite"
    ):
        build(spark, yard.lake)
    report = ingest(spark, yard.url, yard.lake, accept_gap=True)
    assert [(gap.first, gap.last, gap.since, gap.until) for gap in report.gaps] == [(3, 4, TEN, TEN + 2 * DAY)]
    assert ingest(spark, yard.url, yard.lake, accept_gap=True).gaps == []
    gaps, note = check_gaps(yard.lake.manifest("events"), yard.lake.about())
    assert (gaps.ok, note.ok, note.note) == (True, True, True)


@pytest.mark.slow
def test_what_is_purged_while_it_comes_in_is_refused_or_accepted_too(spark: "SparkSession", tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    yard.stored(TEN, TEN + DAY, TEN + 2 * DAY)

    def purge(_: object) -> None:
        yard.purged(keep=2)

    with pytest.raises(EventsLost, match=r"omniq lake ingest --accept-gap\)$") as refused:
        ingest(spark, yard.url, yard.lake, max_rows=2, on_batch=purge)
    assert "failOnDataLoss" not in str(refused.value)
    yard.stored(TEN + 3 * DAY, TEN + 4 * DAY)
    report = ingest(spark, yard.url, yard.lake, max_rows=2, accept_gap=True, on_batch=purge)
    assert yard.numbers() == {"": [(1, 2), (5, 6), (9, 10)]}
    assert [(gap.first, gap.last) for gap in report.gaps] == [(3, 4), (7, 8)]


def test_a_store_that_was_set_back_is_no_gap(spark: "SparkSession", tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    yard.stored(TEN)
    backup = shutil.copy(yard.path, tmp_path / "backup.db")
    yard.stored(TEN + DAY)
    assert ingest(spark, yard.url, yard.lake).rows == 4
    for rest in tmp_path.glob("yard.db*"):
        rest.unlink()
    shutil.copy(backup, yard.path)
    with pytest.raises(EventsLost, match=r"events up to 4 of store \w+, but there are only 2: it was set back"):
        ingest(spark, yard.url, yard.lake, accept_gap=True)


def test_a_gap_beside_a_quarantined_event_and_in_a_new_shard_gets_the_nearest_times(
    spark: "SparkSession", tmp_path: Path
) -> None:
    lake, log = Lake.init(tmp_path / "lake"), Log()
    for n in range(9):
        log.task(f"t{n}", at=n)
    log.rows[2]["event"] = "exploded"  # number 3
    del log.rows[3:6]
    take_in(lake, log.frame(spark), stream="one", batch=0)
    with lake.change() as draft:
        draft.about.stores["s1"] = StoreEntry(url="redis://", since=START - DAY)
    shards = [Shard(name="", first=7, last=9), Shard(name="mail", first=5, last=9)]
    found = accept(spark, lake, "s1", shards, lambda lost: START + DAY)
    seconds = [
        (gap.shard, gap.first, gap.last, *((at - START).total_seconds() for at in (gap.since, gap.until))) for gap in found
    ]
    assert seconds == [("", 4, 6, 1.0, 6.0), ("mail", 1, 4, 8.0, 86_400.0)]


def test_every_table_of_gold_marks_the_buckets_that_a_gap_touches(spark: "SparkSession") -> None:
    assert set(_BUCKETS) == set(GOLD)
    noon = datetime(2026, 3, 29, 12, tzinfo=UTC)
    spans = [("s1", to_us(noon), to_us(noon + timedelta(seconds=30)))]
    for name, (column, length_s) in _BUCKETS.items():
        begin = int(noon.timestamp()) // length_s * length_s
        made = "date_from_unix_date(s div 86400)" if column == "day" else "timestamp_seconds(s)"
        rows = spark.createDataFrame(
            [(store, begin + n * length_s) for store in ("s1", "s2") for n in (-1, 0, 1)], "store string, s bigint"
        ).selectExpr("store", "s", f"{made} AS {column}")
        found = marked(rows, name, spans).where("incomplete").select("store", "s").collect()
        assert [tuple(row) for row in found] == [("s1", begin)], name
        assert marked(rows, name, []).where("incomplete").count() == 0


def test_lost_events_are_told_with_their_shard() -> None:
    from omniq.spark.lake.gaps import told

    assert told("s1", Lost(shard="mail", first=1, last=4)) == "events 1 to 4 of store s1, shard mail"
