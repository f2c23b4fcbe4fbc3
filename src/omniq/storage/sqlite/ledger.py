"""The ledger of the state machine on SQLite: a unit of work over one `BEGIN IMMEDIATE … COMMIT`.

Records are loaded once and kept by identity; inserts, updates, results and events gather in lists and go down in one
statement each, before a query that depends on them and at the end. That is what makes a batch of a hundred cheap.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from omniq.models import Record, State, StoredResult
from omniq.operations import Enqueue, WorkerInfo
from omniq.storage.ledger import FanIn, Key, Lane, QueueRow, Run
from omniq.storage.sqlite import rows as sqlite_rows
from omniq.storage.sqlite.turns import PlainEnds, read_ready, write_leases

MAX_HELD = 20_000


class SQLiteLedger:
    """What `Machine` reads and writes, for the length of one transaction of the database."""

    def __init__(self, connection: sqlite3.Connection, events_on: bool, held: dict[str, Record]) -> None:
        self.events_on = events_on
        self._db = connection
        self._held = held
        self._tasks: dict[str, Record | None] = {}
        self._by_seq: dict[int, Record] = {}
        self._inserts: list[Record] = []
        self._ready: list[tuple[Any, ...]] = []
        self._pushed: list[tuple[Any, ...]] = []
        self._staged: list[tuple[Any, ...]] = []
        self._staged_more: list[tuple[Any, ...]] = []
        self._keys: dict[tuple[str, str], Key | None] = {}
        self._new_keys: list[tuple[Any, ...]] = []
        self._ready_ids: set[str] = set()
        self._ready_runs: list[list[int]] = []  # [first seq, last seq, event number − seq]
        self._updates: dict[int, Record] = {}
        self._leased: dict[int, Record] = {}
        self._done: dict[int, Record] = {}
        self._plain_ends = PlainEnds()
        self._results: list[tuple[Record, StoredResult, int | None]] = []
        self._events: list[tuple[Any, ...]] = []
        self._group_events: list[tuple[Any, ...]] = []
        self._left_out: deque[int] = deque()  # numbers kept for the events of tasks between those released in one go
        self._queues: dict[str, QueueRow] = {}
        self._dirty_queues: set[str] = set()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._dirty_lanes: dict[tuple[str, str], Lane] = {}
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0] * len(sqlite_rows.STATES))
        row = connection.execute("SELECT next_seq, next_event, next_turn FROM store").fetchone()
        self._seq, self._event, self._turn = cast("tuple[int, int, int]", row)
        self._loaded = row

    # -- down to the database ----------------------------------------------------------------------

    def flush(self) -> None:
        """Everything that gathered, in the order of its dependence."""
        self._flush_tasks()
        self._flush_keys()
        self._flush_lanes()
        self._flush_results()
        if self._events:
            self._db.executemany(sqlite_rows.EVENT, self._events)
            self._events.clear()
        if self._group_events:
            self._db.executemany(sqlite_rows.EVENT_IN_GROUP, self._group_events)
            self._group_events.clear()
        if self._dirty_queues:
            rows = [self._queues[q] for q in self._dirty_queues]
            self._db.executemany(sqlite_rows.QUEUE, [(r.queue, r.paused, r.has_groups, r.groups_turn, r.fed) for r in rows])
            self._dirty_queues.clear()
        if self._counts:
            self._db.executemany(sqlite_rows.COUNT, [(queue, *deltas) for queue, deltas in self._counts.items()])
            self._counts.clear()
        counters = (self._seq, self._event, self._turn)
        if counters != self._loaded:
            self._db.execute("UPDATE store SET next_seq=?, next_event=?, next_turn=?", counters)
            self._loaded = counters

    def insert_plain(self, op: Enqueue, now_us: int) -> bool:
        """The row and its event straight from the operation. Later operations of the batch read it from the table."""
        if op.encoding != "json":
            return False
        seq = self._seq
        if op.origin:
            row = sqlite_rows.pushed_row(op, seq, now_us)
            if row is None:
                return False
            self._pushed.append(row)
        else:
            args, kwargs, rest = sqlite_rows.split_call(op.payload)
            if rest is not None or args is None or op.fingerprint:
                return False
            self._ready.append(
                (
                    seq,
                    op.id,
                    op.queue,
                    op.name,
                    now_us,
                    now_us,
                    now_us,
                    op.max_attempts - 1,
                    op.timeout_us,
                    op.lease_us,
                    op.result_ttl_us,
                    args,
                    kwargs,
                    op.backoff,
                )
            )
        self._seq = seq + 1
        self._tasks.pop(op.id, None)
        self._ready_ids.add(op.id)
        self._counts[op.queue][State.READY] += 1
        if self.events_on:
            shift = self._event - seq
            self._event += 1
            runs = self._ready_runs
            if runs and runs[-1][1] == seq - 1 and runs[-1][2] == shift:
                runs[-1][1] = seq
            else:
                runs.append([seq, seq, shift])
        return True

    def _flush_ready(self) -> None:
        if self._ready:
            self._db.executemany(sqlite_rows.INSERT_READY, self._ready)
            self._ready.clear()
        if self._pushed:
            self._db.executemany(sqlite_rows.INSERT_PUSHED, self._pushed)
            self._pushed.clear()
        for sql, rows in (
            (sqlite_rows.INSERT_STAGED, self._staged),
            (sqlite_rows.INSERT_STAGED_MORE, self._staged_more),
        ):
            if rows:
                self._db.executemany(sql, rows)
                rows.clear()
        self._ready_ids.clear()
        for first, last, shift in self._ready_runs:
            self._db.execute(sqlite_rows.EVENTS_OF_READY, (shift, first, last))
        self._ready_runs.clear()

    def _flush_tasks(self) -> None:
        if self._ready_ids:
            self._flush_ready()
        if self._inserts:
            plain: list[tuple[Any, ...]] = []
            full: list[tuple[Any, ...]] = []
            for task in self._inserts:
                row, rest = sqlite_rows.insert_row(task)
                if rest is None:
                    plain.append(row)
                else:
                    full.append(row + rest)
            if plain:
                self._db.executemany(sqlite_rows.INSERT_PLAIN, plain)
            if full:
                self._db.executemany(sqlite_rows.INSERT, full)
            self._inserts.clear()
        for changed, sql, row_of in (
            (self._leased, sqlite_rows.UPDATE_LEASED, sqlite_rows.leased_row),
            (self._done, sqlite_rows.UPDATE_DONE, sqlite_rows.done_row),
            (self._updates, sqlite_rows.UPDATE, sqlite_rows.update_row),
        ):
            if changed:
                self._db.executemany(sql, map(row_of, changed.values()))
                changed.clear()
        if self._plain_ends:
            self._plain_ends.write(self._db)

    def _flush_keys(self) -> None:
        if self._new_keys:
            self._db.executemany(sqlite_rows.KEY, self._new_keys)
            self._new_keys.clear()

    def _flush_results(self) -> None:
        if self._results:
            plain = [sqlite_rows.plain_result(*r) for r in self._results if r[1].state is State.DONE and r[2] is not None]
            if plain:
                self._db.executemany(sqlite_rows.RESULT_PLAIN, plain)
            if len(plain) < len(self._results):
                rest = [sqlite_rows.result_row(*r) for r in self._results if r[1].state is not State.DONE or r[2] is None]
                self._db.executemany(sqlite_rows.RESULT, rest)
            self._results.clear()

    def _flush_lanes(self) -> None:
        if self._dirty_lanes:
            rows = [(x.queue, x.group, x.limit, x.ready, x.inflight, x.members, x.turn) for x in self._dirty_lanes.values()]
            self._db.executemany(sqlite_rows.LANE, rows)
            self._dirty_lanes.clear()

    # -- records -----------------------------------------------------------------------------------

    def prefetch(self, ids: Iterable[str]) -> None:
        """Load the records that a batch will ask for in one statement."""
        wanted = [i for i in ids if i not in self._tasks]
        if self._ready_ids and not self._ready_ids.isdisjoint(wanted):
            self._flush_ready()
        if self._held:
            wanted = self._recall(wanted)
        if wanted:
            self._tasks.update(dict.fromkeys(wanted))
            self._remember(self._db.execute(sqlite_rows.BY_IDS, (sqlite_rows.encode(wanted).decode(),)).fetchall())

    def _recall(self, ids: list[str]) -> list[str]:
        """Take running tasks that this process leased from memory, if they are still held under the same token.

        While they are, only these few columns can have changed; reading them costs a fifth of reading the row.
        """
        known = [i for i in ids if i in self._held]
        if not known:
            return ids
        for id, token, cancel, dependents, until in self._db.execute(
            sqlite_rows.VERIFY, (sqlite_rows.encode(known).decode(),)
        ).fetchall():
            task = self._held[id]
            if task.token == token:
                task.cancel_requested, task.has_dependents, task.lease_until_us = cancel == 1, dependents == 1, until
                self._tasks[id] = self._by_seq[task.seq] = task
        return [i for i in ids if i not in self._tasks]

    def remember_held(self) -> None:
        """After the commit: what this process holds now."""
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
        if task is not None and task in self._plain_ends:  # whatever changes it now must find it written
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

    def _remember(self, rows: list[Any]) -> list[Record]:
        """Rows as records; one that is known stays the same object and only gains its payload."""
        tasks: list[Record] = []
        for row in rows:
            task = self._by_seq.get(row[0])
            if task is None:
                task = sqlite_rows.record_of(row)
                self._tasks[task.id] = self._by_seq[task.seq] = task
            elif task.payload is None and len(row) > 38:
                task.payload = sqlite_rows.join_call(row[38], row[39], row[40])
            tasks.append(task)
        return tasks

    def _select(self, sql: str, *parameters: Any) -> list[Record]:
        self._flush_tasks()
        return self._remember(self._db.execute(sql, parameters).fetchall())

    def insert(self, task: Record) -> None:
        task.seq = self._seq
        self._seq += 1
        self._tasks[task.id] = self._by_seq[task.seq] = task
        self._inserts.append(task)
        self._counts[task.queue][task.state] += 1

    def save(self, task: Record, was: State, was_queue: str) -> None:
        seq, state = task.seq, task.state
        if seq in self._leased or seq in self._done or seq in self._updates:
            self._leased.pop(seq, None)
            self._done.pop(seq, None)
            self._updates[seq] = task
        elif was is State.READY and state is State.RUNNING:
            self._leased[seq] = task
        elif was is State.RUNNING and state is State.DONE:
            self._done[seq] = task
        else:
            self._updates[seq] = task
        if was is not state or was_queue != task.queue:
            self._counts[was_queue][was] -= 1
            self._counts[task.queue][task.state] += 1

    def save_leased(self, tasks: Sequence[Record], now_us: int) -> None:
        write_leases(self._db, tasks, now_us, self._event if self.events_on else None)
        if self.events_on:
            self._event += len(tasks)
        counts = self._counts[tasks[0].queue]
        counts[State.READY] -= len(tasks)
        counts[State.RUNNING] += len(tasks)

    def end_plain(self, task: Record, now_us: int) -> bool:
        seq = task.seq
        if seq in self._leased or seq in self._done or seq in self._updates:  # its row is not what it will be
            return False
        self._plain_ends.add(task, now_us, self._event if self.events_on else None)
        if self.events_on:
            self._event += 1
        counts = self._counts[task.queue]
        counts[State.RUNNING] -= 1
        counts[State.DONE] += 1
        return True

    def delete(self, task: Record) -> None:
        self._flush_tasks()
        self._db.execute("DELETE FROM tasks WHERE seq=?", (task.seq,))
        self._tasks[task.id] = None
        del self._by_seq[task.seq]
        self._counts[task.queue][task.state] -= 1

    def held(self, token: str) -> list[Record]:
        return self._select(sqlite_rows.HELD, token)

    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        if group is None:
            self._flush_tasks()
            return [self._adopt(task) for task in read_ready(self._db, queue, limit)]
        return self._select(sqlite_rows.GROUPED, queue, group, limit)

    def due(self, queue: str, now_us: int, limit: int) -> list[Record]:
        return self._select(sqlite_rows.DUE, queue, now_us, limit)

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
        found = self._db.execute(sqlite_rows.OPEN_LANE, (queue,)).fetchone()
        if found is None:
            return None
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
        self._flush_keys()
        self._keys[queue, key] = None
        self._db.execute("DELETE FROM keys WHERE queue=? AND key=?", (queue, key))

    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None:
        self._results.append((task, result, expires_us))

    def delete_result(self, task: Record) -> None:
        self._flush_results()
        self._db.execute("DELETE FROM results WHERE seq=?", (task.seq,))

    def block(self, blocker: Record, dependent: Record) -> None:
        if not blocker.has_dependents:
            blocker.has_dependents = True
            self.save(blocker, blocker.state, blocker.queue)
        self._db.execute("INSERT OR IGNORE INTO blocks VALUES (?,?)", (blocker.id, dependent.seq))

    def dependents(self, blocker_id: str, limit: int) -> list[Record]:
        return self._select(sqlite_rows.DEPENDENTS, blocker_id, limit)

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
        row = (
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
        )
        if task.group is None:
            self._events.append(row)
        else:
            self._group_events.append((*row, task.group))

    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None:
        if gone:
            self._db.execute("DELETE FROM workers WHERE worker=?", (info.worker,))
        else:
            self._db.execute("INSERT OR REPLACE INTO workers VALUES (?,?,?)", (info.worker, now_us, sqlite_rows.encode(info)))

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

    # -- staged runs -------------------------------------------------------------------------------

    def run(self, queue: str, run_id: str) -> Run | None:
        found = self._db.execute(f"{sqlite_rows.RUN} WHERE queue=? AND run_id=?", (queue, run_id)).fetchone()
        return sqlite_rows.run_of(found) if found else None

    def save_run(self, run: Run) -> None:
        self._db.execute("INSERT OR REPLACE INTO runs VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", msgspec.structs.astuple(run))

    def unsettled(self, now_us: int, limit: int) -> list[Run]:
        sql = f"{sqlite_rows.RUN} WHERE settled = 0 AND (state <> 'OPEN' OR expires_at <= ?) LIMIT ?"
        return [sqlite_rows.run_of(row) for row in self._db.execute(sql, (now_us, limit)).fetchall()]

    def staged(self, run: Run, limit: int) -> list[Record]:
        return self._select(sqlite_rows.STAGED, run.queue, run.run_id, run.queue, run.run_id, limit)

    def foresee(self, queue: str, tasks: Sequence[Enqueue]) -> None:
        self.prefetch([op.id for op in tasks])
        keys = [op.idempotency_key for op in tasks if op.idempotency_key is not None]
        if keys:
            self._flush_keys()
            self._keys.update(((queue, key), None) for key in keys)
            for key, *rest in self._db.execute(sqlite_rows.KEYS, (queue, sqlite_rows.encode(keys).decode())).fetchall():
                self._keys[queue, key] = Key(*rest)

    def stage_plain(self, op: Enqueue, run: Run, now_us: int) -> bool:
        if op.encoding != "json" or op.origin or (op.headers, op.interval_us, op.dead_queue) != (None, None, None):
            return False
        args, kwargs, rest = sqlite_rows.split_call(op.payload)
        if rest is not None or args is None:
            return False
        retries, key = op.max_attempts - 1, op.idempotency_key
        due = now_us if op.eta_us is None else op.eta_us
        lasting = (retries, op.timeout_us, op.lease_us, op.result_ttl_us, args, kwargs, op.backoff, op.fingerprint)
        row = (self._seq, op.id, op.queue, op.name, due, now_us, now_us, *lasting, run.run_id, key)
        if op.group is None and op.eta_us is None:
            self._staged.append(row)
        else:
            self._staged_more.append((*row, op.group, op.eta_us))
        if key is not None:
            self.save_key(op.queue, key, Key(op.id, op.fingerprint, now_us + op.key_ttl_us))
        self._seq += 1
        self._tasks.pop(op.id, None)
        self._ready_ids.add(op.id)
        self._counts[op.queue][State.STAGED] += 1
        return True

    def release_plain(self, run: Run, now_us: int, limit: int) -> int:
        self._flush_tasks()
        place = (run.queue, run.run_id)
        in_order = self._db.execute(sqlite_rows.STAGED_IN_ORDER, (*place, *place, limit)).fetchall()
        found = [seq for seq, plain in in_order if plain]
        if not found:
            return 0
        seqs = sqlite_rows.encode(found).decode()
        self._db.execute(sqlite_rows.RELEASE, (run.ended_at_us, run.ended_at_us, now_us, seqs))
        if self._db.execute("SELECT 1 FROM claims LIMIT 1").fetchone():
            others = "SELECT id FROM tasks WHERE seq IN (SELECT value FROM json_each(?))"
            self._db.execute(f"DELETE FROM claims WHERE task_id IN ({others})", (seqs,))
        if self.events_on:
            numbers = {seq: self._event + at for at, (seq, _) in enumerate(in_order)}
            events = sqlite_rows.encode({numbers[seq]: seq for seq in found}).decode()
            self._db.execute(sqlite_rows.EVENTS_OF_RELEASED, (now_us, events))
            self._left_out.extend(numbers[seq] for seq, plain in in_order if not plain)
            self._event += len(in_order)
        for seq in found:
            task = self._by_seq.pop(seq, None)
            if task is not None:
                self._tasks.pop(task.id, None)
        self._counts[run.queue][State.STAGED] -= len(found)
        self._counts[run.queue][State.READY] += len(found)
        row = self.queue(run.queue)
        if not row.fed:
            row.fed = True
            self.save_queue(row)
        return len(found)

    def claim(self, task: Record, run_id: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO claims VALUES (?,?,?)", (task.queue, run_id, task.id))

    def claims(self, task: Record) -> list[str]:
        sql = "SELECT run_id FROM claims WHERE task_id=? ORDER BY rowid"
        return [row[0] for row in self._db.execute(sql, (task.id,)).fetchall()]

    def unclaim(self, task: Record, run_id: str) -> None:
        self._db.execute("DELETE FROM claims WHERE queue=? AND run_id=? AND task_id=?", (task.queue, run_id, task.id))
