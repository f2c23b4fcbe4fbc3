"""The lake: how fast events come in, and what the tables cost beside the same query written by hand, and beside DuckDB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Series, beside
from benchmarks.timing import Stopwatch, family_cpu_s
from omniq.spark import Lake, build, check, ingest
from omniq.spark.lake.bronze import take_in
from omniq.spark.lake.generator import history
from omniq.spark.lake.manifest import Ranges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAYS = 14
LAST_DAY = date(2026, 1, DAYS)
RUNS = 3
# The table func_hour, without omniq: the same sketches and percentiles, one row per function and hour.
BY_HAND = """
    SELECT store, queue, name, date_trunc('HOUR', finished_at) AS hour, count(*) AS runs,
        count_if(outcome = 'succeeded') AS succeeded, count_if(outcome = 'retried') AS retried,
        count_if(outcome = 'failed') AS failed, count_if(outcome = 'expired') AS expired,
        count_if(outcome = 'cancelled') AS cancelled,
        sum(wait_ms) AS total_wait_ms, sum(run_ms) AS total_run_ms,
        kll_sketch_agg_double(wait_ms, 200) AS wait_sketch, kll_sketch_agg_double(run_ms, 200) AS run_sketch
    FROM attempts WHERE finished_at IS NOT NULL GROUP BY ALL
"""
PERCENTILES = ", ".join(
    f"kll_sketch_get_quantile_double({what}_sketch, {p / 100}D) AS {what}_p{p}"
    for what in ("wait", "run")
    for p in (50, 95, 99)
)
DUCK = """
    SELECT store, queue, name, date_trunc('hour', finished_at) AS hour, count(*) AS runs,
        count_if(outcome = 'succeeded') AS succeeded, count_if(outcome = 'retried') AS retried,
        count_if(outcome = 'failed') AS failed, count_if(outcome = 'expired') AS expired,
        count_if(outcome = 'cancelled') AS cancelled,
        sum(wait_ms) AS total_wait_ms, sum(run_ms) AS total_run_ms,
        quantile_cont(wait_ms, [0.5, 0.95, 0.99]) AS wait_p, quantile_cont(run_ms, [0.5, 0.95, 0.99]) AS run_p
    FROM read_parquet($files) WHERE finished_at IS NOT NULL GROUP BY ALL
"""


def drain(bench: Bench, spark: SparkSession, url: str) -> Iterator[Figure]:
    """The whole log of a store into a new lake."""
    rates: list[float] = []
    for _ in bench.steps("lake: ingest", RUNS):
        folder = bench.fresh()
        taken = ingest(spark, url, Lake.init(folder))
        rates.append(taken.rows / taken.seconds)
        bench.drop(folder)
    yield Figure(name="lake: ingest from SQLite", unit="events/s", measured=Series(rates), above=30_000)


def builds(bench: Bench, spark: SparkSession) -> Iterator[Figure]:
    """Tables of a synthetic history; each run works on a copy of the lake, whose files are shared."""
    events = bench.size(10_000_000, 100_000)
    silver = bench.fresh()
    for _ in bench.steps(f"lake: a history of {events:,} events", 1):
        lake = Lake.init(silver)
        take_in(lake, history(spark, events=events, days=DAYS), stream="synthetic", batch=0)
        build(spark, lake, tables=())
    runs = lake.manifest("attempts").rows
    fields = (f"lake: func_hour of {runs:,} runs", "runs/s")
    measured, by_hand = bench.compare(f"{fields[0]}, by hand", _copied(silver, _gold(spark, runs)), _by_hand(spark, lake, runs))
    yield beside(*fields, measured, "the same in Spark SQL, by hand", by_hand, above=1 / 1.3)
    measured, duck = bench.compare(f"{fields[0]}, DuckDB", _copied(silver, _gold(spark, runs)), _duck(lake, runs))
    ours, theirs = Series(measured.cpu_us), Series(duck.cpu_us)
    yield beside("lake: the same, CPU per run", "µs", ours, "DuckDB, exact percentiles", theirs, below=5)
    yield from _increments(bench, spark, events)
    bench.drop(silver)
    yield _cold(bench, spark)


def _increments(bench: Bench, spark: SparkSession, events: int) -> Iterator[Figure]:
    """Everything from bronze on, and then what one percent more costs; the new events fall on the last of fourteen days."""
    bronze = bench.fresh()
    take_in(Lake.init(bronze), history(spark, events=events, days=DAYS), stream="synthetic", batch=0)
    more = history(spark, events=events // 100, days=1, start=LAST_DAY, store="more", first=events).cache()
    more.count()
    full: list[float] = []
    again: list[float] = []
    for _ in bench.steps("lake: full build, and after 1 % more", RUNS if bench.quick else 1):  # minutes
        folder = _copy(bronze, bench.fresh())
        lake = Lake(folder)
        full.append(build(spark, lake).seconds)
        take_in(lake, more, stream="more", batch=0)
        again.append(build(spark, lake).seconds)
        check(spark, lake)
        bench.drop(folder)
    more.unpersist()
    bench.drop(bronze)
    yield Figure(name=f"lake: full build of {events:,} events", unit="s", measured=Series(full), note="silver, gold, checks")
    yield beside("lake: build after 1 % new events", "s", Series(again), "the full build", Series(full), below=0.2)


def _cold(bench: Bench, spark: SparkSession) -> Figure:
    """`omniq lake build` as a command: Java has to start."""
    took: list[float] = []
    for _ in bench.steps("lake: a cold build of a tiny lake", RUNS):
        folder = bench.fresh()
        take_in(Lake.init(folder), history(spark, events=1_000, days=1), stream="synthetic", batch=0)
        begun = time.perf_counter()
        command = [sys.executable, "-m", "omniq", "lake", "build", "--lake", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took.append(time.perf_counter() - begun)
        bench.drop(folder)
    return Figure(name="lake: omniq lake build, tiny lake, cold", unit="s", measured=Series(took), below=20)


def ranges(bench: Bench, spark: SparkSession) -> Iterator[Figure]:
    """A batch of which half is known already, in few ranges and in many, beside the same batch in an empty lake, as CPU."""
    events = 200_000
    batch = history(spark, events=events * 11 // 10, days=DAYS).where(f"seq <= {events}").cache()
    assert batch.count() == events
    every_other: Ranges = [(n, n) for n in range(1, events, 2)]
    cases: dict[str, Ranges] = {
        "400 ranges known": [(n, n + 249) for n in range(1, events, 500)],
        f"{len(every_other):,} ranges known": every_other,
        f"{len(every_other):,} ranges elsewhere": [(low + 10 * events, high + 10 * events) for low, high in every_other],
    }
    for name, known in cases.items():
        measured, empty = bench.compare(f"lake: {name}", _taken(batch, known), _taken(batch, []))
        cpu = Series(measured.cpu_us)
        yield beside(f"lake: take in, {name}", "CPU µs/event", cpu, "nothing known", Series(empty.cpu_us), below=4)
    batch.unpersist()


def _taken(batch: DataFrame, known: Ranges) -> Callable[[Path], Stopwatch]:
    rows = batch.count()

    def once(folder: Path) -> Stopwatch:
        lake = Lake.init(folder)
        with lake.change() as draft:
            manifest = draft.manifest("events")
            manifest.seen = {"synthetic": {"": known}}
            draft.put(manifest)
        with Stopwatch(rows, family_cpu_s) as watch:
            take_in(lake, batch, stream="synthetic", batch=0)
        return watch

    return once


def growth(bench: Bench, spark: SparkSession) -> Iterator[Figure]:
    """The same work at sizes that grow, as CPU per event, which a busy machine changes less than the time: flat is linear."""
    sizes = (10_000, 50_000, 250_000) if bench.quick else (10_000, 100_000, 1_000_000, 10_000_000)
    _grown(bench, spark, 1_000)  # what is compiled once
    first: dict[str, Series] = {}
    for events in sizes:
        for _ in bench.steps(f"lake: {events:,} events", 1):
            measured = _grown(bench, spark, events)
        for (what, unit), value in measured.items():
            series = Series([value])
            small = first.setdefault(what, series)
            yield beside(f"growth: {what}, {events:,} events", unit, series, f"{sizes[0]:,} events", small)


def _grown(bench: Bench, spark: SparkSession, events: int) -> dict[tuple[str, str], float]:
    folder = bench.fresh()
    lake = Lake.init(folder)
    rows = history(spark, events=events, days=DAYS).cache()
    exact = rows.count()
    with Stopwatch(exact, family_cpu_s) as taken:
        take_in(lake, rows, stream="synthetic", batch=0)
    rows.unpersist()
    with Stopwatch(exact, family_cpu_s) as silver:
        build(spark, lake, tables=())
    with Stopwatch(exact, family_cpu_s) as gold:
        build(spark, lake)
    manifests = sum(file.stat().st_size for file in folder.glob("_manifest/*/*.json"))
    parquet = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
    bench.drop(folder)
    cpu = "CPU µs/event"
    return {
        ("take in", cpu): taken.cpu_us,
        ("silver", cpu): silver.cpu_us,
        ("gold", cpu): gold.cpu_us,
        ("files", "bytes/event"): parquet / exact,
        ("manifests", "bytes"): float(manifests),
    }


# -- one table, three ways -----------------------------------------------------------------------------


def _gold(spark: SparkSession, runs: int) -> Callable[[Path], Stopwatch]:
    def once(folder: Path) -> Stopwatch:
        with Stopwatch(runs, family_cpu_s) as watch:
            report = build(spark, Lake(folder), tables=["func_hour"])
        assert list(report.days) == ["func_hour"]
        return watch

    return once


def _by_hand(spark: SparkSession, lake: Lake, runs: int) -> Callable[[Path], Stopwatch]:
    def once(folder: Path) -> Stopwatch:
        with Stopwatch(runs, family_cpu_s) as watch:
            lake.table(spark, "attempts").createOrReplaceTempView("attempts")
            rows = spark.sql(f"SELECT *, {PERCENTILES}, to_date(hour) AS day FROM ({BY_HAND})").coalesce(1)
            rows.write.partitionBy("day").parquet(str(folder))
        return watch

    return once


def _duck(lake: Lake, runs: int) -> Callable[[Path], Stopwatch]:
    import duckdb

    def once(folder: Path) -> Stopwatch:
        with duckdb.connect(config={"threads": 2}) as db, Stopwatch(runs) as watch:
            db.execute(f"CREATE TABLE found AS {DUCK}", {"files": lake.files("attempts")})
            db.execute(f"COPY (SELECT *, hour::DATE AS day FROM found) TO '{folder}' (FORMAT parquet, PARTITION_BY (day))")
        return watch

    return once


def _copied(lake: Path, run: Callable[[Path], Stopwatch]) -> Callable[[Path], Stopwatch]:
    return lambda folder: run(_copy(lake, folder))


def _copy(lake: Path, folder: Path) -> Path:
    """A lake of its own, made of the same files: a lake never changes a file that it has written."""
    shutil.copytree(lake, folder, copy_function=os.link)
    return folder
