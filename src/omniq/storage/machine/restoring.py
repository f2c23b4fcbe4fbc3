"""Taking in what another store kept: tasks with their results, and events. For drivers with a ledger."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from omniq.models import Record, State, StoredResult
from omniq.operations import EventRow, Saved
from omniq.storage.ledger import Key, Ledger
from omniq.storage.machine.machine import Machine
from omniq.storage.machine.transitions import DEFAULT_RESULT_TTL_US


def restore_tasks(machine: Machine, tasks: Sequence[Saved], key_ttl_us: int, now_us: int) -> int:
    """Insert tasks whose ids are free. A staged one, on either side, is nobody's task yet. Returns how many were new."""
    new = 0
    for saved in tasks:
        there = machine.ledger.load(saved.record.id)
        if saved.record.state is State.STAGED or (there is not None and there.state is not State.STAGED):
            continue
        if there is not None:
            machine.drop_staged(there, now_us)
        _insert(machine, saved, key_ttl_us)
        new += 1
    return new


def _insert(machine: Machine, saved: Saved, key_ttl_us: int) -> None:
    ledger, task = machine.ledger, copy.copy(saved.record)
    # Those that wait for it say so when they come in, if they do.
    task.has_dependents = False
    if task.state is State.RUNNING:
        _hand_back(task)
    blockers = _open_blockers(ledger, task) if task.state is State.BLOCKED else []
    dead = [b for b in blockers if b.state.final]
    task.blockers_left = len(blockers)
    if task.state is State.BLOCKED and not blockers:
        task.state = State.SCHEDULED  # whatever it waited for has ended; `promote` lets it run when it is due
    machine.feed(task.queue, task.group)
    if task.group is not None and not task.state.final:
        machine.join_lane(task, 0)
    ledger.insert(task)
    ledger.save(task, task.state, task.queue)  # an insert writes what a new task has; this one has a past
    for blocker in blockers:
        ledger.block(blocker, task)
    # It died before it could tell them: the next sweep does.
    for blocker in dead:
        ledger.defer(blocker.id, True)
    if task.idempotency_key is not None:
        key = Key(task.id, task.fingerprint, task.created_at_us + key_ttl_us)
        ledger.save_key(task.queue, task.idempotency_key, key)
    if saved.result is not None:
        ledger.save_result(task, saved.result, _expiry(task, saved.result))
    if task.state.waiting:
        machine.ready_queues.add(task.queue)


def _hand_back(task: Record) -> None:
    """Its holder works on the other store: it comes back unused."""
    task.state, task.token, task.lease_until_us, task.returned = State.READY, None, None, True
    task.attempts = max(task.attempts - 1, 0)


def _open_blockers(ledger: Ledger, task: Record) -> list[Record]:
    """Returns the blockers that it still waits for. A dead one counts only if the task had not been told yet."""
    found = [b for wanted in dict.fromkeys(b.id for b in task.blocked_by) if (b := ledger.load(wanted)) is not None]
    waiting = [b for b in found if not b.state.final]
    if task.blockers_left > len(waiting):
        waiting += [b for b in found if b.state in (State.DEAD, State.CANCELLED)]
    return waiting


def _expiry(task: Record, result: StoredResult) -> int | None:
    """The result of a dead letter lives as long as the letter."""
    if task.state is State.DEAD:
        return None
    ttl = DEFAULT_RESULT_TTL_US if task.result_ttl_us is None else task.result_ttl_us
    return result.finished_at_us + ttl


def restore_events(ledger: Ledger, rows: Sequence[EventRow]) -> None:
    """Append them. An event whose task is gone keeps its task's id."""
    for row in rows:
        there = ledger.load(row.task_id)
        task = Record(
            id=row.task_id,
            queue=row.queue,
            name=row.name,
            group=row.group,
            attempts=row.attempt,
            worker=row.worker,
            created_at_us=row.enqueued_at_us,
            due_us=row.due_us,
            state=row.state,
            seq=0 if there is None else there.seq,
        )
        ledger.event(task, row.event, row.ts_us, row.data)
