"""A store as tables: the columns that bulk readers see, and where each value comes from.

Times are integer microseconds (type `timestamp`), so that every reader makes its own kind of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from omniq.errors import Invalid
from omniq.models import Record, State, StoredResult, TaskError, status_of
from omniq.operations import EventRow, GroupInfo, QueueCounts

Type = Literal["string", "int", "long", "boolean", "timestamp", "binary"]
Test = Literal["=", "in", ">", ">=", "<", "<=", "starts", "null", "not null"]
Columns = dict[str, Sequence[Any]]


class Column(msgspec.Struct, frozen=True):
    """One column; `of` takes its value out of the thing that a row stands for."""

    name: str
    type: Type
    of: Callable[[Any], Any]
    doc: str


class Attempt(msgspec.Struct, kw_only=True):
    """One run of a task, put together from its events."""

    task_id: str
    queue: str
    name: str
    group: str | None
    attempt: int
    worker: str | None
    enqueued_at_us: int
    due_us: int
    started_at_us: int
    finished_at_us: int | None = None
    outcome: str = "running"
    run_us: int | None = None
    error_type: str | None = None
    error: str | None = None


class Condition(msgspec.Struct, frozen=True):
    """A condition on a column: `Condition("queue", "=", "mail")`. A missing value (None) meets no test but `null`."""

    column: str
    test: Test
    value: Any = None

    def holds(self, found: Any) -> bool:
        if self.test == "null" or self.test == "not null":
            return (found is None) is (self.test == "null")
        return found is not None and _TESTS[self.test](found, self.value)


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda found, value: found == value,
    "in": lambda found, value: found in value,
    ">": lambda found, value: found > value,
    ">=": lambda found, value: found >= value,
    "<": lambda found, value: found < value,
    "<=": lambda found, value: found <= value,
    "starts": lambda found, value: found.startswith(value),
}


def _kind(error: TaskError | None) -> str | None:
    return None if error is None else error.type


def _text(error: TaskError | None) -> str | None:
    return None if error is None else error.message


_TASKS = (
    Column("id", "string", lambda t: t.id, "the task's id"),
    Column("queue", "string", lambda t: t.queue, "the queue that it is in now"),
    Column("name", "string", lambda t: t.name, "the function, `module:name`, or the name that a job was published under"),
    Column("group_id", "string", lambda t: t.group, "its group, if it has one"),
    Column("status", "string", lambda t: t.status.value, "PENDING, RUNNING, SUCCESS, FAILED, RETRYING or CANCELLED"),
    Column("attempts", "int", lambda t: t.attempts, "number of its starts"),
    Column("max_attempts", "int", lambda t: t.max_attempts, "largest number of starts; 0 or less: the worker's setting"),
    Column("created_at", "timestamp", lambda t: t.created_at_us, "when it was enqueued"),
    Column("due_at", "timestamp", lambda t: t.due_us, "earliest time at which it may run"),
    Column("started_at", "timestamp", lambda t: t.started_at_us, "when its last run began"),
    Column("finished_at", "timestamp", lambda t: t.finished_at_us, "when it ended"),
    Column("worker", "string", lambda t: t.worker, "the worker that holds or last held it"),
    Column("error_type", "string", lambda t: _kind(t.last_error), "the kind of its last error"),
    Column("error", "string", lambda t: _text(t.last_error), "the text of its last error"),
    Column("run_id", "string", lambda t: t.run_id, "the staged run that brought it, if one did"),
    Column("idempotency_key", "string", lambda t: t.idempotency_key, "the key under which it was enqueued once"),
    Column("origin", "string", lambda t: t.origin, "the program that enqueued it, if not this library"),
    Column("seq", "long", lambda t: t.seq, "its number in the store; never changes"),
    Column("encoding", "string", lambda t: t.encoding, "how `payload` is encoded"),
    Column("payload", "binary", lambda t: t.payload, "the encoded arguments"),
)

_EVENTS = (
    Column("store", "string", lambda e: None, "the id of the store; a lake may hold several"),
    Column("shard", "string", lambda e: e.shard, "the part of the log; empty where a store has one"),
    Column("seq", "long", lambda e: e.seq, "its number in the shard; grows by one"),
    Column("ts", "timestamp", lambda e: e.ts_us, "when, by the store's clock"),
    Column("event", "string", lambda e: e.event, "what happened: enqueued, started, succeeded, retried, failed, …"),
    Column("task_id", "string", lambda e: e.task_id, "the task"),
    Column("queue", "string", lambda e: e.queue, "its queue then"),
    Column("name", "string", lambda e: e.name, "its function"),
    Column("group_id", "string", lambda e: e.group, "its group, if it has one"),
    Column("attempt", "int", lambda e: e.attempt, "number of its starts so far"),
    Column("worker", "string", lambda e: e.worker, "the worker that held it"),
    Column("enqueued_at", "timestamp", lambda e: e.enqueued_at_us, "when the task was enqueued"),
    Column("due_at", "timestamp", lambda e: e.due_us, "earliest time at which it may run, after the event"),
    Column("status", "string", lambda e: status_of(e.state, e.attempt).value, "its status after the event"),
    Column("data", "string", lambda e: None if e.data is None else e.data.decode(), "data of the event, as JSON"),
)

_ATTEMPTS = (
    Column("task_id", "string", lambda a: a.task_id, "the task"),
    Column("queue", "string", lambda a: a.queue, "its queue"),
    Column("name", "string", lambda a: a.name, "its function"),
    Column("group_id", "string", lambda a: a.group, "its group, if it has one"),
    Column("attempt", "int", lambda a: a.attempt, "1 for the first run"),
    Column("worker", "string", lambda a: a.worker, "the worker that ran it"),
    Column("enqueued_at", "timestamp", lambda a: a.enqueued_at_us, "when the task was enqueued"),
    Column("due_at", "timestamp", lambda a: a.due_us, "earliest time at which this run could begin"),
    Column("started_at", "timestamp", lambda a: a.started_at_us, "when it began"),
    Column("finished_at", "timestamp", lambda a: a.finished_at_us, "when it ended; null while it runs"),
    Column("outcome", "string", lambda a: a.outcome, "succeeded, retried, failed, expired, released, cancelled or running"),
    Column("run_us", "long", lambda a: a.run_us, "time of the function in microseconds, where the worker reported it"),
    Column("error_type", "string", lambda a: a.error_type, "the kind of the error that ended it"),
    Column("error", "string", lambda a: a.error, "the text of that error"),
)

_RESULTS = (
    Column("task_id", "string", lambda r: r.task_id, "the task"),
    Column("status", "string", lambda r: status_of(r.state, r.attempts).value, "SUCCESS, FAILED or CANCELLED"),
    Column("attempts", "int", lambda r: r.attempts, "number of its starts"),
    Column("started_at", "timestamp", lambda r: r.started_at_us, "when its last run began"),
    Column("finished_at", "timestamp", lambda r: r.finished_at_us, "when it ended"),
    Column("error_type", "string", lambda r: _kind(r.error), "the kind of the error"),
    Column("error", "string", lambda r: _text(r.error), "the text of the error"),
    Column("encoding", "string", lambda r: r.encoding, "how `result` is encoded"),
    Column("result", "binary", lambda r: r.result, "the encoded result"),
)

_QUEUES = (
    Column("queue", "string", lambda q: q.queue, "its name"),
    Column("paused", "boolean", lambda q: q.paused, "whether workers are kept from it"),
    Column("staged", "long", lambda q: q.staged, "tasks staged by runs that are not committed"),
    Column("blocked", "long", lambda q: q.blocked, "tasks that wait for other tasks"),
    Column("scheduled", "long", lambda q: q.scheduled, "tasks that wait for their time"),
    Column("ready", "long", lambda q: q.ready, "tasks that wait for a worker"),
    Column("running", "long", lambda q: q.running, "tasks held by workers"),
    Column("done", "long", lambda q: q.done, "tasks that succeeded and are still kept"),
    Column("dead", "long", lambda q: q.dead, "tasks that failed for good"),
    Column("cancelled", "long", lambda q: q.cancelled, "tasks that were cancelled and are still kept"),
    Column(
        "oldest_ready_at", "timestamp", lambda q: q.oldest_ready_us, "earliest time at which one of the ready tasks could run"
    ),
)

_GROUPS = (
    Column("queue", "string", lambda g: g.queue, "the queue"),
    Column("group_id", "string", lambda g: g.group, "the group"),
    Column("limit", "int", lambda g: g.limit, "number of its tasks that may run at once"),
    Column("running", "long", lambda g: g.inflight, "number of its tasks that run"),
    Column("ready", "long", lambda g: g.ready, "number of its tasks that wait for a worker"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "tasks": _TASKS,
    "attempts": _ATTEMPTS,
    "events": _EVENTS,
    "results": _RESULTS,
    "queues": _QUEUES,
    "groups": _GROUPS,
}
Thing = Record | EventRow | Attempt | StoredResult | QueueCounts | GroupInfo


def columns_of(table: str, names: Sequence[str] | None = None) -> list[Column]:
    """The columns of a table in the order asked, or all of them; raises `Invalid` for an unknown name."""
    if table not in TABLES:
        raise Invalid(f"no table {table!r}; there are {', '.join(TABLES)}")
    known = {column.name: column for column in TABLES[table]}
    for name in names or ():
        if name not in known:
            raise Invalid(f"table {table!r} has no column {name!r}; it has {', '.join(known)}")
    return [known[name] for name in names] if names is not None else list(known.values())


def batch_of(table: str, things: Iterable[Thing], columns: Sequence[str], where: Sequence[Condition]) -> Columns:
    """Returns the columns of the things that meet every condition."""
    tests = [(condition, columns_of(table, [condition.column])[0].of) for condition in where]
    kept = [thing for thing in things if all(condition.holds(of(thing)) for condition, of in tests)]
    return {column.name: list(map(column.of, kept)) for column in columns_of(table, columns)}


def visible(task: Record) -> bool:
    """Whether readers see a task: before its run is committed, a staged one is not there for anybody else."""
    return task.state is not State.STAGED
