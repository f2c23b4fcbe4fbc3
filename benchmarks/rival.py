"""Huey's file store with the same tasks: a file per task and per result, nothing synced, one lock around every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huey import FileHuey

from benchmarks.timing import Stopwatch


def _open(store: Path) -> tuple[Any, Any]:
    huey = FileHuey("benchmark", path=str(store), store_none=True)

    @huey.task()
    def nothing(payload: str) -> None:
        pass

    return huey, nothing


def enqueues(store: Path, tasks: int, payload: str) -> Stopwatch:
    _, nothing = _open(store)
    with Stopwatch(tasks) as watch:
        for _ in range(tasks):
            nothing(payload)
    return watch


def drain(store: Path, tasks: int, payload: str) -> Stopwatch:
    """What its consumer does with each task, without the consumer's threads around it."""
    huey, nothing = _open(store)
    for _ in range(tasks):
        nothing(payload)
    with Stopwatch(tasks) as watch:
        while (task := huey.dequeue()) is not None:
            huey.execute(task)
    assert huey.result_count() == tasks
    return watch
