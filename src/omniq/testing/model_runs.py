"""Staged runs in the reference model: their tasks become visible when the run is committed."""

from __future__ import annotations

import dataclasses

import msgspec

from omniq import errors
from omniq import operations as ops
from omniq.models import State
from omniq.operations import RunState
from omniq.testing.model import Model, ModelTask, Refusal


@dataclasses.dataclass
class ModelRun:
    """A staged run of the model. The counters are those of `RunInfo`."""

    opened: int
    expires: int
    state: RunState = RunState.OPEN
    ended: int | None = None
    new: int = 0
    claimed: int = 0
    released: int = 0
    dropped: int = 0


class RunModel(Model):
    """The model with staged runs, by queue and id."""

    def __init__(self, due_order: bool = True, cross_queue: bool = True) -> None:
        super().__init__(due_order, cross_queue)
        self.runs: dict[tuple[str, str], ModelRun] = {}
        self.wanted_by: dict[str, list[str]] = {}  # the runs that want a staged task; the task shows the id of the first
        self.run_of: dict[str, str] = {}  # the run that brought a task in, once it is committed

    def run_id(self, key: str) -> str | None:
        """Returns the `run_id` that the record of a task shows."""
        return self.wanted_by[key][0] if key in self.wanted_by else self.run_of.get(key)

    # -- operations on runs ------------------------------------------------------------------------

    def info(self, op: ops.OnRun) -> ops.RunInfo:
        run = self.runs[op.queue, op.run_id]
        return ops.RunInfo(
            queue=op.queue,
            run_id=op.run_id,
            state=run.state,
            opened_at_us=run.opened,
            expires_us=run.expires,
            ended_at_us=run.ended,
            new=run.new,
            claimed=run.claimed,
            released=run.released,
            dropped=run.dropped,
            settled=run.state is not RunState.OPEN,
        )

    def still_open(self, op: ops.OnRun, now: int) -> ModelRun:
        run = self.runs.get((op.queue, op.run_id))
        if run is None or run.state is not RunState.OPEN or run.expires <= now:
            raise Refusal(errors.RunClosed)
        return run

    def openrun(self, op: ops.OpenRun, now: int) -> ops.Outcome:
        if (op.queue, op.run_id) not in self.runs:
            self.runs[op.queue, op.run_id] = ModelRun(now, now + op.ttl_us)
        self.still_open(op, now)
        return self.info(op)

    def stage(self, op: ops.Stage, now: int) -> ops.Outcome:
        run, new = self.still_open(op, now), 0
        before = [self.existing(task, now) for task in op.tasks]
        if any(isinstance(found, ModelTask) and found.queue != op.queue for found in before):
            raise Refusal(errors.DuplicateId)
        bodies = [found.op.fingerprint if isinstance(found, ModelTask) else found for found in before]
        if op.strict and any(body not in (None, task.fingerprint) for body, task in zip(bodies, op.tasks, strict=True)):
            raise Refusal(errors.IdempotencyConflict)
        for task in op.tasks:
            found = self.existing(task, now)
            if found is None:
                self.add_staged(op.run_id, task, now)
                new += 1
            elif isinstance(found, ModelTask) and op.run_id not in self.wanted_by[self.key(found)]:
                self.wanted_by[self.key(found)].append(op.run_id)
                run.claimed += 1
        run.new += new
        return ops.Staged(new=new, there=len(op.tasks) - new)

    def existing(self, op: ops.Enqueue, now: int) -> ModelTask | str | None:
        """Returns the staged task that has this key or id, or the fingerprint of a visible task that has it."""
        if op.idempotency_key is not None and (op.queue, op.idempotency_key) in self.keys:
            id, fingerprint, end = self.keys[op.queue, op.idempotency_key]
            first = self.tasks.get(self.key_of(op.queue, id))
            if first is not None and first.state is State.STAGED:
                return first
            if end > now or (first is not None and not first.state.final):
                return fingerprint
        task = self.tasks.get(self.key_of(op.queue, op.id))
        return task if task is None or task.state is State.STAGED else task.op.fingerprint

    def add_staged(self, run_id: str, op: ops.Enqueue, now: int) -> None:
        self.seq += 1
        key = self.key_of(op.queue, op.id)
        due = now if op.eta_us is None else op.eta_us
        self.tasks[key] = ModelTask(op, op.queue, due, self.seq, op.eta_us, op.dead_queue, State.STAGED)
        self.wanted_by[key] = [run_id]
        self.run_of.pop(key, None)
        if op.group is not None and op.group_limit > 0:
            self.limits.setdefault((op.queue, op.group), op.group_limit)
        if op.idempotency_key is not None:
            self.keys[op.queue, op.idempotency_key] = (op.id, op.fingerprint, now + op.key_ttl_us)

    def commitrun(self, op: ops.CommitRun, now: int) -> ops.Outcome:
        run = self.runs.get((op.queue, op.run_id))
        if run is None or run.state is not RunState.COMMITTED:
            run = self.still_open(op, now)
            run.state, run.ended = RunState.COMMITTED, now
            wanted = self.wanted(op.queue, op.run_id)
            if wanted and not self.due_order:
                self.promote(op.queue, now)
            for task in wanted:
                key = self.key(task)
                del self.wanted_by[key]
                self.run_of[key] = op.run_id
                task.due = max(task.eta or 0, now)
                self.place(task, now)
                run.released += 1
        return self.info(op)

    def abortrun(self, op: ops.AbortRun, now: int) -> ops.Outcome:
        run = self.runs.get((op.queue, op.run_id))
        if run is None or run.state is RunState.COMMITTED:
            raise Refusal(errors.RunClosed)
        if run.state is RunState.OPEN:
            self.abort(op.queue, op.run_id, now)
        return self.info(op)

    def abort(self, queue: str, run_id: str, now: int) -> int:
        run, wanted = self.runs[queue, run_id], self.wanted(queue, run_id)
        run.state, run.ended = RunState.ABORTED, now
        for task in wanted:
            self.wanted_by[self.key(task)].remove(run_id)
            if not self.wanted_by[self.key(task)]:
                run.dropped += 1
                self.drop(task, now)
        return len(wanted)

    def wanted(self, queue: str, run_id: str) -> list[ModelTask]:
        found = [self.tasks[key] for key, runs in self.wanted_by.items() if run_id in runs and self.tasks[key].queue == queue]
        return sorted(found, key=lambda t: t.seq)

    def overdue(self, now: int) -> list[tuple[str, str]]:
        return [place for place, run in self.runs.items() if run.state is RunState.OPEN and run.expires <= now]

    def drop(self, task: ModelTask, now: int) -> None:
        """Removes a staged task as if it had never come."""
        key = self.key(task)
        self.wanted_by.pop(key, None)
        del self.tasks[key]
        place = (task.queue, task.op.idempotency_key or "")
        if place in self.keys and self.keys[place][0] == task.op.id:
            del self.keys[place]
        self.fail_dependents(key, now)

    # -- staged tasks and other operations ---------------------------------------------------------

    def enqueue(self, op: ops.Enqueue, now: int) -> ops.Outcome:
        """An `Enqueue` replaces a staged task with its key or id: it does not wait for a run that may never be committed."""
        first, _, end = self.keys.get((op.queue, op.idempotency_key or ""), ("", "", 0))
        by_key, by_id = (self.tasks.get(self.key_of(op.queue, id)) for id in (first, op.id))
        lives = end > now or (by_key is not None and not by_key.state.final)
        if by_key is not None and by_key.state is State.STAGED:
            if by_id is not None and by_id.state is not State.STAGED:
                # The id is in use by a visible task, so that the key does not matter and its staged task stays.
                return super().enqueue(msgspec.structs.replace(op, idempotency_key=None), now)
            self.drop(by_key, now)
        elif lives:
            return super().enqueue(op, now)
        if by_id is not None and by_id is not by_key and by_id.state is State.STAGED:
            self.drop(by_id, now)
        outcome = super().enqueue(op, now)
        if isinstance(outcome, ops.Enqueued) and not outcome.existed:
            self.run_of.pop(self.key_of(op.queue, op.id), None)
        return outcome

    def cancel(self, op: ops.Cancel, now: int) -> ops.Outcome:
        if not op.lost and self.find(op).state is State.STAGED:
            raise Refusal(errors.NotWaiting)
        return super().cancel(op, now)

    def remove(self, op: ops.Remove, now: int) -> ops.Outcome:
        if self.find(op).state is State.STAGED:
            raise Refusal(errors.NotWaiting)
        return super().remove(op, now)
