"""A scan in SQL gives what a scan of records gives, on every column and condition."""

import contextlib
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from omniq.errors import EventsLost
from omniq.models import TaskError, new_token
from omniq.operations import Ack, Cancel, Enqueue, Fail, OpenRun, Reserve, Reserved, Retention, Retry, Stage
from omniq.storage.scanning import Range, scan_range
from omniq.storage.sqlite import SQLiteStorage
from omniq.storage.sqlite import scan as sqlite_scan
from omniq.storage.sqlite.scan import SOURCES
from omniq.storage.tables import TABLES, Condition

NOW = 1_800_000_000_000_000
ERRORS = [TaskError("ValueError", "no\0thing"), TaskError("app.Odd", "ähm 😀 \"quoted\" \\ 'it'"), TaskError("", "")]
PAYLOADS = [b'{"args":[1,"\xc3\xa4"],"kwargs":{}}', b'{"args": [1], "kwargs": {}}', b"null", b'"\xff\xfe"', None]


async def filled(path: Path) -> SQLiteStorage:
    """A store with tasks in every state, staged ones among them, and their events and results."""
    store = SQLiteStorage(path, durability="process", clock=lambda: NOW)
    for n in range(40):
        enqueue = Enqueue(
            id=f"t-{n:02}",
            name=f"app.job_{n % 3}:run",
            queue="mail" if n % 2 else "default",
            payload=PAYLOADS[n % len(PAYLOADS)],
            group=f"g-{n % 2}" if n % 4 == 0 else None,
            eta_us=NOW + 10**9 if n % 10 == 9 else None,
            max_attempts=n % 4,
            idempotency_key=f"key-{n}" if n % 5 == 0 else None,
            origin="tcp" if n % 7 == 0 else "",
        )
        await store.apply([(enqueue,)], NOW + n * 1000)
    await store.apply([(OpenRun(queue="mail", run_id="r"),), (Stage(queue="mail", run_id="r", tasks=(_task("unseen"),)),)], NOW)
    for n in range(14):
        later = NOW + 10**6 + n * 1000
        token = new_token()
        (answer,) = await store.apply([(Reserve(queues=("default", "mail"), token=token, worker=f"w-{n % 3}"),)], later)
        assert isinstance(answer, list)
        assert isinstance(answer[0], Reserved)
        task = answer[0].tasks[0]
        held: dict[str, Any] = {"queue": task.queue, "id": task.id, "token": token}
        end = [
            Ack(**held, result=[b"1", b'"\xff"', None][n % 3], ran_us=7),
            Fail(**held, error=ERRORS[n % 3]),
            Retry(**held, error=ERRORS[n % 3], delay_us=n % 2 * 10**9),
            None,
        ][n % 4]
        if end is not None:
            await store.apply([(end,)], later + 500)
    await store.apply([(Cancel(queue="mail", id="t-39"),)], NOW + 10**7)
    return store


def _task(id: str) -> Enqueue:
    return Enqueue(id=id, name="app:run", queue="mail")


async def rows(batches: Any, names: Sequence[str]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    async for batch in batches:
        assert list(batch) == list(names)
        found += zip(*batch.values(), strict=True)
    return found


async def compare(store: SQLiteStorage, table: str, names: Sequence[str], where: Sequence[Condition], size: int) -> int:
    total = 0
    for part in await store.ranges(table, 3):
        expected = await rows(scan_range(store, part, names, where, size), names)
        assert await rows(store.scan(part, names, where, size), names) == expected, where
        blocking = store.scan_blocking(part, names, where, size)
        assert blocking is not None
        assert [row for batch in blocking for row in zip(*batch.values(), strict=True)] == expected, where
        total += len(expected)
    return total


@pytest.mark.parametrize("table", list(SOURCES))
@pytest.mark.parametrize("size", [3, 10_000])
async def test_every_column_has_the_same_value(tmp_path: Path, table: str, size: int) -> None:
    async with await filled(tmp_path / "a.db") as store:
        names = [column.name for column in TABLES[table]]
        assert await compare(store, table, names, (), size) > 8
        for name in names:
            await compare(store, table, [name], (), size)


@pytest.mark.parametrize("table", list(SOURCES))
async def test_every_condition_chooses_the_same_rows(tmp_path: Path, table: str) -> None:
    async with await filled(tmp_path / "a.db") as store:
        for column in TABLES[table]:
            if column.type == "binary" or column.name == "store":
                continue
            chosen = [await compare(store, table, ["status"], (c,), 3) for c in await conditions(store, table, column.name)]
            assert sum(chosen) > 0, column.name


async def conditions(store: SQLiteStorage, table: str, name: str) -> list[Condition]:
    """Conditions of every kind, with values that the column has and some that it has not."""
    values: set[Any] = set()
    for part in await store.ranges(table, 1):
        values.update(value for (value,) in await rows(scan_range(store, part, [name], (), 100), [name]))
    there = sorted(values - {None})[:8]
    found = [Condition(name, "null"), Condition(name, "not null"), Condition(name, "in", (*there[:2], *there[-1:]))]
    for value in there:
        found += [Condition(name, test, value) for test in ("=", "<", "<=", ">", ">=")]
        if isinstance(value, str):
            found += [
                Condition(name, "starts", value[:1]),
                Condition(name, "starts", value),
                Condition(name, "=", value.lower()),
            ]
    return found


async def test_conditions_add_up_also_where_an_index_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await filled(tmp_path / "a.db") as store:
        for where in (
            (Condition("status", "=", "FAILED"), Condition("error", "starts", "ähm")),
            (Condition("status", "=", "FAILED"), Condition("queue", "=", "default")),
            (Condition("queue", "=", "default"), Condition("status", "=", "RUNNING")),
            (Condition("id", "in", ("t-01", "t-03", "unseen", "none")), Condition("attempts", ">=", 0)),
            (Condition("error_type", "not null"), Condition("error", "=", "no\0thing")),
        ):
            for few in (1, 8):
                monkeypatch.setattr(sqlite_scan, "FEW", few)
                assert await compare(store, "tasks", ["id", "error"], where, 2) > 0, where


FEW = (Condition("status", "=", "FAILED"), Condition("status", "=", "RUNNING"), Condition("id", "in", ("t-01", "t-03")))


@pytest.mark.parametrize("condition", FEW, ids=lambda condition: str(condition.value))
async def test_few_tasks_are_found_by_an_index(tmp_path: Path, condition: Condition) -> None:
    async with await filled(tmp_path / "a.db") as store:
        (part,) = await store.ranges("tasks", 1)
    asked: list[str] = []
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        connection.set_trace_callback(asked.append)
        (batch,) = sqlite_scan.scan_blocking(connection, part, ["id"], (condition,), 100)
        connection.set_trace_callback(None)
        assert 0 < len(batch["id"]) < 10
        plans = [connection.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall() for sql in asked if "FROM tasks" in sql]
    (numbers,), (rows_by_number,) = [[step for *_, step in plan if " tasks" in step] for plan in plans]
    assert re.search(r" USING (COVERING )?INDEX ", numbers)
    assert " USING INTEGER PRIMARY KEY " in rows_by_number


async def test_events_that_are_gone_are_not_passed_over(tmp_path: Path) -> None:
    async with await filled(tmp_path / "a.db") as store:
        (shard,) = await store.event_shards()
        part = Range("events", "", 0, shard.last)
        batches = store.scan(part, ["seq"], (), 5)
        assert await anext(batches) == {"seq": (1, 2, 3, 4, 5)}
        await store.purge(Retention(events_max=10), NOW)
        (kept,) = await store.event_shards()
        assert kept.first > 6
        with pytest.raises(EventsLost, match=f"events up to {kept.first - 1} were purged"):
            await anext(batches)
