"""The whole contract in this process's memory: for tests, and for scripts that need no tomorrow."""

from __future__ import annotations

import copy
import heapq
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from omniq.errors import DriverClosed, EventsLost
from omniq.models import (
    MAX_AT_ONCE,
    Record,
    State,
    StoredResult,
    check_count,
    check_encodable,
    check_queue,
    check_text,
    new_id,
    now_us,
)
from omniq.operations import (
    KEY_TTL_US,
    Capabilities,
    Enqueue,
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    Page,
    QueueCounts,
    Retention,
    RunInfo,
    Saved,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.cursors import decode_cursor, encode_cursor, few
from omniq.storage.ledger import FanIn, Key, Lane, QueueRow, Run, resting
from omniq.storage.machine.machine import Machine
from omniq.storage.machine.restoring import restore_events, restore_tasks
from omniq.storage.machine.staged_runs import keep_until


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


class MemoryLedger:
    """The tables of `Machine` as dictionaries and heaps."""

    def __init__(self, events_on: bool) -> None:
        self.events_on = events_on
        self.tasks: dict[str, Record] = {}
        self.by_seq: dict[int, Record] = {}
        self.results: dict[str, tuple[StoredResult, int | None]] = {}
        self.queues: dict[str, QueueRow] = {}
        self.counters: dict[str, Counter[State]] = defaultdict(Counter)
        self.lanes: dict[str, dict[str, Lane]] = defaultdict(dict)
        self.keys: dict[tuple[str, str], Key] = {}
        self.blocks: dict[str, dict[int, Record]] = {}
        self.deferrals: dict[str, bool] = {}
        self.running: dict[str, Record] = {}
        self.log: list[EventRow] = []
        self.first_event = 1
        self.worker_rows: dict[str, WorkerInfo] = {}
        self.fan_ins: dict[str, FanIn] = {}
        self.members: dict[str, dict[str, int]] = defaultdict(dict)
        self.runs: dict[tuple[str, str], Run] = {}
        self.staged_tasks: dict[tuple[str, str], dict[str, Record]] = defaultdict(dict)
        self.claim_rows: dict[str, list[str]] = {}
        self.seq = self.turn = self.ids = 0
        self._ready: dict[tuple[str, str | None], _Heap] = {}
        self._scheduled: dict[str, _Heap] = {}
        self._open: dict[str, list[tuple[int, str]]] = defaultdict(list)

    # -- records -----------------------------------------------------------------------------------

    def load(self, id: str) -> Record | None:
        return self.tasks.get(id)

    def insert(self, task: Record) -> None:
        self.seq += 1
        task.seq = self.seq
        self.tasks[task.id] = self.by_seq[task.seq] = task
        self.counters[task.queue][task.state] += 1
        self._index(task)

    def insert_plain(self, op: Enqueue, now_us: int) -> bool:
        return False

    def end_plain(self, task: Record, now_us: int) -> bool:
        return False

    def save_leased(self, tasks: Sequence[Record], now_us: int) -> None:
        for task in tasks:
            self.save(task, State.READY, task.queue)
            if self.events_on:
                self.event(task, "started", now_us, None)

    def save(self, task: Record, was: State, was_queue: str) -> None:
        if was is not task.state or was_queue != task.queue:
            self.counters[was_queue][was] -= 1
            self.counters[task.queue][task.state] += 1
        self._index(task)

    def delete(self, task: Record) -> None:
        self.counters[task.queue][task.state] -= 1
        self._unstage(task)
        del self.tasks[task.id], self.by_seq[task.seq]
        self.running.pop(task.id, None)
        task.seq = -1  # whatever still refers to it in a heap no longer holds

    def _unstage(self, task: Record) -> None:
        if task.run_id is not None and (task.queue, task.run_id) in self.staged_tasks:
            self.staged_tasks[task.queue, task.run_id].pop(task.id, None)

    def _index(self, task: Record) -> None:
        if task.state is State.STAGED:
            self.staged_tasks[task.queue, cast(str, task.run_id)][task.id] = task
        else:
            self._unstage(task)
        if task.state is State.READY:
            place = (task.queue, task.group)
            self._ready.setdefault(place, _Heap(_ready_key(task.queue))).push(task)
        elif task.state is State.SCHEDULED:
            self._scheduled.setdefault(task.queue, _Heap(_scheduled_key(task.queue))).push(task)
        if task.state is State.RUNNING:
            self.running[task.id] = task
        else:
            self.running.pop(task.id, None)

    def held(self, token: str) -> list[Record]:
        return [t for t in self.running.values() if t.token == token]

    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        return _take(self._ready.get((queue, group)), limit)

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
        moments = [t.lease_until_us or now_us for t in self.running.values() if t.queue in wanted]
        for queue in wanted:
            heap = self._scheduled.get(queue)
            task = heap.peek() if heap is not None else None
            if task is not None:
                moments.append(task.due_us)
        return min(moments, default=None)

    def late(self, queue: str, now_us: int) -> list[int]:
        """When the scheduled tasks of a queue that are due fell due."""
        heap = self._scheduled.get(queue)
        return [] if heap is None else [t.due_us for t in heap.records() if t.due_us <= now_us]

    def first_ready(self, queue: str) -> list[int]:
        heads = [heap.peek() for (name, _), heap in self._ready.items() if name == queue]
        return [task.due_us for task in heads if task is not None]

    def in_state(self, state: State, queue: str | None) -> list[Record]:
        """Tasks that may be in a state, among them all that are, unless they came without a result from another store."""
        match state:
            case State.STAGED:
                found = [t for tasks in self.staged_tasks.values() for t in tasks.values()]
            case State.BLOCKED:
                found = [t for tasks in self.blocks.values() for t in tasks.values()]
            case State.SCHEDULED:
                found = [t for name, heap in self._scheduled.items() if queue in (None, name) for t in heap.records()]
            case State.READY:
                found = [t for (name, _), heap in self._ready.items() if queue in (None, name) for t in heap.records()]
            case State.RUNNING:
                found = list(self.running.values())
            case _:
                found = [self.tasks[id] for id in self.results if id in self.tasks]
        return [t for t in found if t.state is state and queue in (None, t.queue)]

    def few(self, filter: Filter, scan_limit: int) -> list[Record] | None:
        """The few tasks that can match, with some that do not; None if no index leads to few."""
        if filter.ids:
            return [self.tasks[id] for id in filter.ids if id in self.tasks] if len(filter.ids) <= scan_limit else None
        states = filter.possible
        there = [c[s] for q, c in self.counters.items() if filter.queue in (None, q) for s in states]
        if not few(sum(there), len(self.tasks), scan_limit):
            return None
        found = {t.seq: t for s in states for t in self.in_state(s, filter.queue)}
        return list(found.values()) if len(found) == sum(there) else None

    # -- queues and lanes --------------------------------------------------------------------------

    def queue(self, queue: str) -> QueueRow:
        return self.queues.get(queue) or QueueRow(queue)

    def save_queue(self, row: QueueRow) -> None:
        self.queues[row.queue] = row

    def lane(self, queue: str, group: str) -> Lane:
        return self.lanes[queue].get(group) or Lane(queue, group)

    def save_lane(self, lane: Lane) -> None:
        self.lanes[lane.queue][lane.group] = lane
        if lane.open:
            heapq.heappush(self._open[lane.queue], (lane.turn, lane.group))

    def delete_lane(self, lane: Lane) -> None:
        del self.lanes[lane.queue][lane.group]
        self._ready.pop((lane.queue, lane.group), None)

    def open_lane(self, queue: str) -> Lane | None:
        heap = self._open[queue]
        while heap:
            turn, group = heap[0]
            lane = self.lanes[queue].get(group)
            if lane is not None and lane.open and lane.turn == turn:
                return lane
            heapq.heappop(heap)
        return None

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn

    # -- keys, results, dependents, events ---------------------------------------------------------

    def key(self, queue: str, key: str) -> Key | None:
        return self.keys.get((queue, key))

    def save_key(self, queue: str, key: str, value: Key) -> None:
        self.keys[queue, key] = value

    def delete_key(self, queue: str, key: str) -> None:
        self.keys.pop((queue, key), None)

    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None:
        self.results[task.id] = (result, expires_us)

    def delete_result(self, task: Record) -> None:
        self.results.pop(task.id, None)

    def block(self, blocker: Record, dependent: Record) -> None:
        blocker.has_dependents = True
        self.blocks.setdefault(blocker.id, {})[dependent.seq] = dependent

    def dependents(self, blocker_id: str, limit: int) -> list[Record]:
        return list(self.blocks.get(blocker_id, {}).values())[:limit]

    def unblock(self, blocker_id: str, dependent: Record) -> None:
        edges = self.blocks.get(blocker_id)
        if edges is not None:
            edges.pop(dependent.seq, None)
            if not edges:
                del self.blocks[blocker_id]

    def defer(self, blocker_id: str, dead: bool) -> None:
        self.deferrals[blocker_id] = dead

    def deferred(self, limit: int) -> list[tuple[str, bool]]:
        return list(self.deferrals.items())[:limit]

    def undefer(self, blocker_id: str) -> None:
        del self.deferrals[blocker_id]

    def event(self, task: Record, event: str, now_us: int, data: bytes | None) -> None:
        self.log.append(
            EventRow(
                seq=self.first_event + len(self.log),
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
        )

    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None:
        if gone:
            self.worker_rows.pop(info.worker, None)
        else:
            self.worker_rows[info.worker] = msgspec.structs.replace(info, seen_at_us=now_us)

    def fan_in(self, key: str) -> FanIn | None:
        return self.fan_ins.get(key)

    def save_fan_in(self, key: str, value: FanIn) -> None:
        self.fan_ins[key] = value

    def delete_fan_in(self, key: str) -> None:
        self.fan_ins.pop(key, None)
        self.members.pop(key, None)

    def counted(self, key: str, member: str) -> int | None:
        return self.members[key].get(member)

    def count(self, key: str, member: str, left: int) -> None:
        self.members[key][member] = left

    # -- staged runs -------------------------------------------------------------------------------

    def run(self, queue: str, run_id: str) -> Run | None:
        return self.runs.get((queue, run_id))

    def save_run(self, run: Run) -> None:
        self.runs[run.queue, run.run_id] = run

    def unsettled(self, now_us: int, limit: int) -> list[Run]:
        runs = (run for run in self.runs.values() if run.unsettled(now_us))
        return list(itertools.islice(runs, limit))

    def staged(self, run: Run, limit: int) -> list[Record]:
        tasks = self.staged_tasks[run.queue, run.run_id]
        found: list[Record] = []
        for id, task in list(tasks.items()):
            if task.state is not State.STAGED or (task.run_id != run.run_id and run.run_id not in self.claims(task)):
                del tasks[id]  # released, dropped or handed over to another run
            elif len(found) < limit:
                found.append(task)
            else:
                break
        return found

    def foresee(self, queue: str, tasks: Sequence[Enqueue]) -> None:
        pass

    def stage_plain(self, op: Enqueue, run: Run, now_us: int) -> bool:
        return False

    def release_plain(self, run: Run, now_us: int, limit: int) -> int:
        return 0

    def claim(self, task: Record, run_id: str) -> None:
        self.claim_rows.setdefault(task.id, []).append(run_id)
        self.staged_tasks[task.queue, run_id][task.id] = task

    def claims(self, task: Record) -> list[str]:
        return list(self.claim_rows.get(task.id, ()))

    def unclaim(self, task: Record, run_id: str) -> None:
        self.claim_rows[task.id].remove(run_id)
        if not self.claim_rows[task.id]:
            del self.claim_rows[task.id]
        if task.run_id != run_id:
            self.staged_tasks[task.queue, run_id].pop(task.id, None)


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


def _take(heap: _Heap | None, limit: int) -> list[Record]:
    found: list[Record] = []
    while heap is not None and len(found) < limit:
        task = heap.pop()
        if task is None:
            break
        found.append(task)
    return found


class MemoryStorage(BaseStorage):
    """Everything in this process; gone with it."""

    capabilities = Capabilities(durability="none", push_wait=True, restores=True)

    def __init__(self, *, clock: Callable[[], int] = now_us, **options: Any) -> None:
        super().__init__(clock=clock, **options)
        self._store_id = new_id()
        self._lock = threading.RLock()
        self._closed = False
        self._ledger = MemoryLedger(self.events_on)

    async def open(self) -> None:
        self._ready()

    async def close(self) -> None:
        self._closed = True
        self.waiters.notify_all()

    def _ready(self) -> MemoryLedger:
        if self._closed:
            raise DriverClosed("this MemoryStorage was closed; make a new one")
        return self._ledger

    def _now(self, now_us: int | None) -> int:
        return self.clock() if now_us is None else now_us

    # -- changing ----------------------------------------------------------------------------------

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        return self._apply_blocking(transactions, now_us, repeat)

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        with self._lock:
            machine = Machine(self._ready())
            # Each transaction has its own moment: what one frees stands behind what the one before it enqueued.
            answers: list[Result] = [machine.run(t, self._now(now_us), repeat) for t in transactions]
        self._tell(machine)
        return answers

    def _tell(self, machine: Machine) -> None:
        if machine.ready_queues or machine.ended_tasks:
            self.waiters.notify(machine.ready_queues, machine.ended_tasks)

    async def allocate_ids(self, n: int) -> int:
        check_count(n, "allocate_ids", 1, MAX_AT_ONCE)
        with self._lock:
            ledger = self._ready()
            first = ledger.ids + 1
            ledger.ids += n
            return first

    # -- upkeep ------------------------------------------------------------------------------------

    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        now, lost = self._now(now_us), set(lost_workers)
        with self._lock:
            running = [t for t in self._ready().running.values() if queues is None or t.queue in queues]
            dead = [t for t in running if t.worker in lost or (t.lease_until_us or 0) <= now]
            dead.sort(key=lambda t: (t.lease_until_us, t.seq))
            return [Lease(record=copy.copy(t), lost="worker_lost" if t.worker in lost else "expired") for t in dead[:limit]]

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        with self._lock:
            machine = Machine(self._ready())
            moved = machine.sweep(self._now(now_us), limit)
        self._tell(machine)
        return moved

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        with self._lock:
            machine = Machine(self._ready())
            moved = machine.promote(queue, self._now(now_us), limit)
        self._tell(machine)
        return moved

    async def purge(self, retention: Retention, now_us: int | None = None, limit: int = 1000) -> int:
        now = self._now(now_us)
        with self._lock:
            ledger = self._ready()
            gone = 0
            old_results = [i for i, (_, expires) in ledger.results.items() if expires is not None and expires <= now][:limit]
            gone += self._purge_ended(ledger, old_results)
            if retention.dead_us is not None:
                edge = now - retention.dead_us
                dead = [t for t in ledger.tasks.values() if t.state is State.DEAD and (t.finished_at_us or 0) <= edge]
                gone += self._purge_ended(ledger, [t.id for t in dead[:limit]])
            for place, key in list(ledger.keys.items()):
                task = ledger.tasks.get(key.task_id)
                if key.expires_us <= now and (task is None or task.state.final):
                    del ledger.keys[place]
                    gone += 1
            gone += self._purge_events(ledger, retention, now, limit)
            for worker, info in list(ledger.worker_rows.items()):
                if info.seen_at_us <= now - retention.workers_us:
                    del ledger.worker_rows[worker]
                    gone += 1
            for place, run in list(ledger.runs.items()):
                if run.settled and keep_until(run) <= now:
                    del ledger.runs[place]
                    ledger.staged_tasks.pop(place, None)
                    gone += 1
            for key in [k for k, fan_in in ledger.fan_ins.items() if fan_in.expires_us <= now]:
                ledger.delete_fan_in(key)
                gone += 1
            return gone + self._purge_lanes(ledger, retention, now, limit)

    @staticmethod
    def _purge_lanes(ledger: MemoryLedger, retention: Retention, now: int, limit: int) -> int:
        lanes = (lane for known in ledger.lanes.values() for lane in known.values())
        news, over = resting(lanes, retention.limits_us, now, limit)
        for lane in news:
            ledger.save_lane(lane)
        for lane in over:
            ledger.delete_lane(lane)
        return len(over)

    @staticmethod
    def _purge_ended(ledger: MemoryLedger, ids: Iterable[str]) -> int:
        gone = 0
        for id in ids:
            gone += ledger.results.pop(id, None) is not None
            task = ledger.tasks.get(id)
            if task is not None and task.state.final:
                ledger.delete(task)
        return gone

    @staticmethod
    def _purge_events(ledger: MemoryLedger, retention: Retention, now: int, limit: int) -> int:
        drop = 0
        if retention.events_max is not None:
            drop = max(len(ledger.log) - retention.events_max, 0)
        if retention.events_us is not None:
            edge = now - retention.events_us
            while drop < len(ledger.log) and ledger.log[drop].ts_us <= edge:
                drop += 1
        drop = min(drop, limit)
        del ledger.log[:drop]
        ledger.first_event += drop
        return drop

    async def _purge_results(self, older_than_us: int) -> int:
        with self._lock:
            ledger = self._ready()
            old = [i for i, (result, _) in ledger.results.items() if result.finished_at_us < older_than_us]
            return self._purge_ended(ledger, old)

    async def check(self, repair: bool = False) -> list[str]:
        with self._lock:
            ledger = self._ready()
            true: dict[tuple[str, str], Lane] = {}
            for task in ledger.tasks.values():
                if task.group is not None and not task.state.final and task.state is not State.STAGED:
                    lane = true.setdefault((task.queue, task.group), Lane(task.queue, task.group))
                    lane.members += 1
                    lane.ready += task.state is State.READY
                    lane.inflight += task.state is State.RUNNING
            found: list[str] = []
            for queue, lanes in ledger.lanes.items():
                for group, lane in lanes.items():
                    right = true.get((queue, group), Lane(queue, group))
                    if (lane.ready, lane.inflight, lane.members) != (right.ready, right.inflight, right.members):
                        found.append(f"group {group!r} of queue {queue!r} is miscounted")
                        if repair:
                            lane.ready, lane.inflight, lane.members = right.ready, right.inflight, right.members
                            ledger.save_lane(lane)
            return found

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        with self._lock:
            machine = Machine(self._ready())
            new = restore_tasks(machine, tasks, key_ttl_us, self.clock())
        self._tell(machine)
        return new

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        with self._lock:
            restore_events(self._ready(), rows)

    # -- looking -----------------------------------------------------------------------------------

    async def get(self, id: str, queue: str | None = None) -> Record | None:
        check_encodable(id, "task id")
        with self._lock:
            task = self._ready().tasks.get(id)
            return None if task is None or (queue is not None and task.queue != queue) else copy.copy(task)

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        check_encodable("".join(ids), "task id")
        with self._lock:
            found = self._ready().results
            return {i: copy.copy(found[i][0]) for i in ids if i in found}

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page:
        after = decode_cursor(cursor)
        with self._lock:
            ledger = self._ready()
            found = ledger.few(filter, self.scan_limit)
            seqs = sorted(ledger.by_seq if found is None else {t.seq for t in found}, reverse=newest_first)
            tasks: list[Record] = []
            for scanned, seq in enumerate(s for s in seqs if after is None or (s < after if newest_first else s > after)):
                if scanned >= self.scan_limit:
                    return Page(tasks=tasks, cursor=encode_cursor(seq + (1 if newest_first else -1)), partial=True)
                if filter.matches(ledger.by_seq[seq]):
                    if len(tasks) == limit:
                        return Page(tasks=tasks, cursor=encode_cursor(tasks[-1].seq))
                    tasks.append(copy.copy(ledger.by_seq[seq]))
            return Page(tasks=tasks)

    async def counts(self, now_us: int | None = None) -> list[QueueCounts]:
        now = self._now(now_us)
        with self._lock:
            ledger = self._ready()
            return [self._count(ledger, name, now) for name in sorted(ledger.queues)]

    @staticmethod
    def _count(ledger: MemoryLedger, name: str, now: int) -> QueueCounts:
        by_state = ledger.counters[name]
        late = ledger.late(name, now)
        return QueueCounts(
            queue=name,
            staged=by_state[State.STAGED],
            blocked=by_state[State.BLOCKED],
            scheduled=by_state[State.SCHEDULED] - len(late),
            ready=by_state[State.READY] + len(late),
            running=by_state[State.RUNNING],
            done=by_state[State.DONE],
            dead=by_state[State.DEAD],
            cancelled=by_state[State.CANCELLED],
            paused=ledger.queues[name].paused,
            oldest_ready_us=min([*late, *ledger.first_ready(name)], default=None),
        )

    async def queues(self, fed: bool = False) -> list[str]:
        with self._lock:
            return sorted(q for q, row in self._ready().queues.items() if row.fed or not fed)

    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        with self._lock:
            names = sorted(g for g in self._ready().lanes[queue] if cursor is None or g > cursor)
            lanes = [self._ready().lanes[queue][g] for g in names[:limit]]
            infos = [
                GroupInfo(queue=queue, group=x.group, limit=x.limit or 1, inflight=x.inflight, ready=x.ready) for x in lanes
            ]
            return infos, names[limit - 1] if len(names) > limit else None

    async def workers(self, now_us: int | None = None) -> list[WorkerInfo]:
        with self._lock:
            return sorted(self._ready().worker_rows.values(), key=lambda w: w.worker)

    async def info(self) -> StoreInfo:
        self._ready()
        return StoreInfo(store_id=self._store_id, format=1, url="memory://", capabilities=self.capabilities)

    # -- events ------------------------------------------------------------------------------------

    async def event_shards(self) -> list[Shard]:
        with self._lock:
            ledger = self._ready()
            return [Shard(name="", first=ledger.first_event, last=ledger.first_event + len(ledger.log) - 1)]

    async def events(self, shard: str = "", after: int = 0, limit: int = 1000, upto: int | None = None) -> list[EventRow]:
        with self._lock:
            ledger = self._ready()
            if after < ledger.first_event - 1:
                raise EventsLost(f"events up to {ledger.first_event - 1} were purged; go on from there")
            start = after + 1 - ledger.first_event
            end = start + limit if upto is None else min(start + limit, upto + 1 - ledger.first_event)
            return ledger.log[start : max(end, start)]

    async def events_of(self, id: str) -> list[EventRow]:
        check_encodable(id, "task id")
        with self._lock:
            return [e for e in self._ready().log if e.task_id == id]

    # -- in bulk -----------------------------------------------------------------------------------

    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        with self._lock:
            run = self._ready().run(queue, run_id)
            return None if run is None else run.info()

    async def task_shards(self) -> list[Shard]:
        with self._lock:
            seqs = self._ready().by_seq
            return [Shard(name="", first=min(seqs, default=1), last=max(seqs, default=0))]

    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        with self._lock:
            by_seq = self._ready().by_seq
            found = heapq.nsmallest(limit, (seq for seq in by_seq if after < seq <= upto))
            return [copy.copy(by_seq[seq]) for seq in found], upto if len(found) < limit else found[-1]

    # -- steering ----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> None:
        check_queue(queue)
        with self._lock:
            row = self._ready().queue(queue)
            row.paused = True
            self._ledger.save_queue(row)

    async def resume(self, queue: str) -> bool:
        check_queue(queue)
        with self._lock:
            row = self._ready().queue(queue)
            was, row.paused = row.paused, False
            if was:
                self._ledger.save_queue(row)
        self.waiters.notify([queue])
        return was

    async def is_paused(self, queue: str) -> bool:
        check_queue(queue)
        with self._lock:
            return self._ready().queue(queue).paused

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        check_queue(queue)
        check_text(group, "group")
        check_count(limit, "group limit", 1)
        with self._lock:
            machine = Machine(self._ready())
            machine.set_group_limit(queue, group, limit)
        self._tell(machine)
