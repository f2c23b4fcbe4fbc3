"""The event log as a stream, through Spark."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import redis_server
from support.redis_server import Server
from support.spark_stores import empty, enqueue

import omniq.spark
from omniq.errors import EventsLost, Invalid
from omniq.operations import Retention
from omniq.spark import cause
from omniq.storage.bulk import open_bulk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server.running(tmp_path_factory.mktemp("redis")) as started:
        yield started


def take(stream: "DataFrame", folder: Path) -> tuple[list[tuple[str, int]], list[Any]]:
    """Everything new since the last call with this folder, as shards and numbers, and the progress of its batches."""
    found: list[tuple[str, int]] = []

    def keep(batch: "DataFrame", number: int) -> None:
        found.extend((row["shard"], row["seq"]) for row in batch.collect())

    query = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
    query.awaitTermination()
    return found, [progress for progress in query.recentProgress if progress["numInputRows"]]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("file", marks=pytest.mark.slow), "redis"])
def test_a_stream_goes_on_where_its_checkpoint_says(spark: "SparkSession", tmp_path: Path, server: Server, kind: str) -> None:
    url = empty(kind, tmp_path, server)
    shard = "default" if kind == "redis" else ""
    enqueue(url, 25)
    events = omniq.spark.read_stream(spark, url, max_rows=10)
    found, progress = take(events, tmp_path / "checkpoint")
    assert sorted(found) == [(shard, seq) for seq in range(1, 26)]
    assert [batch["numInputRows"] for batch in progress] == [10, 10, 5]
    assert json.loads(progress[0]["sources"][0]["latestOffset"])["shards"] == {shard: 25}
    enqueue(url, 3)
    if kind == "redis":
        enqueue(url, 2, "mail")
    found, _ = take(events, tmp_path / "checkpoint")
    new = [("mail", 1), ("mail", 2)] if kind == "redis" else []
    assert sorted(found) == sorted([(shard, 26), (shard, 27), (shard, 28), *new])


def test_a_stream_takes_columns_a_predicate_and_a_start(spark: "SparkSession", tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    enqueue(url, 4)
    enqueue(url, 3, "mail")
    columns = ["shard", "seq"]
    start = {"shards": {"": 5}}
    events = omniq.spark.read_stream(spark, url, start=start, columns=columns, where="queue = 'mail' AND seq > 2")
    assert events.columns == columns
    assert take(events, tmp_path / "checkpoint")[0] == [("", 6), ("", 7)]


def test_a_stream_fails_when_events_are_gone(spark: "SparkSession", tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    enqueue(url, 10)
    take(omniq.spark.read_stream(spark, url), tmp_path / "checkpoint")
    enqueue(url, 20)
    with open_bulk(url) as bulk:
        bulk.call(bulk.storage.purge(Retention(events_max=5)))
        first = bulk.event_shards()[0].first
    with pytest.raises(Exception, match="EventsLost") as raised:
        take(omniq.spark.read_stream(spark, url), tmp_path / "checkpoint")
    error = cause(raised.value)
    assert isinstance(error, EventsLost)
    assert f"goes on after event 10, but the store keeps only those from {first} on" in str(error)
    found, _ = take(omniq.spark.read_stream(spark, url, fail_on_data_loss=False), tmp_path / "checkpoint")
    assert found == [("", seq) for seq in range(first, 31)]


def test_only_events_are_a_stream(spark: "SparkSession", tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    enqueue(url, 1)
    with pytest.raises(Invalid, match="is no stream"):
        omniq.spark.read_stream(spark, url, "tasks")
    with pytest.raises(Exception, match="is no stream") as raised:
        take(spark.readStream.format("omniq").option("url", url).load(), tmp_path / "checkpoint")
    assert isinstance(cause(raised.value), Invalid)
