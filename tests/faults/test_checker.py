"""The checker of the chaos runs finds what it is there to find."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from fault_checker import broken_promises

from omniq import SQLiteStorage
from omniq.models import new_token
from omniq.operations import Ack, Enqueue, Reserve

COPY_EVENT = """INSERT INTO events SELECT seq + 100, ts, {event}, task_seq, task_id, queue, name, "group", attempt, {worker},
    enqueued_at, due, state, data FROM events WHERE event = '{copied}' AND task_id = 'a'"""


async def one_task_done(store: Path) -> None:
    async with SQLiteStorage(store) as storage:
        new = [(Enqueue(id=i, name="job", group="g", group_limit=1, max_attempts=2),) for i in "ab"]
        await storage.apply(new)
        for task_id in "ab":
            token = new_token()
            await storage.apply([(Reserve(queues=("default",), token=token, worker="host:7:w"),)])
            await storage.apply([(Ack(queue="default", id=task_id, token=token, result=b'"1-7"'),)])


async def check(store: Path) -> list[str]:
    async with SQLiteStorage(store) as storage:
        return await broken_promises(storage, ["a", "b"], [("a", 1, 7), ("b", 1, 7)], {"g": 1})


def tampered(store: Path, sql: str) -> list[str]:
    asyncio.run(one_task_done(store))
    with sqlite3.connect(store) as connection:
        connection.execute(sql)
    connection.close()
    return asyncio.run(check(store))


def test_an_honest_history_breaks_no_promise(tmp_path: Path) -> None:
    assert tampered(tmp_path / "queue.db", "SELECT 1") == []


@pytest.mark.parametrize(
    ("sql", "finding"),
    [
        ("DELETE FROM tasks WHERE id = 'a'", "acknowledged task a is gone"),
        ("UPDATE tasks SET attempts = 3 WHERE id = 'a'", "3 attempts of 2"),
        ("UPDATE queues SET done = 1", "check()"),
        ("""UPDATE results SET result = '"1-8"' WHERE task_id = 'a'""", "result of attempt 1 in 8"),
        ("DELETE FROM events WHERE event = 'started' AND task_id = 'a'", "ran without a lease"),
        ("UPDATE events SET worker = 'host:9:other' WHERE event = 'succeeded'", "but host:7:w held it"),
        (COPY_EVENT.format(event="'succeeded'", worker="worker", copied="succeeded"), "2 completions"),
        (COPY_EVENT.format(event="'started'", worker="worker", copied="started"), "after its end"),
        ("UPDATE events SET seq = 100 WHERE event = 'succeeded' AND task_id = 'a'", "group g had 2 runs"),
        ("UPDATE events SET task_id = iif(task_id = 'a', 'b', 'a') WHERE event = 'enqueued'", "order of enqueue"),
    ],
)
def test_a_tampered_history_is_found_out(tmp_path: Path, sql: str, finding: str) -> None:
    found = tampered(tmp_path / "queue.db", sql)
    assert any(finding in text for text in found), found


async def test_an_attempt_that_ran_twice_is_found_out(tmp_path: Path) -> None:
    await one_task_done(tmp_path / "queue.db")
    async with SQLiteStorage(tmp_path / "queue.db") as storage:
        broken = await broken_promises(storage, [], [("a", 1, 7), ("a", 1, 8)], {"g": 1})
    assert broken == ["attempt 1 of a ran 2 times"]
