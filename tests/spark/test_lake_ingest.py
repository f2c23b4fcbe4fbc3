"""Ingest: each event once, whatever happens to batches, checkpoints and stores; and the upkeep of what came in."""

import hashlib
import shutil
import threading
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omniq import OmniQ, SQLiteStorage
from omniq.errors import ConfigError, Invalid, LakeError
from omniq.spark import Lake, build, check, compact, erase, expire, ingest
from omniq.spark.lake.bronze import Taken, take_in
from omniq.spark.lake.ingest import follow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def work(n: int) -> int:
    if n % 5 == 0:
        raise ValueError(f"no order {n}")
    return n


# The tables of gold that hold ids of tasks, groups or the text of errors.
HOLDING = ("func_hour", "group_hour", "failure_day")


class Shop:
    """A SQLite store that is worked on between two ingests, and its lake."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"sqlite:///{folder / 'shop.db'}"
        self.lake = Lake.init(folder / "the lake")
        self.ids: list[str] = []

    def trade(self, count: int, group: str | None = None) -> None:
        with OmniQ(SQLiteStorage(self.folder / "shop.db")) as oq:
            options = oq.options(max_retries=0, group=group)
            self.ids += [options.enqueue(work, n) for n in range(count)]
            with oq.worker() as pool:
                pool.drain()

    def numbers(self) -> list[int]:
        with OmniQ(SQLiteStorage(self.folder / "shop.db")) as oq:
            return [event.seq for event in oq.events(after=0)]


@pytest.fixture(scope="module")
def shop(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Two ingests in small batches, one build."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    shop.trade(20, group="customer-1")
    first = ingest(spark, shop.url, shop.lake, max_rows=25, payloads=True)
    assert (first.rows, first.batches) == (60, 3)
    shop.trade(10)
    assert ingest(spark, shop.url, shop.lake, payloads=True).rows == 30
    build(spark, shop.lake, tables=HOLDING)
    return shop


def there(spark: "SparkSession", lake: Lake) -> list[int]:
    return sorted(row["seq"] for row in lake.table(spark, "events").select("seq").collect())


def test_every_event_is_there_once(spark: "SparkSession", shop: Shop) -> None:
    assert there(spark, shop.lake) == shop.numbers()
    assert ingest(spark, shop.url, shop.lake).rows == 0


def test_silver_says_what_the_store_says(spark: "SparkSession", shop: Shop) -> None:
    found = {row["id"]: row for row in shop.lake.table(spark, "tasks").collect()}
    with OmniQ(SQLiteStorage(shop.folder / "shop.db")) as oq:
        for id in shop.ids:
            task, row = oq.get_task(id), found[id]
            assert task is not None
            assert (row["status"], row["attempts"], row["queue"], row["name"]) == (
                task.status,
                task.attempts,
                task.queue,
                task.func_path,
            )
            for name in ("created_at", "started_at", "finished_at"):
                assert row[name].astimezone(UTC) == getattr(task, name)
            assert row["error_type"] == (task.last_error.type if task.last_error else None)
    assert len({row["fingerprint"] for row in found.values() if row["error_type"]}) == 1


def test_the_store_is_noted_with_what_it_promises(shop: Shop) -> None:
    (entry,) = shop.lake.about().stores.values()
    assert entry.events_gapless
    assert entry.url.endswith("shop.db")


def test_payloads_come_in_once_and_only_when_asked_for(spark: "SparkSession", shop: Shop) -> None:
    found = shop.lake.table(spark, "payloads").collect()
    assert sorted(row["id"] for row in found) == sorted(shop.ids)
    assert all(row["payload"] for row in found)


def test_a_lost_checkpoint_is_replaced_by_what_the_manifest_knows(spark: "SparkSession", shop: Shop) -> None:
    shutil.rmtree(shop.lake.path / "_checkpoints")
    shop.trade(2)
    assert ingest(spark, shop.url, shop.lake).rows == 6
    assert there(spark, shop.lake) == shop.numbers()


def test_a_batch_that_was_published_before_its_checkpoint_is_recognised(
    spark: "SparkSession", shop: Shop, tmp_path: Path
) -> None:
    """As after a kill between the two: the checkpoint is set back, the manifest is not."""
    (entry,) = shop.lake.about().stores.values()
    checkpoint = shop.lake.path / "_checkpoints" / entry.checkpoint
    before = shutil.copytree(checkpoint, tmp_path / "before")
    shop.trade(1)
    assert ingest(spark, shop.url, shop.lake).rows == 3
    shutil.rmtree(checkpoint)
    shutil.copytree(before, checkpoint)
    taken: list[Taken] = []
    report = ingest(spark, shop.url, shop.lake, on_batch=taken.append)
    assert (report.rows, [batch.skipped for batch in taken]) == (0, [True])
    assert there(spark, shop.lake) == shop.numbers()


def test_leftovers_of_a_killed_batch_are_replaced(spark: "SparkSession", shop: Shop) -> None:
    (entry,) = shop.lake.about().stores.values()
    number = shop.lake.manifest("events").batches[entry.checkpoint] + 1
    today = datetime.now(UTC).date()
    left = shop.lake.path / f"bronze/events/task_date={today}/_batch={entry.checkpoint}-{number:06d}"
    left.mkdir(parents=True)
    (left / "part-0.parquet").write_bytes(b"cut off in the mid")
    shop.trade(1)
    assert ingest(spark, shop.url, shop.lake).rows == 3
    assert not (left / "part-0.parquet").exists()
    assert there(spark, shop.lake) == shop.numbers()


def test_one_ingest_per_store_at_a_time(spark: "SparkSession", shop: Shop) -> None:
    (store,) = shop.lake.about().stores
    with shop.lake.folder.lock(f"ingest-{store}", "ingest"), pytest.raises(LakeError, match="is in use: ingest"):
        ingest(spark, shop.url, shop.lake)


def test_a_trigger_goes_on_until_it_is_stopped(spark: "SparkSession", shop: Shop) -> None:
    stop = threading.Event()
    shop.trade(1)
    report = ingest(spark, shop.url, shop.lake, trigger="1 seconds", stop=stop, on_batch=lambda _: stop.set())
    assert report.rows == 3
    with pytest.raises(ConfigError, match="'30 seconds'"):
        ingest(spark, shop.url, shop.lake, trigger="soon")


def test_any_stream_with_the_columns_of_events_can_be_followed(spark: "SparkSession", shop: Shop, tmp_path: Path) -> None:
    lake = Lake.init(tmp_path / "lake")
    events = shop.lake.table(spark, "events").drop("task_date")
    events.write.parquet(str(tmp_path / "files"))
    stream = spark.readStream.schema(events.schema).parquet(str(tmp_path / "files"))
    assert follow(stream, lake, "files").rows == events.count()
    with pytest.raises(Invalid, match="lack the columns store, shard"):
        follow(spark.readStream.format("rate").load(), lake, "rate")


def test_a_batch_among_very_many_known_ranges_is_taken_in_once(spark: "SparkSession", tmp_path: Path) -> None:
    """Every other number of one shard, and one of two in each of many shards, as Redis has them; and far more elsewhere."""
    lake = Lake.init(tmp_path / "lake")
    every = spark.range(1, 4001).selectExpr(
        "'s1' AS store",
        "if(id <= 2000, '', concat('q', id % 1000)) AS shard",
        "if(id <= 2000, id, id div 1000) AS seq",
        "timestamp_seconds(1772841600 + id) AS ts",
        "'enqueued' AS event",
        "string(id) AS task_id",
        "'mail' AS queue",
        "'app:send' AS name",
        "string(null) AS group_id",
        "0 AS attempt",
        "string(null) AS worker",
        "ts AS enqueued_at",
        "ts AS due_at",
        "'PENDING' AS status",
        "string(null) AS data",
    )
    with lake.change() as draft:
        manifest = draft.manifest("events")
        manifest.seen = {"s1": {"": [(n, n) for n in range(10_000, 30_000, 2)]}, "s2": {"": [(1, 4000)]}}
        draft.put(manifest)
    even = take_in(lake, every.where("seq % 2 = 0"), stream="one", batch=0)
    assert (even.known, even.quarantined) == (0, 0)
    ranges = sum(map(len, lake.manifest("events").seen["s1"].values())) - 10_000
    assert ranges > 1900
    without_number = every.where("id = 1").selectExpr("* EXCEPT (seq)", "bigint(null) AS seq")
    rest = take_in(lake, every.unionByName(without_number), stream="two", batch=0)
    assert (even.rows + rest.rows, rest.known, rest.quarantined) == (4000, even.rows, 1)
    assert lake.table(spark, "events").select("task_id").distinct().count() == lake.manifest("events").rows == 4000


# -- upkeep ---------------------------------------------------------------------------------------------


def test_compaction_makes_fewer_files_of_the_same_rows(spark: "SparkSession", shop: Shop) -> None:
    before = {name: sorted(map(str, shop.lake.table(spark, name).collect())) for name in ("events", "tasks", "attempts")}
    stamps = {day: part.stamp for day, part in shop.lake.manifest("events").parts.items()}
    many = len(shop.lake.files("events"))
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    report = compact(spark, shop.lake, before=tomorrow)
    assert len(shop.lake.files("events")) == len(stamps) < many
    assert report.before - report.after >= many - len(stamps)
    assert {name: sorted(map(str, shop.lake.table(spark, name).collect())) for name in before} == before
    assert {day: part.stamp for day, part in shop.lake.manifest("events").parts.items()} == stamps  # nothing to build
    assert compact(spark, shop.lake, before=tomorrow).days == 0
    assert compact(spark, shop.lake, before=date(2026, 1, 1)).days == 0


def test_what_was_erased_is_in_no_file_and_does_not_come_back(spark: "SparkSession", shop: Shop) -> None:
    import pyarrow.parquet as parquet

    failed = shop.ids[0]
    assert shop.lake.table(spark, "tasks").where(f"id = '{failed}'").count() == 1
    report = erase(spark, shop.lake, group="customer-1")
    assert (report.rows, report.payloads) == (60, 20)
    (entry,) = shop.lake.about().erased
    assert (entry.kind, entry.digest) == ("group", hashlib.sha256(b"customer-1").hexdigest())
    for file in shop.lake.path.rglob("*.parquet"):
        data = str(parquet.ParquetFile(file).read().to_pylist())
        assert "customer-1" not in data
        assert failed not in data
    assert all(result.ok for result in check(spark, shop.lake))
    # A new checkpoint and an empty list of what was seen: everything would come in again.
    shutil.rmtree(shop.lake.path / "_checkpoints")
    with shop.lake.change() as draft:
        manifest = draft.manifest("events")
        manifest.parts, manifest.seen = {}, {}
        draft.put(manifest)
    again = ingest(spark, shop.url, shop.lake)
    assert (again.rows, again.erased) == (len(shop.numbers()) - 60, 60)
    seen: Any = shop.lake.manifest("events").seen
    assert [ranges for by in seen.values() for ranges in by.values()] == [[(1, len(shop.numbers()))]]  # no gap where they were
    with pytest.raises(Invalid, match="one task or one group"):
        erase(spark, shop.lake, task="a", group="b")


def test_days_without_anything_new_expire_and_gold_stays(shop: Shop) -> None:
    rows = shop.lake.manifest("tasks").rows
    later = datetime.now(UTC) + timedelta(days=40)
    kept = expire(None, shop.lake, keep_days=41, now=later)
    assert (kept.rows, shop.lake.manifest("tasks").rows) == ({}, rows)
    with pytest.raises(Invalid, match="keep_days=7, gold_days=3"):
        expire(None, shop.lake, keep_days=7, gold_days=3)
    gone = expire(None, shop.lake, keep_days=30, now=later)
    assert gone.rows["tasks"] == rows
    assert shop.lake.files("events") == shop.lake.files("attempts") == []
    assert shop.lake.about().expired_before == (later - timedelta(days=30)).date()
    assert shop.lake.manifest("func_hour").rows > 0
    expire(None, shop.lake, keep_days=30, gold_days=30, now=later)
    assert shop.lake.manifest("func_hour").rows == 0


@pytest.mark.slow
def test_after_expiry_a_build_leaves_the_old_days_of_gold_alone(spark: "SparkSession", tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.trade(2)
    ingest(spark, shop.url, shop.lake)
    build(spark, shop.lake, tables=["func_hour"])
    hours = shop.lake.files("func_hour")
    expire(None, shop.lake, keep_days=1, now=datetime.now(UTC) + timedelta(days=3))
    build(spark, shop.lake, tables=["func_hour"], full=True)
    assert shop.lake.files("func_hour") == hours
    assert all(result.ok for result in check(spark, shop.lake))
