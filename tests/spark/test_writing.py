"""Writing with format `omniq`: a task per row, all visible at the commit or none."""

import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support import redis_server
from support.redis_server import Server
from support.spark_stores import KINDS, empty

from omniq.errors import ConfigError, DuplicateId, IdempotencyConflict, Invalid, RunClosed, SerializationError
from omniq.operations import RunState
from omniq.spark import cause
from omniq.spark.writing.writing import WRITE, TaskWriter, WrittenTasks, writer
from omniq.storage.bulk import open_bulk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = {"key": [1, 2, 3, 2], "a": [10, 20, 30, 20], "who": ["x", None, "y", None]}
FUNC = "support.jobs:add"


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


def made(url: str, names: Any = tuple(ROWS), **options: str) -> TaskWriter:
    """A writer as an executor gets it."""
    given = {"url": url, "func": FUNC, "argColumns": "a", "groupColumn": "who", "runId": "run", **options}
    return pickle.loads(pickle.dumps(writer(given, list(names), False)))


def batch(**columns: Any) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict(columns or ROWS)])


def tasks(url: str, *names: str) -> list[tuple[Any, ...]]:
    with open_bulk(url) as bulk:
        found = [batch for part in bulk.ranges("tasks") for batch in bulk.scan(part, names or ["payload", "group_id"])]
    return sorted((row for batch in found for row in zip(*batch.values(), strict=True)), key=repr)


def test_rows_are_seen_after_the_commit_and_not_before(url: str) -> None:
    sink = made(url, chunkRows="2")
    assert sink.write(batch()) == WrittenTasks(new=3, there=1)
    assert tasks(url) == []
    sink.commit([])
    assert tasks(url) == [
        (b'{"args":[10],"kwargs":{}}', "x"),
        (b'{"args":[20],"kwargs":{}}', None),
        (b'{"args":[30],"kwargs":{}}', "y"),
    ]
    sink.commit([])
    assert len(tasks(url)) == 3


def test_a_task_of_spark_that_is_repeated_adds_nothing(url: str) -> None:
    sink = made(url)
    sink.write(batch())
    assert sink.write(batch()) == WrittenTasks(new=0, there=3)
    sink.commit([])
    with open_bulk(url) as bulk:
        found = bulk.run("run")
    assert found is not None
    assert (found.state, found.new) == (RunState.COMMITTED, 3)


def test_the_same_rows_in_another_run_add_nothing(url: str) -> None:
    for run in ("first", "second"):
        sink = made(url, runId=run)
        sink.write(batch())
        sink.commit([])
    assert len(tasks(url)) == 3


def test_an_aborted_run_leaves_nothing(url: str) -> None:
    sink = made(url)
    sink.write(batch())
    sink.abort([None])
    sink.abort([None])
    assert tasks(url) == []
    with pytest.raises(RunClosed):
        sink.write(batch())
    with pytest.raises(RunClosed, match="begin another with an id of its own"):
        made(url)


def test_rows_may_be_visible_at_once(url: str) -> None:
    sink = made(url, visible="immediately")
    assert sink.write(batch()) == WrittenTasks(new=3, there=0)
    assert len(tasks(url)) == 3
    assert sink.write(batch()) == WrittenTasks(new=0, there=3)
    sink.commit([])


@pytest.mark.parametrize("visible", ["on_commit", "immediately"])
def test_another_body_under_a_key_is_passed_over_or_refused(sqlite_url: str, visible: str) -> None:
    for run, conflict in (("one", "skip"), ("two", "error")):
        sink = made(sqlite_url, runId=run, onConflict="error", visible=visible)
        sink.write(batch())
        sink.commit([])
        other = batch(key=[1, 4], a=[11, 40], who=["x", "z"])
        last = made(sqlite_url, runId=f"{run}-again", onConflict=conflict, visible=visible)
        if conflict == "error":
            with pytest.raises(IdempotencyConflict if visible == "on_commit" else DuplicateId):
                last.write(other)
        else:
            assert last.write(other) == WrittenTasks(new=1, there=1)
            last.abort([])
    assert (b'{"args":[10],"kwargs":{}}',) in tasks(sqlite_url, "payload")


def test_two_rows_of_one_key_that_differ_are_refused_when_asked(sqlite_url: str) -> None:
    twice = {"key": [1, 1], "a": [1, 2], "who": ["x", "x"]}
    with pytest.raises(IdempotencyConflict, match="two rows that differ have the same key"):
        made(sqlite_url, onConflict="error").write(batch(**twice))
    assert made(sqlite_url, runId="lenient").write(batch(**twice)).new == 1


def test_keywords_queue_and_times_reach_the_task(sqlite_url: str) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    sink = made(
        sqlite_url,
        ["k", "a", "b", "when"],
        keyColumn="k",
        argColumns="a=a, b=b",
        etaColumn="when",
        queue="mail",
        maxRetries="7",
        **{"groupColumn": "b"},
    )
    columns = {"k": ["x"], "a": [1], "b": [2], "when": pa.array([at], pa.timestamp("us", "UTC"))}
    sink.write(batch(**columns))
    sink.commit([])
    us = int(at.timestamp() * 1_000_000)
    found = tasks(sqlite_url, "payload", "queue", "due_at", "max_attempts", "group_id", "run_id")
    assert found == [(b'{"args":[],"kwargs":{"a":1,"b":2}}', "mail", us, 8, "2", "run")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"func": ""}, "task needs a name|name"),
        ({"runid2": "x"}, rf"no option 'runid2' for writing; did you mean 'runId'\? It has {', '.join(WRITE)}"),
        ({"colour": "red"}, "no option 'colour' for writing; it has url"),
        ({"keyColumn": "id"}, "no column 'id'; the DataFrame has key, a, who"),
        ({"argColumns": "x=a, who"}, r"argColumns 'x=a, who': name columns in order"),
        ({"onConflict": "replace"}, "onConflict 'replace': give skip or error"),
        ({"visible": "never"}, "visible 'never': give on_commit or immediately"),
        ({"chunkRows": "0"}, "chunkRows '0'"),
        ({"maxRetries": "-1"}, "maxRetries '-1': give a whole number of at least 0"),
    ],
)
def test_a_wrong_option_is_named(sqlite_url: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        made(sqlite_url, **options)


def test_what_is_there_is_not_replaced(sqlite_url: str) -> None:
    with pytest.raises(ConfigError, match=r'write with \.mode\("append"\)'):
        writer({"url": sqlite_url, "func": FUNC}, ["key"], True)


def test_a_dataframe_becomes_tasks(spark: "SparkSession", url: str) -> None:
    df = spark.range(50).selectExpr("concat('k-', id) AS key", "id AS a").repartition(3)
    sink = df.write.format("omniq").options(url=url, func=FUNC, argColumns="a", queue="mail").mode("append")
    sink.save()
    assert len(tasks(url)) == 50
    sink.save()
    assert len(tasks(url)) == 50
    assert set(tasks(url, "status", "queue", "attempts")) == {("PENDING", "mail", 0)}


def test_a_row_that_cannot_be_stored_leaves_nothing(spark: "SparkSession", sqlite_url: str) -> None:
    df = spark.range(20).selectExpr("concat('k-', id) AS key", "IF(id = 13, double('NaN'), id) AS a").repartition(4)
    with pytest.raises(Exception, match=r"NaN|nan") as raised:
        df.write.format("omniq").options(url=sqlite_url, func=FUNC, argColumns="a", runId="r").mode("append").save()
    assert isinstance(cause(raised.value), SerializationError)
    assert tasks(sqlite_url) == []
    with open_bulk(sqlite_url) as bulk:
        found = bulk.run("r")
    assert found is not None
    assert found.state is RunState.ABORTED
