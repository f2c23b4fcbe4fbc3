"""The index of a file store, which saves reading it: where each task stands, and in which order tasks are due.

The index is made from the folder's lines and can always be made again. Entries are never changed, only replaced, so that
whatever still refers to an old one (a place in a line-up) sees at once that it no longer holds, and a commit that failed is
undone by putting the old ones back. Whatever joins an order first drops those at its head that no longer hold: a process that
only enqueues never takes anything out, and would remember every task that others ever ran.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from omniq.models import State
from omniq.operations import WorkerInfo
from omniq.storage.file.lines import KeyLine, LineGlimpse
from omniq.storage.ledger import FanIn, Lane, QueueRow, StagedRun


# No cycles, so the garbage collector passes these classes by (`gc=False`): there may be a million entries. `eq=False`: two
# entries with the same values are not the same, since one of them no longer holds.
class Segment(msgspec.Struct, gc=False, eq=False):
    """A file of lines. `size` is what is committed, `live` the bytes in it that still hold."""

    path: str
    table: str
    number: int
    size: int = 0
    live: int = 0


class Place(msgspec.Struct, frozen=True, gc=False):
    """The place of a line, its newline included."""

    segment: Segment
    offset: int
    length: int


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A result: its place, and the moment when it expires."""

    place: Place
    expires_us: int | None
    finished_at_us: int


class Entry(msgspec.Struct, gc=False, eq=False):
    """A task. The first three fields are its place in the order of grants: those given back first, then by time and age."""

    fresh: bool
    due_us: int
    seq: int
    id: str
    queue: str
    group: str | None
    state: State
    token: str | None
    worker: str | None
    lease_until_us: int | None
    finished_at_us: int | None
    waits_for: tuple[str, ...]
    place: Place | None = None  # None until the commit that makes it chooses one
    kept: Kept | None = None
    run_id: str | None = None  # of a staged task


class Lineup:
    """Entries in their order. Most arrive in order and wait in a plain queue, the others in a heap beside it."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries
        self._line: deque[Entry] = deque()
        self._heap: list[tuple[bool, int, int, int, Entry]] = []
        self._pushed = 0

    @property
    def remembered(self) -> int:
        """How many entries it keeps, those that no longer hold included."""
        return len(self._line) + len(self._heap)

    def push(self, entry: Entry) -> None:
        self.first()
        line = self._line
        if line:
            last = line[-1]
            if (entry.fresh, entry.due_us, entry.seq) < (last.fresh, last.due_us, last.seq):
                self._pushed += 1  # two entries of one task may have the same place
                heapq.heappush(self._heap, (entry.fresh, entry.due_us, entry.seq, self._pushed, entry))
                return
        line.append(entry)

    def first(self) -> Entry | None:
        """Returns the first entry that still holds, and forgets those before it."""
        line, heap, entries = self._line, self._heap, self._entries
        while line and entries.get(line[0].id) is not line[0]:
            line.popleft()
        while heap and entries.get(heap[0][4].id) is not heap[0][4]:
            heapq.heappop(heap)
        if not heap:
            return line[0] if line else None
        if line and (line[0].fresh, line[0].due_us, line[0].seq) < heap[0][:3]:
            return line[0]
        return heap[0][4]

    def pop(self) -> Entry | None:
        entry = self.first()
        if entry is not None:
            if self._line and self._line[0] is entry:
                self._line.popleft()
            else:
                heapq.heappop(self._heap)
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """Yields all entries that still hold, in no order."""
        for entry in itertools.chain(self._line, (item[4] for item in self._heap)):
            if self._entries.get(entry.id) is entry:
                yield entry

    def until(self, moment_us: int, limit: int) -> list[Entry]:
        """Returns up to about `limit` entries that are due by then, in no order. Looks at no others."""
        found: list[Entry] = []
        for entry in self._line:
            if entry.due_us > moment_us or len(found) >= limit:
                break
            if self._entries.get(entry.id) is entry:
                found.append(entry)
        # A heap is a tree whose children come later than their parent: below a node that is not due nothing is.
        look = [0]
        while look and len(found) < limit:
            at = look.pop()
            if at < len(self._heap) and self._heap[at][1] <= moment_us:
                entry = self._heap[at][4]
                if self._entries.get(entry.id) is entry:
                    found.append(entry)
                look += (2 * at + 1, 2 * at + 2)
        return found


class Counters(msgspec.Struct, kw_only=True):
    """Numbers that only grow."""

    seq: int = 0
    turn: int = 0
    ids: int = 0
    event: int = 0  # the last event's number
    first_event: int = 1  # the first that is still kept
    segment: int = 0  # the last number of a file; never used again


class KeyEntry(msgspec.Struct, frozen=True, gc=False):
    """The line of an idempotency key, and its place."""

    line: KeyLine
    place: Place | None = None


class Index:
    """The tables of a store, by name, and the orders made from them."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}  # in the order of `seq`
        self.queues: dict[str, QueueRow] = {}
        self.lanes: dict[str, dict[str, Lane]] = {}
        self.keys: dict[tuple[str, str], KeyEntry] = {}
        self.deferrals: dict[str, bool] = {}
        self.workers: dict[str, WorkerInfo] = {}
        self.fan_ins: dict[str, FanIn] = {}
        self.members: dict[str, dict[str, int]] = {}  # of a fan-in: what each was told
        self.counters = Counters()
        self.running: dict[str, Entry] = {}
        self.blocks: dict[str, dict[str, None]] = {}  # blocker → those who wait for it
        self._counts: dict[str, list[int]] = {}
        self._ready: dict[tuple[str, str | None], Lineup] = {}
        self._scheduled: dict[str, Lineup] = {}
        self._open: dict[str, list[tuple[int, str]]] = {}
        self._leases: dict[str, list[tuple[int, str]]] = {}  # by queue: when they end, and of which task
        self._expiring: list[tuple[int, str]] = []
        self._expiring_keys: list[tuple[int, tuple[str, str]]] = []
        self.dead: dict[str, Entry] = {}
        self.runs: dict[tuple[str, str], StagedRun] = {}
        self.claims: dict[str, tuple[str, ...]] = {}  # of a staged task: the runs that claim it besides its own
        self._staged: dict[tuple[str, str], dict[str, None]] = {}
        self._unsorted: set[tuple[str, str]] = set()  # runs whose tasks are not in the order of `seq`

    @property
    def remembered(self) -> int:
        """How many places its orders keep, those that no longer hold included."""
        lineups = [*self._ready.values(), *self._scheduled.values()]
        heaps = [self._expiring, self._expiring_keys, *self._open.values(), *self._leases.values()]
        return sum(lineup.remembered for lineup in lineups) + sum(map(len, heaps))

    # -- tasks -------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Add a task, or replace it."""
        old = self.entries.get(entry.id)
        if old is not None:
            self._leave(old)
        self.entries[entry.id] = entry
        self._join(entry)

    def remove(self, id: str) -> None:
        old = self.entries.pop(id, None)
        if old is not None:
            self._leave(old)

    def _join(self, entry: Entry) -> None:
        counts = self._counts.get(entry.queue)
        if counts is None:
            counts = self._counts[entry.queue] = [0] * (max(State) + 1)
        counts[entry.state] += 1
        if entry.state is State.READY:
            place = (entry.queue, entry.group)
            lineup = self._ready.get(place)
            if lineup is None:
                lineup = self._ready[place] = Lineup(self.entries)
            lineup.push(entry)
        elif entry.state is State.SCHEDULED:
            if entry.queue not in self._scheduled:
                self._scheduled[entry.queue] = Lineup(self.entries)
            self._scheduled[entry.queue].push(entry)
        elif entry.state is State.RUNNING:
            self.running[entry.id] = entry
            self.next_lease(entry.queue)
            heapq.heappush(self._leases.setdefault(entry.queue, []), (entry.lease_until_us or 0, entry.id))
        elif entry.state is State.DEAD:
            self.dead[entry.id] = entry
        elif entry.state is State.STAGED and entry.run_id is not None:
            self._stage((entry.queue, entry.run_id), entry.id)
        for blocker in entry.waits_for:
            self.blocks.setdefault(blocker, {})[entry.id] = None
        if entry.kept is not None:
            self._expire(entry.id, entry.kept)

    def _leave(self, entry: Entry) -> None:
        self._counts[entry.queue][entry.state] -= 1
        if entry.state is State.RUNNING:
            del self.running[entry.id]
        elif entry.state is State.DEAD:
            del self.dead[entry.id]
        elif entry.state is State.STAGED and entry.run_id is not None:
            self._unstage((entry.queue, entry.run_id), entry.id)
        for blocker in entry.waits_for:
            waiting = self.blocks.get(blocker)
            if waiting is not None:
                waiting.pop(entry.id, None)
                if not waiting:
                    del self.blocks[blocker]

    def keep(self, entry: Entry, kept: Kept | None) -> None:
        """Note the result of a task, or with None that it has none."""
        entry.kept = kept
        if kept is not None:
            self._expire(entry.id, kept)

    def _expire(self, id: str, kept: Kept) -> None:
        while self._expiring and not self._expires(*self._expiring[0]):
            heapq.heappop(self._expiring)
        if kept.expires_us is not None:
            heapq.heappush(self._expiring, (kept.expires_us, id))

    def _expires(self, moment_us: int, id: str) -> bool:
        entry = self.entries.get(id)
        return entry is not None and entry.kept is not None and entry.kept.expires_us == moment_us

    def sort(self) -> None:
        """Put the entries back into the order of `seq`, in place: the line-ups hold on to this very dictionary."""
        ordered = sorted(self.entries.values(), key=lambda entry: entry.seq)
        self.entries.clear()
        self.entries.update((entry.id, entry) for entry in ordered)

    def count(self, queue: str, state: State) -> int:
        return self._counts[queue][state] if queue in self._counts else 0

    def ready(self, queue: str, group: str | None) -> Lineup | None:
        return self._ready.get((queue, group))

    def scheduled(self, queue: str) -> Lineup | None:
        return self._scheduled.get(queue)

    def in_state(self, state: State, queue: str | None) -> list[Entry]:
        """Returns the tasks in a state: all of them, unless they came without a result from another store."""
        match state:
            case State.STAGED:
                found = [self.entries[id] for tasks in self._staged.values() for id in tasks]
            case State.BLOCKED:
                found = [self.entries[id] for waiting in self.blocks.values() for id in waiting]
            case State.SCHEDULED:
                found = [e for name, lineup in self._scheduled.items() if queue in (None, name) for e in lineup]
            case State.READY:
                found = [e for (name, _), lineup in self._ready.items() if queue in (None, name) for e in lineup]
            case State.RUNNING:
                found = list(self.running.values())
            case State.DEAD:
                found = list(self.dead.values())
            case _:
                # Ended tasks have no order of their own, but those with a result are in the one by which results expire.
                found = [self.entries[id] for _, id in self._expiring if id in self.entries]
        return [e for e in found if e.state is state and queue in (None, e.queue)]

    def next_lease(self, queue: str) -> int | None:
        """Returns the moment when the first lease of a queue ends."""
        heap = self._leases.get(queue, [])
        while heap:
            moment, id = heap[0]
            entry = self.running.get(id)
            if entry is not None and entry.queue == queue and (entry.lease_until_us or 0) == moment:
                return moment
            heapq.heappop(heap)
        return None

    def heads(self, queue: str) -> Iterator[Entry]:
        """Yields the first ready task of each lane of a queue."""
        lineups = [self._ready.get((queue, None)), *(self._ready.get((queue, g)) for g in self.lanes.get(queue, ()))]
        for lineup in lineups:
            head = lineup.first() if lineup is not None else None
            if head is not None:
                yield head

    def expired_results(self, now_us: int, limit: int) -> list[Entry]:
        found: dict[str, Entry] = {}
        while self._expiring and self._expiring[0][0] <= now_us and len(found) < limit:
            moment, id = heapq.heappop(self._expiring)
            if self._expires(moment, id):
                found[id] = self.entries[id]
        return list(found.values())

    # -- keys --------------------------------------------------------------------------------------

    def put_key(self, key: KeyEntry) -> None:
        place = (key.line.queue, key.line.key)
        while self._expiring_keys and not self._key_expires(*self._expiring_keys[0]):
            heapq.heappop(self._expiring_keys)
        self.keys[place] = key
        heapq.heappush(self._expiring_keys, (key.line.expires_us, place))

    def _key_expires(self, moment_us: int, place: tuple[str, str]) -> bool:
        key = self.keys.get(place)
        return key is not None and key.line.expires_us <= moment_us

    def expired_keys(self, now_us: int, limit: int) -> list[tuple[str, str]]:
        """Returns keys whose time is over and whose task has ended. The others are asked about again later."""
        found: dict[tuple[str, str], None] = {}
        alive: list[tuple[int, tuple[str, str]]] = []
        while self._expiring_keys and self._expiring_keys[0][0] <= now_us and len(found) < limit:
            moment, place = heapq.heappop(self._expiring_keys)
            if not self._key_expires(moment, place):
                continue
            entry = self.entries.get(self.keys[place].line.task_id)
            if entry is None or entry.state.final:
                found[place] = None
            else:
                alive.append((moment, place))
        for item in alive:
            heapq.heappush(self._expiring_keys, item)
        return list(found)

    # -- staged runs -------------------------------------------------------------------------------

    def put_claims(self, id: str, queue: str, runs: tuple[str, ...]) -> None:
        entry, before = self.entries.get(id), self.claims.pop(id, ())
        for run_id in before:
            if entry is None or entry.run_id != run_id:  # it may have become the task's own by now
                self._unstage((queue, run_id), id)
        if runs:
            self.claims[id] = runs
        for run_id in runs:
            self._stage((queue, run_id), id)

    def forget_lost_claims(self) -> None:
        """Drop the claims of tasks that could not be read."""
        lost = {id for id in self.claims if id not in self.entries or self.entries[id].state is not State.STAGED}
        for id in lost:
            del self.claims[id]
        for run in [run for run, tasks in self._staged.items() if not lost.isdisjoint(tasks)]:
            for id in lost:
                self._unstage(run, id)

    def _stage(self, run: tuple[str, str], id: str) -> None:
        tasks = self._staged.setdefault(run, {})
        last, entry = self.entries.get(next(reversed(tasks), id)), self.entries.get(id)
        if last is None or entry is None or last.seq > entry.seq:
            self._unsorted.add(run)
        tasks[id] = None

    def _unstage(self, run: tuple[str, str], id: str) -> None:
        tasks = self._staged.get(run, {})
        tasks.pop(id, None)
        if not tasks:
            self._staged.pop(run, None)
            self._unsorted.discard(run)

    def staged(self, run: StagedRun, limit: int) -> list[Entry]:
        """Returns staged tasks that carry the run's id or that it claims, oldest first."""
        place = (run.queue, run.run_id)
        if place in self._unsorted:
            self._unsorted.discard(place)
            self._staged[place] = dict.fromkeys(sorted(self._staged[place], key=lambda id: self.entries[id].seq))
        return [self.entries[id] for id in itertools.islice(self._staged.get(place, ()), limit)]

    # -- lanes -------------------------------------------------------------------------------------

    def lane(self, queue: str, group: str) -> Lane | None:
        return self.lanes.get(queue, {}).get(group)

    def put_lane(self, lane: Lane) -> None:
        self.lanes.setdefault(lane.queue, {})[lane.group] = lane
        # For its tidying only, as in every order that something joins.
        self.open_lane(lane.queue)
        if lane.open:
            heapq.heappush(self._open.setdefault(lane.queue, []), (lane.turn, lane.group))

    def remove_lane(self, queue: str, group: str) -> None:
        self.lanes.get(queue, {}).pop(group, None)
        self._ready.pop((queue, group), None)

    def open_lane(self, queue: str) -> Lane | None:
        """Returns the lane whose turn it is."""
        heap = self._open.get(queue, [])
        while heap:
            turn, group = heap[0]
            lane = self.lane(queue, group)
            if lane is not None and lane.open and lane.turn == turn:
                return lane
            heapq.heappop(heap)
        return None


def entry_of(glimpse: LineGlimpse, place: Place, kept: Kept | None) -> Entry:
    task = glimpse.task
    assert task is not None
    return Entry(
        not task.returned,
        task.due_us,
        task.seq,
        task.id,
        sys.intern(task.queue),  # a million tasks share a few names
        task.group if task.group is None else sys.intern(task.group),
        task.state,
        task.token,
        task.worker,
        task.lease_until_us,
        task.finished_at_us,
        glimpse.waits_for,
        place,
        kept,
        task.run_id if task.state is State.STAGED else None,
    )


def replaced(entry: Entry, **changes: Any) -> Entry:
    return msgspec.structs.replace(entry, **changes)


def merged(places: Sequence[Place]) -> list[tuple[Segment, int, int]]:
    """Returns places as stretches, neighbours as one."""
    stretches: list[tuple[Segment, int, int]] = []
    for place in sorted(places, key=lambda p: (p.segment.path, p.offset)):
        if stretches and stretches[-1][0] is place.segment and sum(stretches[-1][1:]) == place.offset:
            segment, offset, length = stretches[-1]
            stretches[-1] = (segment, offset, length + place.length)
        else:
            stretches.append((place.segment, place.offset, place.length))
    return stretches
