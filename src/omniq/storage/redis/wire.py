"""Operations as the script reads them, and its answers as outcomes.

Redis keeps milliseconds: moments and durations are rounded up on their way in, `now` is rounded down, the exact `eta` stands in
a field of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from omniq import errors
from omniq.errors import IdempotencyConflict, Refused
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
    Stage,
    Staged,
)
from omniq.storage.machine.staged_runs import another_body, run_closed, staged_elsewhere
from omniq.storage.redis.records import (
    FIELDS,
    MAX_LEASE_MS,
    Options,
    Origin,
    origin_of,
    record_of,
    state_of,
    whole,
    words_of,
)
from omniq.storage.redis.staging import as_text, encode_open, encode_stage, run_of

Command = tuple[Any, ...]
Entry = list[dict[str, Any]]  # a transaction, or a run of them, as the script reads it

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
    """What the script reads; what is not given is left out."""
    made = {k: blob(v) if type(v) is bytes else v for k, v in _ENCODERS[type(op)](op).items() if v is not None}
    made["kind"] = type(op).__name__.lower()
    return made


_GROWING = {"enqueue", "enqueues", "openrun", "stage", "commitrun", "restore", "restore_events", "openfanin"}


def grows(entries: Sequence[Entry]) -> bool:
    """Whether a call brings in something new, which a full server has no room for; all others end, extend or delete."""
    return any(op["kind"] in _GROWING for entry in entries for op in entry)


class Packed:
    """Transactions as the script reads them, and how its answers are read. Equal neighbours travel as one run.

    A run is `enqueues` (tasks that differ in id, payload and fingerprint only) or `acks` (of one queue).
    """

    def __init__(self, transactions: Sequence[Sequence[Operation]]) -> None:
        self._transactions = transactions
        self.entries: list[Entry] = []
        self._spans: list[tuple[int, int, str]] = []  # first transaction, how many, how they travel
        shapes = [_shape(transaction) for transaction in transactions]
        start = 0
        while start < len(transactions):
            end, shape, travels = start + 1, shapes[start], "alone"
            if shape is not None:
                travels = "together" if len(transactions[start]) > 1 else "run"
                while travels == "run" and end < len(transactions) and shapes[end] == shape:
                    end += 1
            ops = [op for transaction in transactions[start:end] for op in transaction]
            entry = [encode_operation(op) for op in ops] if shape is None else [_run(ops, travels == "together")]
            self.entries.append(entry)
            self._spans.append((start, end - start, travels))
            start = end

    def read(self, answers: Sequence[Any]) -> list[list[Outcome] | Refused]:
        """One result per transaction from one answer per entry."""
        results: list[list[Outcome] | Refused] = []
        for (start, count, travels), answer in zip(self._spans, answers, strict=True):
            transactions = self._transactions[start : start + count]
            if travels == "run":
                results += [_plain(t) if a == 1 else decode_answer(t, a) for t, a in zip(transactions, answer, strict=True)]
            elif travels == "together" and not answer:
                results.append(_all_new(transactions[0]))
            else:
                results.append(decode_answer(transactions[0], answer))
        return results


def rest_of(entries: Sequence[Entry], answers: Sequence[Any]) -> list[Entry]:
    """What the script left to another call: a call over very many queues answers only as much as its budget allows."""
    if not answers:
        return list(entries)
    left = list(entries[len(answers) :])
    if _is_cut(entries, answers):
        last = entries[len(answers) - 1][0]
        left.insert(0, [last | {"rows": last["rows"][3 * len(answers[-1]) :]}])
    return left


def _is_cut(entries: Sequence[Entry], answers: Sequence[Any]) -> bool:
    """Whether the last entry that was answered was carried out in part."""
    last = entries[len(answers) - 1][0]
    return last["kind"] == "enqueues" and not last["together"] and 3 * len(answers[-1]) < len(last["rows"])


def joined(entries: Sequence[Entry], answers: list[Any], more: Sequence[Any]) -> list[Any]:
    """Answers, and those that another call gave to the rest."""
    if answers and _is_cut(entries, answers):
        return [*answers[:-1], answers[-1] + more[0], *more[1:]]
    return [*answers, *more]


def _shape(transaction: Sequence[Operation]) -> tuple[Any, ...] | None:
    """What transactions of a run have in common; None for one that travels alone. First: whether it fills a run by itself."""
    first = transaction[0]
    if isinstance(first, Ack):
        if len(transaction) > 1 or first.again_us is not None:
            return None
        return (False, Ack, first.queue, first.late, first.encoding, first.listed)
    if not isinstance(first, Enqueue):
        return None
    shape = enqueue_shape(first)
    if shape is None or any(not isinstance(op, Enqueue) or enqueue_shape(op) != shape for op in transaction[1:]):
        return None
    return (len(transaction) > 1, *shape)


def enqueue_shape(op: Enqueue) -> tuple[Any, ...] | None:
    special = (op.group, op.eta_us, op.delay_us, op.interval_us, op.dead_queue, op.idempotency_key, op.headers)
    if special != _NOT_SPECIAL or op.blocked_by:
        return None
    options = (op.name, op.max_attempts, op.lease_us, op.backoff, op.origin, op.encoding, op.timeout_us, op.result_ttl_us)
    return (Enqueue, op.queue, op.payload is None, op.on_conflict, *options)


def of_shape(shape: tuple[Any, ...]) -> Enqueue:
    """An operation of this shape, without an id of its own."""
    _, queue, empty, on_conflict, name, max_attempts, lease_us, backoff, origin, encoding, timeout_us, result_ttl_us = shape
    return Enqueue(
        id="",
        queue=queue,
        payload=None if empty else b"",
        on_conflict=on_conflict,
        name=name,
        max_attempts=max_attempts,
        lease_us=lease_us,
        backoff=backoff,
        origin=origin,
        encoding=encoding,
        timeout_us=timeout_us,
        result_ttl_us=result_ttl_us,
    )


_NOT_SPECIAL = (None,) * 7


def _run(ops: Sequence[Operation], together: bool) -> dict[str, Any]:
    first = ops[0]
    rows: list[Any] = []
    if isinstance(first, Ack):
        for op in cast("Sequence[Ack]", ops):
            rows += (op.id, op.token, False if op.result is None else blob(op.result), blob(_ack_data(op)))
        kept = {"listed": True} if first.listed else {}
        return {"kind": "acks", "queue": first.queue, "late": first.late, "encoding": first.encoding, "rows": rows, **kept}
    assert isinstance(first, Enqueue)
    for op in cast("Sequence[Enqueue]", ops):
        rows += (op.id, blob(b"null" if op.payload is None else op.payload), op.fingerprint)
    made: dict[str, Any] = {
        "kind": "enqueues",
        "queue": first.queue,
        "name": first.name,
        "fields": common_fields(first),
        "options": blob(options_of(first)),
        "lease": lease_ms(first),
        "on_conflict": first.on_conflict,
        "empty": first.payload is None,
        "together": together,
        "rows": rows,
    }
    if first.result_ttl_us is not None:
        made["ttl"] = ms_up(first.result_ttl_us)
    return made


def _plain(transaction: Sequence[Operation]) -> list[Outcome]:
    """What the short way of the script answers with a mere 1."""
    return [_DONE] if isinstance(transaction[0], Ack) else _all_new(transaction)


def _all_new(transaction: Sequence[Operation]) -> list[Outcome]:
    return [Enqueued(id=op.id, existed=False, state=State.READY) for op in cast("Sequence[Enqueue]", transaction)]


_DONE = Acked(state=State.DONE)


def blob(data: bytes) -> msgspec.Raw:
    return msgspec.Raw(as_text(data))


def lease_ms(op: Enqueue | Record) -> int:
    return DEFAULT_LEASE_MS if op.lease_us is None else ms_up(op.lease_us)


def common_fields(op: Enqueue | Record) -> list[str]:
    """The contract's fields that tasks of one shape share."""
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
    given = Options(op.encoding, op.origin, op.backoff, op.timeout_us, op.result_ttl_us)
    given.no_max, given.no_lease, given.no_payload = op.max_attempts == 0, op.lease_us is None, op.payload is None
    return encode_json(given)


def _enqueue(op: Enqueue) -> dict[str, Any]:
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
    if enqueue_shape(op) is None:
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
        "data": b'{"payload_bytes":%d}' % (0 if op.payload is None else len(op.payload)),
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


def _ack_data(op: Ack) -> bytes:
    size = 0 if op.result is None else len(op.result)
    return b'{"result_bytes":%d}' % size if op.ran_us is None else b'{"ran_us":%d,"result_bytes":%d}' % (op.ran_us, size)


def _ack(op: Ack) -> dict[str, Any]:
    again = maybe_up(op.again_us)
    end = {"result": op.result, "encoding": op.encoding, "data": _ack_data(op), "again": again, "listed": op.listed or None}
    return {**_held(op), **end}


def _failure(op: Retry | Fail) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if op.error is not None:
        data["error"] = {"type": op.error.type, "message": op.error.message[:500]}
    if op.ran_us is not None:
        data["ran_us"] = op.ran_us
    if op.lost is not None:
        data["lost"] = op.lost
    return {
        **_held(op),
        "error": None if op.error is None else encode_json(op.error),
        "words": words_of(op.error),
        "data": encode_json(data) if data else None,
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


_ENCODERS: dict[type[Operation], Callable[[Any], dict[str, Any]]] = {
    Enqueue: _enqueue,
    Reserve: _reserve,
    Ack: _ack,
    Retry: _retry,
    Fail: _fail,
    Release: _held,
    Extend: _extend,
    Progress: _progress,
    Cancel: _cancel,
    Reschedule: _reschedule,
    Requeue: _requeue,
    Remove: _remove,
    Beat: _beat,
    OpenFanIn: _open_fan_in,
    CountFanIn: _count_fan_in,
    OpenRun: encode_open,
    Stage: _stage,
    CommitRun: _on_run,
    AbortRun: _on_run,
}


# -- up: outcomes --------------------------------------------------------------------------------


def decode_answer(transaction: Sequence[Operation], answer: list[Any]) -> list[Outcome] | Refused:
    """The outcomes of a transaction, or why it was refused."""
    if answer and isinstance(answer[0], bytes):
        kind, number = cast("tuple[bytes, int]", answer)
        return refusal(kind.decode(), transaction[number - 1])
    return [_outcome(op, reply) for op, reply in zip(transaction, answer, strict=True)]


def _outcome(op: Operation, reply: list[Any]) -> Outcome:
    if reply and reply[0] == b"before":
        return _BEFORE[type(op)](op)
    return _DECODERS[type(op)](op, reply)


_TEXTS = {
    "TaskNotFound": "no task {id!r} in queue {queue!r}",
    "NotActive": "task {id!r} is not running",
    "LeaseExpired": "the lease of task {id!r} ran out; stop working on it",
    "TokenMismatch": "task {id!r} is held under another token; stop working on it",
    "LeaseHeld": "the lease of task {id!r} was renewed",
    "NotDead": "task {id!r} is no dead letter; only a FAILED task can be requeued",
    "NotWaiting": "task {id!r} is not in a state for this; cancel a running one, requeue a FAILED one",
    "DuplicateId": "task {id!r} is already there with another body; leave the id out or use another",
    "IdempotencyConflict": "idempotency key {key!r} in queue {queue!r} was used for another body",
}


def refusal(kind: str, op: Operation) -> Refused:
    """The error that the script names, about this operation."""
    if isinstance(op, OpenFanIn):
        return IdempotencyConflict(f"fan-in {op.key!r} is open with another number than {op.expected}")
    if isinstance(op, OnRun):
        return _run_refusal(kind, op)
    words = {"id": getattr(op, "id", ""), "queue": getattr(op, "queue", ""), "key": getattr(op, "idempotency_key", "")}
    return cast(Refused, getattr(errors, kind)(_TEXTS[kind].format(**words)))


def _run_refusal(kind: str, op: OnRun) -> Refused:
    """`RunClosed` and why; of a `Stage` also another error and the number of the task that it is about."""
    name, _, rest = kind.partition(" ")
    if name == "RunClosed":
        return run_closed(rest, op.queue, op.run_id)
    told = another_body if name == "IdempotencyConflict" else staged_elsewhere
    return told(cast(Stage, op).tasks[int(rest) - 1].id, op.run_id)


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
    options = origin.options
    return Record(
        id=id.decode(),
        queue=queue,
        name=origin.name,
        payload=None if options.no_payload else payload,
        encoding=options.encoding,
        origin=options.origin,
        due_us=whole(due or created) * 1000,
        timeout_us=options.timeout_us,
        lease_us=None if options.no_lease else whole(timeout_ms or 0, MAX_LEASE_MS) * 1000,
        result_ttl_us=options.result_ttl_us,
        attempts=1,
        max_attempts=0 if options.no_max else whole(max_attempts or 0, MAX_COUNT),
        backoff=options.backoff,
        token=op.token,
        lease_until_us=int(until) * 1000,
        worker=op.worker or None,
        run_id=options.run,
        fingerprint=origin.fingerprint,
        created_at_us=int(created) * 1000,
        updated_at_us=now * 1000,
        started_at_us=now * 1000,
        state=State.RUNNING,
        seq=origin.seq,
    )


_DECODERS: dict[type[Operation], Callable[[Any, list[Any]], Outcome]] = {
    Enqueue: lambda _, r: Enqueued(id=r[0].decode(), existed=r[1] == 1, state=state_of(r[2])),
    Reserve: _reserved,
    Ack: lambda _, r: Acked(state=state_of(r[0]), already=r[1] == 1),
    Retry: lambda _, r: Retried(due_us=r[0] * 1000, state=state_of(r[1])),
    Fail: lambda _, r: Failed(queue=r[0].decode(), state=state_of(r[1]), already=r[2] == 1),
    Release: lambda _, r: Released(state=state_of(r[0])),
    Extend: lambda _, r: Extended(lease_until_us=r[0] * 1000, cancel_requested=r[1] == 1),
    Progress: lambda _, r: Extended(lease_until_us=r[0] * 1000, cancel_requested=r[1] == 1),
    Cancel: lambda _, r: Cancelled(state=state_of(r[0])),
    Reschedule: lambda _, r: Rescheduled(due_us=r[0] * 1000),
    Requeue: lambda _, r: Requeued(state=state_of(r[0])),
    Remove: lambda _, r: Removed(),
    Beat: lambda _, r: Beaten(),
    OpenFanIn: lambda _, r: FannedIn(left=r[0]),
    CountFanIn: lambda _, r: FannedIn(left=r[0]),
    OpenRun: lambda op, r: run_of(op.queue, op.run_id, r),
    Stage: lambda _, r: Staged(new=r[0], there=r[1]),
    CommitRun: lambda op, r: run_of(op.queue, op.run_id, r),
    AbortRun: lambda op, r: run_of(op.queue, op.run_id, r),
}

# What a repeated operation answers when the first one was carried out and its answer got lost.
_BEFORE: dict[type[Operation], Callable[[Any], Outcome]] = {
    Ack: lambda _: Acked(state=State.DONE, already=True),
    Fail: lambda op: Failed(queue=op.queue, already=True),
    Retry: lambda _: Retried(due_us=0),
    Extend: lambda _: Extended(lease_until_us=0, cancel_requested=False),
    Progress: lambda _: Extended(lease_until_us=0, cancel_requested=False),
    Release: lambda _: Released(state=State.READY),
    Cancel: lambda _: Released(state=State.READY),
    Requeue: lambda _: Requeued(state=State.READY),
}
