"""Drivers in processes of their own, and what is in the stores that they write to."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Self

from support.waiting import wait_for

from omniq.spark.rows import task_id
from omniq.storage.bulk import Bulk
from omniq.storage.tables import Condition


class Process:
    """One of the scripts beside this file, with all that it starts."""

    def __init__(self, folder: Path, script: str, *words: str) -> None:
        here = Path(__file__).resolve().parent
        path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.log = (folder / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(here / script), *words],
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
        raise AssertionError(f"the driver ended before it said {word!r}: {Path(self.log.name).read_text()[-3000:]}")

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Driver(Process):
    """A driver that enqueues. `options` are those of `enqueue_driver.started`."""

    def __init__(self, folder: Path, *steps: dict[str, Any], **options: Any) -> None:
        super().__init__(folder, "enqueue_driver.py", json.dumps(steps), json.dumps(options))


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


def must_be_once(bulk: Bulk, queue: str, rows: int) -> None:
    """Every row is a task that workers can see, and became one once."""
    ids = {task_id(f"{queue}/support.jobs:echo", str(n)) for n in range(rows)}
    there = _column(bulk, "tasks", "id", Condition("queue", "=", queue))
    stored = _column(bulk, "events", "task_id", Condition("queue", "=", queue), Condition("event", "=", "enqueued"))
    assert set(there) == ids
    assert stored == Counter(ids)


def _column(bulk: Bulk, table: str, name: str, *where: Condition) -> Counter[str]:
    return Counter(value for range in bulk.ranges(table) for batch in bulk.scan(range, [name], where) for value in batch[name])
