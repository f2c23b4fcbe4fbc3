"""Translates between the users' view (`Task`, `TaskResult`, `Event`) and the drivers' (`Enqueue`, `Record`, `EventRow`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from omniq.errors import Invalid, SerializationError
from omniq.models import (
    Blocker,
    Event,
    Record,
    StoredResult,
    Task,
    TaskResult,
    duration_us,
    from_us,
    maybe_from_us,
    status_of,
    to_us,
)
from omniq.operations import Enqueue, EventRow
from omniq.serialization import Serializer, decode

Call = tuple[list[Any], dict[str, Any]]
PAYLOAD_ONLY = "*"  # the name of a task that has none, as clients of the contract publish them
TCP = "tcp"  # the origin of tasks that came over the line protocol


def encode_call(args: Any, kwargs: dict[str, Any], serializer: Serializer, parameters: Sequence[str] = ()) -> bytes:
    """The payload of a Python call. JSON reads `{"args": […], "kwargs": {…}}`, which any client can show or write.

    Raises `SerializationError` that names the argument, by its place or, where the parameters are known, by its name.
    """
    try:
        return serializer.encode({"args": args, "kwargs": kwargs})
    except SerializationError:
        # Only now: it encodes all of the arguments a second time.
        _encode_each(args, kwargs, serializer, parameters)
        raise


def _encode_each(args: Any, kwargs: dict[str, Any], serializer: Serializer, parameters: Sequence[str]) -> None:
    names = [parameters[n] if n < len(parameters) else n + 1 for n in range(len(args))]
    for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
        try:
            serializer.encode(value)
        except SerializationError as exc:
            raise SerializationError(f"argument {name!r}: {exc}") from exc


def encode_result(value: Any, serializer: Serializer) -> bytes:
    """Encode what a task returned. An error says that it is about the result, since a reader may think of the arguments."""
    try:
        return serializer.encode(value)
    except SerializationError as exc:
        raise SerializationError(f"the result: {exc}") from exc


def decode_call(task: Record, serializer: Serializer) -> Call:
    """Returns the arguments in a payload. A whole call is spread, any other value is the only argument."""
    if task.payload is None:
        return [], {}
    value = decode(task.payload, task.encoding, serializer)
    if task.origin == TCP:
        return _call_of_json(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        # With these keys alone it is a call. With others beside them it is a value that happens to have such a key.
        names_itself = task.name == PAYLOAD_ONLY and isinstance(fields.get("func"), str)
        if names_itself or (fields.keys() <= {"args", "kwargs", "func"} and (fields.keys() & {"args", "kwargs"})):
            args: Any = fields.get("args") or []
            kwargs: Any = fields.get("kwargs") or {}
            if isinstance(args, list | tuple) and isinstance(kwargs, dict):
                return list(cast("list[Any]", args)), cast("dict[str, Any]", kwargs)
            if names_itself:
                raise SerializationError(
                    f"the payload calls {fields['func']!r} but its args are not a list, or its kwargs not an object"
                )
    return [value], {}


def called_name(task: Record, serializer: Serializer) -> str:
    """Returns the name of a task's function: its own, or the text `func` in the payload of a task without a name."""
    if task.name != PAYLOAD_ONLY or task.payload is None:
        return task.name
    value = decode(task.payload, task.encoding, serializer)
    func = cast("dict[str, Any]", value).get("func") if isinstance(value, dict) else None
    return func if isinstance(func, str) else PAYLOAD_ONLY


def _call_of_json(value: Any) -> Call:
    """The call of a task from the line protocol: an array is the positional arguments, an object the keyword ones."""
    if isinstance(value, list):
        return cast("list[Any]", value), {}
    if not isinstance(value, dict):
        return [value], {}
    fields = cast("dict[str, Any]", value)
    args, kwargs = fields.get("args", []), fields.get("kwargs", {})
    if fields and fields.keys() <= {"args", "kwargs"} and isinstance(args, list) and isinstance(kwargs, dict):
        return cast("list[Any]", args), cast("dict[str, Any]", kwargs)
    return [], fields


def fingerprint(*parts: Any) -> str:
    """A short hash of a task's body: the same call has the same one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        # With its length, so that what ends one part cannot begin the next.
        digest.update(len(data).to_bytes(4) + data)
    return digest.hexdigest()


def enqueue_of(task: Task, serializer: Serializer) -> Enqueue:
    """Returns the operation that stores a `Task` as it is."""
    if task.max_retries < 0:
        raise Invalid(f"max_retries cannot be negative: {task.max_retries}")
    given = task.payload is not None
    payload = serializer.encode(task.payload) if given else encode_call(task.args, task.kwargs, serializer)
    timeout = None if task.timeout is None else duration_us(task.timeout, "timeout")
    interval = None if task.interval is None else duration_us(task.interval, "interval")
    eta = None if task.eta is None else to_us(task.eta)
    return Enqueue(
        id=task.id,
        name=task.func_path,
        queue=task.queue,
        payload=payload,
        encoding=serializer.name,
        headers=task.headers,
        eta_us=eta,
        timeout_us=timeout,
        lease_us=None if task.lease is None else duration_us(task.lease, "lease"),
        interval_us=interval,
        result_ttl_us=None if task.result_ttl is None else duration_us(task.result_ttl, "result_ttl", zero=True),
        max_attempts=task.max_retries + 1,
        backoff=task.backoff,
        group=task.group,
        group_limit=task.group_limit or 0,
        dead_queue=task.dead_queue,
        blocked_by=tuple(Blocker(i) for i in task.blocked_by),
        idempotency_key=task.idempotency_key,
        fingerprint=fingerprint(task.func_path, payload, eta, interval, timeout, task.max_retries, task.group),
    )


def task_of(record: Record, serializer: Serializer) -> Task:
    """Returns the user's view of a record. Arguments that this side may not decode are left empty."""
    try:
        args, kwargs = decode_call(record, serializer)
    # Whoever looks at a task need not trust whoever wrote its arguments.
    except (SerializationError, msgspec.DecodeError):
        args, kwargs = [], {}
    return Task(
        id=record.id,
        func_path=record.name,
        args=args,
        kwargs=kwargs,
        eta=maybe_from_us(record.eta_us),
        interval=None if record.interval_us is None else from_us(record.interval_us) - from_us(0),
        max_retries=max(record.max_attempts - 1, 0),
        timeout=_seconds(record.timeout_us),
        created_at=from_us(record.created_at_us),
        updated_at=from_us(record.updated_at_us),
        queue=record.queue,
        status=record.status,
        attempts=record.attempts,
        lease=_seconds(record.lease_us),
        group=record.group,
        dead_queue=record.dead_queue,
        blocked_by=[b.id for b in record.blocked_by],
        idempotency_key=record.idempotency_key,
        backoff=record.backoff,
        result_ttl=_seconds(record.result_ttl_us),
        headers=record.headers,
        worker=record.worker,
        started_at=maybe_from_us(record.started_at_us),
        finished_at=maybe_from_us(record.finished_at_us),
        last_error=record.last_error,
        progress=None if record.progress is None else msgspec.json.decode(record.progress),
        cancel_requested=record.cancel_requested,
    )


def result_of(stored: StoredResult, serializer: Serializer) -> TaskResult:
    """The user's view of a stored result. Raises `SerializationError` for an encoding that was not chosen here."""
    value = None if stored.result is None else decode(stored.result, stored.encoding, serializer)
    return TaskResult(
        task_id=stored.task_id,
        status=status_of(stored.state, stored.attempts),
        result=value,
        error=stored.error,
        finished_at=from_us(stored.finished_at_us),
        attempts=stored.attempts,
        last_attempt_at=maybe_from_us(stored.started_at_us),
    )


def event_of(row: EventRow) -> Event:
    return Event(
        seq=row.seq,
        ts=from_us(row.ts_us),
        event=row.event,
        task_id=row.task_id,
        queue=row.queue,
        name=row.name,
        group=row.group,
        attempt=row.attempt,
        worker=row.worker,
        data={} if row.data is None else msgspec.json.decode(row.data),
    )


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1_000_000
