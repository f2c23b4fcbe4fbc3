"""A driver is killed at any moment while it ingests and builds; the next one goes on, and nothing is lost or doubled."""

import os
import random
import time
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
    lake = Lake.init(tmp_path / "lake")
    words = (f"sqlite:///{tmp_path}/q.db", str(lake.path), str(BATCH))
    events, span = 0, 0.0
    for n in range(ROUNDS + 2):
        events = trade(tmp_path)
        before = taken(lake)
        spared = n in (0, ROUNDS + 1)  # the first tells how long it takes, the last ends what the killed ones began
        with Process(tmp_path, "ingest_driver.py", *words) as driver:
            driver.until("begin")
            begun = time.monotonic()
            if spared:
                driver.until("built")
                span = time.monotonic() - begun
                assert driver.process.wait(START_S) == 0
                continue
            moment = dice.uniform(0, span)
            killed = driver.kill_within(moment)
        after = taken(lake)
        ((tasks, counted),) = asked(lake, "tasks", "select count(*), sum(events)::int from {files}")
        assert before <= after <= events
        assert counted <= after
        told = f"{after - before} of {events - before} events came in, {tasks} tasks are built"
        print(f"round {n}: {'killed' if killed else 'ended'} after {moment:.2f} of {span:.2f} s: {told}")
    assert taken(lake) == events
    all_of_them = TASKS * (ROUNDS + 2)
    states = asked(lake, "tasks", "select status, count(*), sum(runs)::int, sum(events)::int from {files} group by all")
    assert states == [("SUCCESS", all_of_them, all_of_them, events)]
    assert asked(lake, "func_hour", "select sum(runs)::int, sum(succeeded)::int from {files}") == [(all_of_them, all_of_them)]
