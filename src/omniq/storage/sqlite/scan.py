"""Reading a SQLite store in bulk: rows become columns without becoming records, and conditions are met in the database.

Each page is a statement of its own, so that a long scan holds back no checkpoint. Pages follow `seq`, except where an index
finds the few tasks that a condition leaves: those are looked up by their numbers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from omniq.errors import EventsLost
from omniq.models import TaskError
from omniq.storage.scanning import Range
from omniq.storage.sqlite.rows import decode_error
from omniq.storage.tables import Columns, Condition

Row = tuple[Any, ...]
Fetch = Callable[[str, Sequence[Any]], Awaitable[list[Row]]]

WINDOW = 100  # how many times as many numbers a statement may pass over as it may return rows
FEW = 8  # one in so many: beyond that, reading on is quicker than looking up by an index

_CALL = """CAST(CASE WHEN args IS NULL OR kwargs IS NULL THEN payload
 ELSE '{"args":' || args || ',"kwargs":' || kwargs || '}' END AS BLOB)"""
_STATUS = """CASE state WHEN 4 THEN 'RUNNING' WHEN 5 THEN 'SUCCESS' WHEN 6 THEN 'FAILED' WHEN 7 THEN 'CANCELLED'
 ELSE CASE WHEN attempt > 0 THEN 'RETRYING' ELSE 'PENDING' END END"""
_TASKS = {
    "id": "id",
    "queue": "queue",
    "name": "func_path",
    "group_id": '"group"',
    "status": "status",
    "attempts": "attempts",
    "max_attempts": "max_retries + 1",
    "created_at": "created_at",
    "due_at": "eta",
    "started_at": "started_at",
    "finished_at": "finished_at",
    "worker": "worker",
    "error_type": "last_error",
    "error": "last_error",
    "run_id": "run_id",
    "idempotency_key": "idempotency_key",
    "origin": "origin",
    "seq": "seq",
    "encoding": "encoding",
    "payload": _CALL,
}
_RESULTS = {
    "task_id": "task_id",
    "status": "status",
    "attempts": "attempts",
    "started_at": "last_attempt_at",
    "finished_at": "finished_at",
    "error_type": "error",
    "error": "error",
    "encoding": "encoding",
    "result": "CAST(result AS BLOB)",
}
_EVENTS = {
    "store": "NULL",
    "shard": "''",
    "seq": "seq",
    "ts": "ts",
    "event": "event",
    "task_id": "task_id",
    "queue": "queue",
    "name": "name",
    "group_id": '"group"',
    "attempt": "attempt",
    "worker": "nullif(worker, '')",
    "enqueued_at": "enqueued_at",
    "due_at": "due",
    "status": _STATUS,
    "data": "nullif(data, '')",
}
SOURCES = {"tasks": _TASKS, "results": _RESULTS, "events": _EVENTS}

# Errors are stored as JSON, of which SQLite and Python do not read every text alike: Python does.
_IN_PYTHON: dict[str, Callable[[TaskError], str]] = {
    "error_type": lambda error: error.type,
    "error": lambda error: error.message,
}

# What an index leads to: tasks with some ids, and those of a status while they are few, which a counter of the queues tells.
# The plus keeps SQLite from going by `seq`.
_BY_STATUS = {"FAILED": ("state = 6 AND status = 'FAILED'", "dead"), "RUNNING": ("state = 4", "running")}
_NEAR = "+seq > ? AND +seq <= ?"
_FIRST_EVENT = "SELECT coalesce((SELECT min(seq) FROM events), next_event) FROM store"


class Ask(msgspec.Struct, frozen=True):
    """A statement that a scan wants carried out; it goes on with the rows."""

    sql: str
    values: Sequence[Any] = ()


Steps = Generator[Ask | Columns, list[Row] | None, None]


async def scan(
    fetch: Fetch, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int
) -> AsyncIterator[Columns]:
    """The rows of a range of tasks, results or events as column batches. Raises `EventsLost` when some were purged."""
    steps = _steps(range, columns, where, rows)
    answer: list[Row] | None = None
    while (step := _next(steps, answer)) is not None:
        answer = await fetch(step.sql, step.values) if isinstance(step, Ask) else None
        if not isinstance(step, Ask):
            yield step


def scan_blocking(
    connection: sqlite3.Connection, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int
) -> Iterator[Columns]:
    """`scan` on a connection of the caller's own, which saves a change of threads for every page."""
    steps = _steps(range, columns, where, rows)
    answer: list[Row] | None = None
    while (step := _next(steps, answer)) is not None:
        answer = connection.execute(step.sql, step.values).fetchall() if isinstance(step, Ask) else None
        if not isinstance(step, Ask):
            yield step


def _next(steps: Steps, answer: list[Row] | None) -> Ask | Columns | None:
    try:
        return steps.send(answer)
    except StopIteration:
        return None


def _steps(range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int) -> Steps:
    """The statements of a scan, and its batches in between."""
    page = _ScanQuery(range.table, columns, where)
    numbers = yield from _numbers(range, where)
    if numbers is not None:
        while numbers:
            some, numbers = numbers[:rows], numbers[rows:]
            yield page.columns((yield Ask(page.by_numbers, (*page.values, _json(some)))) or [])
        return
    after, window = range.after, rows
    while after < range.upto:
        upto = min(after + window, range.upto)
        found = (yield Ask(page.dense if window == rows else page.sparse, (*page.values, after, upto, rows))) or []
        if range.table == "events":  # asked afterwards: what is there now was there when the page was read
            ((first,),) = (yield Ask(_FIRST_EVENT)) or []
            if after < first - 1:
                raise EventsLost(f"events up to {first - 1} were purged; go on from there")
        after = upto if window == rows or len(found) < rows else found[-1][-1]
        # Numbers without rows, or without rows that are asked for, are passed over in larger and larger steps.
        window = min(window * 2, rows * WINDOW) if len(found) * 2 < rows else rows
        yield page.columns(found)


class _ScanQuery:
    """The statements of a scan, and the columns that their rows become.

    `dense` asks for as many numbers as a page has rows. `sparse` asks for more, so that each row ends with its number, from
    which the next page goes on.
    """

    def __init__(self, table: str, columns: Sequence[str], where: Sequence[Condition]) -> None:
        source = SOURCES[table]
        self._names = list(columns)
        self._tests = [condition for condition in where if condition.column in _IN_PYTHON and condition.test in _VALUES]
        self._fields = list(dict.fromkeys([*columns, *(condition.column for condition in self._tests)]))
        tests = [_test(source[c.column], c) for c in where if c not in self._tests]
        if table == "tasks":
            tests.append(("state <> 0", ()))  # staged tasks are nobody's yet
        self.values = [value for _, values in tests for value in values]
        fields = ", ".join(source[name] for name in self._fields)
        met = " AND ".join(text for text, _ in tests) or "1"
        here = f"FROM {table} WHERE {met} AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        self.dense = f"SELECT {fields} {here}"
        self.sparse = f"SELECT {fields}, seq {here}"
        self.by_numbers = f"SELECT {fields} FROM {table} WHERE {met} AND seq IN (SELECT value FROM json_each(?)) ORDER BY seq"

    def columns(self, rows: list[Row]) -> Columns:
        if not rows:
            return {name: [] for name in self._names}
        found: Columns = dict(zip(self._fields, zip(*rows, strict=True), strict=False))
        for name in _IN_PYTHON.keys() & found.keys():
            found[name] = _parts(found[name], _IN_PYTHON[name])
        for condition in self._tests:
            kept = [n for n, value in enumerate(found[condition.column]) if condition.holds(value)]
            found = {name: [values[n] for n in kept] for name, values in found.items()}
        return {name: found[name] for name in self._names}


def _parts(errors: Iterable[str | bytes | None], part: Callable[[TaskError], str]) -> list[str | None]:
    return [None if error is None else part(decode_error(error)) for error in errors]


# The tests that ask for a value. That an error is missing SQLite sees as well as Python does.
_VALUES = frozenset({"=", "in", ">", ">=", "<", "<=", "starts"})


def _test(source: str, condition: Condition) -> tuple[str, tuple[Any, ...]]:
    """A condition in SQL. Text is compared by its bytes, as Python and Spark do."""
    match condition.test:
        case "null":
            return f"({source}) IS NULL", ()
        case "not null":
            return f"({source}) IS NOT NULL", ()
        case "in":
            return f"({source}) IN (SELECT value FROM json_each(?))", (_json(list(condition.value)),)
        case "starts":
            return f"substr({source}, 1, ?) = ?", (len(condition.value), condition.value)
        case _:
            return f"({source}) {condition.test} ?", (condition.value,)


def _numbers(range: Range, where: Sequence[Condition]) -> Generator[Ask, list[Row] | None, list[int] | None]:
    """Returns the numbers of the few tasks that an index finds for a condition; None if no condition leaves few."""
    if range.table != "tasks":
        return None
    for condition in where:
        few: tuple[str, tuple[Any, ...]] | None = None
        if condition.column == "id" and condition.test in ("=", "in"):
            few = _test("id", condition)
        elif condition.column == "status" and condition.test == "=" and condition.value in _BY_STATUS:
            text, counter = _BY_STATUS[condition.value]
            ((there,),) = (yield Ask(f"SELECT coalesce(sum({counter}), 0) FROM queues")) or []
            few = (text, ()) if there * FEW < range.upto - range.after else None
        if few is not None:
            found = yield Ask(f"SELECT seq FROM tasks WHERE {few[0]} AND {_NEAR}", (*few[1], range.after, range.upto))
            return sorted(row[0] for row in found or [])
    return None


def _json(values: list[Any]) -> str:
    return msgspec.json.encode(values).decode()
