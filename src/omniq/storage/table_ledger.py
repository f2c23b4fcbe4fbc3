"""A ledger over tables that are dictionaries in memory, with the orders that the machine asks for made from them.

What is in the tables is all that has to be kept; the orders follow from it. So a driver that keeps rows elsewhere too gives
tables that note what is set and deleted, and at its opening tables that are full (`docs/how-to/write-a-driver.md` does). A row
that was changed in place is set anew.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast, get_args, get_origin, get_type_hints

import msgspec

from omniq.models import Record, State, StoredResult
from omniq.operations import EventRow, WorkerInfo
from omniq.storage.ledger import FanIn, Key, Lane, QueueRow, StagedRun, TaskRow, WholeLedger


class _Heap:
    """Records in the order of a sort key; entries that no longer hold are dropped when they surface."""

    def __init__(self, holds: Callable[[Record], tuple[Any, ...] | None]) -> None:
        self._entries: list[tuple[tuple[Any, ...], int, Record]] = []
        self._holds = holds

    def push(self, task: Record) -> None:
        key = self._holds(task)
        assert key is not None
        heapq.heappush(self._entries, (key, task.seq, task))

    def records(self) -> Iterable[Record]:
        # By `seq`, since a task that came back to its old place has two entries.
        return {task.seq: task for key, _, task in self._entries if self._holds(task) == key}.values()

    def peek(self) -> Record | None:
        while self._entries:
            key, _, task = self._entries[0]
            if self._holds(task) == key:
                return task
            heapq.heappop(self._entries)
        return None

    def pop(self) -> Record | None:
        """The first record, once: one that came back to where it was before has two entries, which lie side by side."""
        task = self.peek()
        if task is not None:
            place = heapq.heappop(self._entries)[:2]
            while self._entries and self._entries[0][:2] == place:
                heapq.heappop(self._entries)
        return task


class TableLedger(WholeLedger):
    """`tables` are those of a store that is opened again, by the names of `TABLES`."""

    tasks: dict[str, Record]
    results: dict[str, tuple[StoredResult, int | None]]  # with the moment when its time is over
    queues: dict[str, QueueRow]
    lanes: dict[tuple[str, str], Lane]
    keys: dict[tuple[str, str], Key]
    blocks: dict[tuple[str, str], None]  # the ids of a blocker and of a task that waits for it
    deferrals: dict[str, bool]
    workers: dict[str, WorkerInfo]
    fan_ins: dict[str, FanIn]
    members: dict[str, dict[str, int]]  # by the key of their fan-in: the answer that each got
    runs: dict[tuple[str, str], StagedRun]
    claim_rows: dict[str, tuple[str, ...]]  # by the id of a staged task: the runs that claim it besides its own
    log: dict[int, EventRow]
    numbers: dict[str, int]  # the last seq, turn, id and event that were given, and the last event that is gone

    def __init__(self, events_on: bool, tables: Mapping[str, dict[Any, Any]] | None = None) -> None:
        self.events_on = events_on
        for name in TABLES:
            setattr(self, name, {} if tables is None else tables[name])
        for name in ("seq", "turn", "id", "event", "gone"):
            self.numbers.setdefault(name, 0)
        self._counters: dict[str, Counter[State]] = defaultdict(Counter)
        self._ready: dict[tuple[str, str | None], _Heap] = {}
        self._scheduled: dict[str, _Heap] = {}
        self._running: dict[str, Record] = {}
        self._staged: dict[tuple[str, str], dict[str, Record]] = defaultdict(dict)
        self._waiting: dict[str, dict[str, Record]] = {}  # by blocker
        self._open: dict[str, list[tuple[int, str]]] = defaultdict(list)
        if tables is not None:
            self._put_in_order()

    def _put_in_order(self) -> None:
        # Pages of `find` and of bulk readers follow `seq`, and a store that was opened may give its rows in any order.
        by_age = sorted(self.tasks.values(), key=lambda task: task.seq)
        self.tasks.clear()
        self.tasks.update((task.id, task) for task in by_age)
        for task in self.tasks.values():
            self._counters[task.queue][task.state] += 1
            self._index(task)
        for id, runs in self.claim_rows.items():
            for run_id in runs:
                self._staged[self.tasks[id].queue, run_id][id] = self.tasks[id]
        for blocker, dependent in self.blocks:
            self._waiting.setdefault(blocker, {})[dependent] = self.tasks[dependent]
        for lane in self.lanes.values():
            if lane.open:
                heapq.heappush(self._open[lane.queue], (lane.turn, lane.group))

    # -- tasks -------------------------------------------------------------------------------------

    def load(self, id: str) -> Record | None:
        return self.tasks.get(id)

    def insert(self, task: Record) -> None:
        self.numbers["seq"] += 1
        task.seq = self.numbers["seq"]
        self.tasks[task.id] = task
        self._counters[task.queue][task.state] += 1
        self._index(task)

    def save(self, task: Record, was: State, was_queue: str) -> None:
        # Set although it is the same object: a table that keeps its rows elsewhere too learns of the change only by that.
        self.tasks[task.id] = task
        if was is not task.state or was_queue != task.queue:
            self._counters[was_queue][was] -= 1
            self._counters[task.queue][task.state] += 1
            if was is State.RUNNING:
                del self._running[task.id]
            elif was is State.STAGED:
                self._unstage(task)
        self._index(task)

    def delete(self, task: Record) -> None:
        self._counters[task.queue][task.state] -= 1
        if task.run_id is not None:
            self._unstage(task)
        del self.tasks[task.id]
        self._running.pop(task.id, None)
        task.seq = -1  # whatever still refers to it in a heap no longer holds

    def _unstage(self, task: Record) -> None:
        place = (task.queue, cast(str, task.run_id))
        if place in self._staged:
            self._staged[place].pop(task.id, None)

    # Nothing is searched for in a heap: an entry of a task that has moved on is dropped when it surfaces.

    def _index(self, task: Record) -> None:
        if task.state is State.READY:
            place = (task.queue, task.group)
            if place not in self._ready:
                self._ready[place] = _Heap(_ready_key(task.queue))
            self._ready[place].push(task)
        elif task.state is State.SCHEDULED:
            if task.queue not in self._scheduled:
                self._scheduled[task.queue] = _Heap(_scheduled_key(task.queue))
            self._scheduled[task.queue].push(task)
        elif task.state is State.RUNNING:
            self._running[task.id] = task
        elif task.state is State.STAGED:
            self._staged[task.queue, cast(str, task.run_id)][task.id] = task

    def held(self, token: str) -> list[Record]:
        return [t for t in self._running.values() if t.token == token]

    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        heap = self._ready.get((queue, group))
        found: list[Record] = []
        while heap is not None and len(found) < limit:
            task = heap.pop()
            if task is None:
                break
            found.append(task)
        return found

    def due(self, queue: str, now_us: int, limit: int) -> list[Record]:
        heap = self._scheduled.get(queue)
        found: list[Record] = []
        while heap is not None and len(found) < limit:
            task = heap.peek()
            if task is None or task.due_us > now_us:
                break
            found.append(task)
            heap.pop()
        return found

    def next_at(self, queues: Sequence[str], now_us: int) -> int | None:
        wanted = set(queues)
        moments = [t.lease_until_us or now_us for t in self._running.values() if t.queue in wanted]
        for queue in wanted:
            heap = self._scheduled.get(queue)
            task = heap.peek() if heap is not None else None
            if task is not None:
                moments.append(task.due_us)
        return min(moments, default=None)

    def task_row(self, id: str) -> Record | None:
        return self.tasks.get(id)

    def task_rows(self) -> Collection[Record]:
        return self.tasks.values()

    def in_state(self, state: State, queue: str | None) -> list[Record]:
        match state:
            case State.STAGED:
                found = [t for tasks in self._staged.values() for t in tasks.values()]
            case State.BLOCKED:
                found = [t for tasks in self._waiting.values() for t in tasks.values()]
            case State.SCHEDULED:
                found = [t for name, heap in self._scheduled.items() if queue in (None, name) for t in heap.records()]
            case State.READY:
                found = [t for (name, _), heap in self._ready.items() if queue in (None, name) for t in heap.records()]
            case State.RUNNING:
                found = self._running.values()
            case State.DEAD:
                found = self.tasks.values()
            case _:
                found = [self.tasks[id] for id in self.results]
        return [t for t in found if t.state is state and queue in (None, t.queue)]

    def number(self, queue: str, state: State) -> int:
        return self._counters[queue][state]

    def late(self, queue: str, now_us: int) -> list[int]:
        heap = self._scheduled.get(queue)
        return [] if heap is None else [t.due_us for t in heap.records() if t.due_us <= now_us]

    def heads(self, queue: str) -> list[int]:
        heads = [heap.peek() for (name, _), heap in self._ready.items() if name == queue]
        return [task.due_us for task in heads if task is not None]

    def record(self, row: TaskRow) -> Record:
        return copy.copy(cast(Record, row))

    # -- queues and lanes --------------------------------------------------------------------------

    def queue(self, queue: str) -> QueueRow:
        return self.queues.get(queue) or QueueRow(queue)

    def save_queue(self, row: QueueRow) -> None:
        self.queues[row.queue] = row

    def queue_rows(self) -> Iterable[QueueRow]:
        return self.queues.values()

    def lane(self, queue: str, group: str) -> Lane:
        return self.lanes.get((queue, group)) or Lane(queue, group)

    def save_lane(self, lane: Lane) -> None:
        self.lanes[lane.queue, lane.group] = lane
        if lane.open:
            heapq.heappush(self._open[lane.queue], (lane.turn, lane.group))

    def lane_rows(self, queue: str | None = None) -> list[Lane]:
        return [lane for lane in self.lanes.values() if queue in (None, lane.queue)]

    def delete_lane(self, lane: Lane) -> None:
        del self.lanes[lane.queue, lane.group]
        # Groups come by the thousand, and an empty order for each would stay for ever.
        self._ready.pop((lane.queue, lane.group), None)

    def open_lane(self, queue: str) -> Lane | None:
        heap = self._open[queue]
        while heap:
            turn, group = heap[0]
            lane = self.lanes.get((queue, group))
            if lane is not None and lane.open and lane.turn == turn:
                return lane
            heapq.heappop(heap)
        return None

    def next_turn(self) -> int:
        self.numbers["turn"] += 1
        return self.numbers["turn"]

    # -- keys, results, dependents -----------------------------------------------------------------

    def key(self, queue: str, key: str) -> Key | None:
        return self.keys.get((queue, key))

    def save_key(self, queue: str, key: str, value: Key) -> None:
        self.keys[queue, key] = value

    def delete_key(self, queue: str, key: str) -> None:
        _delete(self.keys, (queue, key))

    def expired_keys(self, now_us: int, limit: int) -> list[tuple[str, str]]:
        over = (place for place, key in self.keys.items() if key.expires_us <= now_us and self._has_ended(key.task_id))
        return list(itertools.islice(over, limit))

    def _has_ended(self, id: str) -> bool:
        task = self.tasks.get(id)
        return task is None or task.state.final

    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None:
        self.results[task.id] = (result, expires_us)

    def delete_result(self, task: Record) -> None:
        _delete(self.results, task.id)

    def result(self, id: str) -> StoredResult | None:
        return copy.copy(self.results[id][0]) if id in self.results else None

    def expired_results(self, now_us: int, limit: int) -> list[Record]:
        over = (self.tasks[id] for id, (_, expires) in self.results.items() if expires is not None and expires <= now_us)
        return list(itertools.islice(over, limit))

    def results_before(self, finished_us: int) -> list[Record]:
        return [self.tasks[id] for id, (result, _) in self.results.items() if result.finished_at_us < finished_us]

    def forget(self, row: TaskRow) -> None:
        task = cast(Record, row)
        self.delete_result(task)
        if task.state.final:
            self.delete(task)

    def block(self, blocker: Record, dependent: Record) -> None:
        blocker.has_dependents = True
        self.tasks[blocker.id] = blocker
        self.blocks[blocker.id, dependent.id] = None
        self._waiting.setdefault(blocker.id, {})[dependent.id] = dependent

    def dependents(self, blocker_id: str, limit: int) -> list[Record]:
        return list(itertools.islice(self._waiting.get(blocker_id, {}).values(), limit))

    def unblock(self, blocker_id: str, dependent: Record) -> None:
        waiting = self._waiting.get(blocker_id, {})
        if dependent.id in waiting:
            del waiting[dependent.id], self.blocks[blocker_id, dependent.id]
            if not waiting:
                del self._waiting[blocker_id]

    def defer(self, blocker_id: str, dead: bool) -> None:
        self.deferrals[blocker_id] = dead

    def deferred(self, limit: int) -> list[tuple[str, bool]]:
        return list(itertools.islice(self.deferrals.items(), limit))

    def undefer(self, blocker_id: str) -> None:
        _delete(self.deferrals, blocker_id)

    # -- events, workers, fan-ins ------------------------------------------------------------------

    def event(self, task: Record, event: str, now_us: int, data: bytes | None) -> None:
        self.numbers["event"] += 1
        seq = self.numbers["event"]
        self.log[seq] = EventRow(
            seq=seq,
            ts_us=now_us,
            event=event,
            task_id=task.id,
            queue=task.queue,
            name=task.name,
            group=task.group,
            attempt=task.attempts,
            worker=task.worker,
            enqueued_at_us=task.created_at_us,
            due_us=task.due_us,
            state=task.state,
            data=data,
        )

    def event_span(self) -> tuple[int, int]:
        return self.numbers["gone"] + 1, self.numbers["event"]

    def events(self, after: int, limit: int, upto: int | None = None) -> list[EventRow]:
        last = min(after + limit, self.numbers["event"])
        return [self.log[seq] for seq in range(after + 1, (last if upto is None else min(last, upto)) + 1)]

    def events_of(self, id: str) -> list[EventRow]:
        return [event for event in self.log.values() if event.task_id == id]

    def drop_events(self, upto: int) -> None:
        first, _ = self.event_span()
        for seq in range(first, upto + 1):
            del self.log[seq]
        if upto >= first:
            self.numbers["gone"] = upto

    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None:
        if gone:
            _delete(self.workers, info.worker)
        else:
            self.workers[info.worker] = msgspec.structs.replace(info, seen_at_us=now_us)

    def worker_rows(self) -> Iterable[WorkerInfo]:
        return self.workers.values()

    def fan_in(self, key: str) -> FanIn | None:
        return self.fan_ins.get(key)

    def save_fan_in(self, key: str, value: FanIn) -> None:
        self.fan_ins[key] = value

    def delete_fan_in(self, key: str) -> None:
        _delete(self.fan_ins, key)
        _delete(self.members, key)

    def counted(self, key: str, member: str) -> int | None:
        return self.members.get(key, {}).get(member)

    def count(self, key: str, member: str, left: int) -> None:
        # Fetched, changed and set anew, for the same reason as in `save`.
        members = self.members.get(key, {})
        members[member] = left
        self.members[key] = members

    def fan_in_rows(self) -> Iterable[tuple[str, FanIn]]:
        return self.fan_ins.items()

    def allocate(self, n: int) -> int:
        self.numbers["id"] += n
        return self.numbers["id"] - n + 1

    # -- staged runs -------------------------------------------------------------------------------

    def run(self, queue: str, run_id: str) -> StagedRun | None:
        return self.runs.get((queue, run_id))

    def save_run(self, run: StagedRun) -> None:
        self.runs[run.queue, run.run_id] = run

    def run_rows(self) -> Iterable[StagedRun]:
        return self.runs.values()

    def delete_run(self, run: StagedRun) -> None:
        del self.runs[run.queue, run.run_id]
        self._staged.pop((run.queue, run.run_id), None)

    def unsettled(self, now_us: int, limit: int) -> list[StagedRun]:
        runs = (run for run in self.runs.values() if run.unsettled(now_us))
        return list(itertools.islice(runs, limit))

    def staged(self, run: StagedRun, limit: int) -> list[Record]:
        tasks = self._staged[run.queue, run.run_id]
        found: list[Record] = []
        # Tidied here and not when a task moves: `save` knows the run whose id a task carries, but not those that claim it.
        for id, task in list(tasks.items()):
            if task.state is not State.STAGED or (task.run_id != run.run_id and run.run_id not in self.claims(task)):
                del tasks[id]  # released, dropped or handed over to another run
            elif len(found) < limit:
                found.append(task)
            else:
                break
        return found

    def claim(self, task: Record, run_id: str) -> None:
        self.claim_rows[task.id] = (*self.claim_rows.get(task.id, ()), run_id)
        self._staged[task.queue, run_id][task.id] = task

    def claims(self, task: Record) -> list[str]:
        return list(self.claim_rows.get(task.id, ()))

    def unclaim(self, task: Record, run_id: str) -> None:
        left = tuple(known for known in self.claim_rows[task.id] if known != run_id)
        if left:
            self.claim_rows[task.id] = left
        else:
            del self.claim_rows[task.id]
        if task.run_id != run_id:
            self._staged[task.queue, run_id].pop(task.id, None)


# The tables by name, with the types of their keys and rows.
TABLES: dict[str, tuple[Any, Any]] = {
    name: get_args(kind) for name, kind in get_type_hints(TableLedger).items() if get_origin(kind) is dict
}


def _ready_key(queue: str) -> Callable[[Record], tuple[Any, ...] | None]:
    def holds(task: Record) -> tuple[Any, ...] | None:
        if task.state is not State.READY or task.queue != queue or task.seq < 0:
            return None
        return (not task.returned, task.due_us)

    return holds


def _scheduled_key(queue: str) -> Callable[[Record], tuple[Any, ...] | None]:
    def holds(task: Record) -> tuple[Any, ...] | None:
        return (task.due_us,) if task.state is State.SCHEDULED and task.queue == queue and task.seq >= 0 else None

    return holds


def _delete(table: dict[Any, Any], key: Any) -> None:
    if key in table:
        del table[key]  # noqa: RUF051 - a table that keeps its rows elsewhere too has to note two ways to change, not three
