"""Building a lake: only what changed, the same as from scratch, checked, and readable by others."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from lake_rows import DAYS, Log, rows

from omniq.spark import Lake, build, check
from omniq.spark.lake.bronze import take_in
from omniq.spark.lake.tables import GOLD, SILVER, TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_what_was_built_by_steps_is_what_a_full_build_makes(spark: "SparkSession", built: Lake, tmp_path: Path) -> None:
    whole = Lake.init(tmp_path / "whole")
    take_in(whole, built.table(spark, "events"), stream="other", batch=0)
    build(spark, whole)
    for name in (*SILVER, *GOLD):
        assert rows(built, name) == rows(whole, name), name
        assert len(rows(whole, name)) > 0


@pytest.mark.slow  # three builds
def test_what_was_open_up_to_the_newest_event_of_another_store_is_built_anew_when_it_ends(
    spark: "SparkSession", tmp_path: Path
) -> None:
    day = 86_400
    ahead, behind = Log("ahead"), Log("behind")
    ahead.task("a", at=4 * day).started(4 * day + 1).succeeded(4 * day + 2)
    waits, runs = behind.task("waits", group="g"), behind.task("runs", group="g").started(5)
    known = len(behind.rows)
    waits.started(day).succeeded(day + 10)
    runs.succeeded(day + 20)

    asked = ("queue_minute", "func_hour", "group_hour", "capacity_hour")
    steps, whole = Lake.init(tmp_path / "steps"), Lake.init(tmp_path / "whole")
    take_in(steps, ahead.frame(spark).unionAll(behind.frame(spark).limit(known)), stream="s", batch=0)
    build(spark, steps, tables=asked)
    assert len(steps.manifest("group_hour").parts) == 5
    take_in(steps, behind.frame(spark, after=known), stream="s", batch=1)
    build(spark, steps, tables=asked)
    take_in(whole, ahead.frame(spark).unionAll(behind.frame(spark)), stream="s", batch=0)
    build(spark, whole, tables=asked)
    for name in asked:
        assert rows(steps, name) == rows(whole, name), name


def test_every_table_has_the_columns_that_the_reference_names(spark: "SparkSession", built: Lake) -> None:
    for name, table in TABLES.items():
        assert built.table(spark, name).dtypes == [(column.name, column.type) for column in table.columns], name
        if name != "payloads":
            assert built.manifest(name).rows > 0, name


def test_nothing_new_means_nothing_built(spark: "SparkSession", built: Lake) -> None:
    before = built.current()
    assert not build(spark, built).changed
    assert built.current() == before


def test_the_checks_of_a_sound_lake_pass(spark: "SparkSession", built: Lake) -> None:
    results = check(spark, built)
    assert [result for result in results if not result.ok] == []
    assert {"gaps", "duplicates", "events in silver", "sums of func_hour"} <= {result.name for result in results}


# -- other tools ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def duck(built: Lake) -> "duckdb.DuckDBPyConnection":
    db = duckdb.connect()
    db.execute("set timezone = 'UTC'")
    for name in (*SILVER, *GOLD):
        files = built.files(name)
        db.execute(f"create view {name} as select * from read_parquet({files!r}, hive_partitioning = true)")
    return db


def one(db: "duckdb.DuckDBPyConnection", sql: str) -> Any:
    return db.execute(sql).fetchall()


def test_duckdb_counts_the_minutes_of_queues_as_spark_does(duck: "duckdb.DuckDBPyConnection") -> None:
    theirs = one(
        duck,
        """
        with happened as (
            select enqueued_queue as queue, created_at as moment, 'enqueued' as what, 0.0 as wait_ms from tasks
            union all select queue, finished_at, 'cancelled', 0 from tasks where status = 'CANCELLED'
            union all select queue, started_at, 'started', wait_ms from attempts
            union all select queue, finished_at, outcome, 0 from attempts where outcome <> 'cancelled'
        )
        select queue, date_trunc('minute', moment) as minute,
            count(*) filter (what = 'enqueued'), count(*) filter (what = 'started'), count(*) filter (what = 'succeeded'),
            count(*) filter (what = 'retried'), count(*) filter (what = 'failed'), count(*) filter (what = 'expired'),
            count(*) filter (what = 'cancelled'), count(*) filter (what = 'started' and wait_ms <= 60000)
        from happened where moment is not null group by all order by all
        """,
    )
    ours = one(
        duck,
        """
        select queue, minute, enqueued, started, succeeded, retried, failed, expired, cancelled, in_time from queue_minute
        where enqueued + started + succeeded + retried + failed + expired + cancelled > 0 order by all
        """,
    )
    assert ours == theirs
    ((ours, theirs),) = one(
        duck,
        """
        select sum(busy_ms), (select sum(least(run_ms, (epoch_us(finished_at) - epoch_us(started_at)) / 1000)) from attempts)
        from queue_minute
        """,
    )
    assert ours == pytest.approx(theirs)


def test_duckdb_finds_the_percentiles_of_functions_within_the_error_of_the_sketches(duck: "duckdb.DuckDBPyConnection") -> None:
    exact = """
        select queue, name, date_trunc('hour', finished_at) as hour, count(*) as runs,
            count(*) filter (outcome = 'retried') as retried, round(sum(run_ms), 3) as total
        from attempts where finished_at is not null group by all order by all
    """
    ours = "select queue, name, hour, runs, retried, round(total_run_ms, 3) from func_hour order by all"
    assert one(duck, ours) == one(duck, exact)
    ranks = one(
        duck,
        """
        select p, max(abs(greatest(low, least(high, p)) - p)) from (
            select f.queue, f.name, f.hour, q.p,
                count(*) filter (a.run_ms < q.value) / count(*)::double as low,
                count(*) filter (a.run_ms <= q.value) / count(*)::double as high
            from func_hour f,
                lateral (values (0.5, f.run_p50_ms), (0.95, f.run_p95_ms), (0.99, f.run_p99_ms)) q(p, value),
                attempts a
            where a.queue = f.queue and a.name = f.name and date_trunc('hour', a.finished_at) = f.hour
            group by all
        ) group by p
        """,
    )
    assert len(ranks) == 3
    assert all(off <= 0.03 for _, off in ranks), ranks


def test_sketches_of_hours_merge_into_those_of_all_time(
    spark: "SparkSession", built: Lake, duck: "duckdb.DuckDBPyConnection"
) -> None:
    from pyspark.sql import functions as F

    median = F.kll_sketch_get_quantile_double(F.kll_merge_agg_double("run_sketch"), F.lit(0.5))
    found = built.table(spark, "func_hour").groupBy("name").agg(median.alias("p50")).collect()
    for row in found:
        ((below,),) = one(duck, f"select avg((run_ms <= {row['p50']})::int) from attempts where name = '{row['name']}'")
        assert 0.47 <= below <= 0.53, row


def test_duckdb_clusters_failures_as_spark_does(duck: "duckdb.DuckDBPyConnection") -> None:
    theirs = one(
        duck,
        """
        select fingerprint, name, finished_at::date as day, count(*), count(*) filter (outcome = 'failed'),
            min(finished_at), max(finished_at)
        from attempts where error_type is not null and outcome in ('retried', 'failed', 'expired') group by all order by all
        """,
    )
    assert (
        one(duck, "select fingerprint, name, day, failures, final, first_seen, last_seen from failure_day order by all")
        == theirs
    )
    (wrong,) = one(
        duck,
        """
        select count(*) from (select fingerprint, name, day, unnest(sample_ids) as id from failure_day) s
        where not exists (select 1 from attempts a where a.task_id = s.id and a.fingerprint = s.fingerprint
            and a.finished_at::date = s.day)
        """,
    )
    assert wrong == (0,)


def test_duckdb_counts_groups_storms_and_hours_as_spark_does(duck: "duckdb.DuckDBPyConnection") -> None:
    assert one(
        duck, "select queue, group_id, sum(started), sum(finished), sum(enqueued) from group_hour group by all order by all"
    ) == one(
        duck,
        """
        with seen as (
            select queue, group_id, started_at, finished_at, 0 as stored from attempts
            union all select enqueued_queue, group_id, null, null, 1 from tasks
        )
        select queue, group_id, count(started_at), count(finished_at), sum(stored) from seen
        where group_id is not null group by all order by all
        """,
    )
    busy = "select queue, group_id, round(sum(busy_ms)) from group_hour where busy_ms > 0 group by all order by all"
    held = """
        select queue, group_id, round(sum(epoch_us(finished_at) - epoch_us(started_at)) / 1000) from attempts
        where group_id is not null group by all order by all
    """
    for ours, theirs in zip(one(duck, busy), one(duck, held), strict=True):
        assert ours[:2] == theirs[:2]
        assert abs(ours[2] - theirs[2]) <= 1
    assert one(duck, "select name, sum(attempts), sum(retries) from retry_storm group by all order by all") == one(
        duck, "select name, count(started_at), count(*) filter (attempt > 1) from attempts group by all order by all"
    )
    slots = "select name, window_start, tasks from retry_storm order by all"
    distinct = """
        select name, time_bucket(interval 5 minutes, started_at) as slot, count(distinct task_id) from attempts
        group by all order by all
    """
    assert one(duck, slots) == one(duck, distinct)
    assert one(duck, "select queue, sum(arrivals) from capacity_hour where not is_forecast group by all order by all") == one(
        duck, "select queue, sum(enqueued + rearmed) from queue_minute group by all order by all"
    )


def test_polars_and_pandas_read_the_same_files(spark: "SparkSession", built: Lake) -> None:
    import pandas as pd
    import polars as pl

    count = built.table(spark, "tasks").count()
    frame = pl.scan_parquet(built.files("tasks"), hive_partitioning=True).select("id", "task_date").collect()
    assert (frame.height, frame["task_date"].n_unique()) == (count, DAYS)
    pandas = pd.read_parquet(built.files("tasks"), columns=["id", "created_at", "task_date"], partitioning="hive")
    assert (len(pandas), str(pandas["created_at"].dtype)) == (count, "datetime64[us, UTC]")
