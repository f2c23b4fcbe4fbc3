"""A Hypothesis state machine that drives a storage and the reference model side by side and compares them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omniq.errors import Refused
from omniq.models import Blocker, Record, State
from omniq.operations import (
    Ack,
    Cancel,
    Enqueue,
    Extend,
    Fail,
    Filter,
    Held,
    OnTask,
    Operation,
    Release,
    Remove,
    Requeue,
    Reschedule,
    Reserve,
    Reserved,
    Retry,
)
from omniq.policy import after_loss, next_run
from omniq.storage.base import BaseStorage
from omniq.testing.clock import FakeClock
from omniq.testing.model import Model

S = 1_000_000
QUEUES = ("default", "mail")
WRONG = "0" * 32

picks = st.integers(0, 1000)
rights = st.integers(0, 4)  # 0: a wrong token
queues = st.sampled_from(QUEUES)
groups = st.sampled_from(["g", "h"])
delays = st.sampled_from([0, 1000, S, 5 * S, 60 * S])
times = st.one_of(
    st.just(dict[str, int]()),
    st.fixed_dictionaries({"delay_us": delays}),
    st.fixed_dictionaries({"eta_us": st.sampled_from([-5 * S, 0, S, 60 * S])}),
)
grouped = st.one_of(
    st.just(dict[str, Any]()),
    st.fixed_dictionaries({"group": groups, "group_limit": st.integers(0, 3)}),
)
keyed = st.one_of(
    st.just(dict[str, Any]()),
    st.fixed_dictionaries(
        {"idempotency_key": st.sampled_from(["k", "l"]), "key_ttl_us": st.sampled_from([S, 3600 * S])}
    ),
)
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


class DriverMachine(RuleBasedStateMachine):
    """One storage, one model, one clock. `make_storage` is set by `driver_machine`."""

    make_storage: Callable[[FakeClock], BaseStorage]

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.runner = asyncio.Runner()
        self.store = type(self).make_storage(self.clock)
        self.model = Model()
        self.numbers = itertools.count(1)
        self.old_tokens: dict[str, str] = {}

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
        answer, expected = self.apply(*operations), self.model.run(operations, self.clock())
        found = type(answer) if isinstance(answer, Refused) else answer
        assert found == expected, f"{operations}: the storage says {answer!r}, the model {expected!r}"

    def on(self, kind: type[OnTask], pick: int, **fields: Any) -> OnTask:
        """An operation on some task, or on one that is not there."""
        ids = [*self.model.tasks, "unknown"]
        id = ids[pick % len(ids)]
        task = self.model.tasks.get(id)
        given: dict[str, Any] = {"queue": task.queue if task else "default", "id": id}
        if issubclass(kind, Held):
            given |= {"token": self.token(id, fields.pop("right", True)), "late": fields.pop("late", False)}
        return kind(**(given | fields))

    def token(self, id: str, right: bool) -> str:
        task = self.model.tasks.get(id)
        if task is None or not right:
            return WRONG
        return task.token or self.old_tokens.get(id, WRONG)

    def held(self, pick: int) -> int:
        """A running task, mostly: so that holders have something to do."""
        ids = list(self.model.tasks)
        running = [n for n, id in enumerate(ids) if self.model.tasks[id].state is State.RUNNING]
        return running[pick % len(running)] if running and pick % 5 else pick

    def moment(self, given: dict[str, int]) -> dict[str, int]:
        return {name: us + self.clock() if name == "eta_us" else us for name, us in given.items()}

    # -- rules -------------------------------------------------------------------------------------

    def new(self, id: str, queue: str, time: dict[str, int], after: list[int], *fields: dict[str, Any]) -> Enqueue:
        ids = [*self.model.tasks, "unknown"]
        blockers = dict.fromkeys(ids[n % len(ids)] for n in after)
        blocked = tuple(Blocker(i, t.queue if (t := self.model.tasks.get(i)) else queue) for i in blockers if i != id)
        given: dict[str, Any] = {"id": id, "name": "job", "queue": queue, "blocked_by": blocked} | self.moment(time)
        for more in fields:
            given |= more
        return Enqueue(**given)

    @rule(queue=queues, time=times, after=st.lists(picks, max_size=2), group=grouped, key=keyed, extra=extras)
    def enqueue(self, queue: str, time: dict[str, int], after: list[int], group: Any, key: Any, extra: Any) -> None:
        self.both(self.new(f"t{next(self.numbers)}", queue, time, after, group, key, extra))

    @rule(queue=queues, group=grouped)
    def enqueue_plain(self, queue: str, group: Any) -> None:
        self.both(self.new(f"t{next(self.numbers)}", queue, {}, [], group))

    @precondition(lambda self: bool(cast(DriverMachine, self).model.tasks))
    @rule(pick=picks, queue=queues, time=times, group=grouped, extra=extras)
    def enqueue_again(self, pick: int, queue: str, time: dict[str, int], group: Any, extra: Any) -> None:
        ids = list(self.model.tasks)
        self.both(self.new(ids[pick % len(ids)], queue, time, [], group, extra))

    @rule(
        order=st.sampled_from([("default",), ("mail",), ("dead",), ("mail", "default", "dead")]),
        limit=st.integers(1, 4),
    )
    def reserve(self, order: tuple[str, ...], limit: int) -> None:
        op = Reserve(queues=order, limit=limit, token=f"{next(self.numbers):032x}")
        (reserved,) = self.apply(op)
        assert isinstance(reserved, Reserved)
        wrong, paused = self.model.reserve(op, self.clock(), [t.id for t in reserved.tasks])
        assert not wrong, wrong
        assert list(reserved.paused) == paused
        assert reserved.next_at_us == self.model.next_at(order)
        self.old_tokens.update({t.id: op.token for t in reserved.tasks})

    @rule(pick=picks, right=rights, late=st.booleans(), again=st.booleans())
    def ack(self, pick: int, right: int, late: bool, again: bool) -> None:
        op = self.on(Ack, self.held(pick), right=right > 0, late=late)
        task = self.runner.run(self.store.get(op.id))
        tick = next_run(task, self.clock()) if task is not None and again else None
        self.both(Ack(**self.fields_of(op), again_us=tick))

    @staticmethod
    def fields_of(op: OnTask) -> dict[str, Any]:
        return {"queue": op.queue, "id": op.id, "token": getattr(op, "token", None), "late": getattr(op, "late", False)}

    @rule(
        pick=picks,
        right=rights,
        late=st.booleans(),
        delay=st.none() | delays,
        attempts=st.none() | st.integers(0, 3),
    )
    def retry(self, pick: int, right: int, late: bool, delay: int | None, attempts: int | None) -> None:
        self.both(self.on(Retry, self.held(pick), right=right > 0, late=late, delay_us=delay, attempts=attempts))

    @rule(pick=picks, us=st.sampled_from([-S, 0, S]))
    def retry_at(self, pick: int, us: int) -> None:
        self.both(self.on(Retry, self.held(pick), late=True, due_us=self.clock() + us))

    @rule(pick=picks, right=rights, late=st.booleans(), again=st.booleans())
    def fail(self, pick: int, right: int, late: bool, again: bool) -> None:
        op = self.on(Fail, self.held(pick), right=right > 0, late=late)
        task = self.runner.run(self.store.get(op.id))
        tick = next_run(task, self.clock()) if task is not None and again else None
        self.both(Fail(**self.fields_of(op), again_us=tick))

    @rule(pick=picks, right=rights, late=st.booleans())
    def release(self, pick: int, right: int, late: bool) -> None:
        self.both(self.on(Release, self.held(pick), right=right > 0, late=late))

    @rule(pick=picks, right=rights, late=st.booleans(), lease=st.none() | st.sampled_from([S, 90 * S]))
    def extend(self, pick: int, right: int, late: bool, lease: int | None) -> None:
        self.both(self.on(Extend, self.held(pick), right=right > 0, late=late, lease_us=lease))

    @rule(pick=picks, time=times, right=st.booleans())
    def ack_and_enqueue(self, pick: int, time: dict[str, int], right: bool) -> None:
        ack = self.on(Ack, self.held(pick), right=right, late=True)
        self.both(self.new(f"t{next(self.numbers)}", "default", time, [pick], {"idempotency_key": "k"}), ack)

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        self.both(self.on(Cancel, pick))

    @rule(pick=picks, right=st.booleans())
    def cancel_by_holder(self, pick: int, right: bool) -> None:
        op = self.on(Cancel, self.held(pick))
        self.both(Cancel(queue=op.queue, id=op.id, token=self.token(op.id, right)))

    @rule(pick=picks, time=times)
    def reschedule(self, pick: int, time: dict[str, int]) -> None:
        self.both(self.on(Reschedule, pick, **self.moment(time)))

    @rule(pick=picks, time=times, reset=st.booleans())
    def requeue(self, pick: int, time: dict[str, int], reset: bool) -> None:
        dead = [n for n, t in enumerate(self.model.tasks.values()) if t.state is State.DEAD]
        self.both(self.on(Requeue, dead[pick % len(dead)] if dead else pick, **self.moment(time), reset_attempts=reset))

    @rule(pick=picks, if_state=st.none() | st.sampled_from([State.READY, State.DEAD]))
    def remove(self, pick: int, if_state: State | None) -> None:
        self.both(self.on(Remove, pick, if_state=if_state))

    @rule(queue=queues)
    def pause(self, queue: str) -> None:
        self.runner.run(self.store.pause(queue))
        self.model.paused.add(queue)

    @rule(queue=queues)
    def resume(self, queue: str) -> None:
        assert self.runner.run(self.store.resume(queue)) == (queue in self.model.paused)
        self.model.paused.discard(queue)

    @rule(queue=queues, group=groups, limit=st.integers(1, 3))
    def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        self.runner.run(self.store.set_group_limit(queue, group, limit))
        self.model.set_group_limit(queue, group, limit)

    @rule(queue=queues)
    def promote(self, queue: str) -> None:
        assert self.runner.run(self.store.promote(queue, now_us=self.clock())) == self.model.promote(
            queue, self.clock()
        )

    @rule(seconds=st.sampled_from([0.001, 1, 5, 29.999, 30, 3600]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def reclaim(self) -> None:
        now = self.clock()
        leases = self.runner.run(self.store.expired(now))
        running = [i for i, t in self.model.tasks.items() if t.state is State.RUNNING and t.lease_until <= now]
        assert sorted(x.record.id for x in leases) == sorted(running)
        for lease in leases:
            self.both(after_loss(lease, now, 0.0))

    @rule()
    def sweep(self) -> None:
        assert self.runner.run(self.store.sweep(self.clock())) == 0

    # -- what must be equal at all times -----------------------------------------------------------

    @invariant()
    def the_tasks_are_the_same(self) -> None:
        page = self.runner.run(self.store.find(Filter(), None, 1000))
        assert {t.id: self.seen(t) for t in page.tasks} == {i: self.expected(i) for i in self.model.tasks}
        results = self.runner.run(self.store.results(list(self.model.tasks)))
        assert {i: r.state for i, r in results.items()} == self.model.results

    def shown(self, state: State, due: int) -> State:
        return State.READY if state is State.SCHEDULED and due <= self.clock() else state

    def seen(self, task: Record) -> tuple[Any, ...]:
        due = None if task.state.final else task.due_us
        held = (task.token, task.lease_until_us) if task.state is State.RUNNING else (task.token, None)
        state = self.shown(task.state, task.due_us)
        return (state, task.queue, task.attempts, due, *held, task.cancel_requested, task.dead_queue)

    def expected(self, id: str) -> tuple[Any, ...]:
        task = self.model.tasks[id]
        due = None if task.state.final else task.due
        held = (task.token, task.lease_until) if task.state is State.RUNNING else (None, None)
        return (self.shown(task.state, task.due), task.queue, task.attempts, due, *held, task.cancel, task.dead_queue)

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
    """The state machine for one driver; run it with `hypothesis.stateful.run_state_machine_as_test`."""
    return type("DriverMachine", (DriverMachine,), {"make_storage": staticmethod(make_storage)})
