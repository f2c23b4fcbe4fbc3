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

import msgspec

from omniq.errors import (
    IdempotencyConflict,
    NotActive,
    Refused,
    TaskNotFound,
)
from omniq.models import DEFAULT_LEASE_US, Blocker, Record, State, StoredResult, TaskError
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
from omniq.storage.ledger import Key, Ledger, QueueRow, Run
from omniq.storage.machine.fan_in import count_fan_in, open_fan_in
from omniq.storage.machine.refusals import Refusals
from omniq.storage.machine.staged_runs import abort_run, commit_run, open_run, stage, sweep_runs

DEFAULT_RESULT_TTL_US = 86_400_000_000
PROMOTE_LIMIT = 1000
CASCADE_LIMIT = 1000

_encode = msgspec.json.Encoder().encode


class Machine:
    """Applies operations to a ledger. `ready_queues` and `ended_tasks` gather whom a commit concerns."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.ready_queues: set[str] = set()
        self.ended_tasks: set[str] = set()
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
                    found.append(_done_before(op))
                    continue
                return known
            if isinstance(op, Enqueue) and op.idempotency_key is not None:
                first = keys.setdefault((op.queue, op.idempotency_key), op.fingerprint)
                if first != op.fingerprint:
                    return IdempotencyConflict(
                        f"idempotency key {op.idempotency_key!r} twice in a transaction, with two bodies"
                    )
            found.append(known)
        states = [k.state if isinstance(k, Record) else None for k in found]
        answers = [self._write(op, k, s, now_us) for op, k, s in zip(transaction, found, states, strict=True)]
        self._stands_for.clear()
        return answers

    def _write(self, op: Operation, known: Any, checked: State | None, now_us: int) -> Outcome:
        if isinstance(known, Outcome):
            if isinstance(known, Enqueued):
                self._stands_for[cast(Enqueue, op).id] = known.id
            return known
        if (
            checked is not None and known.state.final and not checked.final
        ):  # it fell with a blocker that ended in this very transaction
            if isinstance(op, Cancel):
                return Cancelled(state=known.state)
            if isinstance(op, Reschedule):
                return Rescheduled(due_us=known.due_us)
        return self._WRITES[type(op)](self, op, known, now_us)

    def _beat(self, op: Beat, now_us: int, _: bool) -> Outcome:
        self.ledger.beat(op.info, op.gone, now_us)
        return Beaten()

    def _open_fan_in(self, op: OpenFanIn, now_us: int, _: bool) -> Outcome | Refused:
        return open_fan_in(self.ledger, op, now_us)

    def _count_fan_in(self, op: CountFanIn, now_us: int, _: bool) -> Outcome:
        return count_fan_in(self.ledger, op, now_us)

    def _open_run(self, op: OpenRun, now_us: int, _: bool) -> Outcome | Refused:
        return open_run(self.ledger, op, now_us)

    def _stage(self, op: Stage, now_us: int, _: bool) -> Outcome | Refused:
        return stage(self, op, now_us)

    def _commit_run(self, op: CommitRun, now_us: int, _: bool) -> Outcome | Refused:
        return commit_run(self, op, now_us)

    def _abort_run(self, op: AbortRun, now_us: int, _: bool) -> Outcome | Refused:
        return abort_run(self, op, now_us)

    # -- enqueue -----------------------------------------------------------------------------------

    def _enqueue(self, op: Enqueue, staged: Record | None, now_us: int) -> Outcome:
        ledger = self.ledger
        for id in () if staged is None else dict.fromkeys((staged.id, op.id)):
            there = ledger.load(id)  # again: an earlier operation of this very transaction may have taken its place
            if there is not None and there.state is State.STAGED:
                self.drop_staged(there, now_us)
        if _is_plain(op) and ledger.queue(op.queue).fed and ledger.insert_plain(op, now_us):
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
                self._drop(old, with_key=True)
        due = op.eta_us if op.eta_us is not None else now_us + (op.delay_us or 0)
        task = Record(
            id=op.id,
            queue=op.queue,
            name=op.name,
            payload=op.payload,
            encoding=op.encoding,
            headers=op.headers,
            origin=op.origin,
            eta_us=due if op.delay_us or op.interval_us else op.eta_us,  # a series is anchored there, whatever its retries
            due_us=due,
            timeout_us=op.timeout_us,
            lease_us=op.lease_us,
            interval_us=op.interval_us,
            result_ttl_us=op.result_ttl_us,
            max_attempts=op.max_attempts,
            backoff=op.backoff,
            group=op.group,
            dead_queue=op.dead_queue,
            blocked_by=self._blockers_of(op),
            idempotency_key=op.idempotency_key,
            fingerprint=op.fingerprint,
            created_at_us=now_us,
            updated_at_us=now_us,
        )
        row = ledger.queue(op.queue)
        if not row.fed or (op.group is not None and not row.has_groups):
            row.fed, row.has_groups = True, row.has_groups or op.group is not None
            ledger.save_queue(row)
        blockers, dead = self._open_blockers(op, task.blocked_by) if op.blocked_by else ([], None)
        task.blockers_left = len(blockers)
        task.state = State.BLOCKED if blockers else State.SCHEDULED if due > now_us else State.READY
        if op.group is not None:
            self._join_lane(task, op.group_limit)
        ledger.insert(task)
        for blocker in blockers:
            ledger.block(blocker, task)
        if op.idempotency_key is not None:
            ledger.save_key(op.queue, op.idempotency_key, Key(op.id, op.fingerprint, now_us + op.key_ttl_us))
        if ledger.events_on:
            size = len(op.payload) if op.payload is not None else 0
            ledger.event(task, "enqueued", now_us, b'{"payload_bytes":%d}' % size)
        if dead is not None:
            self._blocker_failed(task, dead, now_us)
            self._cascade([task.id], now_us)
        elif task.state is not State.BLOCKED:
            self.ready_queues.add(task.queue)  # of a scheduled one too: a sleeper may have to wake earlier now
        return Enqueued(id=task.id, existed=False, state=task.state)

    def _blockers_of(self, op: Enqueue) -> tuple[Blocker, ...]:
        """An earlier operation of this transaction may have found its key in use: then that task blocks in its place."""
        if not (op.blocked_by and self._stands_for):
            return op.blocked_by
        return tuple(Blocker(self._stands_for.get(b.id, b.id), b.queue) for b in op.blocked_by)

    def _open_blockers(self, op: Enqueue, blocked_by: Sequence[Blocker]) -> tuple[list[Record], str | None]:
        """The blockers that have not ended, and one that failed if there is such."""
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
            held = self.ledger.held(op.token)
            if held:
                return Reserved(tasks=[copy.copy(t) for t in held])
        tasks: list[Record] = []
        paused: list[str] = []
        for queue in op.queues:
            row = self.ledger.queue(queue)
            if row.paused:
                paused.append(queue)
            elif len(tasks) < op.limit:
                self.promote(queue, now_us, PROMOTE_LIMIT)
                self._grant(row, op, op.limit - len(tasks), now_us, tasks)
        next_at = self.ledger.next_at(op.queues, now_us)
        return Reserved(tasks=tasks, paused=tuple(paused), next_at_us=next_at)

    def promote(self, queue: str, now_us: int, limit: int) -> int:
        """SCHEDULED tasks whose time has come become READY, in the order of `due`."""
        due = self.ledger.due(queue, now_us, limit)
        for task in due:
            self._move(task, State.READY)
        if due:
            self.ready_queues.add(queue)
        return len(due)

    def _grant(self, row: QueueRow, op: Reserve, limit: int, now_us: int, tasks: list[Record]) -> None:
        if not row.has_groups:
            ready = self.ledger.next_ready(row.queue, None, limit)
            if ready:
                for task in ready:
                    _take(task, op, now_us)
                    task.state = State.RUNNING
                self.ledger.save_leased(ready, now_us)
                tasks.extend(map(copy.copy, ready))
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
        self._move(task, State.RUNNING)
        if self.ledger.events_on:
            self.ledger.event(task, "started", now_us, None)
        return copy.copy(task)

    # -- writes of a holder ------------------------------------------------------------------------

    def _ack(self, op: Ack, task: Record, now_us: int) -> Outcome:
        if _ends_plainly(op, task) and self.ledger.end_plain(task, now_us):
            task.finished_at_us = task.updated_at_us = now_us
            task.ended_by, task.token, task.lease_until_us, task.state = op.token, None, None, State.DONE
            self.ended_tasks.add(task.id)
            if task.has_dependents:
                self._free(task, now_us)
            return _DONE
        again = op.again_us if not task.cancel_requested else None
        result = StoredResult(task_id=task.id, state=State.DONE, result=op.result, encoding=op.encoding)
        self._end(task, State.DONE, result, op.token, now_us, again)
        if self.ledger.events_on:
            size = len(op.result) if op.result is not None else 0
            data = (
                b'{"result_bytes":%d}' % size if op.ran_us is None else b'{"ran_us":%d,"result_bytes":%d}' % (op.ran_us, size)
            )
            self.ledger.event(task, "succeeded", now_us, data)
        if again is not None:
            self._schedule_again(task, again)
        elif task.result_ttl_us == 0:
            self._drop(task)
        if task.has_dependents:
            self._free(task, now_us)
        return Acked(state=task.state)

    def _retry(self, op: Retry, task: Record, now_us: int) -> Outcome:
        task.last_error, task.failed_at_us, task.updated_at_us = op.error, now_us, now_us
        if op.attempts is not None:
            task.attempts = op.attempts
        if task.cancel_requested:
            self._end_cancelled(task, op.token, now_us)
            return Retried(due_us=task.due_us, state=State.CANCELLED)
        event = "expired" if op.lost else "retried"
        if op.delay_us is None and op.due_us is None:
            task.eta_us = task.eta_us if task.interval_us else None  # the grid of an interval task is anchored there
            self._put_back(task)
        else:
            task.due_us = op.due_us if op.due_us is not None else now_us + cast(int, op.delay_us)
            self._give_up_lease(task)
            self._move(task, State.SCHEDULED if task.due_us > now_us else State.READY)
            self.ready_queues.add(task.queue)
        self._note(task, event, now_us, error=_brief(op.error), ran_us=op.ran_us, lost=op.lost)
        return Retried(due_us=task.due_us, state=task.state)

    def _fail(self, op: Fail, task: Record, now_us: int) -> Outcome:
        task.last_error, task.failed_at_us = op.error, now_us
        again = op.again_us if not task.cancel_requested else None
        moves_to = task.dead_queue if again is None else None
        result = StoredResult(task_id=task.id, state=State.DEAD, error=op.error)
        self._end(task, State.DEAD, result, op.token, now_us, again)
        self._note(task, "failed", now_us, error=_brief(op.error), ran_us=op.ran_us, lost=op.lost, to_queue=moves_to)
        if again is not None:
            self._schedule_again(task, again)
        elif moves_to is not None:
            self._move_to_dead_queue(task, moves_to, now_us)
        if task.has_dependents:
            self._cascade([task.id], now_us)
        return Failed(queue=task.queue, state=task.state)

    def _release(self, op: Release, task: Record, now_us: int) -> Outcome:
        task.attempts = max(task.attempts - 1, 0)
        task.updated_at_us = now_us
        if task.cancel_requested:
            self._end_cancelled(task, op.token, now_us)
        else:
            self._note(task, "released", now_us)
            self._put_back(task)
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
        self._end_cancelled(task, op.token, now_us)
        return Cancelled(state=State.CANCELLED)

    def _reschedule(self, op: Reschedule, task: Record, now_us: int) -> Outcome:
        due = op.eta_us if op.eta_us is not None else now_us + (op.delay_us or 0)
        task.eta_us, task.due_us, task.returned, task.updated_at_us = due, due, False, now_us
        if task.state is State.BLOCKED:
            self.ledger.save(task, task.state, task.queue)
        else:
            self._move(task, State.SCHEDULED if due > now_us else State.READY)
            self.ready_queues.add(task.queue)
        self._note(task, "rescheduled", now_us)
        return Rescheduled(due_us=due)

    def _requeue(self, op: Requeue, task: Record, now_us: int) -> Outcome:
        due = op.eta_us if op.eta_us is not None else now_us + (op.delay_us or 0)
        task.eta_us = due if op.eta_us is not None or op.delay_us else None
        task.due_us, task.updated_at_us, task.returned = due, now_us, False
        task.last_error = task.failed_at_us = task.finished_at_us = task.ended_by = task.worker = None
        task.cancel_requested, task.blocked_by, task.blockers_left = False, (), 0
        if op.reset_attempts:
            task.attempts = 0
        self.ledger.delete_result(task)
        self._move(task, State.SCHEDULED if due > now_us else State.READY)
        self.ready_queues.add(task.queue)
        self._note(task, "requeued", now_us)
        return Requeued(state=task.state)

    def _remove(self, op: Remove, task: Record, now_us: int) -> Outcome:
        self._note(task, "removed", now_us)
        waiting, has_dependents = task.state.waiting, task.has_dependents
        self._drop(task, with_key=True)
        self.ended_tasks.add(task.id)
        if waiting and has_dependents:
            self._cascade([task.id], now_us)
        return Removed()

    # -- how a run ends ----------------------------------------------------------------------------

    def _end(self, task: Record, state: State, result: StoredResult, token: str | None, now_us: int, again: int | None) -> None:
        """The lease ends, the result is kept. A dead letter's result lives as long as the letter."""
        result.finished_at_us, result.attempts, result.started_at_us = now_us, task.attempts, task.started_at_us
        task.finished_at_us = task.updated_at_us = now_us
        task.ended_by = token
        self._give_up_lease(task)
        stays = state is State.DEAD and task.dead_queue is None and again is None
        ttl = DEFAULT_RESULT_TTL_US if task.result_ttl_us is None else task.result_ttl_us
        self._move(task, state)
        if stays or ttl:
            self.ledger.save_result(task, result, None if stays else now_us + ttl)
        self.ended_tasks.add(task.id)

    def _end_cancelled(self, task: Record, token: str | None, now_us: int) -> None:
        was_blocked = task.state is State.BLOCKED
        if was_blocked:
            self._forget_blockers(task)
        self._end(
            task,
            State.CANCELLED,
            StoredResult(task_id=task.id, state=State.CANCELLED, error=task.last_error),
            token,
            now_us,
            None,
        )
        self._note(task, "cancelled", now_us, error=_brief(task.last_error))
        if task.result_ttl_us == 0:
            self._drop(task)
        if task.has_dependents:
            self._cascade([task.id], now_us)

    def _schedule_again(self, task: Record, again_us: int) -> None:
        task.attempts = 0
        task.eta_us = task.due_us = again_us
        self._move(task, State.SCHEDULED)
        self.ready_queues.add(task.queue)

    def _move_to_dead_queue(self, task: Record, queue: str, now_us: int) -> None:
        """Same id, ready in the dead queue, as if new there; the FAILED result stays readable."""
        limit = self.ledger.lane(task.queue, task.group).limit if task.group is not None else 0
        was, was_queue = task.state, task.queue
        task.queue, task.dead_queue, task.eta_us, task.due_us = queue, None, None, now_us
        task.attempts, task.blocked_by, task.blockers_left, task.returned, task.ended_by = 0, (), 0, False, None
        row = self.ledger.queue(queue)
        if task.group is not None:
            row.has_groups = True
            task.state = State.READY
            self._join_lane(task, limit)
        self.ledger.save_queue(row)
        task.state = State.READY
        self.ledger.save(task, was, was_queue)
        self.ready_queues.add(queue)

    def _give_up_lease(self, task: Record) -> None:
        task.token = task.lease_until_us = None

    def _put_back(self, task: Record) -> None:
        """READY at its old place: before all tasks of its lane that were never leased."""
        self._give_up_lease(task)
        task.returned = True
        self._move(task, State.READY)
        self.ready_queues.add(task.queue)

    def _drop(self, task: Record, with_key: bool = False) -> None:
        """The record and its result go. The key stays for its time, so that a late repeat still finds its answer."""
        if task.state is State.BLOCKED:
            self._forget_blockers(task)
        if task.group is not None and not task.state.final and task.state is not State.STAGED:
            self._count_lane(task, task.state, None)
        self.ledger.delete_result(task)
        if with_key and task.idempotency_key is not None:
            key = self.ledger.key(task.queue, task.idempotency_key)
            if key is not None and key.task_id == task.id:
                self.ledger.delete_key(task.queue, task.idempotency_key)
        self.ledger.delete(task)

    # -- staged runs -------------------------------------------------------------------------------

    def release_staged(self, task: Record, run: Run, now_us: int) -> None:
        """A task of a committed run is there, as if it had been enqueued at the commit."""
        ledger = self.ledger
        committed = cast(int, run.ended_at_us)
        for other in ledger.claims(task):
            ledger.unclaim(task, other)
        task.run_id, task.created_at_us, task.updated_at_us = run.run_id, committed, now_us
        task.due_us = max(task.eta_us or 0, committed)
        if task.interval_us:
            task.eta_us = task.due_us
        row = ledger.queue(task.queue)
        if not row.fed or (task.group is not None and not row.has_groups):
            row.fed, row.has_groups = True, row.has_groups or task.group is not None
            ledger.save_queue(row)
        task.state = State.SCHEDULED if task.due_us > now_us else State.READY
        if task.group is not None:
            self._join_lane(task, 0)
        ledger.save(task, State.STAGED, task.queue)
        self.ready_queues.add(task.queue)
        if ledger.events_on:
            size = len(task.payload) if task.payload is not None else 0
            ledger.event(task, "enqueued", now_us, b'{"payload_bytes":%d}' % size)

    def drop_staged(self, task: Record, now_us: int) -> None:
        """A staged task goes as if it had never come."""
        for run_id in self.ledger.claims(task):
            self.ledger.unclaim(task, run_id)
        self._drop(task, with_key=True)
        if task.has_dependents:
            self._cascade([task.id], now_us)

    # -- dependents --------------------------------------------------------------------------------

    def _free(self, blocker: Record, now_us: int) -> None:
        budget = CASCADE_LIMIT
        freed = self.ledger.dependents(blocker.id, budget)
        for task in freed:
            self._let_go(blocker.id, task, now_us)
        if len(freed) == budget:
            self.ledger.defer(blocker.id, False)

    def _let_go(self, blocker_id: str, task: Record, now_us: int) -> None:
        self.ledger.unblock(blocker_id, task)
        task.blockers_left -= 1
        if task.blockers_left > 0:
            self.ledger.save(task, task.state, task.queue)
            return
        task.due_us = max(task.eta_us or 0, now_us)
        task.updated_at_us = now_us
        self._move(task, State.SCHEDULED if task.due_us > now_us else State.READY)
        self.ready_queues.add(task.queue)

    def _cascade(self, dead_ids: list[str], now_us: int) -> int:
        """Whatever waits for a dead task dies too, and so on; what exceeds the budget is left to `sweep`."""
        budget = CASCADE_LIMIT
        while dead_ids:
            blocker_id = dead_ids.pop(0)
            dependents = self.ledger.dependents(blocker_id, budget) if budget else []
            for task in dependents:
                self._forget_blockers(task)
                self._blocker_failed(task, blocker_id, now_us)
                if task.has_dependents:
                    dead_ids.append(task.id)
            budget -= len(dependents)
            if budget <= 0:
                self.ledger.defer(blocker_id, True)
        return CASCADE_LIMIT - budget

    def _blocker_failed(self, task: Record, blocker_id: str, now_us: int) -> None:
        error = TaskError("BlockerFailed", f"task {blocker_id}, which this one waits for, failed or was cancelled")
        task.last_error, task.failed_at_us = error, now_us
        moves_to = task.dead_queue
        self._end(task, State.DEAD, StoredResult(task_id=task.id, state=State.DEAD, error=error), None, now_us, None)
        self._note(task, "failed", now_us, error=_brief(error), to_queue=moves_to)
        if moves_to is not None:
            self._move_to_dead_queue(task, moves_to, now_us)

    def _forget_blockers(self, task: Record) -> None:
        for blocker in task.blocked_by:
            self.ledger.unblock(blocker.id, task)

    def sweep(self, now_us: int, limit: int) -> int:
        """Go on with what was too much for the transaction that began it: cascades and runs."""
        moved = sweep_runs(self, now_us, limit)
        for blocker_id, dead in self.ledger.deferred(limit):
            self.ledger.undefer(blocker_id)
            if dead:
                moved += self._cascade([blocker_id], now_us)
                continue
            freed = self.ledger.dependents(blocker_id, CASCADE_LIMIT)
            for task in freed:
                self._let_go(blocker_id, task, now_us)
            if len(freed) == CASCADE_LIMIT:
                self.ledger.defer(blocker_id, False)
            moved += len(freed)
            if moved >= limit:
                break
        return moved

    # -- lanes and events --------------------------------------------------------------------------

    def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        lane = self.ledger.lane(queue, group)
        was_open = lane.open
        lane.limit = limit
        lane.wake()
        if lane.open and not was_open:
            lane.turn = self.ledger.next_turn()
            self.ready_queues.add(queue)
        self.ledger.save_lane(lane)

    def _move(self, task: Record, state: State) -> None:
        was = task.state
        if task.group is not None:
            self._count_lane(task, was, state)
        task.state = state
        self.ledger.save(task, was, task.queue)

    def _join_lane(self, task: Record, limit: int) -> None:
        lane = self.ledger.lane(task.queue, cast(str, task.group))
        was_open = lane.open
        if limit > 0 and lane.limit <= 0:
            lane.limit = limit
        lane.wake()
        lane.members += 1
        lane.ready += task.state is State.READY
        if lane.open and not was_open:
            lane.turn = self.ledger.next_turn()
        self.ledger.save_lane(lane)

    def _count_lane(self, task: Record, was: State, now: State | None) -> None:
        lane = self.ledger.lane(task.queue, cast(str, task.group))
        was_open = lane.open
        lane.wake()  # a dead letter that is requeued joins here
        lane.ready += (now is State.READY) - (was is State.READY)
        lane.inflight = max(lane.inflight + (now is State.RUNNING) - (was is State.RUNNING), 0)
        lane.members += (now is not None and not now.final) - (not was.final)
        if lane.open and not was_open:
            lane.turn = self.ledger.next_turn()
            self.ready_queues.add(task.queue)
        self.ledger.save_lane(lane)

    def _note(self, task: Record, event: str, now_us: int, **data: Any) -> None:
        if self.ledger.events_on:
            given = {k: v for k, v in data.items() if v is not None}
            self.ledger.event(task, event, now_us, _encode(given) if given else None)

    # Plain functions, not bound methods: a machine that held those would hold itself, and with it all that it read.
    _ALONE: ClassVar[dict[type[Operation], Callable[[Machine, Any, int, bool], Outcome | Refused]]] = {
        Reserve: _reserve,
        Beat: _beat,
        OpenFanIn: _open_fan_in,
        CountFanIn: _count_fan_in,
        OpenRun: _open_run,
        Stage: _stage,
        CommitRun: _commit_run,
        AbortRun: _abort_run,
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


_NOTHING = (None,) * 7


def _is_plain(op: Enqueue) -> bool:
    """Most tasks: ready now, no group, key, blockers, repetition."""
    rest = (op.group, op.idempotency_key, op.eta_us, op.delay_us, op.interval_us, op.dead_queue, op.headers)
    return rest == _NOTHING and not op.blocked_by and op.on_conflict == "error"


_DONE = Acked(state=State.DONE)


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


def _done_before(op: Operation) -> Outcome:
    """What a repeated operation answers when the first one was carried out and its answer got lost."""
    if isinstance(op, Ack):
        return Acked(state=State.DONE, already=True)
    if isinstance(op, Fail):
        return Failed(queue=op.queue, already=True)
    if isinstance(op, Retry):
        return Retried(due_us=0)
    if isinstance(op, Extend | Progress):
        return Extended(lease_until_us=0, cancel_requested=False)
    if isinstance(op, Requeue):
        return Requeued(state=State.READY)
    return Released(state=State.READY)


def _brief(error: TaskError | None) -> dict[str, str] | None:
    """An event carries the kind and the first words of an error; the whole stands on the task."""
    return None if error is None else {"type": error.type, "message": error.message[:500]}
