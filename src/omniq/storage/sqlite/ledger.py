"""The ledger of the state machine on SQLite: a unit of work over one `BEGIN IMMEDIATE … COMMIT`.

Records are loaded once and kept by identity. Rows gather and go down in one statement of each kind, before a query that depends
on them and at the end. That is what makes a batch of a hundred cheap. Some ways go past the records; at each stands what it
saves, as a share of processor time in the store.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from omniq.models import Record, State, StoredResult
from omniq.operations import Enqueue, WorkerInfo
from omniq.storage.ledger import FanIn, Key, Lane, Ledger, QueueRow, StagedRun
from omniq.storage.sqlite import moves, rows
from omniq.storage.sqlite.rows import Row

MAX_HELD = 20_000  # running tasks whose records are kept; beyond that all are read anew


class SQLiteLedger(Ledger):
    """The rows that `Machine` reads and writes during one transaction of the database."""

    def __init__(self, connection: sqlite3.Connection, events_on: bool, held: dict[str, Record]) -> None:
        self.events_on = events_on
        self._db = connection
        self._held = held  # running tasks that this process leased, as they were after its last commit
        self._tasks: dict[str, Record | None] = {}
        self._by_seq: dict[int, Record] = {}
        self._plain: list[Row] = []  # plain new tasks
        self._new: list[Row] = []  # all other new tasks
        self._unread: set[str] = set()  # ids among them that have no record: a query for them must find the rows
        self._enqueued: list[list[int]] = []  # [first seq, last seq, event number − seq] of neighbours without a record
        self._updates: dict[int, Record] = {}
        self._ended: dict[int, int] = {}  # running → done, and nothing else since they were read: the moment by seq
        self._left_nothing: list[int] = []  # of these, tasks whose results and events are made from their rows
        self._succeeded: dict[int, int] = {}  # the numbers of these events, and whose they are
        self._keys: dict[tuple[str, str], Key | None] = {}
        self._new_keys: list[Row] = []
        self._results: list[Row] = []
        self._events: list[Row] = []
        self._left_out: deque[int] = deque()  # numbers kept for the events of tasks between those released in one go
        self._queues: dict[str, QueueRow] = {}
        self._dirty_queues: set[str] = set()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._dirty_lanes: dict[tuple[str, str], Lane] = {}
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0] * len(rows.STATES))
        row = connection.execute("SELECT next_seq, next_event, next_turn FROM store").fetchone()
        self._seq, self._event, self._turn = cast("tuple[int, int, int]", row)
        self._loaded = row  # most commits give new numbers, but not all: the row is written only when they did

    # -- down to the database ----------------------------------------------------------------------

    def flush(self) -> None:
        """Write everything that gathered, in the order of its dependence."""
        self._flush_tasks()
        self._write(rows.KEY, self._new_keys)
        self._flush_lanes()
        self._write(rows.RESULT, self._results)
        self._write(rows.EVENT, self._events)
        if self._dirty_queues:
            changed = [self._queues[q] for q in self._dirty_queues]
            self._db.executemany(rows.QUEUE, [(r.queue, r.paused, r.has_groups, r.groups_turn, r.fed) for r in changed])
            self._dirty_queues.clear()
        if self._counts:
            self._db.executemany(rows.COUNT, [(queue, *deltas) for queue, deltas in self._counts.items()])
            self._counts.clear()
        counters = (self._seq, self._event, self._turn)
        if counters != self._loaded:
            self._db.execute("UPDATE store SET next_seq=?, next_event=?, next_turn=?", counters)
            self._loaded = counters

    def _write(self, sql: str, gathered: list[Row]) -> None:
        if gathered:
            self._db.executemany(sql, gathered)
            gathered.clear()

    def _flush_new(self) -> None:
        self._write(rows.INSERT_PLAIN, self._plain)
        self._write(rows.INSERT, self._new)
        self._unread.clear()
        for first, last, shift in self._enqueued:
            moves.log_enqueued(self._db, first, last, shift)
        self._enqueued.clear()

    def _flush_tasks(self) -> None:
        self._flush_new()
        if self._updates:
            self._db.executemany(rows.UPDATE, map(rows.update_row, self._updates.values()))
            self._updates.clear()
        if self._ended:
            moves.write_ends(self._db, self._ended, self._left_nothing, self._succeeded)
            self._ended.clear()
            self._left_nothing.clear()
            self._succeeded.clear()

    def _flush_lanes(self) -> None:
        if self._dirty_lanes:
            changed = self._dirty_lanes.values()
            self._db.executemany(
                rows.LANE, [(x.queue, x.group, x.limit, x.ready, x.inflight, x.members, x.turn) for x in changed]
            )
            self._dirty_lanes.clear()

    # -- new tasks ---------------------------------------------------------------------------------

    def insert(self, task: Record) -> None:
        task.seq = self._seq
        self._seq += 1
        self._tasks[task.id] = self._by_seq[task.seq] = task
        first = task.state, task.due_us, task.created_at_us, task.run_id, task.blockers_left
        self._new.append(rows.whole_row(task, task.seq, *first))
        self._counts[task.queue][task.state] += 1

    # Without a record: 0.7 of the time of `insert`. The machine takes this way where `op.plain` holds and the queue is known.
    def insert_plain(self, op: Enqueue, now_us: int) -> bool:
        seq = self._seq
        self._seq = seq + 1
        self._plain.append(rows.plain_row(op, seq, now_us, now_us))
        self._leave_unread(op, State.READY)
        if self.events_on:
            shift = self._event - seq  # the same for all of a batch of enqueues, so one statement logs them from their rows
            self._event += 1
            stretches = self._enqueued
            if stretches and stretches[-1][1] == seq - 1 and stretches[-1][2] == shift:
                stretches[-1][1] = seq
            else:
                stretches.append([seq, seq, shift])
        return True

    # Without a record: 0.9 of the time of `insert`, for any staged task, since nothing else is done for it before its commit.
    def stage_plain(self, op: Enqueue, run: StagedRun, now_us: int) -> bool:
        due_us = now_us if op.eta_us is None else op.eta_us
        self._new.append(rows.whole_row(op, self._seq, State.STAGED, due_us, now_us, run.run_id))
        self._seq += 1
        self._leave_unread(op, State.STAGED)
        if op.idempotency_key is not None:
            self.save_key(op.queue, op.idempotency_key, Key(op.id, op.fingerprint, now_us + op.key_ttl_us))
        return True

    def _leave_unread(self, op: Enqueue, state: State) -> None:
        """Keep no record of the new row: whoever asks for the task in this batch reads it from the table."""
        self._tasks.pop(op.id, None)
        self._unread.add(op.id)
        self._counts[op.queue][state] += 1

    # -- records -----------------------------------------------------------------------------------

    def prefetch(self, ids: Iterable[str]) -> None:
        """Load the records that a batch will ask for in one statement."""
        wanted = [i for i in ids if i not in self._tasks]
        if self._unread and not self._unread.isdisjoint(wanted):
            self._flush_new()
        if self._held:
            wanted = self._recall(wanted)
        if wanted:
            self._tasks.update(dict.fromkeys(wanted))
            self._remember(self._db.execute(rows.BY_IDS, (rows.encode(wanted).decode(),)).fetchall())

    def _recall(self, ids: list[str]) -> list[str]:
        """Take running tasks that this process leased from memory, if they are still held under the same token.

        While they are, only these few columns can have changed. Saves 0.27 of the time of a lease with its ack.
        """
        known = [i for i in ids if i in self._held]
        if not known:
            return ids
        for id, token, cancel, dependents, until in self._db.execute(rows.VERIFY, (rows.encode(known).decode(),)).fetchall():
            task = self._held[id]
            if task.token == token:
                task.cancel_requested, task.has_dependents, task.lease_until_us = cancel == 1, dependents == 1, until
                self._tasks[id] = self._by_seq[task.seq] = task
        return [i for i in ids if i not in self._tasks]

    def remember_held(self) -> None:
        """Remember, after the commit, the tasks that this process holds."""
        for id, task in self._tasks.items():
            if task is not None and task.state is State.RUNNING:
                self._held[id] = task
            else:
                self._held.pop(id, None)
        if len(self._held) > MAX_HELD:
            self._held.clear()

    def load(self, id: str) -> Record | None:
        if id not in self._tasks:
            self.prefetch([id])
        task = self._tasks[id]
        if task is not None and task.seq in self._ended:  # its result and event are not to show what changes it now
            self._flush_tasks()
        return task

    def _adopt(self, task: Record) -> Record:
        known = self._by_seq.get(task.seq)
        if known is None:
            self._tasks[task.id] = self._by_seq[task.seq] = task
            return task
        if known.payload is None:
            known.payload = task.payload
        return known

    def _remember(self, found: list[Row]) -> list[Record]:
        """Returns rows as records; one that is known stays the same object and only gains its payload."""
        tasks: list[Record] = []
        for row in found:
            task = self._by_seq.get(row[0])
            if task is None:
                task = rows.record_of(row)
                self._tasks[task.id] = self._by_seq[task.seq] = task
            elif task.payload is None:
                task.payload = rows.payload_of(row)
            tasks.append(task)
        return tasks

    def _select(self, sql: str, *parameters: Any) -> list[Record]:
        self._flush_tasks()
        return self._remember(self._db.execute(sql, parameters).fetchall())

    def save(self, task: Record, was: State, was_queue: str) -> None:
        if was is State.RUNNING and task.state is State.DONE and task.seq not in self._updates:
            self._ended[task.seq] = cast(int, task.finished_at_us)
        else:
            self._ended.pop(task.seq, None)
            self._updates[task.seq] = task
        if was is not task.state or was_queue != task.queue:
            self._counts[was_queue][was] -= 1
            self._counts[task.queue][task.state] += 1

    def save_leased(self, tasks: Sequence[Record], now_us: int) -> None:
        """Saves 0.24 of the time of a lease with its ack, against `save` and `event` for each.

        Written at once, since the events are made from the rows: a change of one of them later in this batch must not show.
        """
        moves.write_leases(self._db, tasks, now_us, self._event if self.events_on else None)
        if self.events_on:
            self._event += len(tasks)
        self._count_moved(tasks[0].queue, State.READY, State.RUNNING, len(tasks))

    def end_plain(self, task: Record, now_us: int) -> bool:
        """Saves 0.2 of the time of a lease with its ack, unless the task was changed before in this batch.

        Result and event are made from the row, which then is not what it will be.
        """
        if task.seq in self._updates:
            return False
        self._ended[task.seq] = now_us
        self._left_nothing.append(task.seq)
        if self.events_on:
            self._succeeded[self._event] = task.seq
            self._event += 1
        self._count_moved(task.queue, State.RUNNING, State.DONE, 1)
        return True

    def _count_moved(self, queue: str, was: State, now: State, n: int) -> None:
        counts = self._counts[queue]
        counts[was] -= n
        counts[now] += n

    def delete(self, task: Record) -> None:
        # What gathered for the task is written first: its events and its result are made from the row.
        self._flush_tasks()
        self._db.execute("DELETE FROM tasks WHERE seq=?", (task.seq,))
        self._tasks[task.id] = None
        del self._by_seq[task.seq]
        self._counts[task.queue][task.state] -= 1

    def held(self, token: str) -> list[Record]:
        return self._select(rows.HELD, token)

    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        self._flush_tasks()
        return [self._adopt(task) for task in moves.read_ready(self._db, queue, group, limit)]

    def due(self, queue: str, now_us: int, limit: int) -> list[Record]:
        return self._select(rows.DUE, queue, now_us, limit)

    def next_at(self, queues: Sequence[str], now_us: int) -> int | None:
        self._flush_tasks()
        moments: list[int] = []
        for queue in queues:
            for sql in (
                "SELECT min(eta) FROM tasks WHERE state=2 AND queue=?",
                "SELECT min(lease_until) FROM tasks WHERE state=4 AND queue=?",
            ):
                moment = self._db.execute(sql, (queue,)).fetchone()[0]
                if moment is not None:
                    moments.append(moment)
        return min(moments, default=None)

    # -- queues and lanes --------------------------------------------------------------------------

    def queue(self, queue: str) -> QueueRow:
        row = self._queues.get(queue)
        if row is None:
            sql = "SELECT paused, has_groups, groups_turn, fed FROM queues WHERE queue=?"
            found = self._db.execute(sql, (queue,)).fetchone()
            row = self._queues[queue] = QueueRow(queue, *map(bool, found)) if found else QueueRow(queue)
        return row

    def save_queue(self, row: QueueRow) -> None:
        self._dirty_queues.add(row.queue)

    def lane(self, queue: str, group: str) -> Lane:
        lane = self._lanes.get((queue, group))
        if lane is None:
            sql = 'SELECT queue, "group", "limit", ready, inflight, members, turn FROM lanes WHERE queue=? AND "group"=?'
            found = self._db.execute(sql, (queue, group)).fetchone()
            lane = self._lanes[queue, group] = Lane(*found) if found else Lane(queue, group)
        return lane

    def save_lane(self, lane: Lane) -> None:
        self._dirty_lanes[lane.queue, lane.group] = lane

    def forget_lanes(self) -> None:
        self._flush_lanes()
        self._lanes.clear()

    def open_lane(self, queue: str) -> Lane | None:
        self._flush_lanes()
        found = self._db.execute(rows.OPEN_LANE, (queue,)).fetchone()
        if found is None:
            return None
        # If this commit has used the lane, its object knows more than the row.
        return self._lanes.setdefault((found[0], found[1]), Lane(*found))

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn

    # -- keys, results, dependents, events ---------------------------------------------------------

    def key(self, queue: str, key: str) -> Key | None:
        place = (queue, key)
        if place not in self._keys:
            sql = "SELECT task_id, fingerprint, expires_at FROM keys WHERE queue=? AND key=?"
            found = self._db.execute(sql, place).fetchone()
            self._keys[place] = Key(*found) if found else None
        return self._keys[place]

    def save_key(self, queue: str, key: str, value: Key) -> None:
        self._keys[queue, key] = value
        self._new_keys.append((queue, key, value.task_id, value.fingerprint, value.expires_us))

    def delete_key(self, queue: str, key: str) -> None:
        # A key of this very commit must be in the table before it can be deleted there.
        self._write(rows.KEY, self._new_keys)
        self._keys[queue, key] = None
        self._db.execute("DELETE FROM keys WHERE queue=? AND key=?", (queue, key))

    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None:
        self._results.append(rows.result_row(task, result, expires_us))

    def delete_result(self, task: Record) -> None:
        # The same of a result: a requeue may follow the end in one commit.
        self._write(rows.RESULT, self._results)
        self._db.execute("DELETE FROM results WHERE seq=?", (task.seq,))

    def block(self, blocker: Record, dependent: Record) -> None:
        if not blocker.has_dependents:
            blocker.has_dependents = True
            self.save(blocker, blocker.state, blocker.queue)
        self._db.execute("INSERT OR IGNORE INTO blocks VALUES (?,?)", (blocker.id, dependent.seq))

    def dependents(self, blocker_id: str, limit: int) -> list[Record]:
        return self._select(rows.DEPENDENTS, blocker_id, limit)

    def unblock(self, blocker_id: str, dependent: Record) -> None:
        self._db.execute("DELETE FROM blocks WHERE blocker_id=? AND dependent=?", (blocker_id, dependent.seq))

    def defer(self, blocker_id: str, dead: bool) -> None:
        self._db.execute("INSERT OR REPLACE INTO deferred VALUES (?,?)", (blocker_id, dead))

    def deferred(self, limit: int) -> list[tuple[str, bool]]:
        rows = self._db.execute("SELECT blocker_id, dead FROM deferred LIMIT ?", (limit,)).fetchall()
        return [(blocker_id, bool(dead)) for blocker_id, dead in rows]

    def undefer(self, blocker_id: str) -> None:
        self._db.execute("DELETE FROM deferred WHERE blocker_id=?", (blocker_id,))

    def event(self, task: Record, event: str, now_us: int, data: bytes | None) -> None:
        if self._left_out:
            number = self._left_out.popleft()
        else:
            number, self._event = self._event, self._event + 1
        self._events.append(
            (
                number,
                now_us,
                event,
                task.seq,
                task.id,
                task.queue,
                task.name,
                task.attempts,
                task.worker or "",
                task.created_at_us,
                task.due_us,
                int(task.state),
                data.decode() if data else "",
                task.group or rows.NULL,
            )
        )

    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None:
        if gone:
            self._db.execute("DELETE FROM workers WHERE worker=?", (info.worker,))
        else:
            self._db.execute("INSERT OR REPLACE INTO workers VALUES (?,?,?)", (info.worker, now_us, rows.encode(info)))

    def fan_in(self, key: str) -> FanIn | None:
        found = self._db.execute('SELECT expected, "left", expires_at FROM fan_ins WHERE key=?', (key,)).fetchone()
        return FanIn(*found) if found else None

    def save_fan_in(self, key: str, value: FanIn) -> None:
        row = (key, value.expected, value.left, value.expires_us)
        self._db.execute("INSERT OR REPLACE INTO fan_ins VALUES (?,?,?,?)", row)

    def delete_fan_in(self, key: str) -> None:
        self._db.execute("DELETE FROM fan_ins WHERE key=?", (key,))
        self._db.execute("DELETE FROM fan_in_members WHERE key=?", (key,))

    def counted(self, key: str, member: str) -> int | None:
        found = self._db.execute('SELECT "left" FROM fan_in_members WHERE key=? AND member=?', (key, member)).fetchone()
        return found[0] if found else None

    def count(self, key: str, member: str, left: int) -> None:
        self._db.execute("INSERT INTO fan_in_members VALUES (?,?,?)", (key, member, left))

    def allocate(self, n: int) -> int:
        first = self._db.execute("SELECT next_id FROM store").fetchone()[0]
        self._db.execute("UPDATE store SET next_id = next_id + ?", (n,))
        return first

    # -- staged runs -------------------------------------------------------------------------------

    def run(self, queue: str, run_id: str) -> StagedRun | None:
        found = self._db.execute(f"{rows.RUN} WHERE queue=? AND run_id=?", (queue, run_id)).fetchone()
        return rows.run_of(found) if found else None

    def save_run(self, run: StagedRun) -> None:
        self._db.execute("INSERT OR REPLACE INTO runs VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", msgspec.structs.astuple(run))

    def unsettled(self, now_us: int, limit: int) -> list[StagedRun]:
        sql = f"{rows.RUN} WHERE settled = 0 AND (state <> 'OPEN' OR expires_at <= ?) LIMIT ?"
        return [rows.run_of(row) for row in self._db.execute(sql, (now_us, limit)).fetchall()]

    def staged(self, run: StagedRun, limit: int) -> list[Record]:
        return self._select(rows.STAGED, run.queue, run.run_id, run.queue, run.run_id, limit)

    def foresee(self, queue: str, tasks: Sequence[Enqueue]) -> None:
        """Saves 0.4 of the time of staging tasks with keys, against a query for each."""
        self.prefetch([op.id for op in tasks])
        keys = [op.idempotency_key for op in tasks if op.idempotency_key is not None]
        if keys:
            self._write(rows.KEY, self._new_keys)
            self._keys.update(((queue, key), None) for key in keys)
            for key, *rest in self._db.execute(rows.KEYS, (queue, rows.encode(keys).decode())).fetchall():
                self._keys[queue, key] = Key(*rest)

    def release_plain(self, run: StagedRun, now_us: int, limit: int) -> int:
        """Takes a fifth of the time of the machine, which releases tasks with a group, a time, an interval or a claim."""
        self._flush_tasks()
        in_order = moves.staged_in_order(self._db, run.queue, run.run_id, limit)
        found = [seq for seq, plain in in_order if plain]
        if not found:
            return 0
        moves.release(self._db, found, run.ended_at_us, now_us)
        if self.events_on:
            numbers = {seq: self._event + at for at, (seq, _) in enumerate(in_order)}
            moves.log_released(self._db, {numbers[seq]: seq for seq in found}, now_us)
            self._left_out.extend(numbers[seq] for seq, plain in in_order if not plain)
            self._event += len(in_order)
        for seq in found:
            task = self._by_seq.pop(seq, None)
            if task is not None:
                self._tasks.pop(task.id, None)
        self._count_moved(run.queue, State.STAGED, State.READY, len(found))
        row = self.queue(run.queue)
        if not row.fed:
            row.fed = True
            self.save_queue(row)
        return len(found)

    def claim(self, task: Record, run_id: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO claims VALUES (?,?,?)", (task.queue, run_id, task.id))

    def claims(self, task: Record) -> list[str]:
        # The oldest claim first: it inherits the task when the run that staged it is aborted.
        sql = "SELECT run_id FROM claims WHERE task_id=? ORDER BY rowid"
        return [row[0] for row in self._db.execute(sql, (task.id,)).fetchall()]

    def unclaim(self, task: Record, run_id: str) -> None:
        self._db.execute("DELETE FROM claims WHERE queue=? AND run_id=? AND task_id=?", (task.queue, run_id, task.id))
