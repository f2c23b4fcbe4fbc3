"""Staged runs: tasks come in by thousands, unseen, and are there all at once when their run is committed, or not at all.

A task that two runs staged becomes visible when either is committed and goes when both are aborted, so neither a dead nor a
competing run can swallow it. What one transaction cannot finish is finished by `sweep`, of whoever comes by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omniq.errors import DuplicateId, IdempotencyConflict, Refused, RunClosed
from omniq.models import Record, State
from omniq.operations import AbortRun, CommitRun, Enqueue, OnRun, OpenRun, RunInfo, RunState, Stage, Staged
from omniq.storage.ledger import Key, Ledger, StagedRun
from omniq.storage.machine.transitions import record_of

if TYPE_CHECKING:
    from omniq.storage.machine.machine import Machine

SETTLE_LIMIT = 5000  # tasks of one transaction; everybody else waits for it, so `sweep` does the rest


def open_run(ledger: Ledger, op: OpenRun, now_us: int) -> RunInfo | Refused:
    run = ledger.run(op.queue, op.run_id)
    if run is None:
        run = StagedRun(op.queue, op.run_id, now_us, now_us + op.ttl_us)
        ledger.save_run(run)
        # The queue is listed from now on: whoever knows only the id of a run looks for it in every queue.
        ledger.save_queue(ledger.queue(op.queue))
        return run.info()
    return closed(run, now_us) or run.info()


def closed(run: StagedRun | None, now_us: int, op: OnRun | None = None) -> RunClosed | None:
    """Why nothing more can be staged."""
    if run is None:
        assert op is not None
        return run_closed("unknown", op.queue, op.run_id)
    if run.state is not RunState.OPEN:
        return run_closed(run.state, run.queue, run.run_id)
    return run_closed("late", run.queue, run.run_id) if run.expires_us <= now_us else None


def run_closed(reason: str, queue: str, run_id: str) -> RunClosed:
    """`reason`: unknown, late, there (what an abort comes too late for), or the state that the run is in."""
    named = f"run {run_id!r} of queue {queue!r}"
    texts = {
        "unknown": f"there is no {named}; open it first",
        "late": f"the time of {named} is over; begin another, with a longer ttl",
        "there": f"{named} is COMMITTED; its tasks are there",
    }
    return RunClosed(texts.get(reason) or f"{named} is {reason}; begin another with an id of its own")


def another_body(task_id: str, run_id: str) -> IdempotencyConflict:
    return IdempotencyConflict(f"task {task_id!r} of run {run_id!r} is there with another body; `strict=False` passes it over")


def staged_elsewhere(task_id: str, run_id: str) -> DuplicateId:
    return DuplicateId(f"task {task_id!r} of run {run_id!r} is staged for another queue; ids are unique in a store")


def stage(machine: Machine, op: Stage, now_us: int) -> Staged | Refused:
    ledger = machine.ledger
    run = ledger.run(op.queue, op.run_id)
    refusal = closed(run, now_us, op)
    if refusal is not None:
        return refusal
    assert run is not None
    ledger.foresee(op.queue, op.tasks)
    # All are looked up before the first is written, since nothing is undone when one of them is refused.
    found = [_there(ledger, task, now_us) for task in op.tasks]
    for task, there in zip(op.tasks, found, strict=True):
        if isinstance(there, Record) and there.queue != op.queue:
            return staged_elsewhere(task.id, op.run_id)
        if op.strict and there is not None and task.fingerprint != (there if isinstance(there, str) else there.fingerprint):
            return another_body(task.id, op.run_id)
    new, ids, keys = 0, set[str](), set[str]()
    for task, there in zip(op.tasks, found, strict=True):
        if isinstance(there, Record):
            if there.run_id != run.run_id and run.run_id not in ledger.claims(there):
                ledger.claim(there, run.run_id)
                run.claimed += 1
        elif there is None and task.id not in ids and (task.idempotency_key or "") not in keys:
            new += 1
            ids.add(task.id)
            keys.update(() if task.idempotency_key is None else (task.idempotency_key,))
            _insert(ledger, run, task, now_us)
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


def _insert(ledger: Ledger, run: StagedRun, op: Enqueue, now_us: int) -> None:
    if op.idempotency_key is not None:
        run.key_ttl_us = max(run.key_ttl_us, op.key_ttl_us)
    if op.group is not None and op.group_limit > 0:
        lane = ledger.lane(op.queue, op.group)
        if lane.limit <= 0:
            lane.limit = op.group_limit
        lane.wake()
        ledger.save_lane(lane)
    if ledger.stage_plain(op, run, now_us):
        return
    task = record_of(op, op.eta_us, op.eta_us or now_us, now_us)
    task.run_id, task.state = run.run_id, State.STAGED
    ledger.insert(task)
    if op.idempotency_key is not None:
        ledger.save_key(op.queue, op.idempotency_key, Key(op.id, op.fingerprint, now_us + op.key_ttl_us))


def commit_run(machine: Machine, op: CommitRun, now_us: int) -> RunInfo | Refused:
    run = machine.ledger.run(op.queue, op.run_id)
    # A commit may be repeated, and then goes on with the tasks that the one before left behind.
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
        return run_closed("unknown", op.queue, op.run_id)
    if run.state is RunState.COMMITTED:
        return run_closed("there", op.queue, op.run_id)
    if run.state is RunState.OPEN:
        _end(machine.ledger, run, RunState.ABORTED, now_us)
    settle(machine, run, now_us, SETTLE_LIMIT)
    return run.info()


def _end(ledger: Ledger, run: StagedRun, state: RunState, now_us: int) -> None:
    run.state, run.ended_at_us = state, now_us
    ledger.save_run(run)


def sweep_runs(machine: Machine, now_us: int, limit: int) -> int:
    """Go on with the tasks that runs left behind. Returns how many moved."""
    moved = 0
    for run in sorted(machine.ledger.unsettled(now_us, limit), key=lambda run: (run.opened_at_us, run.queue, run.run_id)):
        if run.state is RunState.OPEN:
            _end(machine.ledger, run, RunState.ABORTED, now_us)
        moved += settle(machine, run, now_us, max(limit - moved, 1))
        if moved >= limit:
            break
    return moved


def settle(machine: Machine, run: StagedRun, now_us: int, limit: int) -> int:
    """Release or drop up to `limit` of its tasks. Returns how many moved."""
    if run.settled:
        return 0
    ledger, committed = machine.ledger, run.state is RunState.COMMITTED
    # A ledger may release plain tasks without reading them; those that it passes over are released one by one below.
    quick = ledger.release_plain(run, now_us, limit) if committed else 0
    if quick:
        run.released += quick
        machine.ready_queues.add(run.queue)
    tasks = ledger.staged(run, limit - quick) if quick < limit else []
    # In the order of staging, which is then that of the events, on every store and in every process.
    for task in sorted(tasks, key=lambda t: t.seq):
        if committed:
            machine.release_staged(task, run, now_us)
            run.released += 1
        elif _disclaim(ledger, run, task):
            machine.drop_staged(task, now_us)
            run.dropped += 1
    run.settled = quick + len(tasks) < limit
    ledger.save_run(run)
    return quick + len(tasks)


def _disclaim(ledger: Ledger, run: StagedRun, task: Record) -> bool:
    """The run lets go of a task. Returns whether nobody else holds on to it."""
    if task.run_id != run.run_id:
        ledger.unclaim(task, run.run_id)
        return False
    others = ledger.claims(task)
    if not others:
        return True
    # A dead or competing run must not take it along: the next one that wants it has it now.
    task.run_id = others[0]
    ledger.unclaim(task, others[0])
    ledger.save(task, task.state, task.queue)
    return False
