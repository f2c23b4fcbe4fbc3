"""A driver is killed at any moment while it enqueues; whoever comes next ends it, and nothing is lost or doubled."""

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
    dice = random.Random(os.environ.get("SEED"))
    span, pending = SPAN_S, []
    with running(tmp_path / "redis") as server:
        urls = [f"sqlite:///{tmp_path}/q.db", f"file://{tmp_path}/q", server.url]
        for n in range(ROUNDS + 1):
            last = n == ROUNDS
            step = {"url": urls[n % 3], "queue": f"round{n}", "rows": ROWS, "run_id": f"run{n}" if n % 2 else None}
            with Driver(tmp_path, *pending, *([] if last else [step])) as driver:
                for before in pending:
                    report = driver.until("done")
                    span = (span + report["seconds"]) / 2  # as long as it takes on this machine just now
                    with open_bulk(before["url"]) as bulk:
                        must_be_once(bulk, before["queue"], ROWS)
                    assert report["rows"] == ROWS
                if last:
                    assert driver.process.wait(START_S) == 0
                    break
                driver.until("begin")
                moment = dice.uniform(0, span)
                killed = driver.kill_within(moment)
            with open_bulk(step["url"]) as bulk:
                seen = state_of(bulk, step)
            print(f"round {n}, {step['url'].partition(':')[0]}: {'killed' if killed else 'ended'} after {moment:.2f} s: {seen}")
            pending = [step]
