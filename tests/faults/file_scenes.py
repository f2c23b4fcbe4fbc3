"""A store with something of everything in it, and every operation of the contract to try on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from omniq.errors import Refused
from omniq.models import Blocker, Record, State, StoredResult, TaskError
from omniq.operations import (
    AbortRun,
    Ack,
    Beat,
    Cancel,
    CommitRun,
    CountFanIn,
    Enqueue,
    EventRow,
    Extend,
    Fail,
    OpenFanIn,
    OpenRun,
    Operation,
    Progress,
    Release,
    Remove,
    Requeue,
    Reschedule,
    Reserve,
    Retention,
    Retry,
    Saved,
    Stage,
    WorkerInfo,
)
from omniq.storage.file import FileStorage
from omniq.testing import FakeClock

START_US = 1_700_000_000_000_000
SECOND = 1_000_000
HOUR = 3600 * SECOND
TOKEN = "0123456789abcdef01234567"
OTHER = "76543210fedcba9876543210"

Scene = Callable[[FileStorage], Awaitable[Any]]


def clock() -> FakeClock:
    """The same moment each time, so that two runs leave the same store."""
    return FakeClock(START_US + 60 * SECOND)


async def do(storage: FileStorage, *transactions: tuple[Operation, ...], at: int | None = None) -> None:
    for answer in await storage.apply(list(transactions), at):
        assert not isinstance(answer, Refused), answer


def job(id: str, queue: str = "q", **options: Any) -> tuple[Operation, ...]:
    return (Enqueue(id=id, name="job", queue=queue, payload=b'{"of":"%b"}' % id.encode(), fingerprint=id, **options),)


async def furnish(path: Path) -> None:
    """Tasks in every state and place, under known ids and tokens."""
    async with FileStorage(path, clock=FakeClock(START_US), durability="process") as storage:
        await do(storage, *(job(f"plain-{n}") for n in range(3)))
        await do(storage, *(job(f"grouped-{n}", group="g", group_limit=2) for n in range(4)))
        await do(storage, job("keyed", idempotency_key="first"), job("later", delay_us=HOUR))
        await do(storage, job("blocker", "w"), job("dep-1", blocked_by=(Blocker("blocker", "w"),)))
        await do(storage, job("dep-2", blocked_by=(Blocker("dep-1", "q"), Blocker("blocker", "w"))))
        await do(storage, job("dead-1", "d"), job("done-1", "d"), job("done-2", "d", result_ttl_us=SECOND))
        await do(storage, (Reserve(queues=("d",), token=TOKEN, limit=9, lease_us=HOUR),))
        await do(storage, (Fail(queue="d", id="dead-1", token=TOKEN, error=TaskError("E", "no luck")),))
        await do(storage, (Ack(queue="d", id="done-1", token=TOKEN, result=b'{"n":1}'),))
        await do(storage, (Ack(queue="d", id="done-2", token=TOKEN, result=b"\xff\x00", encoding="raw"),))
        held = ("ack", "again", "retry", "fail", "release", "extend", "cancel", "keyed")
        await do(storage, *(job(f"run-{n}", "r", group="h", group_limit=99) for n in held))
        await do(storage, job("run-moves", "r", dead_queue="dq"), job("run-blocks", "r", interval_us=HOUR))
        await do(storage, *(job(f"run-dep-{n}", blocked_by=(Blocker("run-blocks", "r"),)) for n in range(5)))
        await do(storage, job("run-dep-dep", blocked_by=(Blocker("run-dep-0", "q"),), dead_queue="dq"))
        await do(storage, (Reserve(queues=("r",), token=TOKEN, limit=99, lease_us=HOUR, worker="w-1"),))
        await do(storage, (Beat(info=WorkerInfo(worker="w-1", host="here", pid=1, queues=("q",))),))
        await _furnish_runs(storage)
        await do(storage, (OpenFanIn(key="half", expected=2),), (CountFanIn(key="half", member="m-1"),))
        await do(storage, (OpenFanIn(key="over", expected=1, ttl_us=1),), (CountFanIn(key="over", member="m-1"),))
        await storage.pause("p")
        await storage.set_group_limit("q", "h", 7)
        await storage.allocate_ids(5)


async def _furnish_runs(storage: FileStorage) -> None:
    """Runs that are open, over, committed and aborted; two of them want the same tasks."""
    for run_id, ttl_us in (("one", 100 * HOUR), ("two", 100 * HOUR), ("short", HOUR), ("done", HOUR), ("gone", HOUR)):
        await do(storage, (OpenRun(queue="s", run_id=run_id, ttl_us=ttl_us),))
    await do(storage, staging("one", "both", "both-keyed", "only-one", "with-group", "with-eta", "blocks"))
    await do(storage, staging("two", "both", "both-keyed", "only-two"))
    await do(storage, staging("short", "both", "only-short"), staging("done", "released"), staging("gone", "dropped"))
    await do(storage, job("behind", blocked_by=(Blocker("blocks", "s"),)))
    await do(storage, (CommitRun(queue="s", run_id="done"),), (AbortRun(queue="s", run_id="gone"),))


def staging(run_id: str, *ids: str) -> tuple[Operation, ...]:
    """What an id says is what its task has."""
    tasks: list[Enqueue] = []
    for id in ids:
        more: dict[str, Any] = {"idempotency_key": f"key of {id}"} if "keyed" in id else {}
        more |= {"group": "g", "group_limit": 2} if "group" in id else {}
        more |= {"eta_us": START_US + HOUR} if "eta" in id else {}
        tasks.append(Enqueue(id=id, name="job", queue="s", payload=b"[]", fingerprint=id, **more))
    return (Stage(queue="s", run_id=run_id, tasks=tuple(tasks)),)


async def _transaction(storage: FileStorage) -> None:
    await do(
        storage,
        (
            Ack(queue="r", id="run-ack", token=TOKEN, result=b"1"),
            *job("new-1", group="g"),
            *job("new-2", "q2", idempotency_key="second", blocked_by=(Blocker("new-1", "q"),)),
            Cancel(queue="q", id="plain-1"),
            Remove(queue="d", id="dead-1"),
        ),
    )


async def _several(storage: FileStorage) -> None:
    """Several transactions, one of them refused, in one call."""
    answers = await storage.apply(
        [
            job("new-1"),
            (Remove(queue="q", id="unknown"),),
            (Reserve(queues=("q",), token=OTHER, limit=3),),
            (Fail(queue="r", id="run-fail", token=TOKEN, error=TaskError("E")),),
        ]
    )
    assert [isinstance(answer, Refused) for answer in answers] == [False, True, False, False]


async def _restore(storage: FileStorage) -> None:
    """What another store kept: a task with a past, one that waits, one that is here already."""
    done = Record(id="old-1", queue="q", name="job", payload=b"[]", state=State.DONE, attempts=3, finished_at_us=START_US)
    result = StoredResult(task_id="old-1", state=State.DONE, result=b"1", finished_at_us=START_US, attempts=3)
    waits = Record(id="old-2", queue="old", name="job", group="g", idempotency_key="k", fingerprint="f")
    tasks = [Saved(record=done, result=result), Saved(record=waits), Saved(record=Record(id="plain-0", queue="q", name="job"))]
    assert await storage.restore(tasks) == 2


def _held(kind: type[Any], id: str, **more: Any) -> Scene:
    return lambda storage: do(storage, (kind(queue="r", id=id, token=TOKEN, **more),))


def _one(op: Operation) -> Scene:
    return lambda storage: do(storage, (op,))


SCENES: dict[str, Scene] = {
    "enqueue": lambda s: do(s, job("new")),
    "enqueue with group, key, blockers": lambda s: do(
        s, job("new", group="g", idempotency_key="second", blocked_by=(Blocker("plain-0", "q"), Blocker("run-ack", "r")))
    ),
    "enqueue to a new queue": lambda s: do(s, job("new", "brand-new", group="n", delay_us=SECOND)),
    "enqueue in place of an ended one": lambda s: do(s, job("done-1", "d", on_conflict="replace_finished")),
    "transaction": _transaction,
    "several transactions": _several,
    "reserve": _one(Reserve(queues=("p", "q", "w"), token=OTHER, limit=5, lease_us=HOUR, worker="w-2")),
    "reserve what falls due": lambda s: do(s, (Reserve(queues=("q",), token=OTHER, limit=9),), at=START_US + 2 * HOUR),
    "ack": _held(Ack, "run-ack", result=b'{"answer":42}', ran_us=7),
    "ack of an interval": _held(Ack, "run-blocks", result=b"1", again_us=START_US + HOUR),
    "ack that frees": _held(Ack, "run-blocks", result=b"1"),
    "retry": _held(Retry, "run-retry", delay_us=SECOND, error=TaskError("E", "again")),
    "retry at once": _held(Retry, "run-retry", error=TaskError("E", "again")),
    "fail": _held(Fail, "run-fail", error=TaskError("E", "for good", "trace")),
    "fail to a dead queue": _held(Fail, "run-moves", error=TaskError("E")),
    "fail with a cascade": _held(Fail, "run-blocks", error=TaskError("E")),
    "release": _held(Release, "run-release"),
    "extend": _held(Extend, "run-extend", lease_us=2 * HOUR),
    "progress": _held(Progress, "run-extend", data=b'{"done":3}'),
    "cancel a waiting one": _one(Cancel(queue="w", id="blocker")),
    "cancel a running one": _one(Cancel(queue="r", id="run-cancel")),
    "reschedule": _one(Reschedule(queue="q", id="plain-2", delay_us=HOUR)),
    "requeue": _one(Requeue(queue="d", id="dead-1", reset_attempts=True)),
    "remove with a key": _one(Remove(queue="q", id="keyed")),
    "remove with dependents": _one(Remove(queue="w", id="blocker")),
    "remove with a result": _one(Remove(queue="d", id="done-1")),
    "pause": lambda s: s.pause("q"),
    "resume": lambda s: s.resume("p"),
    "group limit": lambda s: s.set_group_limit("q", "g", 1),
    "purge": lambda s: s.purge(Retention(dead_us=1, events_us=1, events_max=3, workers_us=1), START_US + 100 * HOUR),
    "purge results": lambda s: s.purge_results(clock().now),
    "promote": lambda s: s.promote("q", now_us=START_US + 2 * HOUR),
    "beat": _one(Beat(info=WorkerInfo(worker="w-2", host="there"))),
    "beat for the last time": _one(Beat(info=WorkerInfo(worker="w-1"), gone=True)),
    "allocate ids": lambda s: s.allocate_ids(3),
    "open a fan-in": _one(OpenFanIn(key="new", expected=2)),
    "open a fan-in anew": _one(OpenFanIn(key="over", expected=2)),
    "count the last of a fan-in": _one(CountFanIn(key="half", member="m-2")),
    "restore": _restore,
    "restore events": lambda s: s.restore_events(
        [EventRow(seq=7, ts_us=START_US, event="succeeded", task_id="gone", queue="q", name="job", data=b'{"ran_us":1}')]
    ),
    "open a run": _one(OpenRun(queue="brand-new", run_id="one")),
    "stage": lambda s: do(s, staging("one", "new", "new-keyed", "new-group", "only-two", "only-one")),
    "commit a run": _one(CommitRun(queue="s", run_id="one")),
    "abort a run": _one(AbortRun(queue="s", run_id="one")),
    "sweep a run whose time is over": lambda s: s.sweep(START_US + 2 * HOUR),
    "enqueue what is staged": lambda s: do(s, job("both", "s"), job("other", "s", idempotency_key="key of both-keyed")),
}
BRIEF = ("transaction", "ack", "several transactions", "purge", "abort a run")  # tried where trying all would take too long
