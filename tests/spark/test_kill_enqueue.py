"""A driver is killed at any moment while it enqueues; whoever comes next ends it, and nothing is lost or doubled."""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
from drivers import Driver, must_be_once
from support.redis_server import running

from omniq.operations import RunState
from omniq.storage.bulk import Bulk, open_bulk

ROUNDS = int(os.environ.get("ROUNDS") or 20)
ROWS = 20_000
SPAN_S = 4.0  # at first: how long the driver may live after it began
START_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def state_of(bulk: Bulk, step: dict[str, Any]) -> str:
    """Where the killed driver had come to. Nothing is visible before the commit."""
    counts = next((c for c in bulk.call(bulk.storage.counts()) if c.queue == step["queue"]), None)
    staged, ready = (0, 0) if counts is None else (counts.staged, counts.ready)
    run = bulk.run(step["run_id"]) if step["run_id"] else None
    if ready == 0:
        assert run is None or run.state is RunState.OPEN or run.released == 0
        return f"{staged} of {ROWS} staged, none visible"
    assert run is None or run.state is RunState.COMMITTED
    assert staged + ready == ROWS, "a part of them became visible"
    return f"committed, {ready} of {ROWS} visible"


def test_a_killed_driver_leaves_all_or_nothing_and_the_next_one_ends_its_work(tmp_path: Path) -> None:
    """Each driver ends what the one before it began, and then begins something of its own, in which it is killed."""
    dice = random.Random(os.environ.get("SEED"))
    kills, pending = 0, list[dict[str, Any]]()
    with running(tmp_path / "redis") as server:
        urls = [f"sqlite:///{tmp_path}/q.db", f"file://{tmp_path}/q", server.url]
        spans = dict.fromkeys(urls, SPAN_S)
        for n in itertools.count():
            url = urls[n % 3]
            begun = [{"url": url, "queue": f"round{n}", "rows": ROWS, "run_id": f"run{n}" if n % 2 else None}]
            if kills == ROUNDS or n == 4 * ROUNDS:
                begun = []
            with Driver(tmp_path, *pending, *begun) as driver:
                for before in pending:
                    report = driver.until("done")
                    assert report["rows"] == ROWS
                    spans[before["url"]] = 0.9 * report["seconds"]  # how long it takes on this machine just now
                if begun:
                    driver.until("begin")
                    moment = dice.uniform(0, spans[url])
                    killed = driver.kill_within(moment)
                else:
                    assert driver.process.wait(START_S) == 0
            for before in pending:
                with open_bulk(before["url"]) as bulk:
                    must_be_once(bulk, before["queue"], ROWS)
            if not begun:
                break
            with open_bulk(url) as bulk:
                seen = state_of(bulk, begun[0])
            kills += killed
            print(f"{n}: {url.partition(':')[0]}, {'killed' if killed else 'ended'} after {moment:.2f} s: {seen}")
            pending = begun
    assert kills == ROUNDS
