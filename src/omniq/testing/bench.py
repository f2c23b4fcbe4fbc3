"""The bench that every conformance case works on, and the register of cases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from omniq.errors import OmniQError, Refused
from omniq.models import DEFAULT_QUEUE, Blocker, Record, State, StoredResult, TaskError, new_token
from omniq.operations import (
    Ack,
    Acked,
    Beat,
    Cancel,
    Cancelled,
    Enqueue,
    Enqueued,
    EventRow,
    Extend,
    Extended,
    Fail,
    Failed,
    Filter,
    GroupInfo,
    Held,
    OnTask,
    Operation,
    Outcome,
    QueueCounts,
    Release,
    Released,
    Remove,
    Removed,
    Requeue,
    Reschedule,
    Rescheduled,
    Reserve,
    Reserved,
    Retention,
    Retried,
    Retry,
    Shard,
    WorkerInfo,
)
from omniq.storage.base import BaseStorage, Result
from omniq.testing.clock import FakeClock

S = 1_000_000  # one second, in microseconds
MS = 1_000
# Several lines, as a traceback has: a store that keeps a task as one line must not break here.
BOOM = TaskError("Boom", "it broke", "line 1\nline 2")

Target = TypeVar("Target", bound=OnTask)
Reopen = Callable[[BaseStorage, FakeClock], BaseStorage]


def on(kind: type[Target], task: Record, **fields: Any) -> Target:
    """An operation on a task; an operation of a holder carries the task's token unless another token is given."""
    given: dict[str, Any] = {"queue": task.queue, "id": task.id}
    if issubclass(kind, Held):
        given["token"] = task.token
    return kind(**(given | fields))


class Bench:
    """One empty storage on a fake clock, with a short call for each step that many cases share."""

    def __init__(self, store: BaseStorage, clock: FakeClock, reopen: Reopen | None = None) -> None:
        self.store = store
        self.clock = clock
        self.closed = False  # set by cases that close the storage themselves: it cannot be verified afterwards
        self._reopen = reopen
        self._left: list[BaseStorage] = []
        self._made = 0

    @property
    def now(self) -> int:
        return self.clock()

    def advance(self, seconds: float) -> int:
        return self.clock.advance(seconds)

    # -- changing ----------------------------------------------------------------------------------

    async def call(self, *transactions: Sequence[Operation], repeat: bool = False) -> list[Result]:
        return await self.store.apply(transactions, self.now, repeat=repeat)

    async def do(self, *operations: Operation, repeat: bool = False) -> Any:
        """Applies one transaction. Returns the outcome, or a list of outcomes for several operations. Raises a refusal."""
        (answer,) = await self.call(operations, repeat=repeat)
        if isinstance(answer, Refused):
            raise answer
        assert len(answer) == len(operations), "one outcome per operation"
        return answer[0] if len(operations) == 1 else answer

    def new(self, id: str | None = None, **fields: Any) -> Enqueue:
        """Returns an `Enqueue` with an id and a name. `after` names blockers by their ids, in the same queue."""
        self._made += 1
        queue = fields.setdefault("queue", DEFAULT_QUEUE)
        after: Iterable[str] = fields.pop("after", ())
        if after:
            fields["blocked_by"] = tuple(Blocker(i, queue) for i in after)
        given: dict[str, Any] = {"id": id or f"task-{self._made}", "name": "job"}
        return Enqueue(**(given | fields))

    async def add(self, id: str | None = None, **fields: Any) -> Enqueued:
        return cast(Enqueued, await self.do(self.new(id, **fields)))

    async def enqueue(self, *ids: str, **fields: Any) -> None:
        """Enqueues tasks that differ only by their ids, each in a transaction of its own."""
        await self.call(*[(self.new(id, **fields),) for id in ids])

    async def chain(self, *ids: str) -> None:
        """Enqueues tasks of which each waits for the one before it."""
        for id, blocker in zip(ids, (None, *ids), strict=False):
            await self.add(id, after=(blocker,) if blocker else ())

    async def reserve(
        self,
        limit: int = 1,
        *queues: str,
        token: str | None = None,
        lease_us: int | None = None,
        worker: str = "",
        repeat: bool = False,
    ) -> Reserved:
        op = Reserve(
            queues=queues or (DEFAULT_QUEUE,), limit=limit, token=token or new_token(), lease_us=lease_us, worker=worker
        )
        return cast(Reserved, await self.do(op, repeat=repeat))

    async def take(self, limit: int = 1, *queues: str, **fields: Any) -> list[Record]:
        return (await self.reserve(limit, *queues, **fields)).tasks

    async def take_ids(self, limit: int = 1, *queues: str) -> list[str]:
        return [t.id for t in await self.take(limit, *queues)]

    async def hold(self, id: str | None = None, *, worker: str = "", **fields: Any) -> Record:
        """Enqueues a task and leases it. The queue must have no other task to give."""
        made = await self.add(id, **fields)
        tasks = await self.take(1, fields.get("queue", DEFAULT_QUEUE), worker=worker)
        assert [t.id for t in tasks] == [made.id]
        return tasks[0]

    async def hold_with_dependents(self, count: int) -> Record:
        """Leases the task "root", for which the tasks d0, d1 and so on wait."""
        task = await self.hold("root")
        for start in range(0, count, 500):
            await self.do(*[self.new(f"d{n}", after=("root",)) for n in range(start, min(start + 500, count))])
        assert (await self.counts()).blocked == count
        return task

    async def dead(self, id: str | None = None, **fields: Any) -> Record:
        task = await self.hold(id, **fields)
        await self.fail(task)
        return await self.get(task.id)

    async def ack(self, task: Record, **fields: Any) -> Acked:
        return cast(Acked, await self.do(on(Ack, task, **fields)))

    async def retry(self, task: Record, **fields: Any) -> Retried:
        return cast(Retried, await self.do(on(Retry, task, **({"error": BOOM} | fields))))

    async def fail(self, task: Record, **fields: Any) -> Failed:
        return cast(Failed, await self.do(on(Fail, task, **({"error": BOOM} | fields))))

    async def release(self, task: Record, **fields: Any) -> Released:
        return cast(Released, await self.do(on(Release, task, **fields)))

    async def extend(self, task: Record, **fields: Any) -> Extended:
        return cast(Extended, await self.do(on(Extend, task, **fields)))

    async def cancel(self, id: str, queue: str = DEFAULT_QUEUE, **fields: Any) -> Cancelled:
        return cast(Cancelled, await self.do(Cancel(queue=queue, id=id, **fields)))

    async def requeue(self, id: str, **fields: Any) -> None:
        await self.do(on(Requeue, await self.get(id), **fields))

    async def reschedule(self, id: str, **fields: Any) -> Rescheduled:
        return cast(Rescheduled, await self.do(on(Reschedule, await self.get(id), **fields)))

    async def remove(self, id: str) -> Removed:
        return cast(Removed, await self.do(on(Remove, await self.get(id))))

    async def beat(self, worker: str, *, gone: bool = False, **info: Any) -> None:
        await self.do(Beat(info=WorkerInfo(worker=worker, **info), gone=gone))

    async def reclaim(self) -> int:
        return await self.store.reclaim(self.now)

    async def purge(self, retention: Retention | None = None, *limit: int) -> int:
        return await self.store.purge(retention or Retention(), self.now, *limit)

    async def sweep(self) -> None:
        """Sweeps until nothing is left to do: one call moves only so many tasks."""
        while await self.store.sweep(self.now):
            pass

    # -- looking -----------------------------------------------------------------------------------

    async def get(self, id: str) -> Record:
        task = await self.store.get(id)
        assert task is not None, f"task {id!r} is gone"
        return task

    async def state(self, id: str) -> State | None:
        task = await self.store.get(id)
        return None if task is None else task.state

    async def states(self, *ids: str) -> list[State | None]:
        return [await self.state(i) for i in ids]

    async def has_result(self, id: str) -> bool:
        return id in await self.store.results([id])

    async def result(self, id: str) -> StoredResult:
        found = await self.store.results([id])
        assert id in found, f"task {id!r} has no result"
        return found[id]

    async def counts(self, queue: str = DEFAULT_QUEUE) -> QueueCounts:
        found = {c.queue: c for c in await self.store.counts(self.now)}
        return found.get(queue) or QueueCounts(queue=queue)

    async def groups(self, queue: str = DEFAULT_QUEUE) -> list[GroupInfo]:
        return (await self.store.groups(queue, None, 500))[0]

    async def shard(self) -> Shard:
        """Returns the first shard of the event log. It has all events as long as a case uses a single queue."""
        return (await self.store.event_shards())[0]

    async def events(self, id: str) -> list[str]:
        return [e.event for e in await self.store.events_of(id)]

    async def last_event(self, id: str) -> tuple[EventRow, dict[str, Any]]:
        """Returns a task's newest event, and the data of that event as a mapping."""
        row = (await self.store.events_of(id))[-1]
        return row, {} if row.data is None else msgspec.json.decode(row.data)

    async def all_events(self) -> list[EventRow]:
        """Returns the events of all shards, each shard in its own order."""
        shards = await self.store.event_shards()
        return [e for s in shards for e in await self.store.events(s.name, s.first - 1, 1_000_000)]

    async def all_tasks(self, **filter: Any) -> list[Record]:
        tasks: list[Record] = []
        cursor: str | None = None
        while True:
            page = await self.store.find(Filter(**filter), cursor, 500, newest_first=False)
            tasks += page.tasks
            cursor = page.cursor
            if cursor is None:
                return tasks

    async def snapshot(self) -> list[Any]:
        """Returns everything that can be seen of the store at this moment."""
        tasks = await self.all_tasks(states=tuple(State))
        queues = await self.store.queues()
        return [
            tasks,
            await self.store.results([t.id for t in tasks]),
            await self.store.counts(self.now),
            [await self.groups(q) for q in queues],
            await self.store.workers(self.now),
            # The shards with their last numbers stand for the events: a new event moves a number.
            await self.store.event_shards(),
        ]

    # -- expecting ---------------------------------------------------------------------------------

    async def refused(self, kind: type[Refused], *operations: Operation, repeat: bool = False) -> None:
        """The store must refuse the transaction with exactly this error, and nothing may change."""
        before = await self.snapshot()
        (answer,) = await self.call(operations, repeat=repeat)
        assert type(answer) is kind, f"{operations!r} answered {answer!r}, not {kind.__name__}"
        assert await self.snapshot() == before, f"a refused {type(operations[0]).__name__} changed something"

    async def unchanged(self, *operations: Operation, repeat: bool = False) -> list[Outcome]:
        """The store must accept the transaction, and yet nothing may change. Returns the outcomes."""
        before = await self.snapshot()
        (answer,) = await self.call(operations, repeat=repeat)
        assert not isinstance(answer, Refused), f"{operations!r} was refused: {answer!r}"
        assert await self.snapshot() == before, f"a repeated {type(operations[0]).__name__} changed something"
        return answer

    async def invalid(self, kind: type[OmniQError], *operations: Operation, naming: str = "") -> None:
        """The call must raise before anything is sent. The text of the error must contain `naming`."""
        before = await self.snapshot()
        error = await raises(kind, self.call(operations))
        assert naming in str(error), f"{error} does not name {naming}"
        assert await self.snapshot() == before

    async def verify(self) -> None:
        """Checks what must hold after every case: the store finds no fault with itself, and its counters are right."""
        assert await self.store.check() == []
        counted = {c.queue: c for c in await self.store.counts(self.now)}
        seen: dict[tuple[str, str], int] = {}
        for task in await self.all_tasks(states=tuple(State)):
            # The counters take a scheduled task for ready as soon as it is due; its record changes only at the next Reserve.
            due = task.state is State.SCHEDULED and task.due_us <= self.now
            state = State.READY if due else task.state
            seen[task.queue, state.name.lower()] = seen.get((task.queue, state.name.lower()), 0) + 1
        for queue, counts in counted.items():
            for state in State:
                name = state.name.lower()
                assert getattr(counts, name) == seen.pop((queue, name), 0), f"{name} of {queue} is miscounted"
        assert not seen, f"counts() leaves out {seen}"

    # -- life --------------------------------------------------------------------------------------

    async def reopen(self, *, close: bool = True) -> None:
        """Opens the same durable store again: after a close, or as another process would while the first process hangs."""
        assert self._reopen is not None, "only cases that need 'durable' may reopen"
        if close:
            await self.store.close()
        else:
            self._left.append(self.store)  # open until the case ends, as in a process that hangs
        self.store = self._reopen(self.store, self.clock)

    async def close(self) -> None:
        self.closed = True
        for store in [*self._left, self.store]:
            await store.close()


async def raises(kind: type[OmniQError], call: Awaitable[object]) -> OmniQError:
    """The call must raise this error, or a kind of it. Returns the error."""
    try:
        await call
    except kind as exc:
        return exc
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")


# -- the register --------------------------------------------------------------------------------

Body = Callable[[Bench], Awaitable[None]]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One behaviour. `rules` names sections of the driver contract, as `§5`.

    A plain number in `rules` is an item of the checklist of 80 rules that the contract grew from. A test sees to it that no
    section and no item is without a case.
    """

    name: str
    topic: str
    rules: tuple[str, ...]
    needs: tuple[str, ...]
    body: Body

    @property
    def id(self) -> str:
        return f"{self.topic}-{self.name}"


CASES: dict[str, Case] = {}


def case(rules: str, needs: str = "") -> Callable[[Body], Body]:
    """Registers a case. It runs on drivers that have what it `needs`: durable, cross_queue, due_order, own_clock, restores."""

    def register(body: Body) -> Body:
        name: str = getattr(body, "__name__", "")
        topic = body.__module__.rpartition(".")[2]
        found = Case(name=name, topic=topic, rules=_split(rules), needs=_split(needs), body=body)
        assert found.id not in CASES, f"two cases are called {found.id}"
        CASES[found.id] = found
        return body

    return register


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
