"""The ledger of the state machine on SQLite: a unit of work over one `BEGIN IMMEDIATE … COMMIT`.

Records are loaded once and kept by identity; inserts, updates, results and events gather in lists and go down in one
statement each, before a query that depends on them and at the end. That is what makes a batch of a hundred cheap.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from omniq.models import Blocker, Record, State, StoredResult, TaskError, TaskStatus, status_of
from omniq.operations import Enqueue, WorkerInfo
from omniq.storage.ledger import Key, Lane, QueueRow

MAX_HELD = 20_000
STATES: list[State] = list(State)
COUNTERS: list[str] = [s.name.lower() for s in State]

_LEAN = """seq, id, queue, func_path, state, eta, asked_eta, returned, attempts, max_retries, timeout, lease, "interval",
 result_ttl, backoff, "group", token, lease_until, ended_by, worker, cancel_requested, dead_queue, blocked_by, blockers_left,
 has_dependents, run_id, idempotency_key, fingerprint, created_at, updated_at, started_at, finished_at, last_error, failed_at,
 progress, headers, origin, encoding"""
COLUMNS = _LEAN + ", args, kwargs, payload"

# sqlite3 looks for an adapter for every None, bool and bytes that it binds, which costs more than storing them. So the
# common shapes of a row have statements of their own, without the columns that are NULL, and JSON is bound as text.
_PLAIN = """seq, id, queue, func_path, state, status, eta, max_retries, timeout, lease, result_ttl, backoff, fingerprint,
 created_at, updated_at, origin, encoding, args, kwargs"""
_INSERT_PLAIN = f"INSERT INTO tasks ({_PLAIN}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
_INSERT_READY = """INSERT INTO tasks (seq, id, queue, func_path, state, status, eta, max_retries, timeout, lease, result_ttl,
 created_at, updated_at, args, kwargs, backoff) VALUES (?1,?2,?3,?4,3,'PENDING',?5,?6,?7,?8,?9,?5,?5,?10,?11,?12)"""
_EVENTS_OF_READY = """INSERT INTO events (seq, ts, event, task_seq, task_id, queue, name, attempt, worker, enqueued_at, due,
 state, data) SELECT seq + ?, created_at, 'enqueued', seq, id, queue, func_path, 0, '', created_at, eta, 3,
 '{"payload_bytes":' || (length(CAST(args AS BLOB)) + length(CAST(kwargs AS BLOB)) + 19) || '}'
 FROM tasks WHERE seq BETWEEN ? AND ?"""
_INSERT = f"""INSERT INTO tasks ({_PLAIN}, asked_eta, "interval", "group", dead_queue, run_id, idempotency_key, headers,
 blocked_by, blockers_left, payload) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"""
_UPDATE_LEASED = """UPDATE tasks SET state=4, status='RUNNING', returned=0, attempts=?, token=?, lease_until=?, worker=?,
 started_at=?, updated_at=? WHERE seq=?"""
_UPDATE_DONE = """UPDATE tasks SET state=5, status='SUCCESS', token=NULL, lease_until=NULL, ended_by=?, finished_at=?,
 updated_at=? WHERE seq=?"""
_UPDATE = """UPDATE tasks SET queue=?, state=?, status=?, eta=?, asked_eta=?, returned=?, attempts=?, token=?, lease_until=?,
 ended_by=?, worker=?, cancel_requested=?, dead_queue=?, blocked_by=?, blockers_left=?, has_dependents=?, updated_at=?,
 started_at=?, finished_at=?, last_error=?, failed_at=?, progress=? WHERE seq=?"""
_RESULT_PLAIN = """INSERT OR REPLACE INTO results (seq, task_id, status, result, encoding, finished_at, attempts,
 last_attempt_at, expires_at) VALUES (?,?,'SUCCESS',?,?,?,?,?,?)"""
_RESULT = """INSERT OR REPLACE INTO results (seq, task_id, status, result, encoding, finished_at, attempts, last_attempt_at,
 expires_at, error) VALUES (?,?,?,?,?,?,?,?,?,?)"""
_EVENT_COLUMNS = "seq, ts, event, task_seq, task_id, queue, name, attempt, worker, enqueued_at, due, state, data"
_EVENT = f"INSERT INTO events ({_EVENT_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"
_EVENT_IN_GROUP = f'INSERT INTO events ({_EVENT_COLUMNS}, "group") VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)'
_LANE = 'INSERT OR REPLACE INTO lanes (queue, "group", "limit", ready, inflight, members, turn) VALUES (?,?,?,?,?,?,?)'
_QUEUE = """INSERT INTO queues (queue, paused, has_groups, groups_turn, fed) VALUES (?,?,?,?,?) ON CONFLICT (queue)
 DO UPDATE SET paused=excluded.paused, has_groups=excluded.has_groups, groups_turn=excluded.groups_turn, fed=excluded.fed"""
_COUNT = f"""INSERT INTO queues (queue, {", ".join(COUNTERS)}) VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT (queue)
 DO UPDATE SET {", ".join(f"{c}={c}+excluded.{c}" for c in COUNTERS)}"""

_SELECT = f"SELECT {COLUMNS} FROM tasks"
_BY_IDS = f"SELECT {_LEAN} FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
_VERIFY = """SELECT id, token, cancel_requested, has_dependents, lease_until FROM tasks
 WHERE state=4 AND id IN (SELECT value FROM json_each(?))"""
_UNGROUPED = f'{_SELECT} WHERE state=3 AND queue=? AND "group" IS NULL ORDER BY returned DESC, eta, seq LIMIT ?'
_GROUPED = f'{_SELECT} WHERE state=3 AND queue=? AND "group"=? ORDER BY returned DESC, eta, seq LIMIT ?'
_DUE = f"{_SELECT} WHERE state=2 AND queue=? AND eta<=? ORDER BY eta, seq LIMIT ?"
_HELD = f"{_SELECT} WHERE state=4 AND token=? ORDER BY seq"
_DEPENDENTS = (
    f"{_SELECT} WHERE seq IN (SELECT dependent FROM blocks WHERE blocker_id=? ORDER BY dependent LIMIT ?) ORDER BY seq"
)
_OPEN_LANE = """SELECT queue, "group", "limit", ready, inflight, members, turn FROM lanes
 WHERE queue=? AND ready > 0 AND inflight < max("limit", 1) ORDER BY turn LIMIT 1"""

_encode = msgspec.json.Encoder().encode
_decode_error = msgspec.json.Decoder(TaskError).decode
_decode_blockers = msgspec.json.Decoder(tuple[Blocker, ...]).decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class _Call(msgspec.Struct):
    args: msgspec.Raw = msgspec.Raw()
    kwargs: msgspec.Raw = msgspec.Raw()


_decode_call = msgspec.json.Decoder(_Call).decode


def split_call(payload: bytes | None) -> tuple[str | None, str | None, bytes | None]:
    """A Python call as (args, kwargs, None), if joining them gives the very same bytes; else (None, None, payload)."""
    if payload is None or not payload.startswith(b'{"args":'):
        return None, None, payload
    try:
        call = _decode_call(payload)
        args, kwargs = bytes(call.args), bytes(call.kwargs)
        if b'{"args":%b,"kwargs":%b}' % (args, kwargs) == payload:
            return args.decode(), kwargs.decode(), None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    return None, None, payload


def join_call(args: str | None, kwargs: str | None, payload: bytes | None) -> bytes | None:
    if args is None or kwargs is None:
        return payload
    return f'{{"args":{args},"kwargs":{kwargs}}}'.encode()


def record_of(row: Sequence[Any]) -> Record:
    """A row of `COLUMNS`, or of its part without the payload."""
    return Record(
        seq=row[0],
        id=row[1],
        queue=row[2],
        name=row[3],
        state=STATES[cast(int, row[4])],
        due_us=row[5],
        eta_us=row[6],
        returned=row[7] == 1,
        attempts=row[8],
        max_attempts=row[9] + 1,
        timeout_us=row[10],
        lease_us=row[11],
        interval_us=row[12],
        result_ttl_us=row[13],
        backoff=row[14],
        group=row[15],
        token=row[16],
        lease_until_us=row[17],
        ended_by=row[18],
        worker=row[19],
        cancel_requested=row[20] == 1,
        dead_queue=row[21],
        blocked_by=() if row[22] is None else _decode_blockers(row[22]),
        blockers_left=row[23],
        has_dependents=row[24] == 1,
        run_id=row[25],
        idempotency_key=row[26],
        fingerprint=row[27],
        created_at_us=row[28],
        updated_at_us=row[29],
        started_at_us=row[30],
        finished_at_us=row[31],
        last_error=None if row[32] is None else _decode_error(row[32]),
        failed_at_us=row[33],
        progress=_bytes(row[34]),
        headers=None if row[35] is None else _decode_headers(row[35]),
        origin=row[36],
        encoding=row[37],
        payload=join_call(row[38], row[39], row[40]) if len(row) > 38 else None,
    )


def _text(data: bytes | None) -> str | bytes | None:
    """JSON as text, which is quicker to bind and can be read in the database; anything else as it is."""
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return data


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


_STATE_OF = {TaskStatus.SUCCESS: State.DONE, TaskStatus.FAILED: State.DEAD, TaskStatus.CANCELLED: State.CANCELLED}


def result_of_row(row: Sequence[Any]) -> StoredResult:
    """A row of `task_id, status, result, encoding, error, finished_at, attempts, last_attempt_at`."""
    return StoredResult(
        task_id=row[0],
        state=_STATE_OF[TaskStatus(row[1])],
        result=_bytes(row[2]),
        encoding=row[3],
        error=None if row[4] is None else _decode_error(row[4]),
        finished_at_us=row[5],
        attempts=row[6],
        started_at_us=row[7],
    )


def _optional(value: object) -> str | None:
    return _encode(value).decode() if value else None


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
        self._ready_ids: set[str] = set()
        self._ready_runs: list[list[int]] = []  # [first seq, last seq, event number − seq]
        self._updates: dict[int, Record] = {}
        self._leased: dict[int, Record] = {}
        self._done: dict[int, Record] = {}
        self._results: list[tuple[Record, StoredResult, int | None]] = []
        self._events: list[tuple[Any, ...]] = []
        self._group_events: list[tuple[Any, ...]] = []
        self._queues: dict[str, QueueRow] = {}
        self._dirty_queues: set[str] = set()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._dirty_lanes: dict[tuple[str, str], Lane] = {}
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0] * len(STATES))
        row = connection.execute("SELECT next_seq, next_event, next_turn FROM store").fetchone()
        self._seq, self._event, self._turn = cast("tuple[int, int, int]", row)
        self._loaded = row

    # -- down to the database ----------------------------------------------------------------------

    def flush(self) -> None:
        """Everything that gathered, in the order of its dependence."""
        self._flush_tasks()
        self._flush_lanes()
        self._flush_results()
        if self._events:
            self._db.executemany(_EVENT, self._events)
            self._events.clear()
        if self._group_events:
            self._db.executemany(_EVENT_IN_GROUP, self._group_events)
            self._group_events.clear()
        if self._dirty_queues:
            rows = [self._queues[q] for q in self._dirty_queues]
            self._db.executemany(_QUEUE, [(r.queue, r.paused, r.has_groups, r.groups_turn, r.fed) for r in rows])
            self._dirty_queues.clear()
        if self._counts:
            self._db.executemany(_COUNT, [(queue, *deltas) for queue, deltas in self._counts.items()])
            self._counts.clear()
        counters = (self._seq, self._event, self._turn)
        if counters != self._loaded:
            self._db.execute("UPDATE store SET next_seq=?, next_event=?, next_turn=?", counters)
            self._loaded = counters

    def insert_plain(self, op: Enqueue, now_us: int) -> bool:
        """The row and its event straight from the operation. Later operations of the batch read it from the table."""
        args, kwargs, rest = split_call(op.payload)
        if rest is not None or args is None or op.fingerprint or op.origin or op.encoding != "json":
            return False
        seq = self._seq
        self._ready.append(
            (
                seq,
                op.id,
                op.queue,
                op.name,
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
        self._db.executemany(_INSERT_READY, self._ready)
        self._ready.clear()
        self._ready_ids.clear()
        for first, last, shift in self._ready_runs:
            self._db.execute(_EVENTS_OF_READY, (shift, first, last))
        self._ready_runs.clear()

    def _flush_tasks(self) -> None:
        if self._ready:
            self._flush_ready()
        if self._inserts:
            plain: list[tuple[Any, ...]] = []
            full: list[tuple[Any, ...]] = []
            for task in self._inserts:
                row, rest = _insert_row(task)
                if rest is None:
                    plain.append(row)
                else:
                    full.append(row + rest)
            if plain:
                self._db.executemany(_INSERT_PLAIN, plain)
            if full:
                self._db.executemany(_INSERT, full)
            self._inserts.clear()
        for changed, sql, row_of in (
            (self._leased, _UPDATE_LEASED, _leased_row),
            (self._done, _UPDATE_DONE, _done_row),
            (self._updates, _UPDATE, _update_row),
        ):
            if changed:
                self._db.executemany(sql, map(row_of, changed.values()))
                changed.clear()

    def _flush_results(self) -> None:
        if self._results:
            plain = [_plain_result(*r) for r in self._results if r[1].state is State.DONE and r[2] is not None]
            if plain:
                self._db.executemany(_RESULT_PLAIN, plain)
            if len(plain) < len(self._results):
                rest = [_result_row(*r) for r in self._results if r[1].state is not State.DONE or r[2] is None]
                self._db.executemany(_RESULT, rest)
            self._results.clear()

    def _flush_lanes(self) -> None:
        if self._dirty_lanes:
            rows = [(x.queue, x.group, x.limit, x.ready, x.inflight, x.members, x.turn) for x in self._dirty_lanes.values()]
            self._db.executemany(_LANE, rows)
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
            self._remember(self._db.execute(_BY_IDS, (_encode(wanted).decode(),)).fetchall())

    def _recall(self, ids: list[str]) -> list[str]:
        """Take running tasks that this process leased from memory, if they are still held under the same token.

        While they are, only these few columns can have changed; reading them costs a fifth of reading the row.
        """
        known = [i for i in ids if i in self._held]
        if not known:
            return ids
        for id, token, cancel, dependents, until in self._db.execute(_VERIFY, (_encode(known).decode(),)).fetchall():
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
        return self._tasks[id]

    def _remember(self, rows: list[Any]) -> list[Record]:
        """Rows as records; one that is known stays the same object and only gains its payload."""
        tasks: list[Record] = []
        for row in rows:
            task = self._by_seq.get(row[0])
            if task is None:
                task = record_of(row)
                self._tasks[task.id] = self._by_seq[task.seq] = task
            elif task.payload is None and len(row) > 38:
                task.payload = join_call(row[38], row[39], row[40])
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

    def delete(self, task: Record) -> None:
        self._flush_tasks()
        self._db.execute("DELETE FROM tasks WHERE seq=?", (task.seq,))
        self._tasks[task.id] = None
        del self._by_seq[task.seq]
        self._counts[task.queue][task.state] -= 1

    def held(self, token: str) -> list[Record]:
        return self._select(_HELD, token)

    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        if group is None:
            return self._select(_UNGROUPED, queue, limit)
        return self._select(_GROUPED, queue, group, limit)

    def due(self, queue: str, now_us: int, limit: int) -> list[Record]:
        return self._select(_DUE, queue, now_us, limit)

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

    def open_lane(self, queue: str) -> Lane | None:
        self._flush_lanes()
        found = self._db.execute(_OPEN_LANE, (queue,)).fetchone()
        if found is None:
            return None
        return self._lanes.setdefault((found[0], found[1]), Lane(*found))

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn

    # -- keys, results, dependents, events ---------------------------------------------------------

    def key(self, queue: str, key: str) -> Key | None:
        sql = "SELECT task_id, fingerprint, expires_at FROM keys WHERE queue=? AND key=?"
        found = self._db.execute(sql, (queue, key)).fetchone()
        return Key(*found) if found else None

    def save_key(self, queue: str, key: str, value: Key) -> None:
        row = (queue, key, value.task_id, value.fingerprint, value.expires_us)
        self._db.execute("INSERT OR REPLACE INTO keys VALUES (?,?,?,?,?)", row)

    def delete_key(self, queue: str, key: str) -> None:
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
        return self._select(_DEPENDENTS, blocker_id, limit)

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
        row = (
            self._event,
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
        self._event += 1
        if task.group is None:
            self._events.append(row)
        else:
            self._group_events.append((*row, task.group))

    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None:
        if gone:
            self._db.execute("DELETE FROM workers WHERE worker=?", (info.worker,))
        else:
            self._db.execute("INSERT OR REPLACE INTO workers VALUES (?,?,?)", (info.worker, now_us, _encode(info)))


def _insert_row(task: Record) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """The columns that every task fills, and those that most leave empty, if this one fills any of them."""
    args, kwargs, payload = split_call(task.payload)
    row = (
        task.seq,
        task.id,
        task.queue,
        task.name,
        int(task.state),
        task.status.value,
        task.due_us,
        task.max_attempts - 1,
        task.timeout_us,
        task.lease_us,
        task.result_ttl_us,
        task.backoff,
        task.fingerprint,
        task.created_at_us,
        task.updated_at_us,
        task.origin,
        task.encoding,
        args,
        kwargs,
    )
    rest = (task.eta_us, task.interval_us, task.group, task.dead_queue, task.run_id, task.idempotency_key, task.headers)
    if rest == _NOTHING and payload is None and not task.blocked_by:
        return row, None
    return row, (*rest[:-1], _optional(task.headers), _optional(task.blocked_by), task.blockers_left, payload)


_NOTHING = (None,) * 7


def _leased_row(task: Record) -> tuple[Any, ...]:
    moment = task.started_at_us
    return (task.attempts, task.token, task.lease_until_us, task.worker, moment, moment, task.seq)


def _done_row(task: Record) -> tuple[Any, ...]:
    return (task.ended_by, task.finished_at_us, task.updated_at_us, task.seq)


def _update_row(task: Record) -> tuple[Any, ...]:
    return (
        task.queue,
        int(task.state),
        task.status.value,
        task.due_us,
        task.eta_us,
        int(task.returned),
        task.attempts,
        task.token,
        task.lease_until_us,
        task.ended_by,
        task.worker,
        int(task.cancel_requested),
        task.dead_queue,
        _optional(task.blocked_by),
        task.blockers_left,
        int(task.has_dependents),
        task.updated_at_us,
        task.started_at_us,
        task.finished_at_us,
        _optional(task.last_error),
        task.failed_at_us,
        _text(task.progress),
        task.seq,
    )


def _plain_result(task: Record, result: StoredResult, expires_us: int | None) -> tuple[Any, ...]:
    return (
        task.seq,
        task.id,
        _text(result.result),
        result.encoding,
        result.finished_at_us,
        result.attempts,
        result.started_at_us,
        expires_us,
    )


def _result_row(task: Record, result: StoredResult, expires_us: int | None) -> tuple[Any, ...]:
    plain = _plain_result(task, result, expires_us)
    return (*plain[:2], status_of(result.state, result.attempts).value, *plain[2:], _optional(result.error))
