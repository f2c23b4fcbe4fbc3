"""A driver is killed at any moment while it ingests and builds; the next one goes on, and nothing is lost or doubled."""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest
from drivers import Process
from support.jobs import echo

from omniq import OmniQ, SQLiteStorage
from omniq.spark import Lake
from omniq.storage.bulk import open_bulk

ROUNDS = int(os.environ.get("ROUNDS") or 20)
TASKS = 1500  # new ones before each round
BATCH = 400
SPAN_S = 8.0  # at first: how long the driver may live after it began
START_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def trade(folder: Path) -> int:
    """Run some more tasks; how many events the store has written by now."""
    with OmniQ(SQLiteStorage(folder / "q.db", durability="process")) as oq:
        oq.enqueue_many(echo, [(n,) for n in range(TASKS)])
        with oq.worker(concurrency=50) as pool:
            pool.drain()
    with open_bulk(f"sqlite:///{folder}/q.db") as bulk:
        (shard,) = bulk.event_shards()
        return shard.last


def asked(lake: Lake, table: str, sql: str) -> list[Any]:
    """What DuckDB reads in a table; it knows nothing of Spark's ways to hide what was not finished."""
    files = lake.files(table)
    return duckdb.sql(sql.format(files=f"read_parquet({files!r})")).fetchall() if files else []


def taken(lake: Lake) -> int:
    """How many events are in bronze: all from the first on, each once."""
    numbers = Counter(dict(asked(lake, "events", "select seq, count(*) from {files} group by seq")))
    assert set(numbers.values()) <= {1}
    assert set(numbers) == set(range(1, len(numbers) + 1))
    return len(numbers)


def test_a_killed_driver_loses_no_event_and_doubles_none(tmp_path: Path) -> None:
    dice = random.Random(os.environ.get("SEED"))
    lake, span = Lake.init(tmp_path / "lake"), SPAN_S
    words = (f"sqlite:///{tmp_path}/q.db", str(lake.path), str(BATCH))
    events = 0
    for n in range(ROUNDS):
        events = trade(tmp_path)
        before = taken(lake)
        with Process(tmp_path, "ingest_driver.py", *words) as driver:
            driver.until("begin")
            moment = dice.uniform(0, span)
            killed = driver.kill_within(moment)
        after = taken(lake)
        built = asked(lake, "tasks", "select count(*), coalesce(sum(events), 0) from {files}") or [(0, 0)]
        assert before <= after <= events
        assert built[0][1] <= after  # never more than bronze has
        print(
            f"round {n}: {'killed' if killed else 'ended'} after {moment:.2f} s: {after - before} of {events - before} events "
            f"came in, {built[0][0]} tasks are built"
        )
        span = max(span, 1.5 * moment) if killed and after == before else span  # as long as it takes on this machine
    with Process(tmp_path, "ingest_driver.py", *words) as driver:
        driver.until("built")
        assert driver.process.wait(START_S) == 0
    assert taken(lake) == events
    tasks = asked(lake, "tasks", "select status, count(*), sum(runs), sum(events)::int from {files} group by all")
    assert tasks == [("SUCCESS", ROUNDS * TASKS, ROUNDS * TASKS, events)]
    hours = asked(lake, "func_hour", "select sum(runs)::int, sum(succeeded)::int from {files}")
    assert hours == [(ROUNDS * TASKS, ROUNDS * TASKS)]
    named = {Path(path) for name in ("events", "tasks", "attempts") for path in lake.files(name)}
    assert all(path.exists() for path in named)
