"""Operations as the script reads them, and its answers as outcomes.

Redis keeps milliseconds: moments and durations are rounded up on their way in, `now` is rounded down, the exact `eta` stands in
a field of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from omniq import errors
from omniq.errors import Refused
from omniq.models import MAX_COUNT, Record, State
from omniq.operations import (
    AbortRun,
    Ack,
    Acked,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    CommitRun,
    CountFanIn,
    Enqueue,
    Enqueued,
    Extend,
    Extended,
    Fail,
    Failed,
    FannedIn,
    Held,
    OnRun,
    OnTask,
    OpenFanIn,
    OpenRun,
    Operation,
    Outcome,
    Progress,
    Release,
    Released,
    Remove,
    Removed,
    Requeue,
    Requeued,
    Reschedule,
    Rescheduled,
    Reserve,
    Reserved,
    Retried,
    Retry,
    RunInfo,
    Stage,
    Staged,
)
from omniq.storage.machine.fan_in import another_number
from omniq.storage.machine.replies import acked_data, done_before, enqueued_data, event_data, key_in_use, refused
from omniq.storage.machine.staged_runs import another_body, run_closed, staged_elsewhere
from omniq.storage.redis.records import (
    FIELDS,
    MAX_LEASE_MS,
    Origin,
    StoredOptions,
    origin_of,
    record_of,
    state_of,
    whole,
    words_of,
)
from omniq.storage.redis.staging import as_text, encode_open, encode_stage, run_of

DEFAULT_LEASE_MS = 30_000
DEFAULT_ATTEMPTS = 4  # what other clients are told when the core's default is meant
DEFAULT_BACKOFF_MS = 1000

_BASE = re.compile(r"\bbase=(\d+)")

encode_json = msgspec.json.Encoder().encode
encode_call = msgspec.msgpack.Encoder().encode


def ms_up(us: int) -> int:
    return -(-us // 1000)


def ms_down(us: int) -> int:
    return us // 1000


def maybe_up(us: int | None) -> int | None:
    return None if us is None else -(-us // 1000)


# -- down ----------------------------------------------------------------------------------------


def encode_operation(op: Operation) -> dict[str, Any]:
    """Returns an operation as the script reads it, without the fields that were not given."""
    made = {k: blob(v) if type(v) is bytes else v for k, v in _WORDS[type(op)].encode(op).items() if v is not None}
    made["kind"] = _kind(type(op))
    return made


def _kind(op: type[Operation]) -> str:
    return op.__name__.lower()


def blob(data: bytes) -> msgspec.Raw:
    return msgspec.Raw(as_text(data))


def lease_ms(op: Enqueue | Record) -> int:
    return DEFAULT_LEASE_MS if op.lease_us is None else ms_up(op.lease_us)


def common_fields(op: Enqueue | Record) -> list[str]:
    """The contract's fields that tasks of one shape share."""
    # Other clients know only one pause for all retries: they are given the first.
    base = _BASE.search(op.backoff) if op.backoff else None
    return [
        "max_attempts",
        str(op.max_attempts or DEFAULT_ATTEMPTS),
        "timeout_ms",
        str(lease_ms(op)),
        "backoff_ms",
        base[1] if base else str(DEFAULT_BACKOFF_MS),
    ]


def options_of(op: Enqueue | Record) -> bytes:
    given = StoredOptions(op.encoding, op.origin, op.backoff, op.timeout_us, op.result_ttl_us)
    given.no_max, given.no_lease, given.no_payload = op.max_attempts == 0, op.lease_us is None, op.payload is None
    return encode_json(given)


def _enqueue(op: Enqueue) -> dict[str, Any]:
    # Other clients read a payload as JSON. That there was none stands among the options, for us.
    payload = b"null" if op.payload is None else op.payload
    fields: list[str | msgspec.Raw] = ["id", op.id, "payload", blob(payload), *common_fields(op)]
    for name, value in (
        ("gid", op.group),
        ("idempotency_key", op.idempotency_key),
        ("dead_queue", op.dead_queue),
    ):
        if value:
            fields += (name, value)
    for name, number in (("interval_us", op.interval_us), ("eta_us", op.eta_us)):
        if number is not None:
            fields += (name, str(number))
    if not op.plain:
        # The short ways of the script read the fields of a plain task only: `more` sends this one the long way.
        fields += ("more", "1")
    if op.headers is not None:
        fields += ("headers", blob(encode_json(op.headers)))
    if op.blocked_by:
        fields += ("blocked_by", blob(encode_json(op.blocked_by)))
    made: dict[str, Any] = {
        "queue": op.queue,
        "id": op.id,
        "name": op.name,
        "fields": fields,
        "lease": lease_ms(op),
        "fingerprint": op.fingerprint,
        "data": enqueued_data(op.payload),
        "group": op.group,
        "group_limit": op.group_limit or None,
        "dead_queue": op.dead_queue,
        "interval_us": None if op.interval_us is None else str(op.interval_us),
        "ttl": maybe_up(op.result_ttl_us),
        "options": options_of(op),
        **_moment(op),
    }
    if op.on_conflict != "error":
        made["on_conflict"] = op.on_conflict
    if op.blocked_by:
        made["blocked_by"], made["dead_blockers"] = op.blocked_by, op.dead_blockers
    if op.idempotency_key is not None:
        made["key"], made["key_ttl"] = op.idempotency_key, ms_up(op.key_ttl_us)
    return made


def _moment(op: Enqueue | Reschedule | Requeue) -> dict[str, Any]:
    # The exact moment goes as text, since Lua writes large numbers with an exponent.
    eta = op.eta_us
    return {"eta": maybe_up(eta), "eta_us": None if eta is None else str(eta), "delay": maybe_up(op.delay_us)}


def _reserve(op: Reserve) -> dict[str, Any]:
    return {
        "queues": op.queues,
        "token": op.token,
        "limit": op.limit,
        "lease": maybe_up(op.lease_us),
        "worker": op.worker,
    }


def _target(op: OnTask) -> dict[str, Any]:
    return {"queue": op.queue, "id": op.id}


def _held(op: Held) -> dict[str, Any]:
    return {"queue": op.queue, "id": op.id, "token": op.token, "late": op.late or None}


def _ack(op: Ack) -> dict[str, Any]:
    again = maybe_up(op.again_us)
    end = {"result": op.result, "encoding": op.encoding, "data": acked_data(op), "again": again, "listed": op.listed or None}
    return {**_held(op), **end}


def _failure(op: Retry | Fail) -> dict[str, Any]:
    return {
        **_held(op),
        "error": None if op.error is None else encode_json(op.error),
        "words": words_of(op.error),
        "data": event_data(op.error, ran_us=op.ran_us, lost=op.lost),
        "lost": op.lost,
    }


def _retry(op: Retry) -> dict[str, Any]:
    return {**_failure(op), "delay": maybe_up(op.delay_us), "due": maybe_up(op.due_us), "attempts": op.attempts}


def _fail(op: Fail) -> dict[str, Any]:
    return {**_failure(op), "again": maybe_up(op.again_us)}


def _extend(op: Extend) -> dict[str, Any]:
    return {**_held(op), "lease": maybe_up(op.lease_us)}


def _progress(op: Progress) -> dict[str, Any]:
    return {**_held(op), "progress": op.data, "data": b'{"progress":%b}' % op.data}


def _cancel(op: Cancel) -> dict[str, Any]:
    error = None if op.error is None else encode_json(op.error)
    return {**_target(op), "token": op.token, "lost": op.lost, "error": error, "words": words_of(op.error)}


def _reschedule(op: Reschedule) -> dict[str, Any]:
    return {**_target(op), **_moment(op)}


def _requeue(op: Requeue) -> dict[str, Any]:
    return {**_target(op), **_moment(op), "reset_attempts": op.reset_attempts or None}


def _remove(op: Remove) -> dict[str, Any]:
    return {**_target(op), "if_state": None if op.if_state is None else int(op.if_state)}


def _beat(op: Beat) -> dict[str, Any]:
    return {"worker": op.info.worker, "gone": op.gone or None, "info": encode_json(op.info)}


def _open_fan_in(op: OpenFanIn) -> dict[str, Any]:
    return {"key": op.key, "expected": op.expected, "ttl": ms_up(op.ttl_us)}


def _count_fan_in(op: CountFanIn) -> dict[str, Any]:
    return {"key": op.key, "member": op.member}


def _on_run(op: OnRun) -> dict[str, Any]:
    return {"queue": op.queue, "run": op.run_id}


def _stage(op: Stage) -> dict[str, Any]:
    return encode_stage(op, _staged_shape, encode_operation)


def _staged_shape(op: Enqueue) -> list[Any]:
    ttl = False if op.result_ttl_us is None else ms_up(op.result_ttl_us)
    return [op.name, common_fields(op), blob(options_of(op)), ttl, op.payload is None]


# -- up: outcomes --------------------------------------------------------------------------------


def decode_answer(transaction: Sequence[Operation], answer: list[Any]) -> list[Outcome] | Refused:
    """The outcomes of a transaction, or why it was refused."""
    if answer and isinstance(answer[0], bytes):
        # Facts and no sentences: all stores refuse in the same words, which Python has.
        kind, number, *details = answer
        return refusal(kind.decode(), transaction[cast(int, number) - 1], *details)
    return [_outcome(op, reply) for op, reply in zip(transaction, answer, strict=True)]


def _outcome(op: Operation, reply: list[Any]) -> Outcome:
    if reply and reply[0] == b"before":
        return done_before(op)
    return _WORDS[type(op)].decode(op, reply)


def refusal(kind: str, op: Operation, *details: Any) -> Refused:
    """The refusal that the script names. `details`: what its words need, as `refuse` in operations.lua gives it."""
    if isinstance(op, OpenFanIn):
        return another_number(op, *details)
    if isinstance(op, OnRun):
        return _run_refusal(kind, op, *details)
    if kind == "IdempotencyConflict":
        return key_in_use(cast(Enqueue, op), details[0].decode() if details else None)
    task = Record(id="", queue="", name="", state=state_of(details[0]), attempts=details[1]) if details else None
    return refused(getattr(errors, kind), op, task)


def _run_refusal(kind: str, op: OnRun, detail: bytes | int) -> Refused:
    """`detail`: why the run is closed, or the number of the staged task that is refused."""
    if isinstance(detail, bytes):
        return run_closed(detail.decode(), op.queue, op.run_id)
    told = another_body if kind == "IdempotencyConflict" else staged_elsewhere
    return told(cast(Stage, op).tasks[detail - 1].id, op.run_id)


def _reserved(op: Reserve, reply: list[Any]) -> Reserved:
    paused, next_at, tasks, now = reply
    return Reserved(
        tasks=[_leased(op, queue.decode(), values, now) for queue, values in tasks],
        paused=tuple(name.decode() for name in paused),
        next_at_us=None if next_at < 0 else next_at * 1000,
    )


def _leased(op: Reserve, queue: str, values: Sequence[Any], now: int) -> Record:
    """The whole of a task's fields, or of a plain one only those that the caller does not know."""
    if len(values) == len(FIELDS):
        fields = {name: value for name, value in zip(FIELDS, values, strict=True) if value is not None}
        return record_of(queue, fields[b"id"].decode(), fields)
    until, _, timeout_ms, _, created, due, _, _, found, id, payload, max_attempts = values
    origin = cast(Origin, origin_of(found))  # the script has read it
    options, created_us, now_us = origin.options, whole(created) * 1000, now * 1000
    task = Record(  # more than 15 names, and Python makes a dictionary of them first: half a µs of each lease
        id=id.decode(),
        queue=queue,
        name=origin.name,
        payload=None if options.no_payload else payload,
        due_us=whole(due) * 1000 if due else created_us,
        attempts=1,
        token=op.token,
        lease_until_us=int(until) * 1000,
        worker=op.worker or None,
        fingerprint=origin.fingerprint,
        created_at_us=created_us,
        updated_at_us=now_us,
        started_at_us=now_us,
        state=State.RUNNING,
        seq=origin.seq,
    )
    task.encoding, task.origin, task.backoff = options.encoding, options.origin, options.backoff
    task.timeout_us, task.result_ttl_us, task.run_id = options.timeout_us, options.result_ttl_us, options.run
    if not options.no_lease:
        task.lease_us = whole(timeout_ms or 0, MAX_LEASE_MS) * 1000
    if not options.no_max:
        task.max_attempts = whole(max_attempts or 0, MAX_COUNT)
    return task


@dataclass(frozen=True, slots=True)
class _Words:
    """The two ways of an operation: its words for the script, and its outcome from the answer."""

    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Any, list[Any]], Outcome]
    grows: bool = False  # it brings in something new, which a full server has no room for


def _extended(_: Operation, reply: list[Any]) -> Extended:
    return Extended(lease_until_us=reply[0] * 1000, cancel_requested=reply[1] == 1)


def _run_info(op: OnRun, reply: list[Any]) -> RunInfo:
    return run_of(op.queue, op.run_id, reply)


_WORDS: dict[type[Operation], _Words] = {
    Enqueue: _Words(_enqueue, lambda _, r: Enqueued(id=r[0].decode(), existed=r[1] == 1, state=state_of(r[2])), grows=True),
    Reserve: _Words(_reserve, _reserved),
    Ack: _Words(_ack, lambda _, r: Acked(state=state_of(r[0]), already=r[1] == 1)),
    Retry: _Words(_retry, lambda _, r: Retried(due_us=r[0] * 1000, state=state_of(r[1]))),
    Fail: _Words(_fail, lambda _, r: Failed(queue=r[0].decode(), state=state_of(r[1]), already=r[2] == 1)),
    Release: _Words(_held, lambda _, r: Released(state=state_of(r[0]))),
    Extend: _Words(_extend, _extended),
    Progress: _Words(_progress, _extended),
    Cancel: _Words(_cancel, lambda _, r: Cancelled(state=state_of(r[0]))),
    Reschedule: _Words(_reschedule, lambda _, r: Rescheduled(due_us=r[0] * 1000)),
    Requeue: _Words(_requeue, lambda _, r: Requeued(state=state_of(r[0]))),
    Remove: _Words(_remove, lambda _, r: Removed()),
    Beat: _Words(_beat, lambda _, r: Beaten()),
    OpenFanIn: _Words(_open_fan_in, lambda _, r: FannedIn(left=r[0]), grows=True),
    CountFanIn: _Words(_count_fan_in, lambda _, r: FannedIn(left=r[0])),
    OpenRun: _Words(encode_open, _run_info, grows=True),
    Stage: _Words(_stage, lambda _, r: Staged(new=r[0], there=r[1]), grows=True),
    # A staged task is one value; its commit makes a hash, index entries and an event of it.
    CommitRun: _Words(_on_run, _run_info, grows=True),
    AbortRun: _Words(_on_run, _run_info),
}

GROWING = frozenset(_kind(op) for op, words in _WORDS.items() if words.grows)
