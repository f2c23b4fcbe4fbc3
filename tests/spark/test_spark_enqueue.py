"""Rows become tasks: once per key, all or none, and such that an ordinary worker runs them."""

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.functions import expr
from support import jobs

import omniq
from omniq import Invalid, OmniQ, Task
from omniq.errors import IdempotencyConflict, RunClosed, SerializationError
from omniq.operations import RunState
from omniq.spark import EnqueueReport, enqueue
from omniq.spark.address import address_of
from omniq.spark.rows import task_id
from omniq.spark.writing.columns import choice
from omniq.spark.writing.enqueueing import task_rows
from omniq.spark.writing.staging import Work, begin, stage
from omniq.storage.bulk import open_bulk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ECHO = "default/support.jobs:echo"


def tasks_of(url: str) -> list[Task]:
    with OmniQ.from_url(url) as oq:
        return oq.find(limit=1000)[0]


def numbers(spark: "SparkSession", n: int = 20) -> "DataFrame":
    return spark.range(n).selectExpr("id", "id * 2 as double", "concat('row ', id) as text")


def counts(report: EnqueueReport) -> tuple[int, int, int]:
    return report.rows, report.inserted, report.already_there


def test_each_row_is_run_once_by_an_ordinary_worker_however_often_it_is_enqueued(
    spark: "SparkSession", each_store: str
) -> None:
    rows = numbers(spark)
    first = enqueue(rows, each_store, jobs.add, key="id", args={"a": "id", "b": "double"}, run_id="monday")
    again = enqueue(rows, each_store, jobs.add, key="id", args={"a": "id", "b": "double"}, run_id="monday")
    other = enqueue(rows, each_store, jobs.add, key="id", args={"a": "id", "b": "double"})
    assert (counts(first), counts(again), counts(other)) == ((20, 20, 0), (20, 20, 0), (20, 0, 20))
    assert (first.run_id, first.queue) == ("monday", "default")
    with OmniQ.from_url(each_store) as oq:
        with oq.worker(concurrency=4, allow=["support.jobs"]) as worker:
            worker.drain()
        results = {n: oq.get_result(task_id("default/support.jobs:add", str(n))) for n in range(20)}
    assert {n: result and result.result for n, result in results.items()} == {n: 3 * n for n in range(20)}
    assert len(tasks_of(each_store)) == 20
    late = enqueue(rows, each_store, jobs.add, key="id", args={"a": "id", "b": "double"})
    assert counts(late) == (20, 0, 20)


@pytest.mark.parametrize("run_id", ["dead", "another"])
def test_a_dead_drivers_run_goes_on_under_its_id_and_is_claimed_by_another(
    spark: "SparkSession", each_store: str, run_id: str
) -> None:
    rows = task_rows(jobs.echo, choice("id"), {}, dedupe="1d")
    keys = [str(n) for n in range(7)]
    batch = pa.RecordBatch.from_pydict({"id": [task_id(ECHO, key) for key in keys], "key": keys})
    with open_bulk(each_store) as bulk:
        bulk.open_run("dead", "default")
        list(stage(iter([batch]), Work(address_of(each_store, bulk.info().store_id), "dead", rows, {}, chunk=10)))
    assert tasks_of(each_store) == []
    assert counts(enqueue(spark.range(10), each_store, jobs.echo, key="id", run_id=run_id)) == (10, 10, 0)
    assert len(tasks_of(each_store)) == 10


def test_a_part_that_is_staged_again_adds_nothing_and_a_late_one_is_refused(store: str) -> None:
    rows = task_rows(jobs.echo, choice("key"), {}, dedupe="1d")
    batch = pa.RecordBatch.from_pydict({"id": ["a", "b", "b", "c"], "key": ["1", "2", "2", "3"]})
    with open_bulk(store) as bulk:
        assert begin(bulk, "run", "default", 60) == ("run", None)
        work = Work(address_of(store, bulk.info().store_id), "run", rows, {"key": "'key'"}, chunk=2)
        for _ in range(2):  # a task of Spark's failed after its last write, and is repeated
            tally = list(stage(iter([batch]), work))[-1].to_pylist()[0]
            assert (tally["rows"], tally["without_key"]) == (4, 0)
        done = bulk.commit_run("run")
        assert (done.state, done.released) == (RunState.COMMITTED, 3)
        with pytest.raises(RunClosed):
            list(stage(iter([batch]), work))
    assert len(tasks_of(store)) == 3


def test_rows_with_the_same_key_are_one_task(spark: "SparkSession", store: str) -> None:
    rows = numbers(spark, 10).unionAll(numbers(spark, 6))
    assert counts(enqueue(rows, store, jobs.echo, key="id", args=["text"], on_conflict="error")) == (16, 10, 6)
    differing = rows.selectExpr("id", "concat(text, '!') as text")
    assert counts(enqueue(differing, store, jobs.echo, key="id", args=["text"])) == (16, 0, 16)
    with pytest.raises(IdempotencyConflict, match="another body"):
        enqueue(differing, store, jobs.echo, key="id", args=["text"], on_conflict="error")


def test_rows_without_a_key_are_counted_and_nothing_is_enqueued(spark: "SparkSession", store: str) -> None:
    rows = numbers(spark, 9).selectExpr("nullif(id % 3, 0) as customer", "text")
    with pytest.raises(Invalid, match=r"^3 of 9 rows have no key \('customer' is null\), for example \{'text': 'row \d'\}"):
        enqueue(rows, store, jobs.echo, key="customer", args=["text"])
    assert tasks_of(store) == []


def test_a_run_that_failed_leaves_nothing_and_can_be_repeated_under_its_name(spark: "SparkSession", store: str) -> None:
    rows = numbers(spark, 10).selectExpr("id", "if(id = 7, double('NaN'), double(id)) as value")
    with pytest.raises(SerializationError, match="the row with key '7': argument 1: nan has no JSON form"):
        enqueue(rows, store, jobs.echo, key="id", args=["value"], run_id="nightly")
    assert tasks_of(store) == []
    with open_bulk(store) as bulk:
        assert (found := bulk.run("nightly")) is not None
        assert (found.state, found.settled) == (RunState.ABORTED, True)
    report = enqueue(rows.where("id <> 7"), store, jobs.echo, key="id", args=["value"], run_id="nightly")
    assert (report.run_id, *counts(report)) == ("nightly", 9, 9, 0)
    assert {task.id for task in tasks_of(store)} == {task_id(ECHO, str(n)) for n in range(10) if n != 7}


NOON = dt.datetime(2026, 11, 16, 12, 0, 0, 250_000, tzinfo=dt.UTC)
VALUES = {
    "text": ("string", "Grüße 🐘"),
    "whole": ("bigint", 2**53 + 1),
    "small": ("tinyint", -3),
    "real": ("double", 0.1),
    "flag": ("boolean", True),
    "nothing": ("string", None),
    "exact": ("decimal(10,2)", Decimal("12.50")),
    "bytes": ("binary", b"\x00\xff"),
    "day": ("date", dt.date(2026, 2, 28)),
    "moment": ("timestamp", NOON),
    "wall": ("timestamp_ntz", NOON.replace(tzinfo=None)),
    "lasting": ("interval day to second", dt.timedelta(days=1, seconds=2.5)),
    "many": ("array<int>", [1, None, 3]),
    "named": ("map<string,double>", {"a": 1.5, "b": None}),
    "by_day": ("map<date,int>", {dt.date(2026, 1, 1): 1}),
    "nested": ("struct<at:timestamp,tags:array<struct<name:string>>>", {"at": NOON, "tags": [{"name": "x"}, {"name": None}]}),
}


@pytest.fixture
def far_away(spark: "SparkSession") -> Iterator[None]:
    """The session's time zone is another one for this test."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    yield
    spark.conf.set("spark.sql.session.timeZone", str(before))


@pytest.mark.usefixtures("far_away")
def test_values_arrive_as_if_a_program_had_passed_them(spark: "SparkSession", store: str) -> None:
    table = pa.table({name: _array(kind, value) for name, (kind, value) in VALUES.items()})
    rows = spark.createDataFrame(table).withColumn("wall", expr("timestamp_ntz'2026-11-16 12:00:00.25'"))
    assert {f.name: f.dataType.simpleString() for f in rows.schema} == {n: kind for n, (kind, _) in VALUES.items()}
    enqueue(rows, store, jobs.echo, key=["whole", "moment"], args={n: n for n in VALUES}, queue="spark")
    with OmniQ.from_url(store) as oq:
        oq.options(queue="hand").enqueue(jobs.echo, **{name: value for name, (_, value) in VALUES.items()})
    by_queue = {task.queue: task for task in tasks_of(store)}
    assert by_queue["spark"].kwargs == by_queue["hand"].kwargs
    assert by_queue["spark"].id == task_id("spark/support.jobs:echo", f"16:{2**53 + 1}16:{int(NOON.timestamp() * 1_000_000)}")


def _array(kind: str, value: Any) -> pa.Array:
    types = {
        "tinyint": pa.int8(),
        "decimal(10,2)": pa.decimal128(10, 2),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestamp_ntz": pa.timestamp("us"),
        "interval day to second": pa.duration("us"),
        "array<int>": pa.list_(pa.int32()),
        "map<string,double>": pa.map_(pa.string(), pa.float64()),
        "map<date,int>": pa.map_(pa.date32(), pa.int32()),
        VALUES["nested"][0]: pa.struct(
            {"at": pa.timestamp("us", "UTC"), "tags": pa.list_(pa.struct({"name": pa.string()}))}.items()
        ),
        "string": pa.string(),
    }
    return pa.array([list(value.items()) if kind.startswith("map") else value], types.get(kind))


@omniq.task(queue="polite", max_retries=7, timeout=5)
def polite(a: int, b: int = 0) -> int:
    return a + b


def test_groups_times_and_the_options_of_the_task_are_kept(spark: "SparkSession", store: str) -> None:
    rows = spark.range(4).selectExpr("id", "id % 2 as tenant", "timestamp'2030-01-01 00:00:00Z' as due")
    report = enqueue(rows, store, polite, key="id", args=["id"], group="tenant", eta="due", group_limit=3, timeout=9)
    assert report.queue == "polite"
    found = {tuple(task.args): task for task in tasks_of(store)}
    assert {n[0]: task.group for n, task in found.items()} == {0: "0", 1: "1", 2: "0", 3: "1"}
    assert {(t.eta, t.max_retries, t.timeout) for t in found.values()} == {(dt.datetime(2030, 1, 1, tzinfo=dt.UTC), 7, 9)}
    with OmniQ.from_url(store) as oq:
        assert {(info.group, info.limit) for info in oq.groups("polite")[0]} == {("0", 3), ("1", 3)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"key": "nothing"}, "there is no column 'nothing'; the DataFrame has id, double, text, shape, made"),
        ({"key": "id", "args": ["shape"]}, "JSON has no objects with keys of type struct<a:int>"),
        ({"key": "id", "args": ["shape.here"]}, "there is no column 'shape.here'"),
        ({"key": "id", "args": "text"}, r"write \['text'\]"),
        ({"key": "id", "eta": "text"}, "eta column 'text' is string; cast it to timestamp"),
        ({"key": "id", "group": "shape"}, "group column 'shape' is map"),
        ({"key": "shape"}, "key column 'shape' is map"),
        ({"key": []}, "name the column that tells the rows apart"),
        ({"key": "id", "on_conflict": "replace"}, "on_conflict is 'skip' or 'error'"),
        ({"key": "id", "dedupe": "soon"}, "'soon' is not a duration"),
        ({"key": "made"}, r"key 'made' is made by uuid\(\)"),
    ],
)
def test_what_cannot_be_is_said_before_any_row_is_read(
    spark: "SparkSession", store: str, arguments: dict[str, Any], sentence: str
) -> None:
    rows = numbers(spark).selectExpr("*", "map(named_struct('a', 1), 2) as shape", "uuid() as made")
    with pytest.raises(Invalid, match=sentence):
        enqueue(rows, store, jobs.echo, **arguments)


def test_arguments_that_the_function_refuses_are_said_before_any_row_is_read(spark: "SparkSession", store: str) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        enqueue(numbers(spark), store, polite, key="id")


@pytest.mark.parametrize("made", ["monotonically_increasing_id()", "uuid()", "rand(7)", "concat(id, '-', randn())"])
def test_a_key_that_spark_may_make_anew_is_refused(spark: "SparkSession", store: str, made: str) -> None:
    rows = numbers(spark).selectExpr("*", f"cast({made} as string) as made").where("id > 3")
    with pytest.raises(Invalid, match="use a key that comes from the data"):
        enqueue(rows, store, jobs.echo, key=["id", "made"])
    named = numbers(spark, 5).selectExpr("id as `rand(7)`", "rand() as `uuid()`")  # only called so
    assert enqueue(named, store, jobs.echo, key="rand(7)", args=["uuid()"]).inserted == 5


def test_a_stream_is_refused(spark: "SparkSession", store: str) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(Invalid, match="map_stream"):
        enqueue(stream, store, jobs.echo, key="value")


def test_whoever_waits_is_told_how_far_it_is(spark: "SparkSession", store: str) -> None:
    told: list[tuple[str, int, int | None]] = []
    enqueue(numbers(spark), store, jobs.echo, key="id", progress=lambda *seen: told.append(seen))
    assert ("staged", 20, None) in told
    assert told[-1] == ("committed", 20, 20)
