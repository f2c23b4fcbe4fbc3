"""The words between core and driver: operations go down in transactions, outcomes come back.

Times and durations are integer microseconds. Operations on a task combine in a transaction; `Reserve`, `Beat` and those of
fan-ins and of staged runs stand alone in theirs.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from omniq.errors import Invalid
from omniq.models import (
    DEFAULT_QUEUE,
    MAX_COUNT,
    Blocker,
    Record,
    State,
    StoredResult,
    TaskError,
    TaskStatus,
    check_encodable,
    status_of,
)

Lost = Literal["expired", "worker_lost"]
KEY_TTL_US = 86_400_000_000  # how long an idempotency key lives, unless it is told


# gc=False: operations live for a call and hold no cycles, so the garbage collector need not visit them.
class Operation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The base of all operations. Operations that stand alone in their transaction name no task."""


class Enqueue(Operation, frozen=True, gc=False, kw_only=True):
    """Store a new task. `eta_us` is absolute, `delay_us` is added to the store's clock; give at most one."""

    id: str
    name: str
    queue: str = DEFAULT_QUEUE
    payload: bytes | None = None
    encoding: str = "json"
    headers: dict[str, str] | None = None
    origin: str = ""
    eta_us: int | None = None
    delay_us: int | None = None
    timeout_us: int | None = None
    lease_us: int | None = None
    interval_us: int | None = None
    result_ttl_us: int | None = None
    max_attempts: int = 0
    backoff: str = ""
    group: str | None = None
    group_limit: int = 0
    dead_queue: str | None = None
    blocked_by: tuple[Blocker, ...] = ()
    dead_blockers: Literal["fail", "ignore"] = "fail"
    idempotency_key: str | None = None
    key_ttl_us: int = KEY_TTL_US
    fingerprint: str = ""
    on_conflict: Literal["error", "return", "replace_finished"] = "error"

    @property
    def plain(self) -> bool:
        """Whether the task is ready at once and is a call or a payload and nothing more, as most are.

        Stores have shorter ways for such a task. How long it may run and is kept, its retries, its origin and its fingerprint
        are columns like any other and do not matter here, nor does `on_conflict`, which is asked of a task that is there.
        """
        # One comparison of tuples: it is asked for each task that is stored.
        rest = (self.group, self.idempotency_key, self.eta_us, self.delay_us, self.interval_us, self.dead_queue, self.headers)
        return rest == _NOTHING and not self.blocked_by


_NOTHING = (None,) * 7


class Reserve(Operation, frozen=True, gc=False, kw_only=True):
    """Lease up to `limit` tasks of the first queues that have any. The caller makes the token, fresh each time."""

    queues: tuple[str, ...]
    token: str
    limit: int = 1
    lease_us: int | None = None
    worker: str = ""


class OnTask(Operation, frozen=True, gc=False, kw_only=True):
    """An operation on one task that is already there."""

    queue: str
    id: str


class Held(OnTask, frozen=True, gc=False, kw_only=True):
    """An operation of the task's holder. `late` forgives a lease that ran out and that nobody has taken since."""

    token: str
    late: bool = False


class Ack(Held, frozen=True, gc=False, kw_only=True):
    """The run succeeded. With `again_us` the same task is scheduled for that moment.

    `listed` is how the contract ends a job: where its clients share a list of completed jobs, the job is kept as long as that
    names it.
    """

    result: bytes | None = None
    encoding: str = "json"
    ran_us: int | None = None
    again_us: int | None = None
    listed: bool = False


class Retry(Held, frozen=True, gc=False, kw_only=True):
    """The run failed, run it again: after `delay_us`, at `due_us`, or with neither at once and at its old place."""

    error: TaskError | None = None
    delay_us: int | None = None
    due_us: int | None = None
    attempts: int | None = None
    ran_us: int | None = None
    lost: Lost | None = None


class Fail(Held, frozen=True, gc=False, kw_only=True):
    """The run failed for good: a dead letter, or moved to the task's dead queue."""

    error: TaskError | None = None
    ran_us: int | None = None
    again_us: int | None = None
    lost: Lost | None = None


class Release(Held, frozen=True, gc=False, kw_only=True):
    """Give the task back unused. The attempt is not spent."""


class Extend(Held, frozen=True, gc=False, kw_only=True):
    """Prolong the lease to the task's own length from now, or the one that is given. Never shortens it."""

    lease_us: int | None = None


class Progress(Held, frozen=True, gc=False, kw_only=True):
    """Store what the running task says about itself, at most 4 KiB."""

    data: bytes


class Cancel(OnTask, frozen=True, gc=False, kw_only=True):
    """End a waiting task, or ask a running one to end; with its token the holder says that it has ended."""

    token: str | None = None
    lost: Lost | None = None
    error: TaskError | None = None


class Reschedule(OnTask, frozen=True, gc=False, kw_only=True):
    """Give a waiting task a new time."""

    eta_us: int | None = None
    delay_us: int | None = None


class Requeue(OnTask, frozen=True, gc=False, kw_only=True):
    """Bring a dead letter back."""

    eta_us: int | None = None
    delay_us: int | None = None
    reset_attempts: bool = False


class Remove(OnTask, frozen=True, gc=False, kw_only=True):
    """Delete a task that is not running, with its result and key. With `if_state`, only if it still is in that state."""

    if_state: State | None = None


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's words about itself. `busy` is how many functions run per queue, None if it does not say."""

    worker: str
    host: str = ""
    pid: int = 0
    queues: tuple[str, ...] = ()
    running: int = 0
    busy: dict[str, int] | None = None
    concurrency: int = 0
    started_at_us: int = 0
    seen_at_us: int = 0


class Beat(Operation, frozen=True, gc=False, kw_only=True):
    """A sign of life of a worker, for the registry. `gone` takes the worker out."""

    info: WorkerInfo
    gone: bool = False


class OpenFanIn(Operation, frozen=True, gc=False, kw_only=True):
    """Wait for `expected` members to be counted under a key. A repeat changes nothing, until `ttl_us` after the first."""

    key: str
    expected: int
    ttl_us: int = 30 * 86_400_000_000


class CountFanIn(Operation, frozen=True, gc=False, kw_only=True):
    """Count a member, once: a repeat gets the answer that it got the first time."""

    key: str
    member: str


class OnRun(Operation, frozen=True, gc=False, kw_only=True):
    """An operation on a staged run. A run belongs to one queue; another queue may have another of the same id."""

    queue: str
    run_id: str


class OpenRun(OnRun, frozen=True, gc=False, kw_only=True):
    """Begin a run. A repeat changes nothing. After `ttl_us` without a commit the run is aborted."""

    ttl_us: int = 86_400_000_000


class Stage(OnRun, frozen=True, gc=False, kw_only=True):
    """Add tasks that nobody may reserve before the run is committed. A task that is there by key or id stays as it is."""

    tasks: tuple[Enqueue, ...]
    strict: bool = False  # refuse a task that is there with another body, instead of passing it over


class CommitRun(OnRun, frozen=True, gc=False, kw_only=True):
    """Release all tasks of a run. They become ready at once or, beyond the first thousands, by `sweep`."""


class AbortRun(OnRun, frozen=True, gc=False, kw_only=True):
    """Forget the tasks of a run, except those that another run claims, too."""


# -- outcomes ------------------------------------------------------------------------------------


class Outcome(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The answer to an operation that was carried out."""


class Enqueued(Outcome, frozen=True, gc=False, kw_only=True):
    id: str
    existed: bool
    state: State


class Reserved(Outcome, frozen=True, gc=False, kw_only=True):
    """`next_at_us`: when something of these queues falls due or runs out, so that an idle worker sleeps exactly."""

    tasks: list[Record]
    paused: tuple[str, ...] = ()
    next_at_us: int | None = None


class Acked(Outcome, frozen=True, gc=False, kw_only=True):
    state: State
    already: bool = False


class Retried(Outcome, frozen=True, gc=False, kw_only=True):
    due_us: int
    state: State = State.SCHEDULED


class Failed(Outcome, frozen=True, gc=False, kw_only=True):
    """`queue` is where the task is now: its own, or the dead queue it moved to."""

    queue: str
    state: State = State.DEAD
    already: bool = False


class Released(Outcome, frozen=True, gc=False, kw_only=True):
    state: State


class Extended(Outcome, frozen=True, gc=False, kw_only=True):
    lease_until_us: int
    cancel_requested: bool


class Cancelled(Outcome, frozen=True, gc=False, kw_only=True):
    state: State


class Rescheduled(Outcome, frozen=True, gc=False, kw_only=True):
    due_us: int


class Requeued(Outcome, frozen=True, gc=False, kw_only=True):
    state: State


class Removed(Outcome, frozen=True, gc=False, kw_only=True):
    pass


class Beaten(Outcome, frozen=True, gc=False, kw_only=True):
    pass


class FannedIn(Outcome, frozen=True, gc=False, kw_only=True):
    """`left` is how many members are still missing: 0 for the last one, -1 if nobody opened the key."""

    left: int


class Staged(Outcome, frozen=True, gc=False, kw_only=True):
    """`new` tasks were stored, and tasks that were `there` before are left as they are."""

    new: int
    there: int


class RunState(enum.StrEnum):
    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


class RunInfo(Outcome, frozen=True, gc=False, kw_only=True):
    """A staged run, counted by the store. `settled`: nothing of it is left to be released or dropped."""

    queue: str
    run_id: str
    state: RunState
    opened_at_us: int
    expires_us: int
    ended_at_us: int | None = None
    new: int = 0  # tasks that it was the first to stage
    claimed: int = 0  # tasks that another run had staged and not committed
    released: int = 0  # tasks that its commit made visible
    dropped: int = 0  # tasks that its end removed
    settled: bool = False


# -- answers of the looking calls ----------------------------------------------------------------


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that its holder lost, and why. `omniq.policy.after_loss` decides what follows."""

    record: Record
    lost: Lost


class QueueCounts(msgspec.Struct, kw_only=True):
    """How many tasks a queue holds now. `ready` includes scheduled tasks that are due."""

    queue: str
    staged: int = 0
    blocked: int = 0
    scheduled: int = 0
    ready: int = 0
    running: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    paused: bool = False
    oldest_ready_us: int | None = None

    @property
    def waiting(self) -> int:
        return self.blocked + self.scheduled + self.ready


class GroupInfo(msgspec.Struct, kw_only=True):
    queue: str
    group: str
    limit: int
    inflight: int
    ready: int


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks `find` returns. Fields that are not given do not matter, but staged tasks are found by state or run only."""

    states: tuple[State, ...] = ()
    statuses: tuple[TaskStatus, ...] = ()
    queue: str | None = None
    name: str | None = None
    group: str | None = None
    worker: str | None = None
    origin: str | None = None
    run_id: str | None = None
    ids: tuple[str, ...] = ()
    min_attempts: int = 0
    created_from_us: int | None = None
    created_to_us: int | None = None
    finished_from_us: int | None = None
    finished_to_us: int | None = None
    error_contains: str | None = None
    payload_contains: str | None = None

    def __post_init__(self) -> None:
        for name in _FILTER_TEXTS:
            text = getattr(self, name)
            if text is not None:
                check_encodable(text, name)
        for task_id in self.ids:
            check_encodable(task_id, "ids")
        for name in _FILTER_NUMBERS:
            number = getattr(self, name)
            if number is not None and not -MAX_COUNT <= number <= MAX_COUNT:
                raise Invalid(f"{name} is a whole number up to {MAX_COUNT}, not {number}")

    def admits(self, state: State) -> bool:
        if self.states:
            return state in self.states
        return state is not State.STAGED or self.run_id is not None

    @property
    def possible(self) -> tuple[State, ...]:
        """The states that a task which matches can be in."""
        return tuple(s for s in State if self.admits(s) and (not self.statuses or not _STATUSES[s].isdisjoint(self.statuses)))

    def matches(self, task: Record) -> bool:
        return (
            self.admits(task.state)
            and (not self.statuses or task.status in self.statuses)
            and (self.queue is None or task.queue == self.queue)
            and (self.name is None or task.name == self.name)
            and (self.group is None or task.group == self.group)
            and (self.worker is None or task.worker == self.worker)
            and (self.origin is None or task.origin == self.origin)
            and (self.run_id is None or task.run_id == self.run_id)
            and (not self.ids or task.id in self.ids)
            and task.attempts >= self.min_attempts
            and _within(task.created_at_us, self.created_from_us, self.created_to_us)
            and _within(task.finished_at_us, self.finished_from_us, self.finished_to_us)
            and (not self.error_contains or self.error_contains in _error_text(task.last_error))
            and (not self.payload_contains or self.payload_contains.encode() in (task.payload or b""))
        )


_FILTER_TEXTS = ("queue", "name", "group", "worker", "origin", "run_id", "error_contains", "payload_contains")
_FILTER_NUMBERS = ("min_attempts", "created_from_us", "created_to_us", "finished_from_us", "finished_to_us")
# A task that waits is PENDING or RETRYING by its attempts, so a state may stand for both.
_STATUSES = {state: {status_of(state, 0), status_of(state, 1)} for state in State}


def _within(value: int | None, low: int | None, high: int | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value < high)


def _error_text(error: TaskError | None) -> str:
    return "" if error is None else f"{error}\n{error.traceback}"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One page of `find`. `cursor` is None at the end. `partial` says that the scan limit cut this page short."""

    tasks: list[Record]
    cursor: str | None = None
    partial: bool = False


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the event log: events `first` to `last` are there. An empty part has `last` = `first` - 1."""

    name: str
    first: int
    last: int


class EventRow(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An event as drivers keep it."""

    seq: int
    ts_us: int
    event: str
    task_id: str
    queue: str
    name: str
    group: str | None = None
    attempt: int = 0
    worker: str | None = None
    enqueued_at_us: int = 0
    due_us: int = 0
    state: State = State.READY
    data: bytes | None = None
    shard: str = ""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A task as another store kept it, with its result if it has one."""

    record: Record
    result: StoredResult | None = None


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long `purge` keeps things. Results go by the ttl of each task; `limits_us` is for groups without tasks."""

    dead_us: int | None = 30 * 86_400_000_000
    events_us: int | None = 7 * 86_400_000_000
    events_max: int | None = 1_000_000
    workers_us: int = 3_600_000_000
    limits_us: int | None = 30 * 86_400_000_000


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """A driver's declaration about itself (section 12 of the driver contract)."""

    durability: Literal["none", "process", "power"]
    cross_queue: bool = True
    store_clock: bool = False
    resolution_us: int = 1
    push_wait: bool = False
    kernel_liveness: bool = False
    foreign_writers: bool = False
    events_gapless: bool = True
    due_order: bool = True
    local: bool = True
    restores: bool = False
    max_transaction: int = 10_000
    max_payload: int = 64 * 1024 * 1024

    @property
    def in_process(self) -> bool:
        """Whether no other process can see the store."""
        return self.local and self.durability == "none"


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    store_id: str
    format: int
    url: str
    capabilities: Capabilities
