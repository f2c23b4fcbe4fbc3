"""The rows that a driver loads, saves and lists for the state machine and for `LedgerStorage`.

All calls come inside one atomic section, from one thread at a time.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from omniq.models import Record, State, StoredResult
from omniq.operations import Enqueue, EventRow, RunInfo, RunState, WorkerInfo


class QueueRow(msgspec.Struct):
    """The row of a queue."""

    queue: str
    paused: bool = False
    has_groups: bool = False  # a queue that never had any grants its tasks without a look at lanes
    groups_turn: bool = True  # whether the next grant is a group's or a task's without one
    fed: bool = False  # tasks were enqueued to it; a mere dead queue only got them from others


class Lane(msgspec.Struct):
    """A group of a queue. `members` counts its tasks that have not ended.

    `turn` is its place among open lanes. While it has a limit and no members, `turn` may be the moment since when that is
    known, as a negative number.
    """

    queue: str
    group: str
    limit: int = 0
    ready: int = 0
    inflight: int = 0
    members: int = 0
    # Two meanings in one field: a lane without members has no place among the open ones, and no stored format had to change.
    turn: int = 0

    @property
    def open(self) -> bool:
        # No limit means one at a time, on every store, since clients of the contract read a missing limit so.
        return self.ready > 0 and self.inflight < (self.limit or 1)

    @property
    def rests_since_us(self) -> int | None:
        return -self.turn if self.turn < 0 else None

    def wake(self) -> None:
        """The group is used again: from its next rest on it keeps its limit as long as others do."""
        self.turn = max(self.turn, 0)


class Key(msgspec.Struct):
    """An idempotency key and the task that it stands for."""

    task_id: str
    fingerprint: str
    expires_us: int


class FanIn(msgspec.Struct):
    """A count of members under a key. At 0 it stays until it expires, since the last member may ask again."""

    expected: int
    left: int
    expires_us: int


class StagedRun(msgspec.Struct):
    """A staged run. Its tasks carry its id; those that another run staged first are kept as claims beside."""

    queue: str
    run_id: str
    opened_at_us: int
    expires_us: int
    state: RunState = RunState.OPEN
    ended_at_us: int | None = None
    key_ttl_us: int = 0  # the longest of its tasks' keys: so long the run is remembered
    new: int = 0
    claimed: int = 0
    released: int = 0
    dropped: int = 0
    settled: bool = False

    def unsettled(self, now_us: int) -> bool:
        """Whether it ended and has tasks left, or is open beyond its time."""
        return not self.settled and (self.state is not RunState.OPEN or self.expires_us <= now_us)

    def info(self) -> RunInfo:
        return RunInfo(
            queue=self.queue,
            run_id=self.run_id,
            state=self.state,
            opened_at_us=self.opened_at_us,
            expires_us=self.expires_us,
            ended_at_us=self.ended_at_us,
            new=self.new,
            claimed=self.claimed,
            released=self.released,
            dropped=self.dropped,
            settled=self.settled,
        )


class TaskRow(Protocol):
    """The fields of a task that a ledger knows without reading it; a `Record` is one."""

    @property
    def seq(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def group(self) -> str | None: ...
    @property
    def state(self) -> State: ...
    @property
    def token(self) -> str | None: ...
    @property
    def worker(self) -> str | None: ...
    @property
    def lease_until_us(self) -> int | None: ...
    @property
    def finished_at_us(self) -> int | None: ...


class Ledger(abc.ABC):
    """The calls of the machine. `TableLedger` has them for drivers that keep their rows in memory, whatever else they do."""

    events_on: bool

    @abc.abstractmethod
    def load(self, id: str) -> Record | None:
        """A task; within a section the same object each time, which the machine changes and then saves."""

    @abc.abstractmethod
    def insert(self, task: Record) -> None:
        """A new task, which gets the next `seq`."""

    @abc.abstractmethod
    def save(self, task: Record, was: State, was_queue: str) -> None: ...
    @abc.abstractmethod
    def delete(self, task: Record) -> None: ...
    @abc.abstractmethod
    def held(self, token: str) -> list[Record]:
        """The tasks that run under this token."""

    @abc.abstractmethod
    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        """READY tasks of a lane in their order: those that came back first, then by `due_us` and `seq`. Each is saved next."""

    @abc.abstractmethod
    def due(self, queue: str, now_us: int, limit: int) -> list[Record]:
        """SCHEDULED tasks whose time has come, in the order of `due_us`. Each is saved next."""

    @abc.abstractmethod
    def next_at(self, queues: Sequence[str], now_us: int) -> int | None:
        """The first moment at which a task of these queues falls due or a lease of theirs runs out."""

    @abc.abstractmethod
    def queue(self, queue: str) -> QueueRow:
        """The row of a queue, a new one if there is none."""

    @abc.abstractmethod
    def save_queue(self, row: QueueRow) -> None: ...
    @abc.abstractmethod
    def lane(self, queue: str, group: str) -> Lane:
        """The row of a group, a new one if there is none."""

    @abc.abstractmethod
    def save_lane(self, lane: Lane) -> None: ...
    @abc.abstractmethod
    def open_lane(self, queue: str) -> Lane | None:
        """Returns the open lane of a queue with the lowest `turn`."""

    @abc.abstractmethod
    def next_turn(self) -> int:
        """A number above all that were given before."""

    @abc.abstractmethod
    def key(self, queue: str, key: str) -> Key | None: ...
    @abc.abstractmethod
    def save_key(self, queue: str, key: str, value: Key) -> None: ...
    @abc.abstractmethod
    def delete_key(self, queue: str, key: str) -> None: ...
    @abc.abstractmethod
    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None: ...
    @abc.abstractmethod
    def delete_result(self, task: Record) -> None:
        """Harmless when there is none, like every deletion here."""

    @abc.abstractmethod
    def block(self, blocker: Record, dependent: Record) -> None:
        """`dependent` waits for `blocker`, which has `has_dependents` from now on."""

    @abc.abstractmethod
    def dependents(self, blocker_id: str, limit: int) -> list[Record]: ...
    @abc.abstractmethod
    def unblock(self, blocker_id: str, dependent: Record) -> None: ...
    @abc.abstractmethod
    def defer(self, blocker_id: str, dead: bool) -> None:
        """Note that the dependents of this task are not all told yet; `sweep` goes on with `deferred`."""

    @abc.abstractmethod
    def deferred(self, limit: int) -> list[tuple[str, bool]]: ...
    @abc.abstractmethod
    def undefer(self, blocker_id: str) -> None: ...
    @abc.abstractmethod
    def event(self, task: Record, event: str, now_us: int, data: bytes | None) -> None:
        """Append an event under the next number."""

    @abc.abstractmethod
    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None: ...
    @abc.abstractmethod
    def fan_in(self, key: str) -> FanIn | None: ...
    @abc.abstractmethod
    def save_fan_in(self, key: str, value: FanIn) -> None: ...
    @abc.abstractmethod
    def delete_fan_in(self, key: str) -> None:
        """Delete a fan-in and the answers that its members got."""

    @abc.abstractmethod
    def counted(self, key: str, member: str) -> int | None:
        """The answer that a member of a fan-in got; None before it is counted."""

    @abc.abstractmethod
    def count(self, key: str, member: str, left: int) -> None: ...
    @abc.abstractmethod
    def run(self, queue: str, run_id: str) -> StagedRun | None: ...
    @abc.abstractmethod
    def save_run(self, run: StagedRun) -> None: ...
    @abc.abstractmethod
    def unsettled(self, now_us: int, limit: int) -> list[StagedRun]:
        """Runs that ended with tasks left, and open ones whose time is over."""

    @abc.abstractmethod
    def staged(self, run: StagedRun, limit: int) -> list[Record]:
        """Staged tasks that carry the run's id or that it claims."""

    @abc.abstractmethod
    def claim(self, task: Record, run_id: str) -> None: ...
    @abc.abstractmethod
    def claims(self, task: Record) -> list[str]:
        """The runs that claim a staged task, besides the one whose id it carries."""

    @abc.abstractmethod
    def unclaim(self, task: Record, run_id: str) -> None: ...

    @abc.abstractmethod
    def allocate(self, n: int) -> int:
        """The first of `n` consecutive integers never given before."""

    # -- short ways: a driver that has none goes the long way through the methods above ------------
    # They spare a store of rows, as SQLite is, the record of a task that nobody looks at again in the same commit: a new task,
    # one that was just leased, one that left no result. Where the long way is as short, in memory, there is nothing to spare.

    def insert_plain(self, op: Enqueue, now_us: int) -> bool:
        """Insert a READY task that uses nothing beyond a call, with its event, without making a record; False: not here."""
        return False

    def save_leased(self, tasks: Sequence[Record], now_us: int) -> None:
        """Save READY tasks without groups that one `Reserve` leased at this moment, with an event each."""
        for task in tasks:
            self.save(task, State.READY, task.queue)
            if self.events_on:
                self.event(task, "started", now_us, None)

    def end_plain(self, task: Record, now_us: int) -> bool:
        """Save that a running task without a group is DONE now, with an empty result and its event; False: not here.

        The record itself is changed by the caller, who has not touched it yet.
        """
        return False

    def foresee(self, queue: str, tasks: Sequence[Enqueue]) -> None:  # noqa: B027 - an optional ability
        """The machine will look for these tasks by id and by key: a driver may fetch them in one go."""

    def stage_plain(self, op: Enqueue, run: StagedRun, now_us: int) -> bool:
        """Insert a staged task that uses nothing beyond a call and a key, without making a record; False: not here."""
        return False

    def release_plain(self, run: StagedRun, now_us: int, limit: int) -> int:
        """Make staged tasks ready that need nothing beyond that, with their events. Returns the number of them.

        The machine does the others.
        """
        return 0


class WholeLedger(Ledger):
    """A ledger that a whole driver can be made of: `LedgerStorage` goes through its rows, to look and to keep house.

    SQLite's is none: its driver looks and purges by SQL.
    """

    @abc.abstractmethod
    def task_row(self, id: str) -> TaskRow | None: ...
    @abc.abstractmethod
    def task_rows(self) -> Collection[TaskRow]:
        """All tasks in the order of `seq`."""

    @abc.abstractmethod
    def in_state(self, state: State, queue: str | None) -> Collection[TaskRow]:
        """Tasks in a state, if need be without those that are DONE or CANCELLED and came without a result."""

    @abc.abstractmethod
    def number(self, queue: str, state: State) -> int:
        """Returns the number of tasks of a queue in a state. Asked often, so drivers count as tasks move."""

    @abc.abstractmethod
    def late(self, queue: str, now_us: int) -> list[int]:
        """The `due_us` of SCHEDULED tasks that are due, of the first 10,000 at least."""

    @abc.abstractmethod
    def heads(self, queue: str) -> list[int]:
        """The `due_us` of the first ready task of each lane."""

    @abc.abstractmethod
    def record(self, row: TaskRow) -> Record:
        """A copy of the task to hand out."""

    @abc.abstractmethod
    def result(self, id: str) -> StoredResult | None: ...
    @abc.abstractmethod
    def expired_results(self, now_us: int, limit: int) -> Sequence[TaskRow]:
        """Tasks whose results have expired."""

    @abc.abstractmethod
    def results_before(self, finished_us: int) -> Sequence[TaskRow]:
        """Tasks whose results were stored before a moment."""

    @abc.abstractmethod
    def forget(self, row: TaskRow) -> None:
        """Delete the result of a task, and the task if it has ended; one that goes on (an interval, a dead queue) stays."""

    @abc.abstractmethod
    def expired_keys(self, now_us: int, limit: int) -> list[tuple[str, str]]:
        """Queue and key of the keys whose time is over and whose task has ended or is gone."""

    @abc.abstractmethod
    def queue_rows(self) -> Iterable[QueueRow]: ...
    @abc.abstractmethod
    def lane_rows(self, queue: str | None = None) -> Iterable[Lane]: ...
    @abc.abstractmethod
    def delete_lane(self, lane: Lane) -> None: ...
    @abc.abstractmethod
    def worker_rows(self) -> Iterable[WorkerInfo]: ...
    @abc.abstractmethod
    def fan_in_rows(self) -> Iterable[tuple[str, FanIn]]: ...
    @abc.abstractmethod
    def run_rows(self) -> Iterable[StagedRun]: ...
    @abc.abstractmethod
    def delete_run(self, run: StagedRun) -> None: ...
    @abc.abstractmethod
    def event_span(self) -> tuple[int, int]:
        """The number of the first event that is kept, and of the last one that there was."""

    @abc.abstractmethod
    def events(self, after: int, limit: int, upto: int | None = None) -> list[EventRow]: ...
    @abc.abstractmethod
    def events_of(self, id: str) -> list[EventRow]: ...
    @abc.abstractmethod
    def drop_events(self, upto: int) -> None:
        """Delete events up to this number. Also called when there are none, so that a driver can tidy up behind them."""
