"""Rows are run as tasks by ordinary workers, and their results come back beside the rows."""

import contextlib
import datetime as dt
from collections.abc import Generator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import row_jobs
from pyspark.errors import SparkRuntimeException

from omniq import Invalid, OmniQ, Settings
from omniq.errors import NotEnded, TaskNotFound, TasksFailed
from omniq.models import new_id
from omniq.spark import enqueue, map_stream, map_tasks, unwrapped
from omniq.storage.bulk import open_bulk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextlib.contextmanager
def working(url: str, concurrency: int = 4, queues: list[str] | None = None) -> Generator[OmniQ, None, None]:
    """A worker in this process."""
    with (
        OmniQ.from_url(url, settings=Settings(backoff_base=0.01)) as oq,
        oq.worker(concurrency=concurrency, allow=["row_jobs"], queues=queues),
    ):
        yield oq


def numbers(spark: "SparkSession", n: int = 6) -> "DataFrame":
    return spark.range(n).selectExpr("id as n", "concat('row ', id) as name")


def rows(df: "DataFrame", *names: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in df.select(*names).collect())


def test_results_come_back_as_typed_columns_beside_their_rows(spark: "SparkSession", each_store: str) -> None:
    with working(each_store):
        found = map_tasks(
            numbers(spark),
            row_jobs.price,
            each_store,
            key="n",
            args=["n"],
            returns="price double, label string, at timestamp, exact decimal(8,2), raw binary, parts array<struct<n:int>>",
        )
    assert found.columns == [
        *["n", "name", "price", "label", "at", "exact", "raw", "parts"],
        *["_task_id", "_status", "_error", "_attempts"],
    ]
    by_number = {row.n: row for row in found.collect()}
    assert sorted(by_number) == list(range(6))
    row = by_number[3]
    assert (row.name, row.price, row.label, row.exact, row.raw) == ("row 3", 3.0, "no. 3", Decimal("0.75"), b"\x03")
    assert row["at"].astimezone(dt.UTC) == dt.datetime(2026, 11, 19, 12, tzinfo=dt.UTC)
    assert [part.n for part in row.parts] == [3, None]
    assert (row._status, row._error, row._attempts) == ("SUCCESS", None, 1)
    with OmniQ.from_url(each_store) as oq:
        task = oq.get_task(row._task_id)
        assert task is not None
        assert task.args == [3]


def test_a_failed_task_gives_nulls_or_an_error(spark: "SparkSession", store: str) -> None:
    arguments: dict[str, Any] = {"key": "n", "args": {"n": "n"}, "returns": "double", "max_retries": 1}
    with working(store):
        found = map_tasks(numbers(spark, 4), row_jobs.half, store, **arguments)
        assert rows(found, "n", "result", "_status", "_error", "_attempts") == [
            (0, 0.0, "SUCCESS", None, 1),
            (1, None, "FAILED", "ValueError: 1 is odd", 2),
            (2, 1.0, "SUCCESS", None, 1),
            (3, None, "FAILED", "ValueError: 3 is odd", 2),
        ]
        with pytest.raises(TasksFailed, match=r"^2 of 4 tasks in queue 'default' failed .*: ValueError: \d is odd; repair it"):
            map_tasks(numbers(spark, 4), row_jobs.half, store, on_error="raise", **arguments)


def test_a_call_that_was_cut_short_goes_on_and_runs_nothing_twice(spark: "SparkSession", each_store: str) -> None:
    mark = new_id()
    table = numbers(spark, 8).selectExpr("n", f"'{mark}' as mark")
    arguments: dict[str, Any] = {"key": "n", "args": ["mark", "n"], "returns": "int", "max_retries": 0, "queue": "counts"}
    with pytest.raises(NotEnded, match=r"^8 of 8 tasks in queue 'counts' have not ended within 0.01 s.*omniq worker"):
        map_tasks(table, row_jobs.count_good, each_store, timeout=0.01, **arguments)
    with pytest.raises(NotEnded, match=r"no worker serves their queue \(the queue has 8 waiting, 0 running\)"):
        map_tasks(table, row_jobs.count_good, each_store, no_worker_after=0.01, **arguments)
    kept = map_tasks(table, row_jobs.count_good, each_store, timeout=0.01, on_error="keep", **arguments)
    assert rows(kept, "n", "result", "_status", "_attempts") == [(n, None, "PENDING", 0) for n in range(8)]
    with working(each_store):
        for _ in range(2):
            found = map_tasks(table, row_jobs.count_good, each_store, **arguments)
            assert rows(found, "n", "result") == [(n, None if n % 2 else n) for n in range(8)]
        assert {row_jobs.runs[f"{mark}/{n}"] for n in range(8)} == {1}
        row_jobs.gates[mark].set()
        mended = map_tasks(table, row_jobs.count_good, each_store, retry_failed=True, **arguments)
        assert rows(mended, "n", "result", "_status") == [(n, n, "SUCCESS") for n in range(8)]
    assert {n: row_jobs.runs[f"{mark}/{n}"] for n in range(8)} == {n: 1 + n % 2 for n in range(8)}


def test_groups_keep_their_limits(spark: "SparkSession", store: str) -> None:
    mark = new_id()
    table = spark.range(24).selectExpr("id as n", "if(id % 3 = 0, 'big', 'small') as tenant", f"'{mark}' as mark")
    with working(store, concurrency=8):
        found = map_tasks(
            table, row_jobs.crowd, store, key="n", args=["mark", "tenant", "n"], returns="int", group="tenant", group_limit=2
        )
        assert rows(found, "result") == [(n,) for n in range(24)]
    assert {row_jobs.most[f"{mark}/{tenant}"] for tenant in ("big", "small")} == {2}


def test_a_result_of_another_shape_is_told(spark: "SparkSession", store: str) -> None:
    arguments: dict[str, Any] = {"key": "n", "args": ["n"], "returns": "length int"}
    with working(store):
        found = map_tasks(numbers(spark, 1), row_jobs.text, store, **arguments)
        sentence = 'the result does not fit returns (length int): {"length":"no number 0"}'
        assert rows(found, "length", "_status", "_error") == [(None, "SUCCESS", sentence)]
        strict = map_tasks(numbers(spark, 1), row_jobs.text, store, on_error="raise", **arguments)
        with pytest.raises(SparkRuntimeException, match="does not fit returns"):
            strict.collect()


def test_tasks_that_are_gone_are_told_instead_of_waited_for(
    spark: "SparkSession", store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniq.spark.working.outcomes.LONG_S", 0.0)
    arguments: dict[str, Any] = {"key": "id", "args": ["id"], "namespace": "mine"}
    enqueue(spark.range(1), store, row_jobs.text, **arguments)  # remembers the key for longer than the result is kept
    with working(store), open_bulk(store) as bulk:
        (found,) = map_tasks(spark.range(1), row_jobs.text, store, returns="string", **arguments).collect()
        bulk.call(bulk.storage.purge_results(dt.datetime.now(dt.UTC) + dt.timedelta(days=1)))
    with pytest.raises(TaskNotFound, match=f"task '{found._task_id}' was enqueued before and is gone"):
        map_tasks(spark.range(1), row_jobs.text, store, returns="string", **arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"returns": "nonsense"}, "returns='nonsense' is no type"),
        ({"returns": "name string"}, "column 'name' is taken"),
        ({"returns": "_status string"}, "column '_status' is taken"),
        ({"returns": "int", "on_error": "ignore"}, "on_error is 'null', 'raise' or 'keep'"),
        ({"returns": "int", "keep": "long"}, "'long' is not a duration"),
    ],
)
def test_what_cannot_be_is_said_first(spark: "SparkSession", store: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence):
        map_tasks(numbers(spark), row_jobs.half, store, key="n", args=["n"], **arguments)


@pytest.fixture
def stream(spark: "SparkSession", tmp_path: Path) -> Iterator["DataFrame"]:
    """Three batches of two rows."""
    for n in range(3):
        numbers(spark, 6).where(f"n div 2 = {n}").coalesce(1).write.mode("append").json(str(tmp_path / "in"))
    yield spark.readStream.schema("n long, name string").option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    for query in spark.streams.active:
        query.stop()


def test_a_stream_is_mapped_batch_by_batch_and_a_repeated_batch_runs_nothing_again(
    spark: "SparkSession", store: str, stream: "DataFrame", tmp_path: Path
) -> None:
    mark = new_id()
    batches: list[tuple[int, list[tuple[Any, ...]]]] = []

    def then(found: "DataFrame", batch_id: int) -> None:
        batches.append((batch_id, rows(found, "n", "result")))
        if len(batches) == 2:
            raise ArithmeticError("the sink is full")

    def run() -> None:
        query = map_stream(
            stream.selectExpr("*", f"'{mark}' as mark"),
            row_jobs.count,
            store,
            key="n",
            args=["mark", "n"],
            returns="int",
            then=then,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger={"availableNow": True},
        )
        with unwrapped():
            query.awaitTermination()

    with working(store):
        with pytest.raises(ArithmeticError, match="the sink is full"):
            run()
        run()
    assert [batch_id for batch_id, _ in batches] == [0, 1, 1, 2]
    assert batches[1] == batches[2]
    assert sorted(row for batch_id, found in batches[:1] + batches[2:] for row in found) == [(n, n) for n in range(6)]
    assert {row_jobs.runs[f"{mark}/{n}"] for n in range(6)} == {1}
