"""Spark: tables of a store as DataFrames, and DataFrames as tasks; in turns with what one process does without Spark."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from benchmarks import jobs, lake
from benchmarks.bench import Bench, sqlite
from benchmarks.enqueue import PAYLOAD
from benchmarks.figures import Figure, Series, beside
from benchmarks.timing import Stopwatch
from omniq import OmniQ
from omniq.spark import enqueue, read, session
from tests.support.redis_server import Server, running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CORES = 2
FAILED = 0.03
# The same twelve columns for all: as the format has them, and as plain SQL finds them in the file.
COLUMNS = [
    *("id", "queue", "name", "group_id", "status", "attempts"),
    *("created_at", "due_at", "started_at", "finished_at", "worker", "run_id"),
]
PLAIN = 'id, queue, func_path, "group", status, attempts, created_at, eta, started_at, finished_at, worker, run_id FROM tasks'
FEW = COLUMNS[:3]
STRINGS = {"id", "queue", "name", "group_id", "status", "worker", "run_id"}
TUPLES = ", ".join(f"{name} {'string' if name in STRINGS else 'bigint'}" for name in COLUMNS)


def run(bench: Bench) -> Iterator[Figure]:
    bench.runs = min(bench.runs, 3)  # a run takes up to a minute here, long enough to even out
    spark = session(master=f"local[{CORES}]", app_name="omniq-benchmarks")
    try:
        store = bench.fresh()
        fill(bench, store, bench.size(1_000_000, 50_000))
        yield from scans(bench, spark, store)
        yield from lake.drain(bench, spark, sqlite(store))
        bench.drop(store)
        yield from enqueues(bench, spark, bench.size(200_000, 20_000))
        yield from lake.builds(bench, spark)
    finally:
        spark.stop()


def run_growth(bench: Bench) -> Iterator[Figure]:
    spark = session(master=f"local[{CORES}]", app_name="omniq-benchmarks")
    try:
        yield from lake.growth(bench, spark)
    finally:
        spark.stop()


def run_ranges(bench: Bench) -> Iterator[Figure]:
    spark = session(master=f"local[{CORES}]", app_name="omniq-benchmarks")
    try:
        yield from lake.ranges(bench, spark)
    finally:
        spark.stop()


# -- out of a store ------------------------------------------------------------------------------------


def fill(bench: Bench, store: Path, tasks: int) -> None:
    """So many tasks, of which a few have failed for good."""
    failed, chunk = round(tasks * FAILED), 50_000
    logging.getLogger("omniq").setLevel(logging.CRITICAL)  # else it tells of each that failed
    with OmniQ.from_url(f"{sqlite(store)}?durability=process") as oq:
        oq.options(queue="bad", max_retries=0).enqueue_many(jobs.broken, [(PAYLOAD,)] * failed)
        with oq.worker(100, queues=["bad"], allow=["benchmarks.jobs"]) as pool:
            pool.drain()
        for start in bench.steps(f"spark: storing {tasks:,} tasks", -(-(tasks - failed) // chunk)):
            oq.enqueue_many(jobs.nothing, [(PAYLOAD,)] * min(chunk, tasks - failed - start * chunk))


def scans(bench: Bench, spark: SparkSession, store: Path) -> Iterator[Figure]:
    url, rows = sqlite(store), _one(sqlite3.connect(store), "SELECT count(*) FROM tasks")
    failed = _one(sqlite3.connect(store), "SELECT count(*) FROM tasks WHERE status = 'FAILED'")
    spark.dataSource.register(TupleSource)
    whole: Callable[[], DataFrame] = lambda: read(spark, url, columns=COLUMNS)  # noqa: E731
    _told(whole())  # the first query of a session pays for what all others find ready

    def spark_rows(frame: Callable[[], DataFrame], expected: int = rows) -> Callable[[Path], Stopwatch]:
        def once(_: Path) -> Stopwatch:
            with Stopwatch(rows) as watch:
                assert _told(frame()) == expected
            return watch

        return once

    def plain_rows(_: Path) -> Stopwatch:
        with Stopwatch(rows) as watch:
            assert sum(batch.num_rows for batch in plain(store)) == rows
        return watch

    tuples: Callable[[], DataFrame] = lambda: spark.read.format("tuples").option("path", str(store)).load()  # noqa: E731
    few: Callable[[], DataFrame] = lambda: read(spark, url, columns=FEW)  # noqa: E731
    bad: Callable[[], DataFrame] = lambda: read(spark, url, columns=COLUMNS, where="status = 'FAILED'")  # noqa: E731
    for name, ours, other, theirs, aim in (
        ("scan, 12 columns", spark_rows(whole), "one process: sqlite3 to pyarrow", plain_rows, 1.2),
        ("scan, 12 columns", spark_rows(whole), "a source that yields tuples", spark_rows(tuples), 3.0),
        ("scan, 3 columns", spark_rows(few), "12 columns", spark_rows(whole), 2.0),
        ("scan, status = 'FAILED', 3 %", spark_rows(bad, failed), "all rows", spark_rows(whole), 4.0),
    ):
        measured, baseline = bench.compare(f"spark: {name}, {other}", ours, theirs)
        yield beside(f"spark: {name}", "rows/s", measured, other, baseline, above=aim)


def plain(store: Path) -> Iterator[pa.RecordBatch]:
    connection = sqlite3.connect(store)
    cursor = connection.execute(f"SELECT {PLAIN}")
    schema = pa.schema([(name, pa.string() if name in STRINGS else pa.int64()) for name in COLUMNS])
    while rows := cursor.fetchmany(10_000):
        arrays = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    connection.close()


class TupleSource(DataSource):
    """What a source looks like that was written in ten minutes."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return TUPLES

    def reader(self, schema: Any) -> DataSourceReader:
        return TupleReader(self.options["path"])


class TupleReader(DataSourceReader):
    def __init__(self, path: str) -> None:
        self.path = path

    def partitions(self) -> list[InputPartition]:
        last = _one(sqlite3.connect(self.path), "SELECT max(seq) FROM tasks") + 1
        edges = [last * part // CORES for part in range(CORES + 1)]
        return [InputPartition(pair) for pair in itertools.pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        connection = sqlite3.connect(self.path)
        yield from connection.execute(f"SELECT {PLAIN} WHERE seq >= ? AND seq < ?", partition.value)
        connection.close()


def _told(frame: DataFrame) -> int:
    """How many rows; every column is looked at, so that none is left out."""
    from pyspark.sql import functions as F

    hashed = F.sum(F.xxhash64(*frame.columns).cast("decimal(20,0)"))
    row = frame.agg(F.count(F.lit(1)), hashed).first()
    assert row is not None
    return int(row[0])


def _one(connection: sqlite3.Connection, query: str) -> int:
    found = connection.execute(query).fetchone()[0]
    connection.close()
    return found


# -- into a store --------------------------------------------------------------------------------------


def enqueues(bench: Bench, spark: SparkSession, tasks: int) -> Iterator[Figure]:
    frame = spark.range(0, tasks, 1, 4 * CORES).selectExpr("id", f"'{PAYLOAD}' AS payload").cache()
    frame.count()
    repeats: list[Stopwatch] = []

    def from_spark(url: str) -> Stopwatch:
        with Stopwatch(tasks) as watch:
            done = enqueue(frame, url, jobs.nothing, key="id", args=["payload"], progress=False)
        assert done.inserted == tasks
        with Stopwatch(tasks) as again:
            done = enqueue(frame, url, jobs.nothing, key="id", args=["payload"], progress=False)
        assert (done.inserted, done.already_there) == (0, tasks)
        repeats.append(again)
        return watch

    measured, baseline = bench.compare(
        "spark: enqueue to SQLite",
        lambda store: from_spark(sqlite(store)),
        lambda store: bulk(sqlite(store), tasks, 1),
    )
    yield beside(
        f"spark: enqueue {tasks:,} to SQLite", "tasks/s", measured, "enqueue_many, one process, no keys", baseline, above=0.8
    )
    yield _again("SQLite", repeats, measured)
    repeats.clear()
    with running(bench.fresh()) as server:
        measured, baseline = bench.compare(
            "spark: enqueue to Redis",
            _emptied(server, lambda: from_spark(server.url)),
            _emptied(server, lambda: bulk(server.url, tasks, CORES)),
        )
    yield beside(
        f"spark: enqueue {tasks:,} to Redis", "tasks/s", measured, "enqueue_many, two processes, no keys", baseline, above=0.8
    )
    yield _again("Redis", repeats, measured)
    frame.unpersist()


def _again(where: str, repeats: list[Stopwatch], first: Series) -> Figure:
    values = Series([watch.per_second for watch in repeats])
    return beside(f"spark: the same enqueue again, {where}", "tasks/s", values, "the first time", first, above=1.0)


def _emptied(server: Server, run: Callable[[], Stopwatch]) -> Callable[[Path], Stopwatch]:
    def once(_: Path) -> Stopwatch:
        with server.client() as client:
            client.flushall()
        return run()

    return once


def bulk(url: str, tasks: int, processes: int) -> Stopwatch:
    """The client's own way, from so many processes that were started before."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_store, [url] * processes, [1] * processes))
        with Stopwatch(tasks) as watch:
            list(pool.map(_store, [url] * processes, [tasks // processes] * processes))
    return watch


def _store(url: str, tasks: int) -> None:
    with OmniQ.from_url(url) as oq:
        oq.enqueue_many(jobs.nothing, [(PAYLOAD,)] * tasks)
