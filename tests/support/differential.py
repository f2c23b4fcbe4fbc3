"""Random episodes of calls, each with several transactions, on a memory store and on another one: they must agree.

Where the contract leaves the order open (tasks that were handed back, tasks that are due at the same moment) memory follows the
other store's choice; anywhere else the same task must come.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from omniq.errors import Refused
from omniq.models import Blocker, Record, State, StoredResult, TaskError
from omniq.operations import (
    AbortRun,
    Ack,
    Cancel,
    CommitRun,
    Enqueue,
    Extend,
    Fail,
    Filter,
    Held,
    OpenRun,
    Operation,
    Progress,
    Release,
    Remove,
    Requeue,
    Reschedule,
    Reserve,
    Retry,
    Stage,
)
from omniq.storage.base import BaseStorage, Result
from omniq.storage.memory import MemoryStorage
from omniq.storage.table_ledger import TableLedger
from omniq.testing import FakeClock

Make = Callable[[FakeClock], BaseStorage]
ROUNDS = int(os.environ.get("ROUNDS") or 20)
CALLS = 20  # of one episode

S = 1_000_000
QUEUES = ("a", "b")
EVERY = (*QUEUES, "dead")
GROUPS = ("g", "h")
IDS = tuple(f"t{n}" for n in range(16))
KEYS = ("k", "l")
KINDS: Sequence[type[Any]] = (
    *(Enqueue,) * 6,
    *(Ack, Ack, Fail, Fail, Retry, Release, Extend, Progress),
    *(Cancel, Cancel, Reschedule, Reschedule, Remove, Remove, Requeue, Requeue),
)
FITS: dict[type[Operation], Sequence[State]] = {
    Cancel: (State.BLOCKED, State.SCHEDULED, State.READY, State.RUNNING),
    Reschedule: (State.BLOCKED, State.SCHEDULED, State.READY),
    Requeue: (State.DEAD,),
}
ERROR = TaskError("Boom", "it broke", "")


def agrees_with_memory(make_storage: Make, episodes: int) -> None:
    """The same episodes at every run."""
    _play(make_storage, range(episodes))


def agrees_with_memory_on_new_episodes(make_storage: Make, episodes_per_round: int) -> None:
    _play(make_storage, random.SystemRandom().sample(range(10**9), episodes_per_round * ROUNDS))


def _play(make_storage: Make, seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            asyncio.run(Episode(seed, make_storage).play(CALLS))
        except AssertionError as exc:
            raise AssertionError(f"episode {seed}: {exc}") from exc


class FollowingLedger(TableLedger):
    """Grants, of tasks that stand equally, the one that another store granted."""

    wanted: list[str]  # ids in the order in which the other store granted them; a task that came back may be there twice

    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        found: list[Record] = []
        for _ in range(limit):
            ready = [t for t in self.tasks.values() if (t.queue, t.group, t.state) == (queue, group, State.READY)]
            ready = [t for t in ready if t not in found]
            if not ready:
                break
            first = min(ready, key=_place)
            equal = [t for t in ready if (t.returned and first.returned) or _place(t) == _place(first)]
            granted = next((t for id in self.wanted for t in equal if t.id == id), first)
            if granted.id in self.wanted:
                self.wanted.remove(granted.id)
            found.append(granted)
        return found


def _place(task: Record) -> tuple[bool, int]:
    return (not task.returned, task.due_us)


class FollowingMemory(MemoryStorage):
    def __init__(self, *, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.ledger = self._ledger = FollowingLedger(self.events_on)
        self.ledger.wanted = []


class Episode:
    """One seed's calls. `told` are the calls so far, for who has to find out."""

    def __init__(self, seed: int, make_storage: Make) -> None:
        self.random, self.clock = random.Random(seed), FakeClock()
        self.other, self.memory = make_storage(self.clock), FollowingMemory(clock=self.clock)
        self.told: list[Any] = []
        self.tokens: list[str] = []
        self.runs: list[tuple[str, str]] = []
        self.made = 0

    async def play(self, calls: int) -> None:
        try:
            for _ in range(calls):
                await self._step()
                await self._compare()
                if self.random.random() < 0.1:
                    await self._check()
            await self._drain()
            await self._compare()
            await self._compare_events()
            await self._check()
        except Exception as exc:
            told = "\n".join(map(_brief, self.told))
            raise AssertionError(f"{exc}\nafter these calls:\n{told}") from exc
        finally:
            await self.other.close()
            await self.memory.close()

    # -- a step ------------------------------------------------------------------------------------

    async def _step(self) -> None:
        pick = self.random.random()
        self.clock.advance(0.001 if pick < 0.8 else self.random.choice([1, 5, 31]))
        await self._promote()
        if pick < 0.05:
            await self._steer()
        elif pick < 0.1:
            self.told.append("reclaim")
            expired = [[(x.record.id, x.lost) for x in await s.expired(self.clock())] for s in (self.memory, self.other)]
            assert sorted(expired[0]) == sorted(expired[1]), f"expired {expired[1]}, not {expired[0]}"
            moved = [await store.sweep(self.clock()) > 0 for store in (self.memory, self.other)]
            assert moved[0] == moved[1], f"swept {moved}"
        call = [self._transaction() for _ in range(self.random.choice([1, 2, 3, 3, 4, 6]))]
        await self._call(call)
        if self.random.random() < 0.1:  # as if no answer had come
            await self._call(call, repeat=True)

    async def _promote(self) -> None:
        """At once, so that lanes in the order of arrival have what falls due in the order of its time."""
        for queue in EVERY:
            if self.memory.ledger.late(queue, self.clock()):
                self.told.append(f"promote {queue}")
                moved = [await store.promote(queue, now_us=self.clock()) for store in (self.memory, self.other)]
                assert moved[0] == moved[1], f"promoted {moved[1]} of {queue}, not {moved[0]}"

    async def _steer(self) -> None:
        queue, group, limit = self.random.choice(QUEUES), self.random.choice(GROUPS), self.random.randint(1, 3)
        self.told.append(("limit", queue, group, limit))
        for store in (self.memory, self.other):
            await store.set_group_limit(queue, group, limit)

    async def _call(self, transactions: Sequence[Sequence[Operation]], repeat: bool = False) -> None:
        self.told.append((self.clock(), "repeat" if repeat else "", transactions))
        if self.random.random() < 0.3:
            found = self.other.apply_blocking(transactions, self.clock(), repeat=repeat)
        else:
            found = await self.other.apply(transactions, self.clock(), repeat=repeat)
        self.memory.ledger.wanted = [t.id for answer in found for t in _taken(answer)]
        expected = await self.memory.apply(transactions, self.clock(), repeat=repeat)
        for transaction, mine, its in zip(transactions, expected, found, strict=True):
            if repeat:  # what is held under a token comes back in any order
                mine, its = _by_id(mine), _by_id(its)
            assert _answer(its) == _answer(mine), f"{_brief(transaction)} answered {_difference(_answer(its), _answer(mine))}"

    def _transaction(self) -> Sequence[Operation]:
        if self.random.random() < 0.2:
            self.made += 1
            self.tokens.append(f"{self.made:032x}")
            queues = tuple(self.random.sample(EVERY, self.random.randint(1, 3)))
            return [Reserve(queues=queues, token=self.tokens[-1], limit=self.random.randint(1, 4))]
        if self.random.random() < 0.1:
            return [self._on_run()]
        count = self.random.choice([1, 1, 1, 2, 3])
        if self.random.random() < 0.5:  # those of one shape travel together
            queue = self.random.choice(QUEUES)
            return [self._plain(id, queue) for id in self.random.sample(IDS, count)]
        made = [self._operation(id) for id in self.random.sample(IDS, count)]
        return list({op.id: op for op in made}.values())  # type: ignore[attr-defined]

    def _on_run(self) -> Operation:
        pick = self.random.random()
        if pick < 0.25 or not self.runs:
            self.runs.append((self.random.choice(QUEUES), f"r{len(self.runs)}"))
        queue, run_id = self.random.choice(self.runs[-2:])
        run: dict[str, Any] = {"queue": queue, "run_id": run_id}
        if pick < 0.3:
            return OpenRun(**run, ttl_us=self.random.choice([5 * S, 3600 * S]))
        if pick > 0.75:
            return self.random.choice([CommitRun, CommitRun, AbortRun])(**run)
        staged = [self._special(id, {}) for id in self.random.sample(IDS, self.random.randint(1, 4))]
        fixed: dict[str, Any] = {"queue": queue, "blocked_by": ()}
        return Stage(**run, tasks=tuple(msgspec.structs.replace(op, **fixed) for op in staged), strict=pick < 0.35)

    def _plain(self, id: str, queue: str) -> Enqueue:
        conflict: Any = self.random.choice(["error", "return", "replace_finished", "replace_finished"])
        return Enqueue(id=id, name="job", queue=queue, on_conflict=conflict, fingerprint=self.random.choice("xxy"))

    def _operation(self, id: str) -> Operation:
        times: list[dict[str, int]] = [{}, {"delay_us": S}, {"delay_us": 5 * S}, {"eta_us": self.clock() + 5 * S}]
        time = self.random.choice(times)
        kind = self.random.choice(KINDS)
        if kind is Enqueue:
            return self._special(id, time)
        fits = FITS.get(kind, (State.RUNNING,) if issubclass(kind, Held) else tuple(State))
        there = [t.id for t in self.memory.ledger.tasks.values() if t.state in fits]
        if there and self.random.random() < 0.8:
            id = self.random.choice(there)
        task = self.memory.ledger.tasks.get(id)
        queue = task.queue if task is not None and self.random.random() < 0.95 else self.random.choice(EVERY)
        on: dict[str, Any] = {"id": id, "queue": queue}
        if issubclass(kind, Held):
            return self._held(kind, on, task)
        if kind is Reschedule:
            return Reschedule(**on, **time)
        if kind is Requeue:
            return Requeue(**on, **time, reset_attempts=self.random.random() < 0.5)
        return kind(**on)

    def _held(self, kind: type[Any], on: dict[str, Any], task: Record | None) -> Operation:
        token = (task.token if task is not None else None) or (self.tokens[-1] if self.tokens else "0" * 32)
        given: dict[str, Any] = {**on, "token": token, "late": True}
        if kind is Ack or kind is Fail:
            repeats = task is not None and task.interval_us and self.random.random() < 0.5
            given["again_us"] = self.clock() + 5 * S if repeats else None
        if kind is Ack:
            given["result"] = self.random.choice([None, b"1"])
        if kind is Fail or kind is Retry:
            given["error"] = ERROR
        if kind is Retry:
            given["delay_us"] = self.random.choice([None, 0, S])
        if kind is Extend:
            given["lease_us"] = 5 * S
        if kind is Progress:
            given["data"] = b"1"
        return kind(**given)

    def _special(self, id: str, time: dict[str, int]) -> Enqueue:
        given: dict[str, Any] = dict(time)
        if self.random.random() < 0.6:
            given |= {"group": self.random.choice(GROUPS), "group_limit": self.random.randint(0, 2)}
        if self.random.random() < 0.2:
            given["dead_queue"] = "dead"
        if self.random.random() < 0.2:
            given["idempotency_key"] = self.random.choice(KEYS)
        if self.random.random() < 0.1:
            given["result_ttl_us"] = 0
        if self.random.random() < 0.1:
            given["interval_us"] = 5 * S
        if self.random.random() < 0.3:
            others = self.random.sample([i for i in IDS if i != id], self.random.randint(1, 2))
            given["blocked_by"] = tuple(Blocker(i, self.random.choice(QUEUES)) for i in others)
        plain = self._plain(id, self.random.choice(QUEUES))
        return msgspec.structs.replace(plain, **given)

    # -- comparing ---------------------------------------------------------------------------------

    async def _compare(self) -> None:
        mine, its = [await self._seen(store) for store in (self.memory, self.other)]
        for what in mine:
            assert its[what] == mine[what], f"{what}:\n{_difference(its[what], mine[what])}"

    async def _seen(self, store: BaseStorage) -> dict[str, Any]:
        tasks = (await store.find(Filter(states=tuple(State)), None, 1000)).tasks
        results = await store.results(IDS)
        counts = {c.queue: c for c in await store.counts(self.clock())}
        return {
            "twice": [t.id for n, t in enumerate(tasks) if t.id in {other.id for other in tasks[:n]}],
            "tasks": {t.id: _shown(t) for t in tasks},
            "results": {id: _told(r) for id, r in results.items()},
            "counts": {q: {s.name: getattr(c, s.name.lower()) for s in State} for q, c in counts.items() if _used(c)},
            "groups": {q: [g for g in (await store.groups(q, None, 100))[0] if g.ready or g.inflight] for q in EVERY},
        }

    async def _check(self) -> None:
        assert await self.other.check() == []

    async def _drain(self) -> None:
        """Whoever waits comes out, in the same order, until nobody is left."""
        for _ in range(50):
            self.clock.advance(60)
            await self._promote()
            for lease in await self.memory.expired(self.clock()):
                ack = Ack(queue=lease.record.queue, id=lease.record.id, token=lease.record.token or "", late=True)
                await self._call([[ack]])
            self.made += 1
            await self._call([[Reserve(queues=EVERY, token=f"{self.made:032x}", limit=3)]])
            if not self.memory.ledger.in_state(State.RUNNING, None):
                return
        raise AssertionError("the store does not run dry")

    async def _compare_events(self) -> None:
        mine, its = [await _events(store) for store in (self.memory, self.other)]
        for queue in mine.keys() | its.keys():
            assert its.get(queue) == mine.get(queue), f"events of {queue}: {_difference(its.get(queue), mine.get(queue))}"


def _taken(answer: Result) -> list[Record]:
    return [] if isinstance(answer, Refused) else [t for outcome in answer for t in getattr(outcome, "tasks", ())]


def _by_id(answer: Result) -> Result:
    if not _taken(answer):
        return answer
    return [msgspec.structs.replace(answer[0], tasks=sorted(_taken(answer), key=lambda t: t.id))]  # type: ignore[index, type-var]


def _answer(answer: Result) -> Any:
    if isinstance(answer, Refused):
        return type(answer)
    if _taken(answer):
        return [msgspec.structs.replace(answer[0], tasks=[]), *map(_shown, _taken(answer))]
    return answer


def _shown(task: Record) -> dict[str, Any]:
    """What everybody sees of a task; the time at which one was due that has ended is nobody's."""
    told = msgspec.structs.asdict(task)
    hidden = ("seq", "returned", "blockers_left", "has_dependents", "updated_at_us")
    for name in (*hidden, *(("due_us",) if task.state.final else ())):
        told.pop(name, None)
    return told


def _told(result: StoredResult) -> StoredResult:
    return result if result.result is not None else msgspec.structs.replace(result, encoding="json")


def _used(counts: Any) -> bool:
    return any(getattr(counts, s.name.lower()) for s in State)


def _brief(what: Any) -> str:
    if isinstance(what, Operation):
        given = {f.name: getattr(what, f.name) for f in msgspec.structs.fields(what) if getattr(what, f.name) != f.default}
        return f"{type(what).__name__}({', '.join(f'{k}={_brief(v)}' for k, v in given.items() if (k, v) != ('name', 'job'))})"
    return f"[{', '.join(map(_brief, what))}]" if isinstance(what, list | tuple) else repr(what)


def _difference(its: Any, mine: Any) -> str:
    if isinstance(its, dict) and isinstance(mine, dict):
        keys = [k for k in {**mine, **its} if its.get(k) != mine.get(k)]
        return "\n".join(f"{k}: {_difference(its.get(k), mine.get(k))}" for k in keys)
    if isinstance(its, list) and isinstance(mine, list):
        n = next((n for n, pair in enumerate(zip(its, mine, strict=False)) if pair[0] != pair[1]), min(len(its), len(mine)))
        return f"from number {n} of {len(its)} and {len(mine)}: {its[n : n + 3]}, not {mine[n : n + 3]}"
    return f"{its!r}, not {mine!r}"


async def _events(store: BaseStorage) -> dict[str, list[Any]]:
    rows = [e for s in await store.event_shards() for e in await store.events(s.name, s.first - 1, 1_000_000)]
    told: dict[str, list[Any]] = {}
    for row in rows:
        told.setdefault(row.queue, []).append((row.event, row.task_id, row.state, row.attempt, row.group, row.ts_us))
    return told
