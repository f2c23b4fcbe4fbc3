"""Whether a SQLite store is whole: its pages and indexes, rows that can be read, and tables that agree with each other.

Nothing here writes, and it runs on a connection of its own, beside the work of others. What only a checksum would show, another
digit in a number or another letter in a text, is not found.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from omniq.models import State
from omniq.operations import WorkerInfo
from omniq.storage.sqlite.rows import COLUMNS, COUNTERS, RESULT_COLUMNS, record_of, result_of_row

Row = tuple[Any, ...]

MAX_TOLD = 20  # of one kind; the rest is counted
_UNREADABLE = object()
_decode = msgspec.json.decode
_decode_worker = msgspec.json.Decoder(WorkerInfo).decode

_STATUS = " OR ".join(
    f"(state = {state:d} AND status {test})"
    for state, test in (
        *((waiting, "IN ('PENDING', 'RETRYING')") for waiting in State if waiting < State.RUNNING),
        (State.RUNNING, "= 'RUNNING'"),
        (State.DONE, "= 'SUCCESS'"),
        (State.DEAD, "= 'FAILED'"),
        (State.CANCELLED, "= 'CANCELLED'"),
    )
)

# What cannot be, whatever was done through omniq: the sentence, and a statement that finds what to fill it with.
_CONTRADICTIONS = (
    (
        "task {} has state {} and status {}, which do not belong together",
        f"SELECT quote(id), state, quote(status) FROM tasks WHERE NOT coalesce({_STATUS}, 0)",
    ),
    (
        "task {} runs without a lease",
        "SELECT quote(id) FROM tasks WHERE state = 4 AND (token IS NULL OR lease_until IS NULL)",
    ),
    (
        "task {} is of queue {}, which there is none of",
        "SELECT quote(id), quote(queue) FROM tasks WHERE queue NOT IN (SELECT queue FROM queues)",
    ),
    (
        "task {} has the number {}, which was not given yet",
        "SELECT quote(id), seq FROM tasks WHERE seq >= (SELECT next_seq FROM store) OR seq < 1",
    ),
    (
        "the result of task {} has no task",
        "SELECT quote(task_id) FROM results r WHERE NOT EXISTS (SELECT 1 FROM tasks t WHERE t.seq=r.seq AND t.id=r.task_id)",
    ),
    (
        "task {} waits for others, and nobody knows for whom",
        "SELECT quote(id) FROM tasks WHERE state = 1 AND seq NOT IN (SELECT dependent FROM blocks)",
    ),
    (
        "the task with the number {} waits for task {}, and is not there",
        "SELECT dependent, quote(blocker_id) FROM blocks WHERE dependent NOT IN (SELECT seq FROM tasks)",
    ),
    (
        "task {} is in group {}, which its queue does not know",
        """SELECT quote(id), quote("group") FROM tasks t WHERE "group" IS NOT NULL AND state BETWEEN 1 AND 4
        AND NOT EXISTS (SELECT 1 FROM lanes l WHERE l.queue = t.queue AND l."group" = t."group")""",
    ),
    (
        "staged task {} is of run {}, which there is none of",
        """SELECT quote(id), quote(run_id) FROM tasks t WHERE state = 0
        AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.queue = t.queue AND r.run_id = t.run_id)""",
    ),
    (
        "the events {} to {} are missing",
        """SELECT seq + 1, following - 1 FROM (SELECT seq, lead(seq, 1, (SELECT next_event FROM store)) OVER (ORDER BY seq)
        AS following FROM events) WHERE following <> seq + 1""",
    ),
)


def examine(connection: sqlite3.Connection) -> list[str]:
    """Returns what is wrong, one sentence each."""
    found = [f"the database is damaged: {row[0]}" for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
    # With its own factory one text that is no UTF-8 would end the whole look.
    kept, connection.text_factory = connection.text_factory, _text
    try:
        for look in (_unreadable, _contradictions):
            found += look(connection)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:
        if not found:
            raise
        found.append(f"the rest could not be looked at: {exc}")  # pages that cannot be read have been told of
    finally:
        connection.text_factory = kept
    return found


def _contradictions(connection: sqlite3.Connection) -> Iterator[str]:
    for sentence, sql in _CONTRADICTIONS:
        rows = connection.execute(sql).fetchall()
        yield from (sentence.format(*(_shown(value) for value in row)) for row in rows[:MAX_TOLD])
        if len(rows) > MAX_TOLD:
            yield f"and {len(rows) - MAX_TOLD} more like the last one"


def _shown(value: object) -> object:
    return "that cannot be read" if value is _UNREADABLE else value


# -- rows that cannot be read ----------------------------------------------------------------------


def _text(raw: bytes) -> Any:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _UNREADABLE


def _task(row: Row) -> None:
    record_of(row)
    *_, args, kwargs, _payload = row
    for part in (args, kwargs):
        if part is not None:
            _decode(part)


def _event(row: Row) -> None:
    State(row[-2])
    if row[-1]:
        _decode(row[-1])


def _worker(row: Row) -> None:
    _decode_worker(row[1])


class _Table(msgspec.Struct):
    """The columns that a row must have as text, as JSON or nothing, and as numbers; `read` makes a record of `columns`."""

    columns: str
    read: Callable[[Row], object] | None = None
    texts: tuple[str, ...] = ()
    jsons: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def suspects(self, name: str) -> str:
        """A statement for all rows: number, texts in one, whether a number is none, and whether a JSON looks wrong."""
        text = " || ".join(f"coalesce({column}, '')" for column in self.texts) or "''"
        numbers = [f"typeof({column}) <> 'integer'" for column in self.numbers]
        jsons = [f"(coalesce({column}, '') <> '' AND NOT json_valid({column}))" for column in self.jsons]
        # NOT INDEXED: an index may hold a sound copy of a value that is damaged in its row.
        return f"SELECT rowid, {text}, {_any(numbers)}, {_any(jsons)} FROM {name} NOT INDEXED"


def _any(tests: list[str]) -> str:
    return " OR ".join(tests) or "0"


_CALL = ("args", "kwargs", "last_error", "headers", "blocked_by")
_TEXTS = ("id", "queue", "func_path", '"group"', "token", "worker", "ended_by", "dead_queue", "backoff", "run_id", "origin")
_KEYED = ("idempotency_key", "fingerprint", "encoding", "progress")
_TABLES = {
    "tasks": _Table(
        COLUMNS,
        _task,
        (*_TEXTS, *_KEYED, *_CALL),
        _CALL,
        ("state", "eta", "returned", "attempts", "max_retries", "blockers_left", "created_at", "updated_at"),
    ),
    "results": _Table(
        RESULT_COLUMNS, result_of_row, ("task_id", "status", "encoding", "error"), ("error",), ("finished_at", "attempts")
    ),
    "events": _Table(
        "event, state, data",
        _event,
        ("event", "task_id", "queue", "name", '"group"', "worker", "data"),
        ("data",),
        ("ts", "task_seq", "attempt", "enqueued_at", "due", "state"),
    ),
    "keys": _Table("queue", None, ("queue", "key", "task_id", "fingerprint"), (), ("expires_at",)),
    "queues": _Table("queue", None, ("queue",), (), tuple(COUNTERS)),
    "lanes": _Table("queue", None, ("queue", '"group"'), (), ('"limit"', "ready", "inflight", "members", "turn")),
}


def _unreadable(connection: sqlite3.Connection) -> Iterator[str]:
    for name, table in _TABLES.items():
        rows = connection.execute(table.suspects(name))
        found = [
            (number, text is _UNREADABLE or wrong) for number, text, wrong, odd in rows if text is _UNREADABLE or wrong or odd
        ]
        yield from _told(name, [number for number, sure in found if sure or not _can_be_read(connection, name, table, number)])
    workers = connection.execute("SELECT rowid, worker, info FROM workers NOT INDEXED").fetchall()
    yield from _told("workers", [number for number, *row in workers if not _makes(_worker, tuple(row))])


def _told(name: str, numbers: list[int]) -> Iterator[str]:
    yield from (f"row {number} of table {name} cannot be read" for number in numbers[:MAX_TOLD])
    if len(numbers) > MAX_TOLD:
        yield f"and {len(numbers) - MAX_TOLD} more rows of table {name}"


def _can_be_read(connection: sqlite3.Connection, name: str, table: _Table, number: int) -> bool:
    """Whether omniq can read a row, which counts: SQLite and Python do not take the same texts for JSON."""
    if table.read is None:
        return False
    row = connection.execute(f"SELECT {table.columns} FROM {name} NOT INDEXED WHERE rowid = ?", (number,)).fetchone()
    return row is not None and _makes(table.read, row)


def _makes(read: Callable[[Row], object], row: Row) -> bool:
    if _UNREADABLE in row:
        return False
    try:
        read(row)
    except (ValueError, TypeError, AttributeError, IndexError, msgspec.MsgspecError):
        return False
    return True
