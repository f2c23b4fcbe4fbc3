"""A driver is killed at any moment while it enqueues; whoever comes next ends it, and nothing is lost or doubled."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import running
from support.waiting import wait_for

from omniq.operations import RunState
from omniq.spark.rows import task_id
from omniq.storage.bulk import Bulk, open_bulk
from omniq.storage.tables import Condition

ROUNDS = int(os.environ.get("ROUNDS") or 20)
ROWS = 20_000
SPAN_S = 4.0  # at first: how long the driver may live after it began
START_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


class Driver:
    """A driver with all that it starts."""

    def __init__(self, folder: Path, *steps: dict[str, Any]) -> None:
        here = Path(__file__).resolve().parent
        path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.log = (folder / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(here / "enqueue_driver.py"), json.dumps(steps)],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )

    def until(self, word: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and (said := json.loads(line))["word"] == word:
                return said
        raise AssertionError(f"the driver ended before it said {word!r}: see {self.log.name}")

    def kill_within(self, seconds: float) -> bool:
        """Kill it at some moment, unless it has ended by then; whether it was killed."""
        try:
            return self.process.wait(seconds) != 0
        except subprocess.TimeoutExpired:
            self.end()
            return True

    def end(self) -> None:
        """Its processes go with it: Java at once, those of Python when they notice."""
        others = _descendants(self.process.pid)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: not any(map(_lives, others)), within=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = list(map(int, listing.read_text().split()))
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def visible(bulk: Bulk, queue: str) -> set[str]:
    where = [Condition("queue", "=", queue)]
    ranges = bulk.ranges("tasks")
    return {id for range in ranges for batch in bulk.scan(range, ["id"], where) for id in batch["id"]}


def enqueued(bulk: Bulk, queue: str) -> Counter[str]:
    where = [Condition("queue", "=", queue), Condition("event", "=", "enqueued")]
    ranges = bulk.ranges("events")
    return Counter(id for range in ranges for batch in bulk.scan(range, ["task_id"], where) for id in batch["task_id"])


def expected(queue: str) -> set[str]:
    return {task_id(f"{queue}/support.jobs:echo", str(n)) for n in range(ROWS)}


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
            driver = Driver(tmp_path, *pending, *([] if last else [step]))
            try:
                for before in pending:
                    report = driver.until("done")
                    span = (span + report["seconds"]) / 2  # as long as it takes on this machine just now
                    with open_bulk(before["url"]) as bulk:
                        ids = expected(before["queue"])
                        assert visible(bulk, before["queue"]) == ids
                        assert enqueued(bulk, before["queue"]) == Counter(ids)
                    assert report["rows"] == ROWS
                if last:
                    assert driver.process.wait(START_S) == 0
                    break
                driver.until("begin")
                moment = dice.uniform(0, span)
                killed = driver.kill_within(moment)
            finally:
                driver.end()
            with open_bulk(step["url"]) as bulk:
                seen = state_of(bulk, step)
            print(f"round {n}, {step['url'].partition(':')[0]}: {'killed' if killed else 'ended'} after {moment:.2f} s: {seen}")
            pending = [step]
