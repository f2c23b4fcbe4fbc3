"""A Hypothesis state machine that makes the same calls to a storage and to the reference model and compares them.

A rule takes random numbers and picks a task, a token or a run by them. A number always picks something, so a story that
fails can be made shorter by leaving out its steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omniq.errors import Refused
from omniq.models import Blocker, Record, State
from omniq.operations import (
    AbortRun,
    Ack,
    Cancel,
    CommitRun,
    CountFanIn,
    Enqueue,
    Extend,
    Fail,
    Filter,
    Held,
    OpenFanIn,
    OpenRun,
    Operation,
    Release,
    Remove,
    Requeue,
    Reschedule,
    Reserve,
    Reserved,
    Retry,
    RunState,
    Stage,
)
from omniq.policy import after_loss, next_run
from omniq.storage.base import BaseStorage
from omniq.testing.bench import S, Target
from omniq.testing.clock import FakeClock
from omniq.testing.model_runs import RunModel

WRONG = "0" * 32  # a token that no lease has

# Few queues, groups, keys and times: rules are to meet each other's tasks, and moments are to coincide.
numbers = st.integers(0, 1000)
rights = st.integers(0, 9)  # 0 gives a wrong token; seldom, or else hardly any task would end
queues = st.sampled_from(["default", "mail"])
groups = st.sampled_from(["g", "h"])
delays = st.sampled_from([0, 1000, S, 5 * S, 60 * S])
times = st.one_of(
    st.just(dict[str, int]()),
    st.fixed_dictionaries({"delay_us": delays}),
    st.fixed_dictionaries({"eta_us": st.sampled_from([-5 * S, 0, S, 60 * S])}),
)
grouped = st.one_of(st.just(dict[str, Any]()), st.fixed_dictionaries({"group": groups, "group_limit": st.integers(0, 3)}))
keys = {"idempotency_key": st.sampled_from(["k", "l"]), "key_ttl_us": st.sampled_from([S, 3600 * S])}
keyed = st.one_of(st.just(dict[str, Any]()), st.fixed_dictionaries(keys))
ends = st.sampled_from([Ack, Retry, Fail, Release])
# "dead" is the dead queue of some tasks.
orders = st.sampled_from([("default",), ("mail",), ("dead",), ("mail", "default", "dead")])
extras = st.fixed_dictionaries(
    {},
    optional={
        "dead_queue": st.just("dead"),
        "interval_us": st.just(60 * S),
        "max_attempts": st.integers(1, 2),
        "lease_us": st.sampled_from([S, 10 * S]),
        "dead_blockers": st.just("ignore"),
        "on_conflict": st.just("return"),
        "fingerprint": st.just("other"),
    },
)

# For staged tasks, which may have no delay.
etas = st.sampled_from([dict[str, int](), {"eta_us": -5 * S}, {"eta_us": S}, {"eta_us": 60 * S}])


def has(state: State) -> Callable[[Any], bool]:
    """Returns the precondition of a rule that needs a task in this state."""
    return lambda machine: any(t.state is state for t in cast(DriverMachine, machine).model.tasks.values())


class DriverMachine(RuleBasedStateMachine):
    """A storage and the model on the same clock. `driver_machine` sets `make_storage`."""

    make_storage: Callable[[FakeClock], BaseStorage]

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.runner = asyncio.Runner()  # rules of Hypothesis are not async; a storage stays on one event loop
        self.store = type(self).make_storage(self.clock)
        self.model = RunModel(self.store.capabilities.due_order, self.store.capabilities.cross_queue)
        self.numbers = itertools.count(1)
        self.old_tokens: dict[str, str] = {}  # the last token of each task, for calls of former holders

    def teardown(self) -> None:
        try:
            assert self.runner.run(self.store.check()) == []
        finally:
            self.runner.run(self.store.close())
            self.runner.close()

    # -- both sides --------------------------------------------------------------------------------

    def apply(self, *operations: Operation) -> Any:
        (answer,) = self.runner.run(self.store.apply([operations], self.clock()))
        return answer

    def both(self, *operations: Operation) -> None:
        answer, expected = self.apply(*operations), self.model.apply(operations, self.clock())
        # The text of an error is the driver's own; its kind is part of the contract.
        found = type(answer) if isinstance(answer, Refused) else answer
        assert found == expected, f"{operations}: the storage says {answer!r}, the model {expected!r}"

    def pick(self, number: int, *states: State) -> str:
        """Returns the key of a task in one of these states. Without states any task will do, also one that does not exist."""
        keys = [k for k, t in self.model.tasks.items() if not states or t.state in states]
        keys += [] if states else ["unknown"]
        return keys[number % len(keys)]

    def place(self, key: str) -> tuple[str, str]:
        """Returns the queue and the id of a task."""
        task = self.model.tasks.get(key)
        return (task.queue, task.op.id) if task else ("default", key)

    def on(self, kind: type[Target], key: str, **fields: Any) -> Target:
        queue, id = self.place(key)
        return kind(**({"queue": queue, "id": id} | fields))

    def token(self, key: str, right: int) -> str:
        """Returns the token of a task, or its last token if it has none. With `right` 0 the token is wrong."""
        task = self.model.tasks.get(key)
        return ((task.token if task else None) or self.old_tokens.get(key, WRONG)) if right else WRONG

    def held(self, kind: type[Target], number: int, right: int, **fields: Any) -> Target:
        key = self.pick(number, State.RUNNING)
        return self.on(kind, key, token=self.token(key, right), **fields)

    def tick(self, number: int) -> int | None:
        """Returns when an interval task runs next."""
        queue, id = self.place(self.pick(number, State.RUNNING))
        task = self.runner.run(self.store.get(id, queue))
        return None if task is None else next_run(task, self.clock())

    def moment(self, given: dict[str, int]) -> dict[str, int]:
        return {name: us + self.clock() if name == "eta_us" else us for name, us in given.items()}

    def new(self, id: str, queue: str, time: dict[str, int], after: list[int], *fields: dict[str, Any]) -> Enqueue:
        """Returns an `Enqueue`. The numbers in `after` pick its blockers; of equal `fields` the last counts."""
        blockers = [self.place(key) for key in dict.fromkeys(self.pick(n) for n in after)]
        blocked = tuple(Blocker(i, of if i != "unknown" else queue) for of, i in blockers if i != id)
        given: dict[str, Any] = {"id": id, "name": "job", "queue": queue, "blocked_by": blocked} | self.moment(time)
        for more in fields:
            given |= more
        if not self.spans():
            given["blocked_by"] = tuple(b for b in blocked if b.queue == queue)
            given.pop("dead_queue", None)
        return Enqueue(**given)

    def spans(self) -> bool:
        """Whether an operation may name several queues. A store that refuses it is asked seldom: else little would happen."""
        return self.model.cross_queue or next(self.numbers) % 8 == 0

    def next_id(self) -> str:
        return f"t{next(self.numbers)}"

    # -- enqueue and reserve -----------------------------------------------------------------------

    @initialize(tasks=st.lists(st.tuples(queues, grouped, extras), min_size=3, max_size=12))
    def begin(self, tasks: list[tuple[str, Any, Any]]) -> None:
        for queue, group, extra in tasks:
            self.both(self.new(self.next_id(), queue, {}, [], group, extra))
        for queue in ("default", "default", "mail"):
            self.open_run(queue, 3600 * S)

    @rule(queue=queues, time=times, after=st.lists(numbers, max_size=2), group=grouped, key=keyed, extra=extras)
    def enqueue(self, queue: str, time: dict[str, int], after: list[int], group: Any, key: Any, extra: Any) -> None:
        self.both(self.new(self.next_id(), queue, time, after, group, key, extra))

    @rule(queue=queues, group=grouped, extra=extras)
    def enqueue_chain(self, queue: str, group: Any, extra: Any) -> None:
        first = self.new(self.next_id(), queue, {}, [], group)
        self.both(first)
        for _ in range(2):
            self.both(self.new(self.next_id(), queue, {}, [len(self.model.tasks) - 1], group, extra))

    @rule(number=numbers, queue=queues, time=times, group=grouped, extra=extras)
    def enqueue_again(self, number: int, queue: str, time: dict[str, int], group: Any, extra: Any) -> None:
        self.both(self.new(self.place(self.pick(number))[1], queue, time, [], group, extra))

    @rule(order=orders, limit=st.integers(1, 6), lease=st.none() | st.just(2 * S))
    def reserve(self, order: tuple[str, ...], limit: int, lease: int | None) -> None:
        self.take(order, limit, lease)

    def take(self, order: tuple[str, ...], limit: int, lease: int | None = None) -> list[str]:
        # Counted and not drawn by chance, so that a story can be repeated.
        op = Reserve(queues=order, limit=limit, token=f"{next(self.numbers):032x}", lease_us=lease)
        (reserved,) = self.apply(op)
        assert isinstance(reserved, Reserved)
        taken = [self.model.key_of(t.queue, t.id) for t in reserved.tasks]
        wrong, paused = self.model.reserve(op, self.clock(), taken)
        assert not wrong, wrong
        assert list(reserved.paused) == paused
        # Exact, because a worker sleeps until then: later would delay a task, earlier would wake workers for nothing.
        assert reserved.next_at_us == self.model.next_at(order)
        self.old_tokens.update(dict.fromkeys(taken, op.token))
        return taken

    @rule(order=orders, kinds=st.lists(ends, min_size=1, max_size=6), data=st.data())
    def work(self, order: tuple[str, ...], kinds: list[type[Held]], data: st.DataObject) -> None:
        """A turn of a worker: it takes some tasks and ends them in another order."""
        taken = self.take(order, len(kinds))
        for key, kind in zip(data.draw(st.permutations(taken)), kinds, strict=False):
            self.both(self.on(kind, key, token=self.token(key, 1)))

    @rule(queue=queues, limit=st.integers(1, 4))
    def reserve_while_paused(self, queue: str, limit: int) -> None:
        self.runner.run(self.store.pause(queue))
        self.model.paused.add(queue)
        self.take(("mail", "default", "dead"), limit)
        assert self.runner.run(self.store.resume(queue))
        self.model.paused.discard(queue)

    # -- the holder --------------------------------------------------------------------------------

    @precondition(has(State.RUNNING))
    @rule(number=numbers, right=rights, late=st.booleans(), again=st.booleans())
    def ack(self, number: int, right: int, late: bool, again: bool) -> None:
        self.both(self.held(Ack, number, right, late=late, again_us=self.tick(number) if again else None))

    @precondition(has(State.RUNNING))
    @rule(number=numbers, right=rights, late=st.booleans(), again=st.booleans())
    def fail(self, number: int, right: int, late: bool, again: bool) -> None:
        self.both(self.held(Fail, number, right, late=late, again_us=self.tick(number) if again else None))

    @precondition(has(State.RUNNING))
    @rule(number=numbers, right=rights, delay=st.none() | delays, attempts=st.none() | st.integers(0, 3))
    def retry(self, number: int, right: int, delay: int | None, attempts: int | None) -> None:
        self.both(self.held(Retry, number, right, late=True, delay_us=delay, attempts=attempts))

    @precondition(has(State.RUNNING))
    @rule(number=numbers, late=st.booleans(), us=st.sampled_from([-S, 0, S]))
    def retry_at(self, number: int, late: bool, us: int) -> None:
        self.both(self.held(Retry, number, 1, late=late, due_us=self.clock() + us))

    @precondition(has(State.RUNNING))
    @rule(number=numbers, right=rights, late=st.booleans())
    def release(self, number: int, right: int, late: bool) -> None:
        self.both(self.held(Release, number, right, late=late))

    @precondition(has(State.RUNNING))
    @rule(number=numbers, right=rights, late=st.booleans(), lease=st.none() | st.sampled_from([S, 90 * S]))
    def extend(self, number: int, right: int, late: bool, lease: int | None) -> None:
        self.both(self.held(Extend, number, right, late=late, lease_us=lease))

    @precondition(has(State.RUNNING))
    @rule(number=numbers, right=rights)
    def cancel_and_say_so(self, number: int, right: int) -> None:
        self.both(self.held(Cancel, number, right))

    @precondition(has(State.RUNNING))
    @rule(number=numbers, time=times, right=rights, group=grouped)
    def ack_and_enqueue(self, number: int, time: dict[str, int], right: int, group: Any) -> None:
        ack = self.held(Ack, number, right, late=True)
        queue = "default" if self.spans() else ack.queue
        self.both(self.new(self.next_id(), queue, time, [number], group, {"idempotency_key": "k"}), ack)

    @rule(number=numbers, kind=st.sampled_from([Ack, Retry, Fail, Release, Extend]), right=rights, late=st.booleans())
    def speak_as_a_former_holder(self, number: int, kind: type[Held], right: int, late: bool) -> None:
        key = self.pick(number)
        self.both(self.on(kind, key, token=self.old_tokens.get(key, WRONG) if right else WRONG, late=late))

    # -- anybody -----------------------------------------------------------------------------------

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        self.both(self.on(Cancel, self.pick(number)))

    @rule(number=numbers, time=times)
    def reschedule(self, number: int, time: dict[str, int]) -> None:
        self.both(self.on(Reschedule, self.pick(number), **self.moment(time)))

    @precondition(has(State.DEAD))
    @rule(number=numbers, time=times, reset=st.booleans())
    def requeue(self, number: int, time: dict[str, int], reset: bool) -> None:
        key = self.pick(number, State.DEAD)
        self.both(self.on(Requeue, key, **self.moment(time), reset_attempts=reset))

    @rule(number=numbers)
    def requeue_anything(self, number: int) -> None:
        self.both(self.on(Requeue, self.pick(number)))

    @rule(number=numbers, if_state=st.none() | st.sampled_from([State.READY, State.DEAD]))
    def remove(self, number: int, if_state: State | None) -> None:
        self.both(self.on(Remove, self.pick(number), if_state=if_state))

    @rule(queue=queues, group=groups, limit=st.integers(1, 3))
    def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        self.runner.run(self.store.set_group_limit(queue, group, limit))
        self.model.set_group_limit(queue, group, limit)

    # Sometimes another number than the fan-in was opened with, and more members than it expects.
    @rule(key=groups, expected=st.sampled_from([2, 2, 3]), members=st.lists(st.sampled_from("abcd"), max_size=4))
    def fan_in(self, key: str, expected: int, members: list[str]) -> None:
        self.both(OpenFanIn(key=key, expected=expected, ttl_us=3600 * S))
        for member in members:
            self.both(CountFanIn(key=key, member=member))

    # -- staged runs -------------------------------------------------------------------------------

    def pick_run(self, number: int) -> tuple[str, str]:
        """Returns the queue and the id of a run: in most cases an open run with tasks, seldom a run that does not exist."""
        model = self.model
        busy = [(model.tasks[key].queue, run_id) for key, runs in model.wanted_by.items() for run_id in runs]
        now_open = [place for place, run in model.runs.items() if run.state is RunState.OPEN]
        choices = [[("default", "unknown"), *model.runs], now_open, busy, busy]
        runs = choices[number % 4] or choices[0]
        return runs[number // 4 % len(runs)]

    @rule(queue=queues, ttl=st.sampled_from([2 * S, 3600 * S]))
    def open_run(self, queue: str, ttl: int) -> None:
        self.both(OpenRun(queue=queue, run_id=f"run{next(self.numbers)}", ttl_us=ttl))

    @rule(number=numbers, count=st.integers(1, 4), time=etas, group=grouped, key=keyed, extra=extras, strict=st.booleans())
    def stage(self, number: int, count: int, time: dict[str, int], group: Any, key: Any, extra: Any, strict: bool) -> None:
        """Stages plain tasks and others in turns, some under the id of a task that exists."""
        queue, run_id = self.pick_run(number)
        ids = [self.next_id() if n % 4 else self.place(self.pick(n))[1] for n in range(number, number + count)]
        tasks = tuple(
            self.new(id, queue, time, [], group, key, extra) if n % 2 else self.new(id, queue, {}, [], key if n else {})
            for n, id in enumerate(ids)
        )
        self.both(Stage(queue=queue, run_id=run_id, tasks=tasks, strict=strict))

    @precondition(has(State.STAGED))
    @rule(number=numbers)
    def stage_what_another_run_staged(self, number: int) -> None:
        """A new run stages every task again that is staged in its queue."""
        queue, _ = self.place(self.pick(number, State.STAGED))
        self.open_run(queue, 3600 * S)
        staged = tuple(t.op for t in self.model.tasks.values() if t.state is State.STAGED and t.queue == queue)
        self.both(Stage(queue=queue, run_id=[*self.model.runs][-1][1], tasks=staged))

    @rule(number=numbers, kind=st.sampled_from([CommitRun, CommitRun, AbortRun, OpenRun]), repeat=st.booleans())
    def end_run(self, number: int, kind: type[CommitRun | AbortRun | OpenRun], repeat: bool) -> None:
        queue, run_id = self.pick_run(number)
        if kind is OpenRun and (queue, run_id) not in self.model.runs:
            return
        for _ in range(1 + repeat):
            self.both(kind(queue=queue, run_id=run_id))

    @precondition(has(State.STAGED))
    @rule(number=numbers, queue=queues, time=times, group=grouped, key=keyed, extra=extras)
    def enqueue_what_is_staged(self, number: int, queue: str, time: dict[str, int], group: Any, key: Any, extra: Any) -> None:
        """The `Enqueue` has the key of the staged task, its id, or both."""
        task = self.model.tasks[self.pick(number, State.STAGED)]
        given: dict[str, Any] = {"idempotency_key": task.op.idempotency_key} if number % 2 else key
        id = self.next_id() if given.get("idempotency_key") and number % 3 else task.op.id
        self.both(self.new(id, task.queue if number % 5 else queue, time, [], group, given, extra))

    def sweep(self, now: int) -> None:
        """Aborts the runs whose time is over. If they share a task, the driver chooses the run that counts it as dropped."""
        late = self.model.overdue(now)
        wanted = sum(self.model.abort(*place, now) for place in late)
        moved = 0
        while some := self.runner.run(self.store.sweep(now)):
            moved += some
        assert (moved > 0) == (wanted > 0)
        runs = {place: self.model.runs[place] for place in late}
        found = {place: self.runner.run(self.store.run(*place)) for place in late}
        assert sum(run.dropped for run in runs.values()) == sum(info.dropped for info in found.values() if info)
        for place, info in found.items():
            assert info is not None
            assert (info.state, info.ended_at_us, info.settled) == (runs[place].state, now, True)
            runs[place].dropped = info.dropped  # from here on the model follows the driver's choice

    # -- time --------------------------------------------------------------------------------------

    @rule(queue=queues)
    def promote(self, queue: str) -> None:
        now = self.clock()
        assert self.runner.run(self.store.promote(queue, now_us=now)) == self.model.promote(queue, now)

    # To the ends of leases (1, 2, 10 and 30 s), of delays and of keys, and a millisecond before.
    @rule(seconds=st.sampled_from([0.001, 1, 2, 5, 29.999, 30, 3600]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([0, 2, 30]))
    def reclaim(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now = self.clock()
        leases = self.runner.run(self.store.expired(now))
        running = [k for k, t in self.model.tasks.items() if t.state is State.RUNNING and t.lease_until <= now]
        assert sorted(self.model.key_of(x.record.queue, x.record.id) for x in leases) == sorted(running)
        for lease in leases:
            self.both(after_loss(lease, now, 0.0))  # not by chance, so that a story can be repeated
        self.sweep(now)

    # -- what must be equal at all times -----------------------------------------------------------

    @invariant()
    def the_tasks_are_the_same(self) -> None:
        page = self.runner.run(self.store.find(Filter(states=tuple(State)), None, 1000))
        found = {self.model.key_of(t.queue, t.id): self.seen(t) for t in page.tasks}
        assert found == {key: self.expected(key) for key in self.model.tasks}
        results = self.runner.run(self.store.results([t.op.id for t in self.model.tasks.values()]))
        # Where ids are unique only within a queue, `results` may answer with the result from any of the queues.
        kept: dict[str, list[State]] = {}
        for key, state in self.model.results.items():
            kept.setdefault(self.place(key)[1], []).append(state)
        assert results.keys() == kept.keys()
        assert all(result.state in kept[id] for id, result in results.items())

    def shown(self, state: State, due: int) -> State:
        """Drivers differ in when they write down that a task fell due, so a due task counts as ready on both sides."""
        return State.READY if state is State.SCHEDULED and due <= self.clock() else state

    def seen(self, task: Record) -> tuple[Any, ...]:
        due = None if task.state.final else task.due_us  # the contract says nothing about the `due_us` of an ended task
        held = (task.token, task.lease_until_us) if task.state is State.RUNNING else (task.token, None)
        state = self.shown(task.state, task.due_us)
        return (state, task.queue, task.attempts, due, *held, task.cancel_requested, task.dead_queue, task.run_id)

    def expected(self, key: str) -> tuple[Any, ...]:
        task = self.model.tasks[key]
        due = None if task.state.final else task.due
        held = (task.token, task.lease_until) if task.state is State.RUNNING else (None, None)
        state, run_id = self.shown(task.state, task.due), self.model.run_id(key)
        return (state, task.queue, task.attempts, due, *held, task.cancel, task.dead_queue, run_id)

    @invariant()
    def the_counters_are_the_same(self) -> None:
        for counts in self.runner.run(self.store.counts(self.clock())):
            mine = [self.shown(t.state, t.due) for t in self.model.tasks.values() if t.queue == counts.queue]
            for state in State:
                assert getattr(counts, state.name.lower()) == mine.count(state), (counts, state)
            lanes, _ = self.runner.run(self.store.groups(counts.queue, None, 100))
            for lane in lanes:
                running = self.model.members(counts.queue, lane.group, State.RUNNING)
                limit = self.model.limits.get((counts.queue, lane.group), 1)
                assert (lane.inflight, lane.limit) == (len(running), limit), lane


def driver_machine(make_storage: Callable[[FakeClock], BaseStorage]) -> type[DriverMachine]:
    """Returns the state machine for a driver. Run it with `hypothesis.stateful.run_state_machine_as_test`."""
    return type("DriverMachine", (DriverMachine,), {"make_storage": staticmethod(make_storage)})
