"""The state machine of the driver contract, written once for every driver that runs in Python.

    STAGED ─commit──┐
    BLOCKED ─freed──┴▶ SCHEDULED ─due─▶ READY ─Reserve─▶ RUNNING ─┬─ Ack ─────────────────────▶ DONE
       │               (or READY at once)                         ├─ Retry(delay), Ack(again) ─▶ SCHEDULED
       └─ blocker died ─▶ DEAD                                    ├─ Retry(neither), Release ──▶ READY
                                                                  ├─ Fail ────────────────────▶ DEAD ─Requeue─▶ READY, SCHEDULED
    waiting ─Cancel─▶ CANCELLED                                   ├─ Fail, with a dead_queue ──▶ READY in that queue, same id
                                                                  └─ Cancel(token) ───────────▶ CANCELLED

A `Ledger` is what a driver brings: records, lanes, keys, results and events to load and save, inside one atomic section.
Every operation has two halves. The check only reads, and refuses; the write cannot be refused. So a transaction checks all
of its operations and then writes them all, and nothing ever has to be undone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from omniq.errors import (
    NotActive,
    Refused,
    TaskNotFound,
)
from omniq.models import DEFAULT_LEASE_US, Blocker, Record, State, StoredResult
from omniq.operations import (
    AbortRun,
    Ack,
    Acked,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    CommitRun,
    CountFanIn,
    Enqueue,
    Enqueued,
    Extend,
    Extended,
    Fail,
    Failed,
    OpenFanIn,
    OpenRun,
    Operation,
    Outcome,
    Progress,
    Release,
    Released,
    Remove,
    Removed,
    Requeue,
    Requeued,
    Reschedule,
    Rescheduled,
    Reserve,
    Reserved,
    Retried,
    Retry,
    Stage,
)
from omniq.storage.ledger import Key, Ledger, QueueRow
from omniq.storage.machine.fan_in import count_fan_in, open_fan_in
from omniq.storage.machine.refusals import Refusals
from omniq.storage.machine.replies import acked_data, done_before, enqueued_data, key_in_use
from omniq.storage.machine.staged_runs import abort_run, commit_run, open_run, stage, sweep_runs
from omniq.storage.machine.transitions import Transitions, record_of

PROMOTE_LIMIT = 1000  # of one Reserve: after a long rest a flood of due tasks must not hold the store


class Machine(Transitions):
    """Applies operations to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._refusals = Refusals(ledger)
        self._stands_for: dict[str, str] = {}  # ids that this transaction did not use, to the tasks that were there already

    def run(self, transaction: Sequence[Operation], now_us: int, repeat: bool = False) -> list[Outcome] | Refused:
        """One transaction: check everything, then write everything."""
        if len(transaction) == 1:
            op = transaction[0]
            alone = self._ALONE.get(type(op))
            if alone is not None:
                answer = alone(self, op, now_us, repeat)
                return answer if isinstance(answer, Refused) else [answer]
            if not repeat:  # most calls, without the ceremony that several operations need
                known = _CHECKS[type(op)](self._refusals, op, now_us)
                if isinstance(known, Refused):
                    return known
                return [known if isinstance(known, Outcome) else self._WRITES[type(op)](self, op, known, now_us)]
        self._stands_for.clear()
        found: list[Any] = []
        keys: dict[tuple[str, str], str] = {}
        for op in transaction:
            known = _CHECKS[type(op)](self._refusals, op, now_us)
            if repeat and known is None and isinstance(op, Enqueue):
                known = self._refusals.stored_before(op)
            if isinstance(known, Refused):
                if (
                    repeat
                    and not isinstance(op, Enqueue)
                    and isinstance(known, NotActive)
                    and not isinstance(known, TaskNotFound)
                ):
                    found.append(done_before(op))
                    continue
                return known
            if isinstance(op, Enqueue) and op.idempotency_key is not None:
                first = keys.setdefault((op.queue, op.idempotency_key), op.fingerprint)
                if first != op.fingerprint:
                    return key_in_use(op, None)
            found.append(known)
        # As they were when they were checked, since a write may end a task that a later operation is about.
        states = [k.state if isinstance(k, Record) else None for k in found]
        answers = [self._write(op, k, s, now_us) for op, k, s in zip(transaction, found, states, strict=True)]
        self._stands_for.clear()
        return answers

    def _write(self, op: Operation, known: Any, checked: State | None, now_us: int) -> Outcome:
        if isinstance(known, Outcome):
            if isinstance(known, Enqueued):
                self._stands_for[cast(Enqueue, op).id] = known.id
            return known
        # It fell with a blocker that ended in this very transaction.
        if checked is not None and known.state.final and not checked.final:
            if isinstance(op, Cancel):
                return Cancelled(state=known.state)
            if isinstance(op, Reschedule):
                return Rescheduled(due_us=known.due_us)
        return self._WRITES[type(op)](self, op, known, now_us)

    def _beat(self, op: Beat, now_us: int, _: bool) -> Outcome:
        self.ledger.beat(op.info, op.gone, now_us)
        return Beaten()

    # -- enqueue -----------------------------------------------------------------------------------

    def _enqueue(self, op: Enqueue, staged: Record | None, now_us: int) -> Outcome:
        ledger = self.ledger
        for id in () if staged is None else dict.fromkeys((staged.id, op.id)):
            there = ledger.load(id)  # again: an earlier operation of this very transaction may have taken its place
            if there is not None and there.state is State.STAGED:
                self.drop_staged(there, now_us)
        # A queue that was never fed goes the long way, which writes its row.
        if op.plain and op.on_conflict == "error" and ledger.queue(op.queue).fed and ledger.insert_plain(op, now_us):
            self.ready_queues.add(op.queue)
            return Enqueued(id=op.id, existed=False, state=State.READY)
        if op.idempotency_key is not None:
            twin = self._refusals.known_key(op, now_us)  # an earlier operation of this very transaction
            if isinstance(twin, Enqueued):
                self._stands_for[op.id] = twin.id
                return twin
        if op.on_conflict == "replace_finished":
            old = ledger.load(op.id)
            if old is not None:
                self.drop(old, with_key=True)
        due = op.eta_us if op.eta_us is not None else now_us + (op.delay_us or 0)
        anchored = op.delay_us or op.interval_us  # a series is anchored at its first time, whatever its retries
        task = record_of(op, due if anchored else op.eta_us, due, now_us)
        task.blocked_by = self._blockers_of(op)
        self.feed(op.queue, op.group)
        blockers, dead = self._open_blockers(op, task.blocked_by) if op.blocked_by else ([], None)
        task.blockers_left = len(blockers)
        task.state = State.BLOCKED if blockers else State.SCHEDULED if due > now_us else State.READY
        if op.group is not None:
            self.join_lane(task, op.group_limit)
        ledger.insert(task)
        for blocker in blockers:
            ledger.block(blocker, task)
        if op.idempotency_key is not None:
            ledger.save_key(op.queue, op.idempotency_key, Key(op.id, op.fingerprint, now_us + op.key_ttl_us))
        if ledger.events_on:
            ledger.event(task, "enqueued", now_us, enqueued_data(op.payload))
        if dead is not None:
            self.blocker_failed(task, dead, now_us)
            self.cascade([task.id], now_us)
        elif task.state is not State.BLOCKED:
            self.ready_queues.add(task.queue)  # of a scheduled one too: a sleeper may have to wake earlier now
        return Enqueued(id=task.id, existed=False, state=task.state)

    def _blockers_of(self, op: Enqueue) -> tuple[Blocker, ...]:
        """An earlier operation of this transaction may have found its key in use: then that task blocks in its place."""
        if not (op.blocked_by and self._stands_for):
            return op.blocked_by
        return tuple(Blocker(self._stands_for.get(b.id, b.id), b.queue) for b in op.blocked_by)

    def _open_blockers(self, op: Enqueue, blocked_by: Sequence[Blocker]) -> tuple[list[Record], str | None]:
        """Returns the blockers that have not ended, and one that failed, if any."""
        waiting: list[Record] = []
        for wanted in dict.fromkeys(b.id for b in blocked_by):
            blocker = self.ledger.load(wanted)
            if blocker is None or blocker.state is State.DONE:
                continue
            if blocker.state.final:
                if op.dead_blockers == "fail":
                    return [], blocker.id
                continue
            waiting.append(blocker)
        return waiting, None

    # -- reserve -----------------------------------------------------------------------------------

    def _reserve(self, op: Reserve, now_us: int, repeat: bool) -> Reserved:
        if repeat:
            # The first call may have leased tasks although its answer got lost: its token finds them.
            held = self.ledger.held(op.token)
            if held:
                return Reserved(tasks=[copy.copy(t) for t in held])
        tasks: list[Record] = []
        paused: list[str] = []
        for queue in op.queues:
            row = self.ledger.queue(queue)
            # Told also when nothing is left to grant: tasks that are due in a paused queue shall keep no worker awake.
            if row.paused:
                paused.append(queue)
            elif len(tasks) < op.limit:
                self.promote(queue, now_us, PROMOTE_LIMIT)
                self._grant(row, op, op.limit - len(tasks), now_us, tasks)
        next_at = self.ledger.next_at(op.queues, now_us)
        return Reserved(tasks=tasks, paused=tuple(paused), next_at_us=next_at)

    def promote(self, queue: str, now_us: int, limit: int) -> int:
        """Make SCHEDULED tasks ready whose time has come, in the order of `due`. Returns the number of them."""
        due = self.ledger.due(queue, now_us, limit)
        for task in due:
            self.move(task, State.READY)
        if due:
            self.ready_queues.add(queue)
        return len(due)

    def _grant(self, row: QueueRow, op: Reserve, limit: int, now_us: int, tasks: list[Record]) -> None:
        if not row.has_groups:
            # One read and one write for all. The turn flips as if for each: groups may come, and the order must not tell.
            ready = self.ledger.next_ready(row.queue, None, limit)
            if ready:
                for task in ready:
                    _take(task, op, now_us)
                    task.state = State.RUNNING
                self.ledger.save_leased(ready, now_us)
                tasks.extend(map(copy.copy, ready))  # copies: the ledger goes on changing its own
            if len(ready) % 2:
                row.groups_turn = not row.groups_turn
                self.ledger.save_queue(row)
            return
        turn = row.groups_turn
        for _ in range(limit):
            task = self._next_grouped(row.queue) if turn else self._next_ungrouped(row.queue)
            if task is None:
                task = self._next_ungrouped(row.queue) if turn else self._next_grouped(row.queue)
            if task is None:
                break
            tasks.append(self._lease(task, op, now_us))
            if task.group is not None:
                self._to_the_back(task)
            turn = not turn
        if turn is not row.groups_turn:
            row.groups_turn = turn
            self.ledger.save_queue(row)

    def _next_grouped(self, queue: str) -> Record | None:
        lane = self.ledger.open_lane(queue)
        if lane is None:
            return None
        ready = self.ledger.next_ready(queue, lane.group, 1)
        return ready[0] if ready else None

    def _next_ungrouped(self, queue: str) -> Record | None:
        ready = self.ledger.next_ready(queue, None, 1)
        return ready[0] if ready else None

    def _to_the_back(self, task: Record) -> None:
        lane = self.ledger.lane(task.queue, cast(str, task.group))
        if lane.open:
            lane.turn = self.ledger.next_turn()
            self.ledger.save_lane(lane)

    def _lease(self, task: Record, op: Reserve, now_us: int) -> Record:
        _take(task, op, now_us)
        self.move(task, State.RUNNING)
        if self.ledger.events_on:
            self.ledger.event(task, "started", now_us, None)
        return copy.copy(task)

    # -- writes of a holder ------------------------------------------------------------------------

    def _ack(self, op: Ack, task: Record, now_us: int) -> Outcome:
        if _ends_plainly(op, task) and self.ledger.end_plain(task, now_us):
            # Written already; the record is changed for whoever looks at it later in this commit.
            task.finished_at_us = task.updated_at_us = now_us
            task.ended_by, task.token, task.lease_until_us, task.state = op.token, None, None, State.DONE
            self.ended_tasks.add(task.id)
            if task.has_dependents:
                self.free(task.id, now_us)
            return _DONE
        # A cancelled series does not begin its next round.
        again = op.again_us if not task.cancel_requested else None
        result = StoredResult(task_id=task.id, state=State.DONE, result=op.result, encoding=op.encoding)
        self.end(task, State.DONE, result, op.token, now_us, again)
        if self.ledger.events_on:
            self.ledger.event(task, "succeeded", now_us, acked_data(op))
        if again is not None:
            self.schedule_again(task, again)
        elif task.result_ttl_us == 0:
            self.drop(task)
        if task.has_dependents:
            self.free(task.id, now_us)
        return Acked(state=task.state)

    def _retry(self, op: Retry, task: Record, now_us: int) -> Outcome:
        task.last_error, task.failed_at_us, task.updated_at_us = op.error, now_us, now_us
        if op.attempts is not None:
            task.attempts = op.attempts
        if task.cancel_requested:
            self.end_cancelled(task, op.token, now_us)
            return Retried(due_us=task.due_us, state=State.CANCELLED)
        event = "expired" if op.lost else "retried"
        if op.delay_us is None and op.due_us is None:
            task.eta_us = task.eta_us if task.interval_us else None  # the grid of an interval task is anchored there
            self.put_back(task)
        else:
            task.due_us = op.due_us if op.due_us is not None else now_us + cast(int, op.delay_us)
            self.give_up_lease(task)
            self.move(task, State.SCHEDULED if task.due_us > now_us else State.READY)
            self.ready_queues.add(task.queue)
        self.note(task, event, now_us, error=op.error, ran_us=op.ran_us, lost=op.lost)
        return Retried(due_us=task.due_us, state=task.state)

    def _fail(self, op: Fail, task: Record, now_us: int) -> Outcome:
        task.last_error, task.failed_at_us = op.error, now_us
        again = op.again_us if not task.cancel_requested else None
        moves_to = task.dead_queue if again is None else None
        result = StoredResult(task_id=task.id, state=State.DEAD, error=op.error)
        self.end(task, State.DEAD, result, op.token, now_us, again)
        self.note(task, "failed", now_us, error=op.error, ran_us=op.ran_us, lost=op.lost, to_queue=moves_to)
        if again is not None:
            self.schedule_again(task, again)
        elif moves_to is not None:
            self.move_to_dead_queue(task, moves_to, now_us)
        if task.has_dependents:
            self.cascade([task.id], now_us)
        return Failed(queue=task.queue, state=task.state)

    def _release(self, op: Release, task: Record, now_us: int) -> Outcome:
        # Handed back unused, so the attempt is not spent.
        task.attempts = max(task.attempts - 1, 0)
        task.updated_at_us = now_us
        if task.cancel_requested:
            self.end_cancelled(task, op.token, now_us)
        else:
            self.note(task, "released", now_us)
            self.put_back(task)
        return Released(state=task.state)

    def _extend(self, op: Extend, task: Record, now_us: int) -> Outcome:
        self._prolong(task, op.lease_us, now_us)
        return Extended(lease_until_us=cast(int, task.lease_until_us), cancel_requested=task.cancel_requested)

    def _progress(self, op: Progress, task: Record, now_us: int) -> Outcome:
        task.progress, task.updated_at_us = op.data, now_us
        self._prolong(task, None, now_us)
        if self.ledger.events_on:
            self.ledger.event(task, "progress", now_us, b'{"progress":%b}' % op.data)
        return Extended(lease_until_us=cast(int, task.lease_until_us), cancel_requested=task.cancel_requested)

    def _prolong(self, task: Record, lease_us: int | None, now_us: int) -> None:
        until = now_us + (lease_us or task.lease_us or DEFAULT_LEASE_US)
        # From now on and not on top of what is left, or beats would pile up and a lost task would wait for all of them.
        task.lease_until_us = max(cast(int, task.lease_until_us), until)
        self.ledger.save(task, task.state, task.queue)

    # -- writes of anybody -------------------------------------------------------------------------

    def _cancel(self, op: Cancel, task: Record, now_us: int) -> Outcome:
        if task.state is State.RUNNING and op.token is None:
            if not task.cancel_requested:
                task.cancel_requested, task.updated_at_us = True, now_us
                self.ledger.save(task, task.state, task.queue)
            return Cancelled(state=State.RUNNING)
        if op.error is not None:
            task.last_error = op.error
        self.end_cancelled(task, op.token, now_us)
        return Cancelled(state=State.CANCELLED)

    def _reschedule(self, op: Reschedule, task: Record, now_us: int) -> Outcome:
        due = op.eta_us if op.eta_us is not None else now_us + (op.delay_us or 0)
        task.eta_us, task.due_us, task.returned, task.updated_at_us = due, due, False, now_us
        if task.state is State.BLOCKED:
            self.ledger.save(task, task.state, task.queue)
        else:
            self.move(task, State.SCHEDULED if due > now_us else State.READY)
            self.ready_queues.add(task.queue)
        self.note(task, "rescheduled", now_us)
        return Rescheduled(due_us=due)

    def _requeue(self, op: Requeue, task: Record, now_us: int) -> Outcome:
        due = op.eta_us if op.eta_us is not None else now_us + (op.delay_us or 0)
        task.eta_us = due if op.eta_us is not None or op.delay_us else None
        task.due_us, task.updated_at_us, task.returned = due, now_us, False
        task.last_error = task.failed_at_us = task.finished_at_us = task.ended_by = task.worker = None
        # Asked for by somebody who knows that its blocker failed: from now on it waits for nobody.
        task.cancel_requested, task.blocked_by, task.blockers_left = False, (), 0
        if op.reset_attempts:
            task.attempts = 0
        self.ledger.delete_result(task)
        self.move(task, State.SCHEDULED if due > now_us else State.READY)
        self.ready_queues.add(task.queue)
        self.note(task, "requeued", now_us)
        return Requeued(state=task.state)

    def _remove(self, op: Remove, task: Record, now_us: int) -> Outcome:
        self.note(task, "removed", now_us)
        waiting, has_dependents = task.state.waiting, task.has_dependents
        self.drop(task, with_key=True)
        # Whoever waits for its end waits for nothing from now on, and has to look.
        self.ended_tasks.add(task.id)
        if waiting and has_dependents:
            self.cascade([task.id], now_us)
        return Removed()

    # -- sweeping ------------------------------------------------------------------------------------

    def sweep(self, now_us: int, limit: int) -> int:
        """Go on with what was too much for the transaction that began it: cascades and runs."""
        moved = sweep_runs(self, now_us, limit)
        for blocker_id, dead in self.ledger.deferred(limit):
            self.ledger.undefer(blocker_id)
            moved += self.cascade([blocker_id], now_us) if dead else self.free(blocker_id, now_us)
            if moved >= limit:
                break
        return moved

    # Plain functions, not bound methods: a machine that held those would hold itself, and with it all that it read.
    _ALONE: ClassVar[dict[type[Operation], Callable[[Machine, Any, int, bool], Outcome | Refused]]] = {
        Reserve: _reserve,
        Beat: _beat,
        OpenFanIn: lambda machine, op, now_us, _: open_fan_in(machine.ledger, op, now_us),
        CountFanIn: lambda machine, op, now_us, _: count_fan_in(machine.ledger, op, now_us),
        OpenRun: lambda machine, op, now_us, _: open_run(machine.ledger, op, now_us),
        Stage: lambda machine, op, now_us, _: stage(machine, op, now_us),
        CommitRun: lambda machine, op, now_us, _: commit_run(machine, op, now_us),
        AbortRun: lambda machine, op, now_us, _: abort_run(machine, op, now_us),
    }
    _WRITES: ClassVar[dict[type[Operation], Callable[[Machine, Any, Any, int], Outcome]]] = {
        Enqueue: _enqueue,
        Ack: _ack,
        Retry: _retry,
        Fail: _fail,
        Release: _release,
        Extend: _extend,
        Progress: _progress,
        Cancel: _cancel,
        Reschedule: _reschedule,
        Requeue: _requeue,
        Remove: _remove,
    }


_CHECKS: dict[type[Operation], Callable[[Refusals, Any, int], Any]] = {
    Enqueue: Refusals.enqueue,
    Ack: Refusals.held,
    Retry: Refusals.lost_or_held,
    Fail: Refusals.lost_or_held,
    Release: Refusals.held,
    Extend: Refusals.held,
    Progress: Refusals.held,
    Cancel: Refusals.cancel,
    Reschedule: Refusals.waiting,
    Requeue: Refusals.dead,
    Remove: Refusals.remove,
}


_DONE = Acked(state=State.DONE)  # answers are never changed, so most acks share this one


def _ends_plainly(op: Ack, task: Record) -> bool:
    """Nothing to keep but that it is done."""
    return (
        op.result is None
        and op.again_us is None
        and op.ran_us is None
        and op.encoding == "json"
        and task.group is None
        and task.result_ttl_us != 0
    )


def _take(task: Record, op: Reserve, now_us: int) -> None:
    """Make the caller of a `Reserve` the holder."""
    task.attempts += 1
    task.token = op.token
    task.lease_until_us = now_us + (op.lease_us or task.lease_us or DEFAULT_LEASE_US)
    task.worker = op.worker or None
    task.started_at_us = task.updated_at_us = now_us
    task.returned = False
