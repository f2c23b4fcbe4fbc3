"""Few tasks behind many newer ones: found at once by their state, at the size of the real bound too."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from omniq import BaseStorage, FileStorage, MemoryStorage, SQLiteStorage
from omniq.models import State, new_token
from omniq.operations import Enqueue, Filter, Record, Reserve, Saved
from omniq.storage.cursors import SCAN_LIMIT
from omniq.storage.sqlite.find import COUNTS

Make = Callable[[Path], BaseStorage]
MAKERS: dict[str, Make] = {
    "memory": lambda _: MemoryStorage(),
    "sqlite": lambda folder: SQLiteStorage(folder / "q.db", durability="process"),
    "file": lambda folder: FileStorage(folder / "queue", durability="process"),
}
each_store = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


async def crowd(storage: BaseStorage, tasks: int) -> None:
    for first in range(0, tasks, 5000):
        ids = [f"crowd-{n}" for n in range(first, min(first + 5000, tasks))]
        await storage.apply([(Enqueue(id=id, name="job"),) for id in ids])


async def running(storage: BaseStorage) -> None:
    await storage.apply([(Enqueue(id="running", name="job"),)])
    await storage.apply([(Reserve(queues=("default",), token=new_token(), lease_us=1 << 40),)])


@pytest.mark.slow
@each_store
async def test_a_running_task_is_found_behind_more_newer_ones_than_a_page_looks_at(tmp_path: Path, make: Make) -> None:
    async with make(tmp_path) as storage:
        await running(storage)
        await crowd(storage, SCAN_LIMIT + 1)
        page = await storage.find(Filter(states=(State.RUNNING,)))
        assert ([t.id for t in page.tasks], page.partial) == (["running"], False)


@each_store
async def test_ids_are_found_however_far_back_they_are(tmp_path: Path, make: Make) -> None:
    async with make(tmp_path) as storage:
        await crowd(storage, 50)
        storage.scan_limit = 10
        page = await storage.find(Filter(ids=("crowd-1", "unknown", "crowd-7")))
        assert ([t.id for t in page.tasks], page.partial) == (["crowd-7", "crowd-1"], False)


@each_store
async def test_many_of_a_state_are_looked_for_as_far_as_a_page_goes(tmp_path: Path, make: Make) -> None:
    async with make(tmp_path) as storage:
        await crowd(storage, 50)
        storage.scan_limit = 10
        page = await storage.find(Filter(states=(State.READY,), name="another"))
        assert (page.tasks, page.partial) == ([], True)


@each_store
async def test_ended_tasks_that_another_store_kept_without_a_result_are_not_passed_over(tmp_path: Path, make: Make) -> None:
    """What leads to the few ended tasks are their results: where those are not all there, the tasks are looked through."""
    async with make(tmp_path) as storage:
        ended = Record(id="ended", queue="default", name="job", state=State.DONE, attempts=1)
        assert await storage.restore([Saved(record=ended, result=None)]) == 1
        await crowd(storage, 50)
        page = await storage.find(Filter(states=(State.DONE,)))
        assert [t.id for t in page.tasks] == ["ended"]


# -- what counting and finding cost on SQLite ------------------------------------------------------


def steps(path: Path, sql: str, parameters: tuple[int, ...]) -> int:
    """What a statement costs, in steps of SQLite's machine."""
    taken = [0]

    def step() -> int:
        taken[0] += 1
        return 0

    connection = sqlite3.connect(path)
    connection.set_progress_handler(step, 1)
    connection.execute(sql, parameters).fetchall()
    connection.close()
    return taken[0]


async def test_counting_costs_the_same_with_ten_groups_and_with_a_thousand(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    taken: list[int] = []
    async with SQLiteStorage(path, durability="process") as storage:
        for upto in (10, 1000):
            grouped = [(Enqueue(id=f"{upto}-{n}", name="job", group=f"{n}"),) for n in range(upto)]
            await storage.apply([*grouped, *((Enqueue(id=f"{upto}-plain-{n}", name="job"),) for n in range(upto))])
            taken.append(steps(path, COUNTS, (0, 0)))
    few, many = taken
    assert many < few * 1.2
