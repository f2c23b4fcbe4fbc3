"""Readers of format `omniq`, called as Spark calls them but without a JVM."""

import pickle
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType
from support import redis_server
from support.redis_server import Server
from support.spark_stores import KINDS, empty, enqueue, fill

from omniq.errors import ConfigError, EventsLost, StoreUnavailable
from omniq.operations import Retention
from omniq.spark.address import Address, address_of, anchored, existing
from omniq.spark.reading.schema import arrow_schema
from omniq.spark.reading.source import BatchReader, reader
from omniq.spark.reading.stream import StreamReader
from omniq.storage.bulk import open_bulk
from omniq.storage.tables import TABLES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server.running(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> str:
    return empty(request.param, tmp_path, server)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


Streams = Callable[..., StreamReader]


def struct(table: str, *names: str) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(arrow_schema(table, names or None))


def batch_reader(url: str, table: str, *names: str, **options: str) -> BatchReader:
    return reader({"url": url, "table": table, **options}, struct(table, *names))


def rows(made: Any, parts: Any) -> list[dict[str, Any]]:
    """What the executors would read; parts and reader travel as they do in Spark."""
    fresh = StreamReader(made.given, made.schema) if isinstance(made, StreamReader) else made
    batches = [batch for part in parts for batch in pickle.loads(pickle.dumps(fresh)).read(pickle.loads(pickle.dumps(part)))]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


@pytest.fixture
def stream() -> Iterator[Callable[..., StreamReader]]:
    """Makes readers as the driver has them, and stops them as it does."""
    with ExitStack() as stack:

        def make(url: str, **options: str) -> StreamReader:
            made = StreamReader({"url": url, "table": "events", **options}, struct("events"))
            stack.callback(made.stop)
            return made

        yield make


def drained(made: StreamReader, start: dict[str, Any], limit: int) -> tuple[list[int], dict[str, Any], list[dict[str, Any]]]:
    """The sizes of the batches until there is nothing new, where they end, and their rows."""
    sizes: list[int] = []
    found: list[dict[str, Any]] = []
    while (end := made.latestOffset(start, ReadMaxRows(limit))) != start:
        batch = rows(made, made.partitions(start, end))
        sizes.append(len(batch))
        found += batch
        start = end
    return sizes, start, found


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", list(TABLES))
def test_a_table_is_what_the_store_holds(url: str, table: str) -> None:
    fill(url)
    made = batch_reader(url, table, numPartitions="3", batchRows="4")
    found = rows(made, made.partitions())
    with open_bulk(url) as bulk:
        batches = [batch for part in bulk.ranges(table) for batch in bulk.scan(part)]
        store = bulk.info().store_id
    expected = [dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True)]
    moments = {column.name for column in TABLES[table] if column.type == "timestamp"}
    for row in found:
        for name in moments & {name for name, value in row.items() if value is not None}:
            assert row[name].tzinfo is not None
            row[name] = round(row[name].timestamp() * 1_000_000)
    for row in expected:
        if table == "events":
            row["store"] = store
    assert len(found) == {"tasks": 21, "results": 20, "attempts": 20, "events": 61, "queues": 2, "groups": 3}[table]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_only_the_columns_and_rows_that_are_asked_for_are_read(url: str) -> None:
    fill(url)
    made = batch_reader(url, "tasks", "name", "error", where="status = 'FAILED' AND queue = 'mail'")
    assert rows(made, made.partitions()) == [{"name": "support.jobs:fail", "error": "ähm, no luck"}] * 2


def test_the_id_of_the_store_is_a_column_that_conditions_see(url: str) -> None:
    enqueue(url, 2)
    with open_bulk(url) as bulk:
        store = bulk.info().store_id
    for where, count in ((f"store = '{store}' AND seq = 1", 1), ("store = 'other'", 0), ("store IS NOT NULL", 2)):
        made = batch_reader(url, "events", "store", where=where)
        assert rows(made, made.partitions()) == [{"store": store}] * count


def test_an_empty_store_has_no_rows(url: str) -> None:
    with open_bulk(url) as bulk:
        bulk.info()
    for table in TABLES:
        made = batch_reader(url, table)
        assert rows(made, made.partitions() or [None]) == []


def test_a_schema_of_the_users_own_chooses_columns_and_must_fit(sqlite_url: str) -> None:
    enqueue(sqlite_url, 2)
    made = batch_reader(sqlite_url, "tasks", "seq", "queue")
    assert rows(made, made.partitions()) == [{"seq": 1, "queue": "default"}, {"seq": 2, "queue": "default"}]
    wrong = StructType().add("seq", "string")
    with pytest.raises(ConfigError, match="other types; the table's columns are `seq` BIGINT"):
        reader({"url": sqlite_url}, wrong)


# -- where the store is ----------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/none.db", f"file://{tmp_path}/none"):
        with pytest.raises(StoreUnavailable, match=r"no store at .*none.*check the URL"):
            batch_reader(url, "tasks").partitions()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["memory://", "sqlite://", "sqlite:///:memory:"])
def test_a_store_inside_a_process_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="lives inside one process"):
        address_of(url, "s")


def test_a_file_is_not_read_on_another_machine(sqlite_url: str) -> None:
    enqueue(sqlite_url, 1)
    made = batch_reader(sqlite_url, "tasks")
    (part,) = made.partitions()
    part.address = Address(part.address.url, part.address.store, "elsewhere")  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match=r"another machine.*keep the tasks in Redis"):
        rows(made, [part])


def test_a_server_is_read_on_every_machine(server: Server) -> None:
    assert address_of(server.url, "s").machine == ""


def test_a_store_that_was_replaced_since_the_plan_is_refused(tmp_path: Path, sqlite_url: str) -> None:
    enqueue(sqlite_url, 1)
    made = batch_reader(sqlite_url, "tasks")
    parts = made.partitions()
    for file in tmp_path.iterdir():
        file.unlink()
    enqueue(sqlite_url, 1)
    with pytest.raises(StoreUnavailable, match=r"holds the store .* and not .*: it was replaced"):
        rows(made, parts)


def test_a_relative_path_means_the_drivers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    enqueue("sqlite:///queue.db", 1)
    made = batch_reader("sqlite:///queue.db?durability=process", "tasks", "seq")
    parts = made.partitions()
    monkeypatch.chdir("/")
    assert rows(made, parts) == [{"seq": 1}]
    assert anchored("file:a/b?durability=process") == "file:///a/b?durability=process"


def test_a_url_in_the_environment_stays_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = server.url.replace("127.0.0.1", "user:hush@127.0.0.1")
    monkeypatch.setenv("QUEUE_URL", secret)
    made = batch_reader("env:QUEUE_URL", "tasks")
    assert "hush" not in repr(vars(made)) + repr(address_of("env:QUEUE_URL", "s")) + repr(address_of(secret, "s"))
    assert b"hush" not in pickle.dumps([made, address_of("env:QUEUE_URL", "s")])
    monkeypatch.setenv("QUEUE_URL", server.url)
    with existing("env:QUEUE_URL") as bulk:
        assert bulk.info().url == server.url
    monkeypatch.delenv("QUEUE_URL")
    with pytest.raises(ConfigError, match=r"QUEUE_URL is not set .* spark.executorEnv.QUEUE_URL"):
        made.partitions()


# -- streams ---------------------------------------------------------------------------------------


def test_batches_follow_each_other_up_to_the_limit(url: str, stream: Streams) -> None:
    enqueue(url, 25)
    made = stream(url, numPartitions="3")
    sizes, end, found = drained(made, made.initialOffset(), 10)
    assert sizes == [10, 10, 5]
    assert [row["seq"] for row in found] == list(range(1, 26))
    assert {row["store"] for row in found} == {end["store"]}
    assert made.getDefaultReadLimit() == ReadMaxRows(100_000)
    assert made.latestOffset(end, ReadAllAvailable()) == end
    assert made.partitions(end, end) == []
    enqueue(url, 3)
    assert drained(made, end, 10)[0] == [3]


def test_a_batch_that_is_repeated_holds_the_same_rows(url: str, stream: Streams) -> None:
    enqueue(url, 25)
    made = stream(url)
    start = made.initialOffset()
    end = made.latestOffset(start, ReadMaxRows(10))
    first = rows(made, made.partitions(start, end))
    enqueue(url, 5)
    again = stream(url, numPartitions="4")
    assert rows(again, again.partitions(start, end)) == first


def test_a_queue_that_appears_later_is_read_from_its_beginning(server: Server, tmp_path: Path, stream: Streams) -> None:
    url = empty("redis", tmp_path, server)
    enqueue(url, 2, "old")
    made = stream(url, startingOffsets="latest")
    start = made.initialOffset()
    assert start["shards"] == {"old": 2}
    enqueue(url, 1, "old")
    enqueue(url, 2, "new")
    _, end, found = drained(made, start, 100)
    assert end["shards"] == {"old": 3, "new": 2}
    assert sorted((row["shard"], row["seq"]) for row in found) == [("new", 1), ("new", 2), ("old", 3)]


def test_available_now_ends_with_what_was_there_at_its_start(url: str, stream: Streams) -> None:
    enqueue(url, 7)
    made = stream(url)
    made.prepareForTriggerAvailableNow()
    enqueue(url, 5)
    enqueue(url, 5, "later")
    sizes, end, _ = drained(made, made.initialOffset(), 4)
    assert sizes == [4, 3]
    assert sum(made.reportLatestOffset()["shards"].values()) == sum(end["shards"].values()) + 10


def test_a_stream_begins_where_it_is_told(url: str, stream: Streams) -> None:
    enqueue(url, 3)
    with open_bulk(url) as bulk:
        (part,) = bulk.ranges("events")
        times = [us for batch in bulk.scan(part, ["ts"]) for us in batch["ts"]]
        (shard,) = bulk.event_shards()
    between = datetime.fromtimestamp(times[-1] / 1_000_000 + 3600, UTC)
    before = datetime.fromtimestamp(times[0] / 1_000_000 - 3600, UTC)
    for text, seq in (
        ("earliest", 0),
        ("latest", 3),
        (between.isoformat(), 3),
        (before.isoformat(), 0),
        (f'{{"shards": {{"{shard.name}": 2}}}}', 2),
    ):
        assert stream(url, startingOffsets=text).initialOffset()["shards"] == {shard.name: seq}


def test_a_time_is_found_among_many(sqlite_url: str, tmp_path: Path) -> None:
    enqueue(sqlite_url, 100)
    with sqlite3.connect(tmp_path / "queue.db") as connection:
        connection.execute("UPDATE events SET ts = 1800000000000000 + seq * 1000000")
    connection.close()
    for after in (0, 1, 50, 99, 100):
        at = datetime.fromtimestamp(1_800_000_000 + after + 0.5, UTC).isoformat()
        made = batch_reader(sqlite_url, "events", "seq", startingOffsets=at)
        assert [row["seq"] for row in rows(made, made.partitions())] == list(range(after + 1, 101))


def test_a_batch_of_events_has_two_ends(url: str) -> None:
    enqueue(url, 9)
    with open_bulk(url) as bulk:
        (shard,) = bulk.event_shards()
    offsets = {name: f'{{"shards": {{"{shard.name}": {seq}}}}}' for name, seq in (("startingOffsets", 2), ("endingOffsets", 6))}
    made = batch_reader(url, "events", "seq", **offsets)
    assert [row["seq"] for row in rows(made, made.partitions())] == [3, 4, 5, 6]


# -- what is gone ----------------------------------------------------------------------------------


def keep(url: str, events: int) -> int:
    """Purge all but about so many events; the first that is left."""
    with open_bulk(url) as bulk:
        bulk.call(bulk.storage.purge(Retention(events_max=events)))
        return min(shard.first for shard in bulk.event_shards())


def test_events_that_were_purged_unread_stop_the_stream(sqlite_url: str, stream: Streams) -> None:
    enqueue(sqlite_url, 30)
    made = stream(sqlite_url)
    start = made.initialOffset()
    end = made.latestOffset(start, ReadMaxRows(20))
    first = keep(sqlite_url, 5)
    said = f"after event 0, but the store keeps only those from {first} on; .*failOnDataLoss to false"
    with pytest.raises(EventsLost, match=said):
        made.latestOffset(start, ReadMaxRows(20))
    with pytest.raises(EventsLost, match=f"wants the events after 0 up to 20, but events up to {first - 1} were purged"):
        rows(made, made.partitions(start, end))


def test_a_lenient_stream_goes_on_with_what_is_left(url: str, stream: Streams) -> None:
    enqueue(url, 30)
    strict, made = stream(url), stream(url, failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, ReadMaxRows(28))
    first = keep(url, 5)
    left = [seq for seq in range(first, 31) if seq <= 28]
    assert [row["seq"] for row in rows(made, made.partitions(start, end))] == left
    assert [row["seq"] for row in drained(made, start, 100)[2]] == list(range(first, 31))


def test_another_store_at_the_same_place_stops_the_stream(tmp_path: Path, sqlite_url: str, stream: Streams) -> None:
    enqueue(sqlite_url, 5)
    made = stream(sqlite_url)
    _, end, _ = drained(made, made.initialOffset(), 100)
    for file in tmp_path.iterdir():
        file.unlink()
    enqueue(sqlite_url, 3)
    with pytest.raises(EventsLost, match=f"goes on in the store {end['store']}, but the store there now is "):
        made.latestOffset(end, ReadMaxRows(100))
    _, new, found = drained(stream(sqlite_url, failOnDataLoss="false"), end, 100)
    assert new["store"] != end["store"]
    assert [row["seq"] for row in found] == [1, 2, 3]


def test_an_offset_of_another_store_is_refused_in_a_batch_too(sqlite_url: str) -> None:
    enqueue(sqlite_url, 3)
    made = batch_reader(sqlite_url, "events", startingOffsets='{"store": "other", "shards": {"": 1}}')
    with pytest.raises(EventsLost, match="in the store other"):
        made.partitions()
