"""Random lives of a file store: any operation, through one of two storages, with a fault at any call, again and again."""

import asyncio
import contextlib
import errno
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from file_scenes import HOUR, SECOND, clock, job
from file_truth import Dump, check_folder, difference, dump
from support.faulty_files import FaultyFiles, LayeredStorage, Stopped
from support.inside import InsideStorage

from omniq.errors import StoreError
from omniq.models import Blocker, State, TaskError
from omniq.operations import (
    AbortRun,
    Ack,
    Beat,
    Cancel,
    CommitRun,
    CountFanIn,
    Enqueue,
    Extend,
    Fail,
    Filter,
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
    Stage,
    WorkerInfo,
)
from omniq.storage.file import FileStorage
from omniq.storage.file import folder as file_folder
from omniq.storage.machine import staged_runs as runs
from omniq.storage.machine import transitions

ROUNDS = int(os.environ.get("ROUNDS") or 20)
QUEUES = ("q", "w")

_numbers = itertools.count()


class Life:
    """Operations that make sense for what a store holds. The same dice give the same life."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self._numbers = itertools.count()

    def one(self, found: Dump) -> Any:
        """A call on a storage."""
        dice, now = self.dice, clock()()
        kind = dice.random()
        if kind < 0.25:
            transactions: list[tuple[Operation, ...]] = [self._enqueue(found) for _ in range(dice.randrange(1, 4))]
        elif kind < 0.45:
            token = f"{next(self._numbers):024x}"
            queues = tuple(dice.sample(QUEUES, dice.randrange(1, 3)))
            reserve = Reserve(queues=queues, token=token, limit=dice.randrange(1, 5), lease_us=HOUR, worker="w")
            at = now + dice.choice((0, HOUR // 2))
            return lambda storage: storage.apply([(reserve,)], at)
        elif kind < 0.65:
            transactions = [self._on_run(found) for _ in range(dice.randrange(1, 4))]
        elif kind < 0.9:
            ids = dice.sample(list(found["tasks"]), min(len(found["tasks"]), dice.randrange(1, 5)))
            ops = [self._on(found["tasks"][id]) for id in ids]
            transactions = [tuple(ops)] if dice.random() < 0.5 and ops else [(op,) for op in ops]
            if dice.random() < 0.3:
                transactions.append(self._enqueue(found))
        else:
            return self._steering(now)
        return lambda storage: storage.apply(transactions)

    def _enqueue(self, found: Dump) -> tuple[Operation, ...]:
        dice = self.dice
        more: dict[str, Any] = {}
        if dice.random() < 0.4:
            more["group"], more["group_limit"] = dice.choice("gh"), dice.randrange(3)
        if dice.random() < 0.2:
            more["idempotency_key"] = f"k-{dice.randrange(6)}"
        id = f"t-{dice.randrange(40)}"
        others = [known for known in found["tasks"] if known != id]
        if dice.random() < 0.3 and others:
            chosen = dice.sample(others, min(len(others), 2))
            more["blocked_by"] = tuple(Blocker(known, found["tasks"][known]["queue"]) for known in chosen)
        if dice.random() < 0.2:
            more["delay_us"] = dice.choice((SECOND, HOUR))
        if dice.random() < 0.2:
            more["dead_queue"] = "dq"
        if dice.random() < 0.2:
            more["result_ttl_us"] = dice.choice((0, SECOND))
        if dice.random() < 0.2:
            more["on_conflict"] = "replace_finished"
        return job(id, dice.choice(QUEUES), **more)

    def _on_run(self, found: Dump) -> tuple[Operation, ...]:
        """Few runs, which therefore want the same tasks; one that has ended is followed by another."""
        dice = self.dice
        queue, runs = dice.choice(QUEUES), found["rows"]["runs"]
        over = {id for (of, id), run in runs.items() if of == queue and run.get("state", "OPEN") != "OPEN"}
        run_id = next(id for id in (f"r-{n}" for n in itertools.count(dice.randrange(2))) if id not in over)
        if (queue, run_id) not in runs:
            return (OpenRun(queue=queue, run_id=run_id, ttl_us=dice.choice((HOUR, 24 * HOUR))),)
        kind = dice.random()
        if kind < 0.15:
            return (CommitRun(queue=queue, run_id=run_id),)
        if kind < 0.3:
            return (AbortRun(queue=queue, run_id=run_id),)
        tasks: list[Enqueue] = []
        for _ in range(dice.randrange(1, 6)):
            (task,) = self._enqueue(found)
            assert isinstance(task, Enqueue)
            eta_us = None if task.delay_us is None else clock()() + task.delay_us
            tasks.append(msgspec.structs.replace(task, queue=queue, delay_us=None, eta_us=eta_us, blocked_by=()))
        return (Stage(queue=queue, run_id=run_id, tasks=tuple(tasks)),)

    def _on(self, task: dict[str, Any]) -> Operation:
        dice, place = self.dice, {"queue": task["queue"], "id": task["id"]}
        state = State(task.get("state", State.READY))
        if state is State.RUNNING:
            held = {**place, "token": task["token"]}
            return dice.choice(
                [
                    Ack(**held, result=b'{"n":1}'),
                    Ack(**held, again_us=clock()() + HOUR),
                    Retry(**held, error=TaskError("E")),
                    Retry(**held, delay_us=SECOND),
                    Fail(**held, error=TaskError("E")),
                    Release(**held),
                    Extend(**held, lease_us=2 * HOUR),
                    Progress(**held, data=b"{}"),
                    Cancel(**held),
                    Cancel(**place),
                ]
            )
        return dice.choice(
            [
                Cancel(**place),
                Reschedule(**place, delay_us=dice.choice((0, HOUR))),
                Requeue(**place, reset_attempts=True),
                Remove(**place),
            ]
        )

    def _steering(self, now: int) -> Any:
        dice = self.dice
        kept = Retention(dead_us=HOUR, events_us=None, events_max=30, workers_us=1)
        beat = Beat(info=WorkerInfo(worker="w"), gone=dice.random() < 0.3)
        fan_in, member = OpenFanIn(key="f", expected=3, ttl_us=HOUR), f"m-{dice.randrange(4)}"
        limit, group, queue = dice.randrange(1, 4), dice.choice("gh"), dice.choice(QUEUES)
        return dice.choice(
            [
                lambda storage: storage.pause(queue),
                lambda storage: storage.resume(queue),
                lambda storage: storage.set_group_limit(queue, group, limit),
                lambda storage: storage.purge(kept, now + 2 * HOUR),
                lambda storage: storage.sweep(),
                lambda storage: storage.sweep(now + 2 * HOUR),
                lambda storage: storage.promote(queue, now_us=now + HOUR),
                lambda storage: storage.allocate_ids(2),
                lambda storage: storage.apply([(beat,)]),
                lambda storage: storage.apply([(fan_in,), (CountFanIn(key="f", member=member),)]),
            ]
        )


async def after_it(path: Path, room: Path, call: Any) -> Dump:
    """What the call makes of the store when nothing goes wrong."""
    copy = room / f"{next(_numbers)}"
    shutil.copytree(path, copy)
    async with InsideStorage(copy, clock=clock(), durability="process") as storage:
        await call(storage)
        found = await dump(storage)
    shutil.rmtree(copy)
    return found


async def live(room: Path, steps: int, dice: random.Random) -> None:
    path = room / f"{next(_numbers)}"
    pair = [LayeredStorage(path, clock=clock()) for _ in range(2)]
    for storage in pair:
        await storage.open()
    life, found = Life(dice), await dump(pair[0])
    try:
        for step in range(steps):
            call, number = life.one(found), dice.randrange(2)
            after = await after_it(path, room, call)
            actor, how, at = pair[number], dice.choice(("fail", "stop", None)), dice.randrange(1, 30)
            torn, error = dice.random() < 0.5, dice.choice((errno.EIO, errno.ENOSPC))
            files: FaultyFiles = actor.files
            if how is not None:
                files.arm(at, how, error, torn)
            raised: Exception | None = None
            try:
                await call(actor)
            except (StoreError, Stopped) as exc:
                raised = exc
            where = f"step {step}: {how} at {at} of {files.kinds}: {raised!r}"
            if how == "stop":
                await actor.close()
                pair[number] = LayeredStorage(path, clock=clock())
                await pair[number].open()
            files.disarm()
            before, found = found, await dump(pair[dice.randrange(2)])
            if raised is None:
                assert difference(found, after) == [], where
            elif found != before and (how == "fail" or found != after):
                raise AssertionError(f"{where}: {difference(found, before)} / {difference(found, after)}")
            check_folder(path, found)
        for storage in pair:
            assert difference(await dump(storage), found) == []
        async with InsideStorage(path, clock=clock(), durability="process") as storage:
            assert difference(await dump(storage), found) == []
            assert await storage.check() == []
    finally:
        for storage in pair:
            await storage.close()
    assert not list((path / "corrupt").iterdir())
    shutil.rmtree(path)


async def test_a_group_that_was_purged_and_came_back_is_served_after_a_restart(tmp_path: Path) -> None:
    async with FileStorage(tmp_path / "store", clock=clock(), durability="process") as storage:
        await storage.apply([job("first", group="g")])
        await storage.apply([(Remove(queue="q", id="first"),)])
        assert await storage.purge(Retention()) == 1
        await storage.apply([job("second", group="g")])
    async with FileStorage(tmp_path / "store", clock=clock(), durability="process") as storage:
        granted = await storage.reserve("q", 30)
        assert granted is not None
        assert granted.id == "second"


async def test_who_waits_for_a_task_that_succeeded_and_was_removed_is_let_go_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than one transaction lets go: the rest must not take the blocker for lost."""
    monkeypatch.setattr(transitions, "CASCADE_LIMIT", 1)
    async with FileStorage(tmp_path / "store", clock=clock(), durability="process") as storage:
        await storage.apply([job("first")])
        blocked = (Blocker("first", "q"),)
        await storage.apply([job("second", blocked_by=blocked), job("third", blocked_by=blocked)])
        granted = await storage.reserve("q", 30)
        assert granted is not None
        await storage.apply([(Ack(queue="q", id="first", token=granted.token or ""),), (Remove(queue="q", id="first"),)])
    async with FileStorage(tmp_path / "store", clock=clock(), durability="process") as storage:
        await storage.sweep()
        states = [task.state for task in (await storage.find(Filter(queue="q"))).tasks]
        assert states == [State.READY, State.READY]


async def test_a_task_whose_removal_failed_is_granted_once(tmp_path: Path) -> None:
    async def granted_after_failure_at(number: int) -> list[int]:
        async with LayeredStorage(tmp_path / f"{number}", clock=clock()) as storage:
            await storage.apply([job("kept")])
            storage.files.arm(number, "fail", errno.EIO)
            with contextlib.suppress(StoreError):
                await storage.apply([(Remove(queue="q", id="kept"),)])
            storage.files.disarm()
            [outcomes] = await storage.apply([(Reserve(queues=("q",), token="0" * 24, limit=2, lease_us=HOUR, worker="w"),)])
            return [task.attempts for task in outcomes[0].tasks]

    found = [await granted_after_failure_at(number) for number in range(1, 12)]
    assert [1] in found
    assert all(attempts in ([1], []) for attempts in found)


def live_with_small_files(room: Path, patch: pytest.MonkeyPatch, steps: int, seed: int) -> None:
    dice = random.Random(seed)
    patch.setattr(file_folder, "JOURNAL_BYTES", dice.choice((1, 3000, 20_000, 1 << 20)))
    patch.setattr(file_folder, "SEGMENT_BYTES", dice.choice((1, 600, 3000, 1 << 20)))
    patch.setattr(file_folder, "TIDY_BYTES", dice.choice((1, 500, 1 << 14)))
    patch.setattr(transitions, "CASCADE_LIMIT", dice.choice((1, 3, 1000)))
    patch.setattr(runs, "SETTLE_LIMIT", dice.choice((1, 3, 5000)))
    asyncio.run(live(room, steps, dice))


def test_a_store_that_is_hurt_again_and_again_always_tells_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for n in range(4):
        live_with_small_files(tmp_path, monkeypatch, 25, seed + n)


@pytest.mark.slow
def test_many_stores_that_are_hurt_again_and_again_tell_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for n in range(5 * ROUNDS):
        print(f"life {n}")
        live_with_small_files(tmp_path, monkeypatch, 120, seed + n)
