"""The reference model: the driver contract as plain dictionaries and lists, small and slow, with which drivers are compared.

It was written from the contract alone and shares no code with any driver, so a mistake of the shared state machine does not
hide in it. Left out are cascades over a thousand tasks and purging, which only a large store shows, and events, payloads and
workers, which do not change the state of a task.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from omniq import errors
from omniq import operations as ops
from omniq.models import State


@dataclasses.dataclass
class ModelTask:
    """A task of the model."""

    op: ops.Enqueue
    queue: str
    due: int
    seq: int
    eta: int | None
    dead_queue: str | None
    state: State = State.READY
    attempts: int = 0
    token: str | None = None
    lease_until: int = 0
    ended_by: str | None = None
    cancel: bool = False  # somebody asked the holder to stop
    returned: bool = False  # by Release, or by Retry without a time: it comes before tasks that were never leased
    place: int = 0  # grows with each task that becomes ready: the order of lanes where `due_order` is False
    waits: set[str] = dataclasses.field(default_factory=set[str])  # the blockers that have not ended


class Refusal(Exception):
    """Ends a transaction of the model, which is then refused with an error of this kind."""

    def __init__(self, kind: type[errors.Refused]) -> None:
        self.kind = kind


class Model:
    """All queues of one store. The mappings `tasks` and `results` have the keys that `key_of` returns.

    With `due_order` False a lane keeps the order of arrival, and an enqueue first makes those tasks ready that are due already.
    With `cross_queue` False a transaction that names several queues is refused, and an id is unique only within its queue.
    """

    def __init__(self, due_order: bool = True, cross_queue: bool = True) -> None:
        self.due_order, self.cross_queue = due_order, cross_queue
        self.tasks: dict[str, ModelTask] = {}
        self.results: dict[str, State] = {}
        self.keys: dict[tuple[str, str], tuple[str, str, int]] = {}  # task id, fingerprint, end of life
        self.limits: dict[tuple[str, str], int] = {}
        self.lanes: dict[str, list[str]] = {}  # open lanes of a queue, the one that opened first in front
        self.turns: dict[str, bool] = {}  # True: groups are next
        self.paused: set[str] = set()
        self.seq = 0
        self.places = 0
        self.fan_ins: dict[str, tuple[int, int, dict[str, int]]] = {}  # expected, end of life, the answer that each member got

    def apply(self, transaction: Sequence[ops.Operation], now: int) -> list[ops.Outcome] | type[errors.Refused]:
        """Applies a transaction without `Reserve`. Returns the outcomes, or the error; after an error nothing has changed."""
        if not self.cross_queue and len({q for op in transaction for q in queues_of(op)}) > 1:
            return errors.CrossQueue
        # In this transaction: the id of an `Enqueue` whose key was in use, and the task that has the key.
        self.stands_for: dict[str, str] = {}
        before = copy.deepcopy(self.__dict__)  # dear and simple: no operation of the model has to be undone by hand
        try:
            return [getattr(self, type(op).__name__.lower())(op, now) for op in transaction]
        except Refusal as refusal:
            self.__dict__.update(before)
            return refusal.kind

    def key_of(self, queue: str, id: str) -> str:
        return id if self.cross_queue else f"{queue}/{id}"

    def key(self, task: ModelTask) -> str:
        return self.key_of(task.queue, task.op.id)

    # -- lanes and order ---------------------------------------------------------------------------

    def move(self, task: ModelTask, state: State) -> None:
        task.state = state
        if state is not State.RUNNING:
            task.token = None
        if state is State.READY:
            self.places += 1
            task.place = self.places
        self.update_lane(task.queue, task.op.group)

    def members(self, queue: str, group: str | None, state: State) -> list[ModelTask]:
        return [t for t in self.tasks.values() if (t.queue, t.op.group, t.state) == (queue, group, state)]

    def update_lane(self, queue: str, group: str | None) -> None:
        """Lets a lane that opens stand in line behind the others, and takes a lane that closes out of the line."""
        if group is None:
            return
        lanes, limit = self.lanes.setdefault(queue, []), self.limits.get((queue, group), 1)
        is_open = bool(self.members(queue, group, State.READY)) and len(self.members(queue, group, State.RUNNING)) < limit
        if is_open and group not in lanes:
            lanes.append(group)
        elif not is_open and group in lanes:
            lanes.remove(group)

    def place(self, task: ModelTask, now: int) -> None:
        self.move(task, State.SCHEDULED if task.due > now else State.READY)

    def candidates(self, queue: str) -> list[ModelTask]:
        """Returns the tasks that may be granted next: a single one, or all tasks that were returned to the lane.

        The contract leaves the order among returned tasks to the driver.
        """
        grouped = self.lanes.get(queue, [])[:1]
        sides: list[str | None] = [*grouped, None] if self.turns.get(queue, True) else [None, *grouped]
        for group in sides:
            ready = sorted(self.members(queue, group, State.READY), key=self.order)
            if ready:
                return [t for t in ready if t.returned] or ready[:1]
        return []

    def order(self, task: ModelTask) -> tuple[bool, int, int]:
        return (not task.returned, task.due, task.seq) if self.due_order else (not task.returned, task.place, 0)

    def promote(self, queue: str, now: int) -> int:
        due = [t for t in self.tasks.values() if t.queue == queue and t.state is State.SCHEDULED and t.due <= now]
        for task in sorted(due, key=lambda t: (t.due, t.seq)):
            self.move(task, State.READY)
        return len(due)

    def reserve(self, op: ops.Reserve, now: int, taken: Iterable[str]) -> tuple[list[str], list[str]]:
        """Follows the grants of a driver. Returns complaints about grants that were not allowed, and the paused queues."""
        wrong: list[str] = []
        left, picks = op.limit, list(taken)
        for queue in op.queues:
            if queue in self.paused or not left:
                continue
            self.promote(queue, now)
            # Where several tasks are allowed the driver's choice counts: the grants after it depend on it.
            while left and (allowed := self.candidates(queue)):
                pick = picks.pop(0) if picks else None
                task = next((t for t in allowed if self.key(t) == pick), allowed[0])
                if self.key(task) != pick:
                    wrong.append(f"granted {pick}, not one of {[t.op.id for t in allowed]}")
                self.grant(task, op, now)
                left -= 1
        return wrong + [f"granted {pick}, which nobody could have" for pick in picks], [
            q for q in op.queues if q in self.paused
        ]

    def grant(self, task: ModelTask, op: ops.Reserve, now: int) -> None:
        task.attempts, task.returned, task.token = task.attempts + 1, False, op.token
        task.lease_until = now + (op.lease_us or task.op.lease_us or 30_000_000)
        self.move(task, State.RUNNING)
        lanes = self.lanes.get(task.queue, [])
        if task.op.group in lanes:  # still open after this grant: to the back
            lanes.append(lanes.pop(lanes.index(task.op.group)))
        self.turns[task.queue] = not self.turns.get(task.queue, True)

    def next_at(self, queues: Iterable[str]) -> int | None:
        mine = [t for t in self.tasks.values() if t.queue in queues]
        moments = [t.due for t in mine if t.state is State.SCHEDULED]
        return min(moments + [t.lease_until for t in mine if t.state is State.RUNNING], default=None)

    def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        self.limits[queue, group] = limit
        self.update_lane(queue, group)

    # -- checks ------------------------------------------------------------------------------------

    def find(self, op: ops.OnTask) -> ModelTask:
        task = self.tasks.get(self.key_of(op.queue, op.id))
        if task is None or task.queue != op.queue:
            raise Refusal(errors.TaskNotFound)
        return task

    def held(self, op: Any, now: int) -> ModelTask:
        """Returns the task if the operation may speak for its lease. The order of these checks is part of the contract."""
        task = self.find(op)
        if task.state is not State.RUNNING:
            raise Refusal(errors.NotActive)
        if getattr(op, "lost", None):
            if task.token != op.token:
                raise Refusal(errors.TokenMismatch)
            if op.lost == "expired" and task.lease_until > now:
                raise Refusal(errors.LeaseHeld)
            return task
        if task.lease_until <= now and not op.late:
            raise Refusal(errors.LeaseExpired)
        if task.token != op.token:
            raise Refusal(errors.TokenMismatch)
        return task

    def already(self, op: ops.Held, *states: State) -> ModelTask | None:
        task = self.tasks.get(self.key_of(op.queue, op.id))
        if task is None or task.queue != op.queue or getattr(op, "lost", None):
            return None
        return task if task.state in states and task.ended_by == op.token else None

    # -- operations --------------------------------------------------------------------------------

    def enqueue(self, op: ops.Enqueue, now: int) -> ops.Outcome:
        if op.idempotency_key is not None and (op.queue, op.idempotency_key) in self.keys:
            # The key counts before the id, until its time is over and its task has ended.
            first, fingerprint, end = self.keys[op.queue, op.idempotency_key]
            there = self.tasks.get(self.key_of(op.queue, first))
            if end > now or (there is not None and not there.state.final):
                if fingerprint != op.fingerprint:
                    raise Refusal(errors.IdempotencyConflict)
                self.stands_for[op.id] = first
                return ops.Enqueued(id=first, existed=True, state=there.state if there else State.DONE)
        key = self.key_of(op.queue, op.id)
        if key in self.tasks:
            if op.on_conflict != "return" and self.tasks[key].op.fingerprint != op.fingerprint:
                raise Refusal(errors.DuplicateId)
            return ops.Enqueued(id=op.id, existed=True, state=self.tasks[key].state)
        if not self.due_order:  # tasks that fell due before this one was enqueued stand before it
            self.promote(op.queue, now)
        self.seq += 1
        due = op.eta_us if op.eta_us is not None else now + (op.delay_us or 0)
        task = ModelTask(op, op.queue, due, self.seq, due if op.delay_us else op.eta_us, op.dead_queue)
        named = [self.key_of(b.queue or op.queue, self.stands_for.get(b.id, b.id)) for b in op.blocked_by]
        blockers = {name: self.tasks[name].state for name in named if name in self.tasks}
        dies = op.dead_blockers == "fail" and not {State.DEAD, State.CANCELLED}.isdisjoint(blockers.values())
        task.waits = {i for i, state in blockers.items() if not state.final}
        self.tasks[key] = task
        if op.group is not None and op.group_limit > 0:
            self.limits.setdefault((op.queue, op.group), op.group_limit)
        if op.idempotency_key is not None:
            self.keys[op.queue, op.idempotency_key] = (op.id, op.fingerprint, now + op.key_ttl_us)
        if dies:
            self.die(task, None, now)
        elif task.waits:
            self.move(task, State.BLOCKED)
        else:
            self.place(task, now)
        return ops.Enqueued(id=op.id, existed=False, state=task.state)

    def ack(self, op: ops.Ack, now: int) -> ops.Outcome:
        if self.already(op, State.DONE):
            return ops.Acked(state=State.DONE, already=True)
        task = self.held(op, now)
        self.end(task, State.DONE, op.token, None if task.cancel else op.again_us)  # a requested cancel ends a series
        for other in self.dependents(self.key(task)):
            other.waits.discard(self.key(task))
            if not other.waits:
                other.due = max(other.eta or 0, now)
                self.place(other, now)
        return ops.Acked(state=task.state)

    def retry(self, op: ops.Retry, now: int) -> ops.Outcome:
        task = self.held(op, now)
        task.attempts = task.attempts if op.attempts is None else op.attempts
        if task.cancel:
            self.stop(task, op.token, now)
        elif op.delay_us is None and op.due_us is None:  # its place in the lane is the old one
            task.returned = True
            self.move(task, State.READY)
        else:
            task.due = op.due_us if op.due_us is not None else now + (op.delay_us or 0)
            self.place(task, now)
        return ops.Retried(due_us=task.due, state=task.state)

    def fail(self, op: ops.Fail, now: int) -> ops.Outcome:
        if ended := self.already(op, State.DONE, State.DEAD):
            return ops.Failed(queue=ended.queue, state=ended.state, already=True)
        task = self.held(op, now)
        self.die(task, op.token, now, None if task.cancel else op.again_us)
        return ops.Failed(queue=task.queue, state=task.state)

    def release(self, op: ops.Release, now: int) -> ops.Outcome:
        task = self.held(op, now)
        task.attempts = max(task.attempts - 1, 0)
        if task.cancel:
            self.stop(task, op.token, now)
        else:
            task.returned = True
            self.move(task, State.READY)
        return ops.Released(state=task.state)

    def extend(self, op: ops.Extend, now: int) -> ops.Outcome:
        task = self.held(op, now)
        task.lease_until = max(task.lease_until, now + (op.lease_us or task.op.lease_us or 30_000_000))
        return ops.Extended(lease_until_us=task.lease_until, cancel_requested=task.cancel)

    def cancel(self, op: ops.Cancel, now: int) -> ops.Outcome:
        task = self.held(op, now) if op.lost else self.find(op)
        if task.state is State.RUNNING and op.token is None:
            task.cancel = True
        elif task.state is State.RUNNING and task.token != op.token:
            raise Refusal(errors.TokenMismatch)
        elif task.state.waiting and op.token is not None:
            raise Refusal(errors.NotActive)
        elif not task.state.final:
            self.stop(task, op.token, now)
        return ops.Cancelled(state=task.state)

    def reschedule(self, op: ops.Reschedule, now: int) -> ops.Outcome:
        task = self.find(op)
        if not task.state.waiting:
            raise Refusal(errors.NotWaiting)
        task.due = task.eta = op.eta_us if op.eta_us is not None else now + (op.delay_us or 0)
        task.returned = False
        if task.state is not State.BLOCKED:
            self.place(task, now)
        return ops.Rescheduled(due_us=task.due)

    def requeue(self, op: ops.Requeue, now: int) -> ops.Outcome:
        task = self.find(op)
        if task.state is not State.DEAD:
            raise Refusal(errors.NotDead)
        task.due = op.eta_us if op.eta_us is not None else now + (op.delay_us or 0)
        task.eta = task.due if op.eta_us is not None or op.delay_us else None
        task.cancel, task.ended_by, task.attempts = False, None, 0 if op.reset_attempts else task.attempts
        self.results.pop(self.key(task), None)
        self.place(task, now)
        return ops.Requeued(state=task.state)

    def remove(self, op: ops.Remove, now: int) -> ops.Outcome:
        task = self.find(op)
        if task.state is State.RUNNING or (op.if_state is not None and task.state is not op.if_state):
            raise Refusal(errors.NotWaiting)
        key = self.key(task)
        del self.tasks[key]
        self.update_lane(task.queue, task.op.group)
        self.results.pop(key, None)
        place = (task.queue, task.op.idempotency_key or "")
        if place in self.keys and self.keys[place][0] == op.id:
            del self.keys[place]
        self.fail_dependents(key, now)
        return ops.Removed()

    def openfanin(self, op: ops.OpenFanIn, now: int) -> ops.Outcome:
        expected, end, told = self.fan_ins.get(op.key, (0, 0, dict[str, int]()))
        if end <= now:
            expected, told = op.expected, dict[str, int]()
            self.fan_ins[op.key] = expected, now + op.ttl_us, told
        if expected != op.expected:
            raise Refusal(errors.IdempotencyConflict)
        return ops.FannedIn(left=expected - len(told))

    def countfanin(self, op: ops.CountFanIn, now: int) -> ops.Outcome:
        expected, end, told = self.fan_ins.get(op.key, (0, 0, dict[str, int]()))
        if end <= now or (op.member not in told and len(told) == expected):
            return ops.FannedIn(left=-1)
        return ops.FannedIn(left=told.setdefault(op.member, expected - len(told) - 1))

    # -- how a run ends ----------------------------------------------------------------------------

    def end(self, task: ModelTask, state: State, token: str | None, again: int | None) -> None:
        task.ended_by = token
        self.results[self.key(task)] = state
        if again is not None:
            task.attempts, task.due, task.eta, state = 0, again, again, State.SCHEDULED
        self.move(task, state)

    def stop(self, task: ModelTask, token: str | None, now: int) -> None:
        task.waits = set()
        self.end(task, State.CANCELLED, token, None)
        self.fail_dependents(self.key(task), now)

    def die(self, task: ModelTask, token: str | None, now: int, again: int | None = None) -> None:
        self.die_alone(task, token, now, again)
        self.fail_dependents(self.key(task), now)

    def die_alone(self, task: ModelTask, token: str | None, now: int, again: int | None = None) -> None:
        """The task dies, or moves to its dead queue. Its dependents stay as they are."""
        task.waits = set()
        self.end(task, State.DEAD, token, again)
        if again is None and task.dead_queue is not None:
            limit = self.limits.get((task.queue, task.op.group or ""))  # the group keeps its limit in the dead queue
            task.queue, task.dead_queue, task.attempts, task.due, task.eta = task.dead_queue, None, 0, now, None
            task.returned, task.ended_by = False, None
            if limit is not None:
                self.limits.setdefault((task.queue, task.op.group or ""), limit)
            self.move(task, State.READY)

    def dependents(self, key: str) -> list[ModelTask]:
        return sorted((t for t in self.tasks.values() if key in t.waits), key=lambda t: t.seq)

    def fail_dependents(self, key: str, now: int) -> None:
        """Fails the tasks that wait for this task, then the tasks that wait for those, level by level."""
        dead = [key]
        while dead:
            blocker = dead.pop(0)
            for other in self.dependents(blocker):
                self.die_alone(other, None, now)
                dead.append(self.key(other))


def queues_of(op: ops.Operation) -> list[str]:
    """Returns the queues that an operation names."""
    if isinstance(op, ops.Enqueue):
        return [op.queue, *([op.dead_queue] if op.dead_queue else []), *[b.queue or op.queue for b in op.blocked_by]]
    if isinstance(op, ops.Stage):
        return [op.queue, *[task.dead_queue for task in op.tasks if task.dead_queue]]
    return [op.queue] if isinstance(op, ops.OnTask) else []
