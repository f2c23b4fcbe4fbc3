"""Leases and ends that SQLite writes for many tasks at once are the same as those of one task."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from omniq import SQLiteStorage
from omniq.models import Blocker, Record, State, TaskError, new_token
from omniq.operations import Ack, Enqueue, EventRow, Operation, Outcome, Release, Remove, Reserve, Reserved, Retry

NOW = 1_800_000_000_000_000


@pytest.fixture
def storage(tmp_path: Path) -> SQLiteStorage:
    return SQLiteStorage(tmp_path / "q.db", durability="process", clock=lambda: NOW)


def pushed(id: str, **more: Any) -> Enqueue:
    given: dict[str, Any] = {"name": "work", "queue": "q", "payload": b'{"n":1}', "max_attempts": 3}
    return Enqueue(id=id, **(given | more))


def reserve(limit: int, lease_us: int | None = 30_000_000) -> Reserve:
    return Reserve(queues=("q",), limit=limit, token=new_token(), lease_us=lease_us, worker="w")


async def done(storage: SQLiteStorage, *operations: Operation, now_us: int = NOW) -> list[Outcome]:
    answers = await storage.apply([(op,) for op in operations], now_us)
    return [cast("list[Outcome]", answer)[0] for answer in answers]


async def leased(storage: SQLiteStorage, op: Reserve, now_us: int = NOW) -> list[Record]:
    (outcome,) = await done(storage, op, now_us=now_us)
    return cast(Reserved, outcome).tasks


def ack(task: Record, **more: Any) -> Ack:
    return Ack(queue=task.queue, id=task.id, token=cast(str, task.token), **more)


async def test_a_reserve_reads_all_of_fresh_and_of_used_tasks(storage: SQLiteStorage) -> None:
    async with storage:
        await done(
            storage,
            pushed("plain", origin="tcp", backoff="fixed:base=5"),
            pushed("call", payload=b'{"args":[1],"kwargs":{}}'),
            pushed("eta", eta_us=NOW - 5),
            pushed("times", timeout_us=7, lease_us=8, result_ttl_us=9),
            pushed("names", dead_queue="dead", idempotency_key="key", fingerprint="print"),
            pushed("series", interval_us=60_000_000),
            pushed("headed", headers={"a": "b"}),
            pushed("empty", payload=None),
            pushed("used"),
            pushed("blocker"),
        )
        await done(storage, pushed("waits", blocked_by=(Blocker("blocker"),)))
        held = {task.id: task for task in await leased(storage, reserve(20))}
        for task in held.values():
            assert task == await storage.get(task.id)
        token, error = cast(str, held["used"].token), TaskError("E", "no")
        await done(storage, *(Release(queue="q", id=id, token=token) for id in held if id != "used"))
        await done(storage, Retry(queue="q", id="used", token=token, error=error, delay_us=0))
        tasks = await leased(storage, reserve(20), NOW + 1)
        assert {task.id for task in tasks} == set(held)
        for task in tasks:
            assert task == await storage.get(task.id)
        used = next(task for task in tasks if task.id == "used")
        assert (used.attempts, used.last_error) == (2, error)


async def test_what_a_reserve_returns_is_what_is_stored(storage: SQLiteStorage) -> None:
    async with storage:
        await done(storage, *(pushed(str(n), lease_us=n * 1000 if n % 2 else None) for n in range(1, 8)))
        tasks = await leased(storage, reserve(7, lease_us=None))
        assert len({task.lease_until_us for task in tasks}) == 5
        for task in tasks:
            assert task == await storage.get(task.id)
        (counts,) = await storage.counts()
        assert (counts.ready, counts.running) == (0, 7)
        assert await storage.check() == []


def brief(event: EventRow) -> tuple[str, str, int, str | None, State, bytes | None]:
    return event.event, event.task_id, event.attempt, event.worker, event.state, event.data


async def test_tasks_that_end_together_leave_the_same_traces_as_one_with_a_result(storage: SQLiteStorage) -> None:
    async with storage:
        await done(storage, *(pushed(i, payload=None) for i in ("a", "b", "c", "d")), pushed("x", result_ttl_us=0))
        tasks = await leased(storage, reserve(5))
        start = (await storage.event_shards())[0].last
        a, b, c, d, x = tasks
        await done(storage, ack(b), ack(c, result=b"7"), ack(a), ack(x), ack(d), now_us=NOW + 5)
        events = await storage.events(after=start)
        assert [event.seq for event in events] == list(range(start + 1, start + 6))
        assert [brief(event) for event in events] == [
            ("succeeded", id, 1, "w", State.DONE, b'{"result_bytes":%d}' % size)
            for id, size in (("b", 0), ("c", 1), ("a", 0), ("x", 0), ("d", 0))
        ]
        results = await storage.results(["a", "b", "c", "d", "x"])
        with_one = results.pop("c")
        assert with_one.result == b"7"
        for id in ("a", "b", "d"):
            assert results.pop(id) == msgspec.structs.replace(with_one, task_id=id, result=None)
            task, twin = await storage.get(id), await storage.get("c")
            assert task is not None
            assert twin is not None
            assert task == msgspec.structs.replace(twin, id=id, seq=task.seq)
        assert results == {}
        assert await storage.get("x") is None
        assert await storage.check() == []


async def test_tasks_change_again_in_the_commit_that_leased_or_ended_them(storage: SQLiteStorage) -> None:
    """A token is chosen by the caller, so it can be used before the answer has come."""
    async with storage:
        await done(storage, pushed("a"), pushed("b"), pushed("c", interval_us=60_000_000), pushed("d"))
        take = reserve(4)
        ends = [Ack(queue="q", id=id, token=take.token) for id in ("a", "b")]
        again = Ack(queue="q", id="c", token=take.token, again_us=NOW + 60_000_000)
        await done(storage, take, *ends, again, Remove(queue="q", id="a"), Release(queue="q", id="d", token=take.token))
        assert await storage.get("a") is None
        assert (await storage.results(["a", "b"])).keys() == {"b"}
        states = [(await storage.get(id)) for id in ("b", "c", "d")]
        assert [(task and task.state, task and task.attempts) for task in states] == [
            (State.DONE, 1),
            (State.SCHEDULED, 0),
            (State.READY, 0),
        ]
        for id, words in (("b", "enqueued started succeeded"), ("c", "enqueued started succeeded")):
            assert [event.event for event in await storage.events_of(id)] == words.split()
        (repeated,) = await storage.apply([(ends[1],)])
        assert cast(Any, repeated)[0].already
        assert await storage.check() == []


async def test_a_check_beside_a_lease_in_one_commit_finds_nothing_wrong(storage: SQLiteStorage) -> None:
    async with storage:
        await done(storage, *(pushed(str(n)) for n in range(5)))
        inside, gate = threading.Event(), threading.Event()

        def stopped() -> int:
            inside.set()
            gate.wait(10)
            return NOW

        storage.clock = stopped  # read in the middle of a commit: whatever is asked meanwhile shares the one after it
        first = asyncio.ensure_future(storage.promote("q"))
        await asyncio.to_thread(inside.wait, 10)
        asyncio.get_running_loop().call_later(0.05, gate.set)
        found = await asyncio.gather(storage.apply([(reserve(3),)]), storage.check(repair=True), first)
        assert found[1] == []
        assert await storage.check() == []
