"""Format `omniq` through Spark: tables of a store as DataFrames."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import redis_server
from support.spark_stores import KINDS, empty, enqueue, fill

import omniq.spark
from omniq.errors import ConfigError, Invalid, StoreUnavailable
from omniq.spark import unwrapped
from omniq.spark.schema import SPARK_TYPES
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


def test_a_file_on_a_cluster_is_refused(spark: "SparkSession", urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.spark.reading.is_local", lambda spark: False)
    for kind in ("sqlite", "file"):
        with pytest.raises(ConfigError, match=r"executors are not: .* keep the tasks in Redis"):
            omniq.spark.read(spark, urls[kind])
    assert omniq.spark.read(spark, urls["redis"]).columns[0] == "id"


def test_an_error_of_the_source_comes_out_of_spark_as_it_is(spark: "SparkSession", tmp_path: Path) -> None:
    with unwrapped(), pytest.raises(Exception, match="no store at") as raised:
        load(spark, f"sqlite:///{tmp_path}/none.db", "tasks").count()
    assert isinstance(omniq.spark.cause(raised.value), StoreUnavailable)


def test_a_large_table_is_read_in_parts(spark: "SparkSession", tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    enqueue(url, 500)
    found = load(spark, url, "tasks", numPartitions="4", batchRows="50", columns="seq")
    assert found.rdd.getNumPartitions() == 4
    assert sorted(row["seq"] for row in found.collect()) == list(range(1, 501))
