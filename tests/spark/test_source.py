"""Format `omniq` through Spark: tables of a store as DataFrames."""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import redis_server
from support.spark_stores import KINDS, empty, enqueue, fill

import omniq.spark
from omniq.errors import ConfigError, Invalid, StoreUnavailable
from omniq.spark import unwrapped
from omniq.spark.reading.schema import SPARK_TYPES
from omniq.storage.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One filled store of each kind: 20 tasks that ran, 4 of which failed, and one that waits."""
    with redis_server.running(tmp_path_factory.mktemp("redis")) as server:
        found = {kind: empty(kind, tmp_path_factory.mktemp(kind), server) for kind in KINDS}
        for url in found.values():
            fill(url)
        yield found


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


def load(spark: "SparkSession", url: str, table: str, **options: str) -> "DataFrame":
    return spark.read.format("omniq").option("url", url).option("table", table).options(**options).load()


def test_tables_are_found_without_registration_on_every_store(spark: "SparkSession", url: str) -> None:
    tasks = load(spark, url, "tasks").groupBy("queue", "status").count().collect()
    assert sorted(map(tuple, tasks)) == [
        ("default", "FAILED", 2),
        ("default", "PENDING", 1),
        ("default", "SUCCESS", 8),
        ("mail", "FAILED", 2),
        ("mail", "SUCCESS", 8),
    ]
    joined = load(spark, url, "results").join(load(spark, url, "attempts", numPartitions="2"), "task_id")
    assert sorted(map(tuple, joined.groupBy("status", "outcome").count().collect())) == [
        ("FAILED", "failed", 4),
        ("SUCCESS", "succeeded", 16),
    ]


def test_the_schema_is_the_table(spark: "SparkSession", urls: dict[str, str]) -> None:
    for table, columns in TABLES.items():
        found = load(spark, urls["sqlite"], table)
        assert [(field.name, field.dataType.simpleString().upper()) for field in found.schema] == [
            (column.name, SPARK_TYPES[column.type]) for column in columns
        ]


def test_values_arrive_with_their_types(spark: "SparkSession", urls: dict[str, str]) -> None:
    (row,) = load(spark, urls["sqlite"], "tasks", where="status = 'PENDING'").collect()
    assert row["name"] == "support.jobs:add"
    assert bytes(row["payload"]) == b'{"args":[99],"kwargs":{}}'
    assert (row["attempts"], row["finished_at"], row["group_id"]) == (0, None, None)
    age = datetime.now(UTC) - row["created_at"].replace(tzinfo=row["created_at"].tzinfo or UTC)
    assert 0 <= age.total_seconds() < 3600


FILTERS = {
    "status = 'FAILED' AND error LIKE 'ähm%'": 4,
    "queue IN ('mail', 'none') AND attempts > 0 AND group_id IS NULL": 10,
    "created_at > '2020-01-01' AND (seq < 5 OR seq > 15)": 10,
    "name <> 'support.jobs:add' OR finished_at IS NULL": 5,
}


@pytest.mark.parametrize("setting", ["true", "false"])
def test_filters_choose_the_same_rows_whatever_the_session_pushes(
    spark: "SparkSession", urls: dict[str, str], setting: str
) -> None:
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, setting)
    try:
        tasks = load(spark, urls["sqlite"], "tasks")
        counts = reduce(lambda a, b: a.union(b), (tasks.filter(text).selectExpr("count(*) AS n") for text in FILTERS))
        assert [row["n"] for row in counts.collect()] == list(FILTERS.values())
        assert tasks.count() == 21
    finally:
        spark.conf.set(PUSHDOWN, str(before))


def test_filters_are_met_by_the_store_where_a_query_asks_for_it(spark: "SparkSession", urls: dict[str, str]) -> None:
    assert spark.conf.get(PUSHDOWN) == "true"
    for text, count in FILTERS.items():
        found = load(spark, urls["sqlite"], "tasks", pushFilters="true").filter(text)
        assert found.count() == count, text
    plan = load(spark, urls["sqlite"], "tasks", pushFilters="true").filter("status = 'FAILED' AND name <> 'x'")
    left = plan._jdf.queryExecution().executedPlan().toString().partition("Filter")[2].partition("\n")[0]
    assert "status" not in left
    assert "name" in left


def test_read_takes_columns_and_a_predicate(spark: "SparkSession", url: str) -> None:
    found = omniq.spark.read(spark, url, columns=["id", "error"], where="status = 'FAILED'", partitions=3)
    assert found.columns == ["id", "error"]
    assert {row["error"] for row in found.collect()} == {"ähm, no luck"}


def test_read_checks_before_spark_is_asked(spark: "SparkSession", urls: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="no table 'jobs'"):
        omniq.spark.read(spark, urls["sqlite"], "jobs")
    with pytest.raises(Invalid, match="for anything else, filter the DataFrame"):
        omniq.spark.read(spark, urls["sqlite"], where="status = 'FAILED' OR seq = 1")
    with pytest.raises(ConfigError, match="lives inside one process"):
        omniq.spark.read(spark, "memory://")
    for read in (omniq.spark.read, omniq.spark.read_stream):
        with pytest.raises(StoreUnavailable, match=r"^no store at sqlite:.*/none\.db"):
            read(spark, f"{urls['sqlite']}/none.db")


def test_a_file_on_a_cluster_is_refused(spark: "SparkSession", urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.spark.reading.reading.is_local", lambda spark: False)
    for kind in ("sqlite", "file"):
        with pytest.raises(ConfigError, match=r"executors are not: .* keep the tasks in Redis"):
            omniq.spark.read(spark, urls[kind])
    assert omniq.spark.read(spark, urls["redis"]).columns[0] == "id"


def test_an_error_of_the_source_comes_out_of_spark_as_it_is(spark: "SparkSession", tmp_path: Path) -> None:
    with unwrapped(), pytest.raises(Exception, match="no store at") as raised:
        load(spark, f"sqlite:///{tmp_path}/none.db", "tasks").count()
    assert isinstance(omniq.spark.cause(raised.value), StoreUnavailable)


def written(rows: "DataFrame", mode: str, **options: str) -> None:
    rows.write.format("omniq").options(func="support.jobs:add", **options).mode(mode).save()


def streamed(rows: "DataFrame", sink: str, folder: Path, **options: str) -> None:
    writer = rows.writeStream.format(sink).options(checkpointLocation=str(folder), **options).trigger(availableNow=True)
    writer.start().awaitTermination()


def stream(spark: "SparkSession", **options: str) -> "DataFrame":
    return spark.readStream.format("omniq").options(**options).load()


MISTAKES: list[tuple[Callable[..., Any], str]] = [
    (
        lambda spark, url, _: load(spark, f"{url}/none.db", "tasks").count(),
        r"StoreUnavailable: no store at sqlite:\S+/none\.db on ",
    ),
    (lambda spark, url, _: spark.read.format("omniq").load().count(), r"ConfigError: format omniq needs the option url"),
    (
        lambda spark, url, _: load(spark, url, "tasks", colums="id").count(),
        r"ConfigError: .* 'colums' .* did you mean 'columns'\?",
    ),
    (lambda spark, url, _: load(spark, url, "jobs"), r"Invalid: no table 'jobs'; there are tasks"),
    (
        lambda spark, url, _: written(spark.range(1), "overwrite", url=url),
        r"ConfigError: .* only appends .*\.mode\(\"append\"\)",
    ),
    (lambda spark, url, _: written(spark.range(1), "append", url=url, keyColum="id"), r"ConfigError: .* mean 'keyColumn'\?"),
    (
        lambda spark, url, folder: streamed(stream(spark, url=url, table="events"), "omniq", folder, url=url),
        r"ConfigError: format omniq is no sink of a stream: .*foreachBatch\(.*omniq\.spark\.enqueue",
    ),
    (
        lambda spark, url, folder: streamed(stream(spark, url=f"{url}/none.db", table="events"), "noop", folder),
        r"StoreUnavailable: no store at ",
    ),
]


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES)
def test_a_mistake_in_the_bare_format_is_one_sentence_and_no_traceback(
    spark: "SparkSession", urls: dict[str, str], tmp_path: Path, mistake: Callable[..., Any], sentence: str
) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of which kind it is depends on where Spark was
        mistake(spark, urls["sqlite"], tmp_path)
    said = str(raised.value)
    of_spark = r"(\[STREAM_FAILED\] .* terminated with exception: )?\[PYTHON_\w+\] Failed [\w ]+: "
    assert re.match(rf"{of_spark}omniq\.errors\.{sentence}", said.splitlines()[0])
    assert "Traceback" not in said
    found = omniq.spark.cause(raised.value)
    kind, _, text = re.sub(of_spark, "", said.splitlines()[0]).removeprefix("omniq.errors.").partition(": ")
    assert (type(found).__name__, str(found)) == (kind, text)


def test_a_large_table_is_read_in_parts(spark: "SparkSession", tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    enqueue(url, 500)
    found = load(spark, url, "tasks", numPartitions="4", batchRows="50", columns="seq")
    assert found.rdd.getNumPartitions() == 4
    assert sorted(row["seq"] for row in found.collect()) == list(range(1, 501))
