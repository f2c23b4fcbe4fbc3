"""Staged runs: tasks come in by thousands, unseen, and are there all at once when their run is committed, or not at all.

A task that two runs staged becomes visible when either is committed and goes when both are aborted, so neither a dead nor a
competing run can swallow it. What one transaction cannot finish is finished by `sweep`, of whoever comes by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omniq.errors import IdempotencyConflict, Refused, RunClosed
from omniq.models import Record, State
from omniq.operations import KEY_TTL_US, AbortRun, CommitRun, Enqueue, OnRun, OpenRun, RunInfo, RunState, Stage, Staged
from omniq.storage.ledger import Key, Ledger, Run

if TYPE_CHECKING:
    from omniq.storage.machine import Machine

SETTLE_LIMIT = 5000


def open_run(ledger: Ledger, op: OpenRun, now_us: int) -> RunInfo | Refused:
    run = ledger.run(op.queue, op.run_id)
    if run is None:
        run = Run(op.queue, op.run_id, now_us, now_us + op.ttl_us)
        ledger.save_run(run)
        ledger.save_queue(ledger.queue(op.queue))
        return run.info()
    return closed(run, now_us) or run.info()


def closed(run: Run | None, now_us: int, op: OnRun | None = None) -> RunClosed | None:
    """Why nothing more can be staged."""
    if run is None:
        assert op is not None
        return RunClosed(f"no run {op.run_id!r} in queue {op.queue!r}; open it first")
    if run.state is not RunState.OPEN:
        return RunClosed(f"run {run.run_id!r} of queue {run.queue!r} is {run.state}; begin another with an id of its own")
    if run.expires_us <= now_us:
        return RunClosed(f"the time of run {run.run_id!r} is over; begin another, with a longer ttl")
    return None


def stage(machine: Machine, op: Stage, now_us: int) -> Staged | Refused:
    ledger = machine.ledger
    run = ledger.run(op.queue, op.run_id)
    refusal = closed(run, now_us, op)
    if refusal is not None:
        return refusal
    assert run is not None
    ledger.foresee(op.queue, op.tasks)
    new = 0
    for task in op.tasks:
        there = _there(ledger, task, now_us) if op.strict else None
        if there is not None and task.fingerprint != (there.fingerprint if isinstance(there, Record) else there):
            return IdempotencyConflict(f"task {task.id!r} of run {op.run_id!r} is already there with another body")
    for task in op.tasks:
        there = _there(ledger, task, now_us)
        if there is None:
            new += 1
            _insert(ledger, run, task, now_us)
        elif isinstance(there, Record) and there.run_id != run.run_id and run.run_id not in ledger.claims(there):
            ledger.claim(there, run.run_id)
            run.claimed += 1
    run.new += new
    ledger.save_run(run)
    return Staged(new=new, there=len(op.tasks) - new)


def _there(ledger: Ledger, op: Enqueue, now_us: int) -> Record | str | None:
    """The staged record of this task, or the fingerprint of one that is visible, or None."""
    if op.idempotency_key is not None:
        key = ledger.key(op.queue, op.idempotency_key)
        if key is not None:
            first = ledger.load(key.task_id)
            if first is not None and first.state is State.STAGED:
                return first
            if key.expires_us > now_us or (first is not None and not first.state.final):
                return key.fingerprint
    there = ledger.load(op.id)
    return there if there is None or there.state is State.STAGED else there.fingerprint


def _insert(ledger: Ledger, run: Run, op: Enqueue, now_us: int) -> None:
    if op.idempotency_key is not None:
        run.key_ttl_us = max(run.key_ttl_us, op.key_ttl_us)
    if ledger.stage_plain(op, run, now_us):
        return
    if op.group is not None and op.group_limit > 0:
        lane = ledger.lane(op.queue, op.group)
        if lane.limit <= 0:
            lane.limit = op.group_limit
            ledger.save_lane(lane)
    ledger.insert(
        Record(
            id=op.id,
            queue=op.queue,
            name=op.name,
            payload=op.payload,
            encoding=op.encoding,
            headers=op.headers,
            origin=op.origin,
            eta_us=op.eta_us,
            due_us=op.eta_us or now_us,
            timeout_us=op.timeout_us,
            lease_us=op.lease_us,
            interval_us=op.interval_us,
            result_ttl_us=op.result_ttl_us,
            max_attempts=op.max_attempts,
            backoff=op.backoff,
            group=op.group,
            dead_queue=op.dead_queue,
            run_id=run.run_id,
            idempotency_key=op.idempotency_key,
            fingerprint=op.fingerprint,
            created_at_us=now_us,
            updated_at_us=now_us,
            state=State.STAGED,
        )
    )
    if op.idempotency_key is not None:
        ledger.save_key(op.queue, op.idempotency_key, Key(op.id, op.fingerprint, now_us + op.key_ttl_us))


def commit_run(machine: Machine, op: CommitRun, now_us: int) -> RunInfo | Refused:
    run = machine.ledger.run(op.queue, op.run_id)
    if run is None or run.state is not RunState.COMMITTED:
        refusal = closed(run, now_us, op)
        if refusal is not None:
            return refusal
        assert run is not None
        _end(machine.ledger, run, RunState.COMMITTED, now_us)
    settle(machine, run, now_us, SETTLE_LIMIT)
    return run.info()


def abort_run(machine: Machine, op: AbortRun, now_us: int) -> RunInfo | Refused:
    run = machine.ledger.run(op.queue, op.run_id)
    if run is None:
        return RunClosed(f"no run {op.run_id!r} in queue {op.queue!r}")
    if run.state is RunState.COMMITTED:
        return RunClosed(f"run {run.run_id!r} is COMMITTED; its tasks are there")
    if run.state is RunState.OPEN:
        _end(machine.ledger, run, RunState.ABORTED, now_us)
    settle(machine, run, now_us, SETTLE_LIMIT)
    return run.info()


def _end(ledger: Ledger, run: Run, state: RunState, now_us: int) -> None:
    run.state, run.ended_at_us = state, now_us
    ledger.save_run(run)


def sweep_runs(machine: Machine, now_us: int, limit: int) -> int:
    """Go on with what runs left behind; how many tasks moved."""
    moved = 0
    for run in machine.ledger.unsettled(now_us, limit):
        if run.state is RunState.OPEN:
            _end(machine.ledger, run, RunState.ABORTED, now_us)
        moved += settle(machine, run, now_us, max(limit - moved, 1))
        if moved >= limit:
            break
    return moved


def settle(machine: Machine, run: Run, now_us: int, limit: int) -> int:
    """Release or drop up to `limit` of its tasks; how many."""
    if run.settled:
        return 0
    ledger, committed = machine.ledger, run.state is RunState.COMMITTED
    quick = ledger.release_plain(run, now_us, limit) if committed else 0
    if quick:
        run.released += quick
        machine.ready_queues.add(run.queue)
    tasks = ledger.staged(run, limit - quick) if quick < limit else []
    for task in tasks:
        if committed:
            machine.release_staged(task, run, now_us)
            run.released += 1
        elif _disclaim(ledger, run, task):
            machine.drop_staged(task, now_us)
            run.dropped += 1
    run.settled = quick + len(tasks) < limit
    ledger.save_run(run)
    return quick + len(tasks)


def _disclaim(ledger: Ledger, run: Run, task: Record) -> bool:
    """The run lets go of a task; whether nobody else holds on to it."""
    if task.run_id != run.run_id:
        ledger.unclaim(task, run.run_id)
        return False
    others = ledger.claims(task)
    if not others:
        return True
    task.run_id = others[0]
    ledger.unclaim(task, others[0])
    ledger.save(task, task.state, task.queue)
    return False


def keep_until(run: Run) -> int:
    """Till when an ended run is remembered: as long as its keys."""
    return (run.ended_at_us or run.opened_at_us) + max(run.key_ttl_us, KEY_TTL_US)
