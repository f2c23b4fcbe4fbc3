"""What most turns do, in a few statements for all of their tasks: lease ready ones, end those that left no result.

Rows go down as one JSON text that SQLite takes apart. A statement per row costs twice as much, and lets go of the
interpreter's lock, which other threads wait for, at every row. Events and results are made from the rows of the tasks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from omniq.models import Record
from omniq.storage.machine.machine import DEFAULT_RESULT_TTL_US
from omniq.storage.sqlite.rows import EVENT_COLUMNS, SELECT, encode, join_call, record_of

# Most tasks were never leased and ask for little: what is not read here is NULL or 0 then. The last column says otherwise.
FRESH = """SELECT seq, id, func_path, eta, max_retries, backoff, fingerprint, created_at, updated_at, origin, encoding, args,
 kwargs, payload, asked_eta, timeout, lease, result_ttl, dead_queue, run_id, idempotency_key,
 coalesce("interval", ended_by, worker, blocked_by, started_at, finished_at, last_error, failed_at, progress, headers,
 nullif(returned + attempts + cancel_requested + blockers_left + has_dependents, 0)) IS NOT NULL
 FROM tasks WHERE state=3 AND queue=? AND "group" IS NULL ORDER BY returned DESC, eta, seq LIMIT ?"""
BY_SEQ = f"{SELECT} WHERE seq IN (SELECT value FROM json_each(?))"
LEASE = """UPDATE tasks SET state=4, status='RUNNING', returned=0, attempts=attempts+1, token=?, lease_until=?, worker=?,
 started_at=?, updated_at=? WHERE seq IN (SELECT value FROM json_each(?))"""
STARTED = f"""INSERT INTO events ({EVENT_COLUMNS}) SELECT ? + j.key, t.started_at, 'started', t.seq, t.id, t.queue, t.func_path,
 t.attempts, coalesce(t.worker, ''), t.created_at, t.eta, 4, '' FROM json_each(?) j CROSS JOIN tasks t ON t.seq = j.value"""
END = """UPDATE tasks SET state=5, status='SUCCESS', ended_by=token, token=NULL, lease_until=NULL, finished_at=j.value,
 updated_at=j.value FROM json_each(?) j WHERE seq = j.key + 0"""
RESULTS = f"""INSERT OR REPLACE INTO results (seq, task_id, status, encoding, finished_at, attempts, last_attempt_at,
 expires_at) SELECT t.seq, t.id, 'SUCCESS', 'json', t.finished_at, t.attempts, t.started_at,
 t.finished_at + coalesce(t.result_ttl, {DEFAULT_RESULT_TTL_US}) FROM json_each(?) j CROSS JOIN tasks t ON t.seq = j.key + 0"""
SUCCEEDED = f"""INSERT INTO events ({EVENT_COLUMNS}) SELECT j.key + 0, t.finished_at, 'succeeded', t.seq, t.id, t.queue,
 t.func_path, t.attempts, coalesce(t.worker, ''), t.created_at, t.eta, 5, '{{"result_bytes":0}}'
 FROM json_each(?) j CROSS JOIN tasks t ON t.seq = j.value"""


class PlainEnds:
    """Tasks that ended without a result, until they are written."""

    def __init__(self) -> None:
        self._moments: dict[int, int] = {}  # by seq
        self._events: dict[int, int] = {}  # the seq of each event's task

    def __bool__(self) -> bool:
        return bool(self._moments)

    def __contains__(self, task: Record) -> bool:
        return task.seq in self._moments

    def add(self, task: Record, now_us: int, event: int | None) -> None:
        self._moments[task.seq] = now_us
        if event is not None:
            self._events[event] = task.seq

    def write(self, db: sqlite3.Connection) -> None:
        moments = encode(self._moments).decode()
        db.execute(END, (moments,))
        db.execute(RESULTS, (moments,))
        if self._events:
            db.execute(SUCCEEDED, (encode(self._events).decode(),))
        self._moments.clear()
        self._events.clear()


def write_leases(db: sqlite3.Connection, tasks: Sequence[Record], now_us: int, event: int | None) -> None:
    """Tasks that were leased together: their rows, and their events from number `event` on."""
    groups: dict[int | None, list[int]] = {}
    for task in tasks:
        groups.setdefault(task.lease_until_us, []).append(task.seq)
    for until, seqs in groups.items():
        db.execute(LEASE, (tasks[0].token, until, tasks[0].worker, now_us, now_us, encode(seqs).decode()))
    if event is not None:
        db.execute(STARTED, (event, encode([task.seq for task in tasks]).decode()))


def read_ready(db: sqlite3.Connection, queue: str, limit: int) -> list[Record]:
    """The next ready tasks of a queue that belong to no group."""
    rows = db.execute(FRESH, (queue, limit)).fetchall()
    used = [row[0] for row in rows if row[-1]]
    whole = {row[0]: record_of(row) for row in db.execute(BY_SEQ, (encode(used).decode(),))} if used else {}
    return [whole[row[0]] if row[-1] else _fresh(row, queue) for row in rows]


def _fresh(row: Sequence[Any], queue: str) -> Record:
    return Record(
        id=row[1],
        queue=queue,
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
