"""What the state machine asks of a driver: rows to load and to save, inside one atomic section."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from omniq.models import Record, State, StoredResult
from omniq.operations import Enqueue, RunInfo, RunState, WorkerInfo


class QueueRow(msgspec.Struct):
    """What a driver keeps per queue. `groups_turn`: whose turn is the next grant."""

    queue: str
    paused: bool = False
    has_groups: bool = False
    groups_turn: bool = True
    fed: bool = False


class Lane(msgspec.Struct):
    """A group of a queue. `members` counts its tasks that have not ended.

    `turn` is its place among open lanes. While it has no members but a limit, `turn` may be the moment since which that is
    known, as a negative number.
    """

    queue: str
    group: str
    limit: int = 0
    ready: int = 0
    inflight: int = 0
    members: int = 0
    turn: int = 0

    @property
    def open(self) -> bool:
        return self.ready > 0 and self.inflight < (self.limit or 1)

    def wake(self) -> None:
        """It is used again: from its next rest on it keeps its limit as long as others do."""
        self.turn = max(self.turn, 0)


def resting(lanes: Iterable[Lane], limits_us: int | None, now_us: int, limit: int) -> tuple[list[Lane], list[Lane]]:
    """Of the lanes without members: those of which it is known only now, marked, and those whose limit is over or absent."""
    news: list[Lane] = []
    over: list[Lane] = []
    for lane in lanes:
        if lane.members:
            continue
        if lane.limit == 0 or (limits_us is not None and lane.turn < 0 and -lane.turn <= now_us - limits_us):
            over.append(lane)
        elif lane.turn >= 0:
            news.append(msgspec.structs.replace(lane, turn=-now_us))
        if len(news) + len(over) >= limit:
            break
    return news, over


class Key(msgspec.Struct):
    """An idempotency key and the task that it stands for."""

    task_id: str
    fingerprint: str
    expires_us: int


class FanIn(msgspec.Struct):
    """Members to be counted under a key; at 0 it stays as a marker until it expires."""

    expected: int
    left: int
    expires_us: int


class Run(msgspec.Struct):
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


class Ledger(Protocol):
    """The reads and writes that the machine asks of a driver. All inside one atomic section, by one thread at a time."""

    events_on: bool

    def queue(self, queue: str) -> QueueRow: ...
    def save_queue(self, row: QueueRow) -> None: ...
    def load(self, id: str) -> Record | None: ...
    def insert(self, task: Record) -> None: ...
    def insert_plain(self, op: Enqueue, now_us: int) -> bool:
        """Insert a READY task that uses nothing beyond a call, with its event, without making a record; False: not here."""
        ...

    def save(self, task: Record, was: State, was_queue: str) -> None: ...
    def save_leased(self, tasks: Sequence[Record], now_us: int) -> None:
        """Save READY tasks without groups that one `Reserve` leased at this moment, with an event each."""
        ...

    def end_plain(self, task: Record, now_us: int) -> bool:
        """Save that a running task without a group is DONE now, with an empty result and its event; False: not here.

        The record itself is changed by the caller, who has not touched it yet.
        """
        ...

    def delete(self, task: Record) -> None: ...
    def held(self, token: str) -> list[Record]: ...
    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]: ...
    def due(self, queue: str, now_us: int, limit: int) -> list[Record]: ...
    def next_at(self, queues: Sequence[str], now_us: int) -> int | None: ...
    def lane(self, queue: str, group: str) -> Lane: ...
    def save_lane(self, lane: Lane) -> None: ...
    def open_lane(self, queue: str) -> Lane | None: ...
    def next_turn(self) -> int: ...
    def key(self, queue: str, key: str) -> Key | None: ...
    def save_key(self, queue: str, key: str, value: Key) -> None: ...
    def delete_key(self, queue: str, key: str) -> None: ...
    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None: ...
    def delete_result(self, task: Record) -> None: ...
    def block(self, blocker: Record, dependent: Record) -> None: ...
    def dependents(self, blocker_id: str, limit: int) -> list[Record]: ...
    def unblock(self, blocker_id: str, dependent: Record) -> None: ...
    def defer(self, blocker_id: str, dead: bool) -> None: ...
    def deferred(self, limit: int) -> list[tuple[str, bool]]: ...
    def undefer(self, blocker_id: str) -> None: ...
    def event(self, task: Record, event: str, now_us: int, data: bytes | None) -> None: ...
    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None: ...
    def fan_in(self, key: str) -> FanIn | None: ...
    def save_fan_in(self, key: str, value: FanIn) -> None: ...
    def delete_fan_in(self, key: str) -> None: ...
    def counted(self, key: str, member: str) -> int | None:
        """The answer that a member of a fan-in got; None before it is counted."""
        ...

    def count(self, key: str, member: str, left: int) -> None: ...
    def run(self, queue: str, run_id: str) -> Run | None: ...
    def save_run(self, run: Run) -> None: ...
    def unsettled(self, now_us: int, limit: int) -> list[Run]:
        """Runs that ended with tasks left, and open ones whose time is over."""
        ...

    def staged(self, run: Run, limit: int) -> list[Record]:
        """Staged tasks that carry the run's id or that it claims."""
        ...

    def foresee(self, queue: str, tasks: Sequence[Enqueue]) -> None:
        """These will be looked for, by id and by key: a driver may fetch them in one go."""
        ...

    def stage_plain(self, op: Enqueue, run: Run, now_us: int) -> bool:
        """Insert a staged task that uses nothing beyond a call and a key, without making a record; False: not here."""
        ...

    def release_plain(self, run: Run, now_us: int, limit: int) -> int:
        """Make staged tasks ready that need nothing beyond that, with their events; how many. The machine does the others."""
        ...

    def claim(self, task: Record, run_id: str) -> None: ...
    def claims(self, task: Record) -> list[str]:
        """The runs that claim a staged task, besides the one whose id it carries."""
        ...

    def unclaim(self, task: Record, run_id: str) -> None: ...
