"""The first half of every operation: look, and refuse or let pass. Nothing here writes.

A check answers with the record to write on (or None for a new one), with an outcome if there is nothing left to do, or with
the refusal.
"""

from __future__ import annotations

from typing import Any, cast

from omniq.errors import (
    DuplicateId,
    LeaseExpired,
    LeaseHeld,
    NotActive,
    NotDead,
    NotWaiting,
    Refused,
    TaskNotFound,
    TokenMismatch,
)
from omniq.models import Record, State
from omniq.operations import (
    Ack,
    Acked,
    Cancel,
    Cancelled,
    Enqueue,
    Enqueued,
    Fail,
    Failed,
    Held,
    Outcome,
    Remove,
    Requeue,
    Reschedule,
    Retry,
)
from omniq.storage.ledger import Ledger
from omniq.storage.machine.replies import key_in_use, refused


class Refusals:
    """The checks of each operation against a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def enqueue(self, op: Enqueue, now_us: int) -> Record | Outcome | Refused | None:
        staged: Record | None = None
        if op.idempotency_key is not None:
            first = self.known_key(op, now_us)
            if first is not None and not isinstance(first, Record):
                return first
            staged = first  # of a run that is not committed and may never be: whoever enqueues now is not kept waiting
        there = self.ledger.load(op.id)
        if there is None or there.state is State.STAGED:
            return staged or there
        if op.on_conflict == "replace_finished":
            return staged if there.state.final else Enqueued(id=op.id, existed=True, state=there.state)
        if op.on_conflict == "return" or there.fingerprint == op.fingerprint:
            return Enqueued(id=op.id, existed=True, state=there.state)
        return refused(DuplicateId, op)

    def stored_before(self, op: Enqueue) -> Outcome | None:
        """A repeated `replace_finished` must not replace, and run again, what its own first call stored."""
        there = self.ledger.load(op.id)
        if there is None or there.state is State.STAGED or there.fingerprint != op.fingerprint:
            return None
        return Enqueued(id=op.id, existed=True, state=there.state)

    def known_key(self, op: Enqueue, now_us: int) -> Record | Outcome | Refused | None:
        key = self.ledger.key(op.queue, cast(str, op.idempotency_key))
        if key is None:
            return None
        first = self.ledger.load(key.task_id)
        if first is not None and first.state is State.STAGED:
            return first
        # While its task has not ended a key holds beyond its time, or the same work would be under way twice.
        if key.expires_us <= now_us and (first is None or first.state.final):
            return None
        if key.fingerprint != op.fingerprint:
            return key_in_use(op, key.task_id)
        return Enqueued(id=key.task_id, existed=True, state=State.DONE if first is None else first.state)

    # -- checks of a holder ------------------------------------------------------------------------

    def _find(self, op: Any) -> Record | TaskNotFound:
        task = self.ledger.load(op.id)
        if task is None or task.queue != op.queue:
            return refused(TaskNotFound, op)
        return task

    def held(self, op: Held, now_us: int) -> Record | Outcome | Refused:
        task = self.ledger.load(op.id)
        if task is None or task.queue != op.queue:
            return refused(TaskNotFound, op)
        if task.state is not State.RUNNING:
            return self._already(op, task) or refused(NotActive, op, task)
        # Expired before mismatch, as the driver contract says. `late` ends are welcome until somebody takes the lease back.
        if not op.late and cast(int, task.lease_until_us) <= now_us:
            return refused(LeaseExpired, op)
        if task.token != op.token:
            return refused(TokenMismatch, op)
        return task

    @staticmethod
    def _already(op: Held, task: Record) -> Outcome | None:
        """The same end reported twice, by the token that ended the task, changes nothing."""
        if not op.token or task.ended_by != op.token:
            return None
        if isinstance(op, Ack) and task.state is State.DONE:
            return Acked(state=State.DONE, already=True)
        if isinstance(op, Fail) and task.state in (State.DONE, State.DEAD):
            return Failed(queue=task.queue, state=task.state, already=True)
        return None

    def lost_or_held(self, op: Retry | Fail, now_us: int) -> Record | Outcome | Refused:
        return self.lost(op, now_us) if op.lost else self.held(op, now_us)

    def lost(self, op: Retry | Fail | Cancel, now_us: int) -> Record | Refused:
        """The reaper speaks: it must have seen this very lease, and the lease must be over or its worker dead."""
        task = self._find(op)
        if isinstance(task, Refused):
            return task
        if task.state is not State.RUNNING:
            return refused(NotActive, op, task)
        if task.token != op.token:
            return refused(TokenMismatch, op)
        if op.lost == "expired" and cast(int, task.lease_until_us) > now_us:
            return refused(LeaseHeld, op)
        return task

    def cancel(self, op: Cancel, now_us: int) -> Record | Outcome | Refused:
        if op.lost:
            return self.lost(op, now_us)
        task = self._find(op)
        if isinstance(task, Refused):
            return task
        if task.state is State.STAGED:
            return refused(NotWaiting, op, task)
        if task.state.final:
            return Cancelled(state=task.state)
        if op.token is not None:
            if task.state is not State.RUNNING:
                return refused(NotActive, op, task)
            if task.token != op.token:
                return refused(TokenMismatch, op)
        return task

    def waiting(self, op: Reschedule, now_us: int) -> Record | Refused:
        task = self._find(op)
        if isinstance(task, Refused) or task.state.waiting:
            return task
        return refused(NotWaiting, op, task)

    def dead(self, op: Requeue, now_us: int) -> Record | Refused:
        task = self._find(op)
        if isinstance(task, Refused) or task.state is State.DEAD:
            return task
        return refused(NotDead, op, task)

    def remove(self, op: Remove, now_us: int) -> Record | Refused:
        task = self._find(op)
        if isinstance(task, Refused):
            return task
        if task.state in (State.RUNNING, State.STAGED) or op.if_state not in (None, task.state):
            return refused(NotWaiting, op, task)
        return task
