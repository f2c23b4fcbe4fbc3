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
    Held,
    OnTask,
    Operation,
    Outcome,
    QueueCounts,
    Release,
    Released,
    Reserve,
    Reserved,
    Retried,
    Retry,
)
from omniq.storage.base import BaseStorage, Result
from omniq.testing.clock import FakeClock

S = 1_000_000  # one second, in microseconds
MS = 1_000
BOOM = TaskError("Boom", "it broke", "line 1\nline 2")

Target = TypeVar("Target", bound=OnTask)
Reopen = Callable[[BaseStorage, FakeClock], BaseStorage]


def on(kind: type[Target], task: Record, **fields: Any) -> Target:
    """An operation on a task; a holder's carries the task's token unless another one is given."""
    given: dict[str, Any] = {"queue": task.queue, "id": task.id}
    if issubclass(kind, Held):
        given["token"] = task.token
    return kind(**(given | fields))


class Bench:
    """One empty storage on a fake clock, with short ways to do what cases do again and again."""

    def __init__(self, store: BaseStorage, clock: FakeClock, reopen: Reopen | None = None) -> None:
        self.store = store
        self.clock = clock
        self.closed = False
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
        """One transaction; its outcome, or the list of them. A refusal is raised."""
        (answer,) = await self.call(operations, repeat=repeat)
        if isinstance(answer, Refused):
            raise answer
        assert len(answer) == len(operations), "one outcome per operation"
        return answer[0] if len(operations) == 1 else answer

    def new(self, id: str | None = None, **fields: Any) -> Enqueue:
        """An Enqueue with an id and a name; `after` takes plain ids of the same queue as blockers."""
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
        """Several tasks that differ by their id only, a transaction each."""
        await self.call(*[(self.new(id, **fields),) for id in ids])

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
        """Enqueue a task and lease it: the queue must have nothing else to give."""
        made = await self.add(id, **fields)
        tasks = await self.take(1, fields.get("queue", DEFAULT_QUEUE), worker=worker)
        assert [t.id for t in tasks] == [made.id]
        return tasks[0]

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

    async def reclaim(self) -> int:
        return await self.store.reclaim(self.now)

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

    async def result(self, id: str) -> StoredResult | None:
        return (await self.store.results([id])).get(id)

    async def counts(self, queue: str = DEFAULT_QUEUE) -> QueueCounts:
        found = {c.queue: c for c in await self.store.counts(self.now)}
        return found.get(queue) or QueueCounts(queue=queue)

    async def events(self, id: str) -> list[str]:
        return [e.event for e in await self.store.events_of(id)]

    async def last_event(self, id: str) -> tuple[EventRow, dict[str, Any]]:
        """A task's newest event, and its data as a mapping."""
        row = (await self.store.events_of(id))[-1]
        return row, {} if row.data is None else msgspec.json.decode(row.data)

    async def all_events(self) -> list[EventRow]:
        """Every event of every shard, in each shard's order."""
        return [e for s in await self.store.event_shards() for e in await self.store.events(s.name, s.first - 1, 1_000_000)]

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
        """Everything that can be seen of the store at this moment."""
        tasks = await self.all_tasks(states=tuple(State))
        queues = await self.store.queues()
        return [
            tasks,
            await self.store.results([t.id for t in tasks]),
            await self.store.counts(self.now),
            [await self.store.groups(q, None, 500) for q in queues],
            await self.store.workers(self.now),
            await self.store.event_shards(),
        ]

    # -- expecting ---------------------------------------------------------------------------------

    async def refused(self, kind: type[Refused], *operations: Operation, repeat: bool = False) -> None:
        """The transaction must be refused with exactly this error and change nothing at all."""
        before = await self.snapshot()
        (answer,) = await self.call(operations, repeat=repeat)
        assert type(answer) is kind, f"{operations!r} answered {answer!r}, not {kind.__name__}"
        assert await self.snapshot() == before, f"a refused {type(operations[0]).__name__} changed something"

    async def unchanged(self, *operations: Operation, repeat: bool = False) -> list[Outcome]:
        """The transaction must be accepted and yet change nothing; its outcomes."""
        before = await self.snapshot()
        (answer,) = await self.call(operations, repeat=repeat)
        assert not isinstance(answer, Refused), f"{operations!r} was refused: {answer!r}"
        assert await self.snapshot() == before, f"a repeated {type(operations[0]).__name__} changed something"
        return answer

    async def invalid(self, kind: type[OmniQError], *operations: Operation) -> None:
        """The call must raise before anything is sent."""
        before = await self.snapshot()
        await raises(kind, self.call(operations))
        assert await self.snapshot() == before

    async def verify(self) -> None:
        """What must hold after every case: the store finds no fault with itself, and its counters are true."""
        assert await self.store.check() == []
        counted = {c.queue: c for c in await self.store.counts(self.now)}
        seen: dict[tuple[str, str], int] = {}
        for task in await self.all_tasks(states=tuple(State)):
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
        """Open the same durable store again: after a close, or as another process would while the first one hangs."""
        assert self._reopen is not None, "only cases that need 'durable' may reopen"
        if close:
            await self.store.close()
        else:
            self._left.append(self.store)
        self.store = self._reopen(self.store, self.clock)

    async def close(self) -> None:
        self.closed = True
        for store in [*self._left, self.store]:
            await store.close()


async def raises(kind: type[OmniQError], call: Awaitable[object]) -> None:
    """The call must raise this error, or a kind of it."""
    try:
        await call
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")


# -- the register --------------------------------------------------------------------------------

Body = Callable[[Bench], Awaitable[None]]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One behaviour. `rules` are numbers of the driver rules and sections (`§5`) of the driver contract."""

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
    """Register a case. It runs on drivers that have what it `needs`: durable, cross_queue, due_order, own_clock, restores."""

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
