"""Statements that move many tasks at once: lease ready ones, end those that left no result, release those of a staged run.

Numbers go down as one JSON text that SQLite takes apart. A statement per row costs twice as much, and lets go of the
interpreter's lock, which other threads wait for, at every row. Events and results are made from the rows of the tasks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from omniq.models import Record
from omniq.storage.machine.transitions import DEFAULT_RESULT_TTL_US
from omniq.storage.sqlite.rows import EVENT_COLUMNS, SELECT, encode, join_call, record_of

_PAYLOAD_BYTES = """'{"payload_bytes":' || CASE WHEN args IS NULL THEN coalesce(length(CAST(payload AS BLOB)), 0)
 ELSE length(CAST(args AS BLOB)) + length(CAST(kwargs AS BLOB)) + 19 END || '}'"""


def _events(event: str, number: str, moment: str, data: str, tasks: str) -> str:
    """The statement that logs a transition of tasks without groups, made from their rows."""
    return f"""INSERT INTO events ({EVENT_COLUMNS}) SELECT {number}, {moment}, '{event}', t.seq, t.id, t.queue, t.func_path,
     t.attempts, coalesce(t.worker, ''), t.created_at, t.eta, t.state, {data} FROM {tasks}"""


_LISTED = "json_each(?) j CROSS JOIN tasks t ON t.seq = j.value"  # CROSS: the list leads, and not the table
_ENQUEUED = _events("enqueued", "t.seq + ?", "t.created_at", _PAYLOAD_BYTES, "tasks t WHERE t.seq BETWEEN ? AND ?")
_RELEASED = _events("enqueued", "j.key + 0", "?", _PAYLOAD_BYTES, _LISTED)
_STARTED = _events("started", "? + j.key", "t.started_at", "''", _LISTED)
_SUCCEEDED = _events("succeeded", "j.key + 0", "t.finished_at", "'{\"result_bytes\":0}'", _LISTED)

# Most tasks were never leased and ask for little: what is not read here is NULL or 0 then. The last column says otherwise, and
# such a task is read whole. Saves a tenth of the time of a lease with its ack.
_FRESH = """SELECT seq, id, func_path, eta, max_retries, backoff, fingerprint, created_at, updated_at, origin, encoding, args,
 kwargs, payload, asked_eta, timeout, lease, result_ttl, dead_queue, run_id, idempotency_key,
 coalesce("interval", ended_by, worker, blocked_by, started_at, finished_at, last_error, failed_at, progress, headers,
 nullif(returned + attempts + cancel_requested + blockers_left + has_dependents, 0)) IS NOT NULL
 FROM tasks WHERE state=3 AND queue=? AND "group" IS ? ORDER BY returned DESC, eta, seq LIMIT ?"""
_BY_SEQ = f"{SELECT} WHERE seq IN (SELECT value FROM json_each(?))"
_LEASE = """UPDATE tasks SET state=4, status='RUNNING', returned=0, attempts=attempts+1, token=?, lease_until=?, worker=?,
 started_at=?, updated_at=? WHERE seq IN (SELECT value FROM json_each(?))"""
_END = """UPDATE tasks SET state=5, status='SUCCESS', ended_by=token, token=NULL, lease_until=NULL, finished_at=j.value,
 updated_at=j.value FROM json_each(?) j WHERE seq = j.key + 0"""
_EMPTY_RESULTS = f"""INSERT OR REPLACE INTO results (seq, task_id, status, encoding, finished_at, attempts, last_attempt_at,
 expires_at) SELECT t.seq, t.id, 'SUCCESS', 'json', t.finished_at, t.attempts, t.started_at,
 t.finished_at + coalesce(t.result_ttl, {DEFAULT_RESULT_TTL_US}) FROM {_LISTED}"""
_STAGED_IN_ORDER = """SELECT seq, coalesce("group", asked_eta, "interval") IS NULL FROM tasks
 WHERE state=0 AND queue=? AND run_id=?
 UNION ALL SELECT seq, 0 FROM tasks WHERE state=0 AND id IN (SELECT task_id FROM claims WHERE queue=? AND run_id=?)
 ORDER BY seq LIMIT ?"""
_RELEASE = "UPDATE tasks SET state=3, eta=?, created_at=?, updated_at=? WHERE seq IN (SELECT value FROM json_each(?))"
_UNCLAIM = """DELETE FROM claims WHERE task_id IN
 (SELECT id FROM tasks WHERE seq IN (SELECT value FROM json_each(?)))"""


def _json(value: object) -> str:
    return encode(value).decode()


def log_enqueued(db: sqlite3.Connection, first: int, last: int, shift: int) -> None:
    """Write the events of new tasks whose numbers follow each other; `shift` leads from a task's number to its event's."""
    db.execute(_ENQUEUED, (shift, first, last))


def write_leases(db: sqlite3.Connection, tasks: Sequence[Record], now_us: int, event: int | None) -> None:
    """Lease ready tasks together; their events are numbered from `event` on."""
    # Mostly all of a turn have leases of one length, and then one statement does.
    alike: dict[int | None, list[int]] = {}
    for task in tasks:
        alike.setdefault(task.lease_until_us, []).append(task.seq)
    for until_us, seqs in alike.items():
        db.execute(_LEASE, (tasks[0].token, until_us, tasks[0].worker, now_us, now_us, _json(seqs)))
    if event is not None:
        db.execute(_STARTED, (event, _json([task.seq for task in tasks])))


def write_ends(db: sqlite3.Connection, moments: Mapping[int, int], empty: Sequence[int], events: Mapping[int, int]) -> None:
    """End running tasks, each at its moment. `empty` left no value; `events` are numbers of events and whose they are."""
    db.execute(_END, (_json(moments),))
    if empty:
        db.execute(_EMPTY_RESULTS, (_json(empty),))
    if events:
        db.execute(_SUCCEEDED, (_json(events),))


def staged_in_order(db: sqlite3.Connection, queue: str, run_id: str, limit: int) -> list[tuple[int, int]]:
    """Returns the next staged tasks of a run by their numbers, each with whether `release` can take it."""
    return db.execute(_STAGED_IN_ORDER, (queue, run_id, queue, run_id, limit)).fetchall()


def release(db: sqlite3.Connection, seqs: Sequence[int], committed_us: int | None, now_us: int) -> None:
    """Make staged tasks ready."""
    numbers = _json(seqs)
    db.execute(_RELEASE, (committed_us, committed_us, now_us, numbers))
    if db.execute("SELECT 1 FROM claims LIMIT 1").fetchone():  # few runs bring tasks of another one
        db.execute(_UNCLAIM, (numbers,))


def log_released(db: sqlite3.Connection, events: Mapping[int, int], now_us: int) -> None:
    db.execute(_RELEASED, (now_us, _json(events)))


def read_ready(db: sqlite3.Connection, queue: str, group: str | None, limit: int) -> list[Record]:
    """Returns the next ready tasks of a lane."""
    rows = db.execute(_FRESH, (queue, group, limit)).fetchall()
    used = [row[0] for row in rows if row[-1]]
    whole = {row[0]: record_of(row) for row in db.execute(_BY_SEQ, (_json(used),))} if used else {}
    return [whole[row[0]] if row[-1] else _fresh(row, queue, group) for row in rows]


def _fresh(row: Sequence[Any], queue: str, group: str | None) -> Record:
    return Record(
        id=row[1],
        queue=queue,
        group=group,
        name=row[2],
        payload=join_call(row[11], row[12], row[13]),
        encoding=row[10],
        origin=row[9],
        eta_us=row[14],
        due_us=row[3],
        timeout_us=row[15],
        lease_us=row[16],
        result_ttl_us=row[17],
        max_attempts=row[4] + 1,
        backoff=row[5],
        dead_queue=row[18],
        run_id=row[19],
        idempotency_key=row[20],
        fingerprint=row[6],
        created_at_us=row[7],
        updated_at_us=row[8],
        seq=row[0],
    )
