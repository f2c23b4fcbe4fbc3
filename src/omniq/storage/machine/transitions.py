"""How tasks move between states: the counters of their groups, their results, and whoever waits for them follow.

The operations of `Machine` are made of these steps. No step refuses, and none asks what the user wanted.
"""

from __future__ import annotations

from typing import Any, cast

from omniq.models import Record, State, StoredResult, TaskError
from omniq.operations import Enqueue
from omniq.storage.ledger import Ledger, StagedRun
from omniq.storage.machine.replies import enqueued_data, event_data

DEFAULT_RESULT_TTL_US = 86_400_000_000
CASCADE_LIMIT = 1000  # tasks that one ending frees or fails in its own transaction, so that others need not wait long


def record_of(op: Enqueue, eta_us: int | None, due_us: int, now_us: int) -> Record:
    """The record of a task that comes to be now, still without its state."""
    return Record(
        id=op.id,
        queue=op.queue,
        name=op.name,
        payload=op.payload,
        encoding=op.encoding,
        headers=op.headers,
        origin=op.origin,
        eta_us=eta_us,
        due_us=due_us,
        timeout_us=op.timeout_us,
        lease_us=op.lease_us,
        interval_us=op.interval_us,
        result_ttl_us=op.result_ttl_us,
        max_attempts=op.max_attempts,
        backoff=op.backoff,
        group=op.group,
        dead_queue=op.dead_queue,
        idempotency_key=op.idempotency_key,
        fingerprint=op.fingerprint,
        created_at_us=now_us,
        updated_at_us=now_us,
    )


class Transitions:
    """Steps on a ledger. `ready_queues` and `ended_tasks` gather whom a commit concerns."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.ready_queues: set[str] = set()
        self.ended_tasks: set[str] = set()

    # -- how a run ends ----------------------------------------------------------------------------

    def end(self, task: Record, state: State, result: StoredResult, token: str | None, now_us: int, again: int | None) -> None:
        """The lease ends, the result is kept. A dead letter's result lives as long as the letter."""
        result.finished_at_us, result.attempts, result.started_at_us = now_us, task.attempts, task.started_at_us
        task.finished_at_us = task.updated_at_us = now_us
        task.ended_by = token
        self.give_up_lease(task)
        # A dead letter that goes on, in its dead queue or in the next round, is none: its result expires like others.
        stays = state is State.DEAD and task.dead_queue is None and again is None
        ttl = DEFAULT_RESULT_TTL_US if task.result_ttl_us is None else task.result_ttl_us
        self.move(task, state)
        if stays or ttl:
            self.ledger.save_result(task, result, None if stays else now_us + ttl)
        self.ended_tasks.add(task.id)

    def end_cancelled(self, task: Record, token: str | None, now_us: int) -> None:
        if task.state is State.BLOCKED:
            self.forget_blockers(task)
        result = StoredResult(task_id=task.id, state=State.CANCELLED, error=task.last_error)
        self.end(task, State.CANCELLED, result, token, now_us, None)
        self.note(task, "cancelled", now_us, error=task.last_error)
        if task.result_ttl_us == 0:
            self.drop(task)
        if task.has_dependents:
            self.cascade([task.id], now_us)

    def schedule_again(self, task: Record, again_us: int) -> None:
        task.attempts = 0
        task.eta_us = task.due_us = again_us
        self.move(task, State.SCHEDULED)
        self.ready_queues.add(task.queue)

    def move_to_dead_queue(self, task: Record, queue: str, now_us: int) -> None:
        """The task becomes ready in its dead queue under the same id, as if new there. Its FAILED result stays readable."""
        limit = self.ledger.lane(task.queue, task.group).limit if task.group is not None else 0
        was, was_queue = task.state, task.queue
        task.queue, task.dead_queue, task.eta_us, task.due_us = queue, None, None, now_us
        task.attempts, task.blocked_by, task.blockers_left, task.returned, task.ended_by = 0, (), 0, False, None
        row = self.ledger.queue(queue)
        if task.group is not None:
            row.has_groups = True
            task.state = State.READY  # by which the lane counts it
            self.join_lane(task, limit)
        self.ledger.save_queue(row)
        task.state = State.READY
        self.ledger.save(task, was, was_queue)
        self.ready_queues.add(queue)

    def put_back(self, task: Record) -> None:
        """READY at its old place: before all tasks of its lane that were never leased."""
        self.give_up_lease(task)
        task.returned = True
        self.move(task, State.READY)
        self.ready_queues.add(task.queue)

    def give_up_lease(self, task: Record) -> None:
        task.token = task.lease_until_us = None

    def drop(self, task: Record, with_key: bool = False) -> None:
        """The record and its result go. The key stays for its time, so that a late repeat still finds its answer."""
        if task.state is State.BLOCKED:
            self.forget_blockers(task)
        if task.group is not None and not task.state.final and task.state is not State.STAGED:
            self.count_lane(task, task.state, None)
        self.ledger.delete_result(task)
        if with_key and task.idempotency_key is not None:
            key = self.ledger.key(task.queue, task.idempotency_key)
            if key is not None and key.task_id == task.id:
                self.ledger.delete_key(task.queue, task.idempotency_key)
        self.ledger.delete(task)

    # -- staged tasks ------------------------------------------------------------------------------

    def release_staged(self, task: Record, run: StagedRun, now_us: int) -> None:
        """A task of a committed run is there, as if it had been enqueued at the commit."""
        ledger = self.ledger
        committed = cast(int, run.ended_at_us)
        for other in ledger.claims(task):
            ledger.unclaim(task, other)
        task.run_id, task.created_at_us, task.updated_at_us = run.run_id, committed, now_us
        task.due_us = max(task.eta_us or 0, committed)
        if task.interval_us:
            task.eta_us = task.due_us
        self.feed(task.queue, task.group)
        task.state = State.SCHEDULED if task.due_us > now_us else State.READY
        if task.group is not None:
            self.join_lane(task, 0)
        ledger.save(task, State.STAGED, task.queue)
        self.ready_queues.add(task.queue)
        if ledger.events_on:
            ledger.event(task, "enqueued", now_us, enqueued_data(task.payload))

    def drop_staged(self, task: Record, now_us: int) -> None:
        """A staged task goes as if it had never come."""
        for run_id in self.ledger.claims(task):
            self.ledger.unclaim(task, run_id)
        self.drop(task, with_key=True)
        if task.has_dependents:
            self.cascade([task.id], now_us)

    # -- dependents --------------------------------------------------------------------------------

    def free(self, blocker_id: str, now_us: int) -> int:
        """Let go of the tasks that waited for one that is done, up to a limit; `sweep` does the rest.

        Returns the number of tasks.
        """
        freed = self.ledger.dependents(blocker_id, CASCADE_LIMIT)
        for task in freed:
            self.let_go(blocker_id, task, now_us)
        if len(freed) == CASCADE_LIMIT:
            self.ledger.defer(blocker_id, False)
        return len(freed)

    def let_go(self, blocker_id: str, task: Record, now_us: int) -> None:
        self.ledger.unblock(blocker_id, task)
        task.blockers_left -= 1
        if task.blockers_left > 0:
            self.ledger.save(task, task.state, task.queue)
            return
        task.due_us = max(task.eta_us or 0, now_us)
        task.updated_at_us = now_us
        self.move(task, State.SCHEDULED if task.due_us > now_us else State.READY)
        self.ready_queues.add(task.queue)

    def cascade(self, dead_ids: list[str], now_us: int) -> int:
        """Every task that waits for a dead one dies too, and so on. `sweep` does what exceeds the budget."""
        budget = CASCADE_LIMIT
        while dead_ids:
            blocker_id = dead_ids.pop(0)
            dependents = self.ledger.dependents(blocker_id, budget) if budget else []
            for task in dependents:
                self.forget_blockers(task)
                self.blocker_failed(task, blocker_id, now_us)
                if task.has_dependents:
                    dead_ids.append(task.id)
            budget -= len(dependents)
            if budget <= 0:
                self.ledger.defer(blocker_id, True)
        return CASCADE_LIMIT - budget

    def blocker_failed(self, task: Record, blocker_id: str, now_us: int) -> None:
        error = TaskError("BlockerFailed", f"task {blocker_id}, which this one waits for, failed or was cancelled")
        task.last_error, task.failed_at_us = error, now_us
        moves_to = task.dead_queue
        self.end(task, State.DEAD, StoredResult(task_id=task.id, state=State.DEAD, error=error), None, now_us, None)
        self.note(task, "failed", now_us, error=error, to_queue=moves_to)
        if moves_to is not None:
            self.move_to_dead_queue(task, moves_to, now_us)

    def forget_blockers(self, task: Record) -> None:
        for blocker in task.blocked_by:
            self.ledger.unblock(blocker.id, task)

    # -- queues, lanes and events ------------------------------------------------------------------

    def feed(self, queue: str, group: str | None) -> None:
        """Tasks, also of groups, come to a queue from now on."""
        row = self.ledger.queue(queue)
        if not row.fed or (group is not None and not row.has_groups):
            row.fed, row.has_groups = True, row.has_groups or group is not None
            self.ledger.save_queue(row)

    def move(self, task: Record, state: State) -> None:
        was = task.state
        if task.group is not None:
            self.count_lane(task, was, state)
        task.state = state
        self.ledger.save(task, was, task.queue)

    def join_lane(self, task: Record, limit: int) -> None:
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

    def count_lane(self, task: Record, was: State, now: State | None) -> None:
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

    def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        lane = self.ledger.lane(queue, group)
        was_open = lane.open
        lane.limit = limit
        lane.wake()
        if lane.open and not was_open:
            lane.turn = self.ledger.next_turn()
            self.ready_queues.add(queue)
        self.ledger.save_lane(lane)

    def note(self, task: Record, event: str, now_us: int, **data: Any) -> None:
        if self.ledger.events_on:
            self.ledger.event(task, event, now_us, event_data(**data))
