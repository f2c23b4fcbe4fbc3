"""Tasks, results, events and workers as Redis keeps them.

A hash that another client wrote lacks our fields, or has those of a task that it overwrote; its field `o` tells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from omniq.models import MAX_COUNT, MAX_DURATION_US, Blocker, Record, State, StoredResult, TaskError
from omniq.operations import EventRow, WorkerInfo
from omniq.storage.redis.text import in_utf8

Hash = dict[bytes, bytes]
T = TypeVar("T")

FOREIGN_LEASE_MS = 60_000  # what every client takes a stored timeout of nothing for
MAX_WORDS = 4096  # bytes of `last_error` that other clients keep
MAX_MS = 9_999_999_999_999  # the year 2286; from 10^14 on Lua writes an exponent, which other clients cannot read
MAX_LEASE_MS = MAX_DURATION_US // 1000
_MOST_US = 253_402_300_799_999_999  # the end of the year 9999, where the calendar of Python ends
_NOT_READ = (msgspec.MsgspecError, UnicodeError, RecursionError)

_STATES: list[State] = list(State)
_WORDS = {
    b"wait": State.READY,
    b"delayed": State.SCHEDULED,
    b"active": State.RUNNING,
    b"completed": State.DONE,
    b"failed": State.DEAD,
    b"blocked": State.BLOCKED,
    b"cancelled": State.CANCELLED,
}

WORD_OF = {state: word.decode() for word, state in _WORDS.items()}

_decode_error = msgspec.json.Decoder(TaskError).decode
_decode_blockers = msgspec.json.Decoder(tuple[Blocker, ...]).decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_decode_worker = msgspec.json.Decoder(WorkerInfo).decode
_decode_body = msgspec.json.Decoder(dict[str, Any]).decode
_decode_any = msgspec.json.Decoder().decode
_decode_events = msgspec.msgpack.Decoder(tuple[int, list[Any]]).decode


def words_of(error: TaskError | None) -> str:
    """Returns an error as other clients show it: one line, cut where they cut."""
    if error is None:
        return ""
    return str(error).encode()[:MAX_WORDS].decode("utf-8", "ignore")


def state_of(code: Any) -> State:
    return _STATES[cast(int, code)]


class StoredOptions(msgspec.Struct, omit_defaults=True):
    """The options that the contract has no field for and the script never looks at. `no_…`: the option was not given."""

    encoding: str = "json"
    origin: str = ""
    backoff: str = ""
    timeout_us: int | None = None
    result_ttl_us: int | None = None
    no_max: bool = False
    no_lease: bool = False
    no_payload: bool = False
    run: str | None = None


# A program has a few sets of options, and thousands of tasks with each.
_decode_options = functools.lru_cache(maxsize=1024)(msgspec.json.Decoder(StoredOptions).decode)


class Origin(msgspec.Struct):
    """The field `o`: what never changes of a task of ours."""

    created_ms: bytes
    seq: int
    name: str
    fingerprint: str
    options: StoredOptions


def origin_of(value: bytes) -> Origin | None:
    """Returns the parts of the field; None if we did not write it: then the job is that of another client."""
    try:
        created, seq, _, name, fingerprint, rest = value.split(b" ", 5)
        said = _said_by_all(name, rest) if fingerprint == b"0" else _said(int(name), int(fingerprint), rest)
        return Origin(created, int(seq), *said) if said is not None else None
    except ValueError:
        return None


def _said(name: int, fingerprint: int, rest: bytes) -> tuple[str, str, StoredOptions] | None:
    end = name + fingerprint
    if rest[end : end + 1] != b"{":
        return None
    return _str(rest[:name]), _str(rest[name:end]), _options_of(rest[end:])


@functools.lru_cache(maxsize=1024)
def _said_by_all(name: bytes, rest: bytes) -> tuple[str, str, StoredOptions] | None:
    """Cached: tasks without a fingerprint, which are most, say the same by the thousand. Saves a quarter of reading a lease."""
    return _said(int(name), 0, rest)


def _options_of(value: bytes) -> StoredOptions:
    try:
        return _decode_options(value)
    except _NOT_READ:  # a task with damaged options is run as one without any
        return StoredOptions()


# The order in which the script gives a task's fields: `FIELDS` in tasks.lua.
FIELDS = [
    name.encode()
    for name in """state attempt timeout_ms gid created_ms due_ms lock_until_ms lease_token last_started_ms o
    worker cancel ended_by deps first_started_ms eta_us interval_us dead_queue left edges idempotency_key
    id payload max_attempts backoff_ms updated_ms completed_ms failed_ms last_error last_error_ms
    headers blocked_by error progress finished_ms foreign""".split()  # noqa: SIM905 - as a list it is a page long
]


def _us(fields: Hash, name: bytes) -> int | None:
    ms = _int(fields, name)
    return None if ms is None else ms * 1000


def _int(fields: Hash, name: bytes, most: int = MAX_MS) -> int | None:
    value = fields.get(name)
    return whole(value, most) if value else None


def whole(value: bytes | float, most: int = MAX_MS) -> int:
    """A number that another client stored, as the script reads it: whole, from 0 to `most`, and 0 if it is none.

    Some write large numbers with an exponent, and nothing keeps them from writing anything else.
    """
    try:
        number = int(value)
    except (ValueError, OverflowError):
        number = _from_float(value)
    if 0 <= number <= most:  # asked of each task that is leased, several times
        return number
    return most if number > 0 else 0


def _from_float(value: bytes | float) -> int:
    try:
        number = float(value)
    except ValueError:
        return 0
    return MAX_COUNT if number > MAX_COUNT else int(number) if number > 0 else 0  # not a number is not greater than 0


def _str(value: bytes) -> str:
    # Other clients may store any bytes, and one odd task must not break the list that it is in.
    return value.decode("utf-8", "replace")


def text_of(value: bytes | str) -> str:
    """Returns a name from the server as text; those of settings come as text already."""
    return _str(value) if isinstance(value, bytes) else value


def _text(fields: Hash, name: bytes) -> str | None:
    value = fields.get(name)
    return _str(value) if value else None


def record_of(queue: str, id: str, fields: Hash) -> Record:
    """Returns the task of a hash, whoever wrote into it. One in an unknown state is nobody's to run, like a dead letter."""
    created, created_us = fields.get(b"created_ms", b"0"), _us(fields, b"created_ms") or 0
    state = _WORDS.get(fields.get(b"state", b""), State.DEAD)
    common: dict[str, Any] = {
        "id": id,
        "queue": queue,
        "state": state,
        "group": _text(fields, b"gid"),
        "attempts": _int(fields, b"attempt") or 0,
        "created_at_us": created_us,
        "updated_at_us": _us(fields, b"updated_ms") or 0,
        "due_us": _us(fields, b"due_ms") or created_us,
        "started_at_us": _us(fields, b"last_started_ms"),
        "token": _text(fields, b"lease_token"),
        "lease_until_us": _us(fields, b"lock_until_ms"),
        "failed_at_us": _us(fields, b"last_error_ms"),
        "last_error": _error_of(fields),
    }
    found = fields.get(b"o")
    origin = None if found is None else origin_of(found)
    # Another client that publishes an id again writes its own `created_ms`, and leaves our fields of the task before there.
    if origin is None or origin.created_ms != created:
        return _foreign(common, fields)
    options, foreign = origin.options, fields.get(b"foreign") == b"1"
    headers, blockers = fields.get(b"headers"), fields.get(b"blocked_by")
    return Record(
        **common,
        name=origin.name,
        payload=None if options.no_payload else fields.get(b"payload", b""),
        encoding=options.encoding,
        headers=_read(_decode_headers, headers) if headers else None,
        origin=options.origin,
        eta_us=_int(fields, b"eta_us", _MOST_US),
        timeout_us=options.timeout_us,
        lease_us=None if options.no_lease else _lease_us(fields),
        interval_us=_int(fields, b"interval_us", _MOST_US) or None,
        result_ttl_us=options.result_ttl_us,
        # What was not given is left to the worker; the hash has a number all the same, for other clients.
        max_attempts=0 if options.no_max else max(_int(fields, b"max_attempts", MAX_COUNT) or 0, 1),
        backoff=_foreign_backoff(fields) if foreign else options.backoff,
        ended_by=_text(fields, b"ended_by"),
        worker=_text(fields, b"worker"),
        cancel_requested=fields.get(b"cancel") == b"1",
        dead_queue=_text(fields, b"dead_queue"),
        blocked_by=(_read(_decode_blockers, blockers) or ()) if blockers else (),
        run_id=options.run,
        idempotency_key=_text(fields, b"idempotency_key"),
        fingerprint=origin.fingerprint,
        finished_at_us=_finished_us(fields, state),
        progress=_progress_of(fields),
        seq=origin.seq,
        blockers_left=_int(fields, b"left") or 0,
        has_dependents=fields.get(b"deps") == b"1",
    )


def _foreign(common: dict[str, Any], fields: Hash) -> Record:
    """Returns a job that another client published and that we have not touched yet."""
    payload = fields.get(b"payload", b"")
    return Record(
        **common,
        name=_called(payload),
        payload=payload,
        lease_us=_lease_us(fields),
        # Other clients count a maximum of nothing as one run.
        max_attempts=max(_int(fields, b"max_attempts", MAX_COUNT) or 0, 1),
        backoff=_foreign_backoff(fields),
        finished_at_us=_finished_us(fields, common["state"]),
    )


def _called(payload: bytes) -> str:
    # A job of the contract has no name of its own. Its payload may name a function; without that any handler may take it.
    body = _read(_decode_body, payload)
    func = None if body is None else body.get("func")
    return func if isinstance(func, str) and 0 < len(func.encode()) <= 1024 and "\0" not in func else "*"


def _progress_of(fields: Hash) -> bytes | None:
    found = fields.get(b"progress")
    return found if found and _read(_decode_any, found) is not None else None


def _read(decode: Callable[[bytes], T], value: bytes) -> T | None:
    """Returns a value that another client may have damaged; None if it cannot be read."""
    try:
        return decode(value)
    except _NOT_READ:
        return None


def _lease_us(fields: Hash) -> int:
    ms = _int(fields, b"timeout_ms", MAX_LEASE_MS) or 0
    return (ms if ms > 0 else FOREIGN_LEASE_MS) * 1000


def _foreign_backoff(fields: Hash) -> str:
    ms = max(_int(fields, b"backoff_ms") or 0, 0)
    # Other clients wait as long after a lost lease as after a failure.
    return f"fixed:base={ms},max={ms},jitter=0,loss=backoff"


def _finished_us(fields: Hash, state: State) -> int | None:
    """Returns the end of the last run. `finished_ms` alone may be of an earlier one: in a series, or if others ended it."""
    found = _us(fields, b"finished_ms")
    ended = _us(fields, _ENDED[state]) if state in _ENDED else None
    return max(found or 0, ended) if ended is not None else found


_ENDED = {State.DONE: b"completed_ms", State.DEAD: b"failed_ms"}


def _error_of(fields: Hash) -> TaskError | None:
    """Returns our error if it is the last one. Other clients store a single line."""
    stored, words = fields.get(b"error"), _text(fields, b"last_error")
    if stored:
        error = _read(_decode_error, stored)
        # Another client that fails the task later writes the words only, and leaves our error of the run before.
        if error is not None and (words is None or words == words_of(error)):
            return error
    return None if words is None else TaskError.from_text(words)


class _Ended(msgspec.Struct):
    """The end of a run as the script stores it: a line of numbers, then the task's name, the error and the data."""

    result: StoredResult
    name: str
    created_at_us: int


def _ended(task_id: str, value: bytes) -> _Ended:
    head, _, rest = value.partition(b"\n")
    state, finished, attempts, started, created, name, size, has_data, encoding = head.split(b" ", 8)
    data_at = int(name) + int(size)
    failure = rest[int(name) : data_at]
    result = StoredResult(
        task_id=task_id,
        state=state_of(int(state)),
        result=rest[data_at:] if has_data == b"1" else None,
        encoding=encoding.decode(),
        error=_read(_decode_error, failure) if failure else None,
        finished_at_us=int(finished) * 1000,
        attempts=int(attempts),
        started_at_us=None if started == b"-" else int(started) * 1000,
    )
    return _Ended(result, rest[: int(name)].decode("utf-8", "replace"), int(created) * 1000)


def value_of_result(record: Record, result: StoredResult) -> bytes:
    """Returns the same line for a result of another store."""
    name, failure = record.name.encode(), b"" if result.error is None else msgspec.json.encode(result.error)
    started = "-" if result.started_at_us is None else result.started_at_us // 1000
    times = f"{result.finished_at_us // 1000} {result.attempts} {started} {record.created_at_us // 1000}"
    head = f"{int(result.state)} {times} {len(name)} {len(failure)} {int(result.result is not None)} {result.encoding}"
    return b"%b\n%b%b%b" % (head.encode(), name, failure, result.result or b"")


def result_of(task_id: str, value: bytes) -> StoredResult:
    return _ended(task_id, value).result


def record_of_result(queue: str, task_id: str, value: bytes) -> Record:
    """Returns the record of a task whose hash another client deleted, made from its result."""
    ended = _ended(task_id, value)
    return Record(
        id=task_id,
        queue=queue,
        name=ended.name,
        state=ended.result.state,
        attempts=ended.result.attempts,
        created_at_us=ended.created_at_us,
        updated_at_us=ended.result.finished_at_us,
        started_at_us=ended.result.started_at_us,
        finished_at_us=ended.result.finished_at_us,
        last_error=ended.result.error,
    )


def _unpacked(packed: bytes) -> tuple[int, list[Any]]:
    """Decodes events. Names among them may come from other clients, which nothing keeps to UTF-8."""
    try:
        return _decode_events(packed)
    except _NOT_READ:
        return _decode_events(in_utf8(packed))


def events_of_entry(queue: str, last: int, packed: bytes) -> list[EventRow]:
    """Returns the events of one entry; `last` is the number of the last of them."""
    ts_ms, flat = _unpacked(packed)
    first = last - len(flat) // 10 + 1
    rows = [flat[at : at + 10] for at in range(0, len(flat), 10)]
    return [
        EventRow(
            seq=first + n,
            ts_us=ts_ms * 1000,
            event=event,
            task_id=id,
            queue=queue,
            name=name,
            group=group or None,
            attempt=attempt,
            worker=worker or None,
            enqueued_at_us=created * 1000,
            due_us=due * 1000,
            state=state_of(state),
            data=data.encode() if data else None,
            shard=queue,
        )
        for n, (event, id, name, group, attempt, worker, created, due, state, data) in enumerate(rows)
    ]


def worker_of(value: bytes) -> WorkerInfo:
    """`seen_ms {info}`"""
    seen, _, info = value.partition(b" ")
    return msgspec.structs.replace(_decode_worker(info), seen_at_us=int(seen) * 1000)
