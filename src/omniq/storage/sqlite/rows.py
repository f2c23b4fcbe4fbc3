"""Rows of a SQLite store and the statements that read and write them, beside the records they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from omniq.models import Blocker, Record, State, StoredResult, TaskError, TaskStatus, status_of
from omniq.operations import Enqueue, RunState
from omniq.storage.ledger import StagedRun

Row = tuple[Any, ...]

STATES: list[State] = list(State)
COUNTERS: list[str] = [s.name.lower() for s in State]

LEAN = """seq, id, queue, func_path, state, eta, asked_eta, returned, attempts, max_retries, timeout, lease, "interval",
 result_ttl, backoff, "group", token, lease_until, ended_by, worker, cancel_requested, dead_queue, blocked_by, blockers_left,
 has_dependents, run_id, idempotency_key, fingerprint, created_at, updated_at, started_at, finished_at, last_error, failed_at,
 progress, headers, origin, encoding"""
COLUMNS = LEAN + ", args, kwargs, payload"
_LEAN_WIDTH = LEAN.count(",") + 1

# Stands for NULL in a row to be bound. sqlite3 looks for an adapter for every None, bool and bytes that it binds, which costs
# more than storing them: a row of 28 values without a None takes as long as one of 14 with three. No column holds a fraction.
NULL = -0.5


def _or_null(count: int) -> str:
    return ", ".join([f"nullif(?, {NULL})"] * count)


# A column that is not named is NULL or 0. A plain task (`Enqueue.plain`) comes in by a statement of its own: with the other one
# `enqueue_many` would spend 1.17 times as much processor time in the store. All others, in whatever state they begin, by that.
_PLAIN = """seq, id, queue, func_path, status, eta, created_at, updated_at, max_retries, backoff, fingerprint, origin, encoding,
 timeout, lease, result_ttl, args, kwargs, payload, state"""
_PLAIN_VALUES = f"?, ?, ?, ?, 'PENDING', ?, ?, ?, ?, ?, ?, ?, ?, {_or_null(6)}"
INSERT_PLAIN = f"INSERT INTO tasks ({_PLAIN}) VALUES ({_PLAIN_VALUES}, {State.READY:d})"
INSERT = f"""INSERT INTO tasks ({_PLAIN}, blockers_left, asked_eta, "interval", "group", dead_queue, run_id, idempotency_key,
 headers, blocked_by) VALUES ({_PLAIN_VALUES}, ?, ?, {_or_null(8)})"""
KEY = "INSERT OR REPLACE INTO keys VALUES (?,?,?,?,?)"
KEYS = "SELECT key, task_id, fingerprint, expires_at FROM keys WHERE queue=? AND key IN (SELECT value FROM json_each(?))"
UPDATE = f"""UPDATE tasks SET (queue, state, status, eta, returned, attempts, cancel_requested, blockers_left, has_dependents,
 updated_at, created_at, asked_eta, token, lease_until, ended_by, worker, dead_queue, blocked_by, started_at, finished_at,
 last_error, failed_at, progress, run_id) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {_or_null(13)}) WHERE seq=?"""
RESULT = f"""INSERT OR REPLACE INTO results (seq, task_id, status, encoding, finished_at, attempts, result, last_attempt_at,
 expires_at, error) VALUES (?, ?, ?, ?, ?, ?, {_or_null(4)})"""
RESULT_COLUMNS = "task_id, status, result, encoding, error, finished_at, attempts, last_attempt_at"
EVENT_COLUMNS = "seq, ts, event, task_seq, task_id, queue, name, attempt, worker, enqueued_at, due, state, data"
EVENT = f'INSERT INTO events ({EVENT_COLUMNS}, "group") VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,{_or_null(1)})'
LANE = 'INSERT OR REPLACE INTO lanes (queue, "group", "limit", ready, inflight, members, turn) VALUES (?,?,?,?,?,?,?)'
QUEUE = """INSERT INTO queues (queue, paused, has_groups, groups_turn, fed) VALUES (?,?,?,?,?) ON CONFLICT (queue)
 DO UPDATE SET paused=excluded.paused, has_groups=excluded.has_groups, groups_turn=excluded.groups_turn, fed=excluded.fed"""
COUNT = f"""INSERT INTO queues (queue, {", ".join(COUNTERS)}) VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT (queue)
 DO UPDATE SET {", ".join(f"{c}={c}+excluded.{c}" for c in COUNTERS)}"""

SELECT = f"SELECT {COLUMNS} FROM tasks"
BY_IDS = f"SELECT {LEAN} FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
VERIFY = """SELECT id, token, cancel_requested, has_dependents, lease_until FROM tasks
 WHERE state=4 AND id IN (SELECT value FROM json_each(?))"""
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


class PythonCall(msgspec.Struct):
    args: msgspec.Raw = msgspec.Raw()
    kwargs: msgspec.Raw = msgspec.Raw()


decode_call = msgspec.json.Decoder(PythonCall).decode


def split_call(payload: bytes | None) -> tuple[str | float, str | float, str | bytes | float]:
    """The columns args, kwargs and payload: a Python call fills the first two, if joining them gives the very same bytes."""
    if payload is None:
        return NULL, NULL, NULL
    if payload.startswith(b'{"args":'):
        try:
            call = decode_call(payload)
            args, kwargs = bytes(call.args), bytes(call.kwargs)
            # Blanks, a third key or the same key twice would be lost on the way back.
            if b'{"args":%b,"kwargs":%b}' % (args, kwargs) == payload:
                return args.decode(), kwargs.decode(), NULL
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last one: nested deeper than Python reads
            pass
    return NULL, NULL, as_text(payload)


def join_call(args: str | None, kwargs: str | None, payload: str | bytes | None) -> bytes | None:
    if args is None or kwargs is None:
        return as_bytes(payload)
    return f'{{"args":{args},"kwargs":{kwargs}}}'.encode()


def record_of(row: Sequence[Any]) -> Record:
    """Returns the record of a row of `COLUMNS`, or of its part without the payload."""
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
        payload=payload_of(row),
    )


def payload_of(row: Sequence[Any]) -> bytes | None:
    """Returns the payload of a row of `COLUMNS`; a row of `LEAN` has none."""
    return join_call(*row[_LEAN_WIDTH:]) if len(row) > _LEAN_WIDTH else None


def as_text(data: bytes | None) -> str | bytes | float:
    """Returns JSON as text, which is quicker to bind and can be read in the database; anything else as it is."""
    if data is None:
        return NULL
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


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


def run_of(row: Sequence[Any]) -> StagedRun:
    run = StagedRun(*row)
    run.state, run.settled = RunState(row[4]), bool(row[11])
    return run


def or_null(value: Any) -> Any:
    return NULL if value is None else value


def json_or_null(value: object) -> str | float:
    return encode(value).decode() if value else NULL


def plain_row(task: Enqueue | Record, seq: int, due_us: int, now_us: int) -> Row:
    """A new task for `INSERT_PLAIN`: from its operation, or from its record where the machine made one."""
    timeout, lease, ttl = task.timeout_us, task.lease_us, task.result_ttl_us
    args, kwargs, payload = split_call(task.payload)
    return (
        seq,
        task.id,
        task.queue,
        task.name,
        due_us,
        now_us,
        now_us,
        task.max_attempts - 1,
        task.backoff,
        task.fingerprint,
        task.origin,
        task.encoding,
        NULL if timeout is None else timeout,
        NULL if lease is None else lease,
        NULL if ttl is None else ttl,
        args,
        kwargs,
        payload,
    )


def whole_row(
    task: Enqueue | Record, seq: int, state: State, due_us: int, now_us: int, run_id: str | None, blockers_left: int = 0
) -> Row:
    """A new task for `INSERT`."""
    eta, interval, group, dead_queue, key = task.eta_us, task.interval_us, task.group, task.dead_queue, task.idempotency_key
    rest = (
        int(state),
        blockers_left,
        NULL if eta is None else eta,
        NULL if interval is None else interval,
        NULL if group is None else group,
        NULL if dead_queue is None else dead_queue,
        NULL if run_id is None else run_id,
        NULL if key is None else key,
        json_or_null(task.headers),
        json_or_null(task.blocked_by),
    )
    return plain_row(task, seq, due_us, now_us) + rest


def update_row(task: Record) -> Row:
    return (
        task.queue,
        int(task.state),
        task.status.value,
        task.due_us,
        int(task.returned),
        task.attempts,
        int(task.cancel_requested),
        task.blockers_left,
        int(task.has_dependents),
        task.updated_at_us,
        task.created_at_us,
        or_null(task.eta_us),
        or_null(task.token),
        or_null(task.lease_until_us),
        or_null(task.ended_by),
        or_null(task.worker),
        or_null(task.dead_queue),
        json_or_null(task.blocked_by),
        or_null(task.started_at_us),
        or_null(task.finished_at_us),
        json_or_null(task.last_error),
        or_null(task.failed_at_us),
        as_text(task.progress),
        or_null(task.run_id),
        task.seq,
    )


def result_row(task: Record, result: StoredResult, expires_us: int | None) -> Row:
    return (
        task.seq,
        task.id,
        status_of(result.state, result.attempts).value,
        result.encoding,
        result.finished_at_us,
        result.attempts,
        as_text(result.result),
        or_null(result.started_at_us),
        or_null(expires_us),
        json_or_null(result.error),
    )
