"""Rows of a SQLite store and the statements that read and write them, beside the records they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from omniq.models import Blocker, Record, State, StoredResult, TaskError, TaskStatus, status_of
from omniq.operations import Enqueue, RunState
from omniq.storage.ledger import Run

STATES: list[State] = list(State)
COUNTERS: list[str] = [s.name.lower() for s in State]

LEAN = """seq, id, queue, func_path, state, eta, asked_eta, returned, attempts, max_retries, timeout, lease, "interval",
 result_ttl, backoff, "group", token, lease_until, ended_by, worker, cancel_requested, dead_queue, blocked_by, blockers_left,
 has_dependents, run_id, idempotency_key, fingerprint, created_at, updated_at, started_at, finished_at, last_error, failed_at,
 progress, headers, origin, encoding"""
COLUMNS = LEAN + ", args, kwargs, payload"

# sqlite3 looks for an adapter for every None, bool and bytes that it binds, which costs more than storing them. So the
# common shapes of a row have statements of their own, without the columns that are NULL, and JSON is bound as text.
PLAIN = """seq, id, queue, func_path, state, status, eta, max_retries, timeout, lease, result_ttl, backoff, fingerprint,
 created_at, updated_at, origin, encoding, args, kwargs"""
INSERT_PLAIN = f"INSERT INTO tasks ({PLAIN}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
_NEW = "INSERT INTO tasks (seq, id, queue, func_path, state, status, eta, created_at, updated_at, max_retries"
INSERT_READY = f"""{_NEW}, timeout, lease, result_ttl, args, kwargs, backoff)
 VALUES (?,?,?,?,3,'PENDING',?,?,?,?,?,?,?,?,?,?)"""
INSERT_PUSHED = f"{_NEW}, payload, backoff, fingerprint, origin) VALUES (?,?,?,?,3,'PENDING',?,?,?,?,?,?,?,?)"
INSERT_STAGED = f"""{_NEW}, timeout, lease, result_ttl, args, kwargs, backoff, fingerprint, run_id, idempotency_key)
 VALUES (?,?,?,?,0,'PENDING',?,?,?,?,?,?,?,?,?,?,?,?,?)"""
INSERT_STAGED_MORE = f"""{_NEW}, timeout, lease, result_ttl, args, kwargs, backoff, fingerprint, run_id, idempotency_key,
 "group", asked_eta) VALUES (?,?,?,?,0,'PENDING',?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"""
KEY = "INSERT OR REPLACE INTO keys VALUES (?,?,?,?,?)"
KEYS = "SELECT key, task_id, fingerprint, expires_at FROM keys WHERE queue=? AND key IN (SELECT value FROM json_each(?))"
STAGED_IN_ORDER = """SELECT seq, coalesce("group", asked_eta, "interval") IS NULL FROM tasks
 WHERE state=0 AND queue=? AND run_id=?
 UNION ALL SELECT seq, 0 FROM tasks WHERE state=0 AND id IN (SELECT task_id FROM claims WHERE queue=? AND run_id=?)
 ORDER BY seq LIMIT ?"""
RELEASE = """UPDATE tasks SET state=3, eta=?, created_at=?, updated_at=? WHERE seq IN (SELECT value FROM json_each(?))"""
_SIZE = """'{"payload_bytes":' || CASE WHEN args IS NULL THEN coalesce(length(CAST(payload AS BLOB)), 0)
 ELSE length(CAST(args AS BLOB)) + length(CAST(kwargs AS BLOB)) + 19 END || '}'"""
EVENTS_OF_RELEASED = f"""INSERT INTO events (seq, ts, event, task_seq, task_id, queue, name, attempt, worker, enqueued_at, due,
 state, data) SELECT j.key + 0, ?, 'enqueued', t.seq, t.id, t.queue, t.func_path, 0, '', t.created_at, t.eta, 3, {_SIZE}
 FROM json_each(?) j CROSS JOIN tasks t ON t.seq = j.value"""
EVENTS_OF_READY = f"""INSERT INTO events (seq, ts, event, task_seq, task_id, queue, name, attempt, worker, enqueued_at, due,
 state, data) SELECT seq + ?, created_at, 'enqueued', seq, id, queue, func_path, 0, '', created_at, eta, 3,
 {_SIZE}
 FROM tasks WHERE seq BETWEEN ? AND ?"""
INSERT = f"""INSERT INTO tasks ({PLAIN}, asked_eta, "interval", "group", dead_queue, run_id, idempotency_key, headers,
 blocked_by, blockers_left, payload) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"""
UPDATE_LEASED = """UPDATE tasks SET state=4, status='RUNNING', returned=0, attempts=?, token=?, lease_until=?, worker=?,
 started_at=?, updated_at=? WHERE seq=?"""
UPDATE_DONE = """UPDATE tasks SET state=5, status='SUCCESS', token=NULL, lease_until=NULL, ended_by=?, finished_at=?,
 updated_at=? WHERE seq=?"""
UPDATE = """UPDATE tasks SET queue=?, state=?, status=?, eta=?, asked_eta=?, returned=?, attempts=?, token=?, lease_until=?,
 ended_by=?, worker=?, cancel_requested=?, dead_queue=?, blocked_by=?, blockers_left=?, has_dependents=?, updated_at=?,
 started_at=?, finished_at=?, last_error=?, failed_at=?, progress=?, run_id=?, created_at=? WHERE seq=?"""
RESULT_PLAIN = """INSERT OR REPLACE INTO results (seq, task_id, status, result, encoding, finished_at, attempts,
 last_attempt_at, expires_at) VALUES (?,?,'SUCCESS',?,?,?,?,?,?)"""
RESULT = """INSERT OR REPLACE INTO results (seq, task_id, status, result, encoding, finished_at, attempts, last_attempt_at,
 expires_at, error) VALUES (?,?,?,?,?,?,?,?,?,?)"""
RESULT_COLUMNS = "task_id, status, result, encoding, error, finished_at, attempts, last_attempt_at"
EVENT_COLUMNS = "seq, ts, event, task_seq, task_id, queue, name, attempt, worker, enqueued_at, due, state, data"
EVENT = f"INSERT INTO events ({EVENT_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"
EVENT_IN_GROUP = f'INSERT INTO events ({EVENT_COLUMNS}, "group") VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)'
LANE = 'INSERT OR REPLACE INTO lanes (queue, "group", "limit", ready, inflight, members, turn) VALUES (?,?,?,?,?,?,?)'
QUEUE = """INSERT INTO queues (queue, paused, has_groups, groups_turn, fed) VALUES (?,?,?,?,?) ON CONFLICT (queue)
 DO UPDATE SET paused=excluded.paused, has_groups=excluded.has_groups, groups_turn=excluded.groups_turn, fed=excluded.fed"""
COUNT = f"""INSERT INTO queues (queue, {", ".join(COUNTERS)}) VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT (queue)
 DO UPDATE SET {", ".join(f"{c}={c}+excluded.{c}" for c in COUNTERS)}"""

SELECT = f"SELECT {COLUMNS} FROM tasks"
BY_IDS = f"SELECT {LEAN} FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
VERIFY = """SELECT id, token, cancel_requested, has_dependents, lease_until FROM tasks
 WHERE state=4 AND id IN (SELECT value FROM json_each(?))"""
GROUPED = f'{SELECT} WHERE state=3 AND queue=? AND "group"=? ORDER BY returned DESC, eta, seq LIMIT ?'
DUE = f"{SELECT} WHERE state=2 AND queue=? AND eta<=? ORDER BY eta, seq LIMIT ?"
HELD = f"{SELECT} WHERE state=4 AND token=? ORDER BY seq"
DEPENDENTS = f"{SELECT} WHERE seq IN (SELECT dependent FROM blocks WHERE blocker_id=? ORDER BY dependent LIMIT ?) ORDER BY seq"
STAGED = f"""{SELECT} WHERE state=0 AND queue=? AND run_id=?
 UNION ALL {SELECT} WHERE state=0 AND id IN (SELECT task_id FROM claims WHERE queue=? AND run_id=?) ORDER BY seq LIMIT ?"""
RUN = """SELECT queue, run_id, opened_at, expires_at, state, ended_at, key_ttl, new, claimed, released, dropped, settled
 FROM runs"""
OPEN_LANE = """SELECT queue, "group", "limit", ready, inflight, members, turn FROM lanes
 WHERE queue=? AND ready > 0 AND inflight < max("limit", 1) ORDER BY turn LIMIT 1"""

encode = msgspec.json.Encoder().encode
decode_error = msgspec.json.Decoder(TaskError).decode
decode_blockers = msgspec.json.Decoder(tuple[Blocker, ...]).decode
decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class Call(msgspec.Struct):
    args: msgspec.Raw = msgspec.Raw()
    kwargs: msgspec.Raw = msgspec.Raw()


decode_call = msgspec.json.Decoder(Call).decode


def split_call(payload: bytes | None) -> tuple[str | None, str | None, bytes | None]:
    """A Python call as (args, kwargs, None), if joining them gives the very same bytes; else (None, None, payload)."""
    if payload is None or not payload.startswith(b'{"args":'):
        return None, None, payload
    try:
        call = decode_call(payload)
        args, kwargs = bytes(call.args), bytes(call.kwargs)
        if b'{"args":%b,"kwargs":%b}' % (args, kwargs) == payload:
            return args.decode(), kwargs.decode(), None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last one: nested deeper than Python reads
        pass
    return None, None, payload


def join_call(args: str | None, kwargs: str | None, payload: str | bytes | None) -> bytes | None:
    if args is None or kwargs is None:
        return as_bytes(payload)
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
        blocked_by=() if row[22] is None else decode_blockers(row[22]),
        blockers_left=row[23],
        has_dependents=row[24] == 1,
        run_id=row[25],
        idempotency_key=row[26],
        fingerprint=row[27],
        created_at_us=row[28],
        updated_at_us=row[29],
        started_at_us=row[30],
        finished_at_us=row[31],
        last_error=None if row[32] is None else decode_error(row[32]),
        failed_at_us=row[33],
        progress=as_bytes(row[34]),
        headers=None if row[35] is None else decode_headers(row[35]),
        origin=row[36],
        encoding=row[37],
        payload=join_call(row[38], row[39], row[40]) if len(row) > 38 else None,
    )


def as_text(data: bytes | None) -> str | bytes | None:
    """JSON as text, which is quicker to bind and can be read in the database; anything else as it is."""
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return data


def as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def pushed_row(op: Enqueue, seq: int, now_us: int) -> tuple[Any, ...] | None:
    """The row of a task that came with a payload of its own and little else; None for one that needs the long form."""
    if op.timeout_us is not None or op.lease_us is not None or op.result_ttl_us is not None:
        return None
    payload = as_text(op.payload)
    if isinstance(payload, bytes):
        return None
    retries = op.max_attempts - 1
    return (seq, op.id, op.queue, op.name, now_us, now_us, now_us, retries, payload, op.backoff, op.fingerprint, op.origin)


STATE_OF = {TaskStatus.SUCCESS: State.DONE, TaskStatus.FAILED: State.DEAD, TaskStatus.CANCELLED: State.CANCELLED}


def result_of_row(row: Sequence[Any]) -> StoredResult:
    """A row of `task_id, status, result, encoding, error, finished_at, attempts, last_attempt_at`."""
    return StoredResult(
        task_id=row[0],
        state=STATE_OF[TaskStatus(row[1])],
        result=as_bytes(row[2]),
        encoding=row[3],
        error=None if row[4] is None else decode_error(row[4]),
        finished_at_us=row[5],
        attempts=row[6],
        started_at_us=row[7],
    )


def run_of(row: Sequence[Any]) -> Run:
    run = Run(*row)
    run.state, run.settled = RunState(row[4]), bool(row[11])
    return run


def optional(value: object) -> str | None:
    return encode(value).decode() if value else None


def insert_row(task: Record) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
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
    if rest == NOTHING and payload is None and not task.blocked_by:
        return row, None
    return row, (*rest[:-1], optional(task.headers), optional(task.blocked_by), task.blockers_left, payload)


NOTHING = (None,) * 7


def leased_row(task: Record) -> tuple[Any, ...]:
    moment = task.started_at_us
    return (task.attempts, task.token, task.lease_until_us, task.worker, moment, moment, task.seq)


def done_row(task: Record) -> tuple[Any, ...]:
    return (task.ended_by, task.finished_at_us, task.updated_at_us, task.seq)


def update_row(task: Record) -> tuple[Any, ...]:
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
        optional(task.blocked_by),
        task.blockers_left,
        int(task.has_dependents),
        task.updated_at_us,
        task.started_at_us,
        task.finished_at_us,
        optional(task.last_error),
        task.failed_at_us,
        as_text(task.progress),
        task.run_id,
        task.created_at_us,
        task.seq,
    )


def plain_result(task: Record, result: StoredResult, expires_us: int | None) -> tuple[Any, ...]:
    return (
        task.seq,
        task.id,
        as_text(result.result),
        result.encoding,
        result.finished_at_us,
        result.attempts,
        result.started_at_us,
        expires_us,
    )


def result_row(task: Record, result: StoredResult, expires_us: int | None) -> tuple[Any, ...]:
    plain = plain_result(task, result, expires_us)
    return (*plain[:2], status_of(result.state, result.attempts).value, *plain[2:], optional(result.error))
