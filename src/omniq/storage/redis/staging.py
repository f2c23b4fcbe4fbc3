"""Staged runs as the script reads them, and what it tells and keeps of them.

Most rows of a `Stage` differ in id, key, fingerprint and payload only. What they share is encoded once, and the script passes a
task on without looking into it until its run is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from omniq.models import Record, State
from omniq.operations import Enqueue, OpenRun, RunInfo, RunState, Stage
from omniq.storage.redis.records import record_of

Row = list[Any]  # id, key or False, how long the key lives in ms, fingerprint, the packed task

_encode = msgspec.msgpack.Encoder().encode
_shape = msgspec.msgpack.Decoder(tuple[str, list[str], str, int | bool, bool])
_own = msgspec.msgpack.Decoder(tuple[str, str | bool, msgspec.Raw])
_operation = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_fields = msgspec.msgpack.Decoder(list[msgspec.Raw])
_SPECIAL = (None,) * 5


def encode_open(op: OpenRun) -> dict[str, Any]:
    return {"queue": op.queue, "run": op.run_id, "ttl": -(-op.ttl_us // 1000)}


def encode_stage(
    op: Stage, shape_of: Callable[[Enqueue], list[Any]], whole: Callable[[Enqueue], dict[str, Any]]
) -> dict[str, Any]:
    """`shape_of`: what rows of one shape share; `whole`: an enqueue with all that it says."""
    rows: Row = []
    limits: list[tuple[int, str, int]] = []
    shapes: dict[tuple[Any, ...], bytes] = {}
    for number, task in enumerate(op.tasks, 1):
        key = task.idempotency_key
        # A task with one of these travels whole: such rows are rare, and mostly no two are alike.
        if (task.group, task.eta_us, task.interval_us, task.dead_queue, task.headers) != _SPECIAL:
            packed = b"0 " + _encode(whole(task))
            if task.group is not None and task.group_limit > 0:
                limits.append((number, task.group, task.group_limit))
        else:
            empty = task.payload is None
            shape = (task.name, task.max_attempts, task.lease_us, task.backoff, task.origin, task.encoding, task.timeout_us)
            shape += (task.result_ttl_us, empty)
            shared = shapes.get(shape)
            if shared is None:
                made = _encode(shape_of(task))
                shared = shapes[shape] = b"%d %b\x93" % (len(made), made)
            payload = b"null" if task.payload is None else task.payload
            packed = b"%b%b%b%b" % (shared, _encode(task.fingerprint), _encode(key or False), as_text(payload))
        rows += (task.id, key or False, -(-task.key_ttl_us // 1000), task.fingerprint, msgspec.Raw(as_text(packed)))
    call: dict[str, Any] = {"queue": op.queue, "run": op.run_id, "rows": rows}
    if op.strict:
        call["strict"] = True
    if limits:
        call["limits"] = limits
    return call


# How texts of a few bytes begin: most values of a call are such.
_SHORT = [bytes((0xA0 | size,)) if size < 32 else bytes((0xD9, size)) for size in range(256)]


def as_text(data: bytes) -> bytes:
    """Bytes as a msgpack string: the server's Lua knows no binary type, and its strings are bytes."""
    size = len(data)
    if size < 256:
        return _SHORT[size] + data
    if size < 1 << 16:
        return b"\xda" + size.to_bytes(2, "big") + data
    return b"\xdb" + size.to_bytes(4, "big") + data


def _bytes_of(value: msgspec.Raw) -> bytes:
    """The bytes of a msgpack string, which need not be text."""
    data = bytes(value)
    return data[{0xD9: 2, 0xDA: 3, 0xDB: 5}.get(data[0], 1) :]


def run_of(queue: str, run_id: str, values: list[Any]) -> RunInfo:
    """A run from what the script tells, or from the fields of its hash in the same order."""
    opened, expires, ended, new, claimed, released, dropped, settled = (int(value or 0) for value in values[1:])
    return RunInfo(
        queue=queue,
        run_id=run_id,
        state=RunState(values[0].decode()),
        opened_at_us=opened * 1000,
        expires_us=expires * 1000,
        ended_at_us=ended * 1000 or None,
        new=new,
        claimed=claimed,
        released=released,
        dropped=dropped,
        settled=settled == 1,
    )


RUN_FIELDS = ("state", "opened", "expires", "ended", "new", "claimed", "released", "dropped", "settled")


def staged_record(queue: str, id: str, value: bytes) -> Record:
    """A staged task; `store.read_staged` in tasks.lua says how it is kept."""
    seq, staged_ms, deps, run_size, shape_size, rest = value.split(b" ", 5)
    rest, run_id = rest[: -int(run_size)], rest[-int(run_size) :].decode()
    shape, packed = rest[: int(shape_size)], rest[int(shape_size) :]
    fields: dict[bytes, bytes] = {b"deps": deps, b"due_ms": staged_ms}
    if shape:
        (name, common, options, ttl, _), (fingerprint, key, payload) = _shape.decode(shape), _own.decode(packed)
        fields |= _hash([part.encode() for part in common])
        fields[b"payload"] = _bytes_of(payload)
        if key:
            fields[b"idempotency_key"] = cast(str, key).encode()
        origin = _origin(staged_ms, seq, None if ttl is False else ttl, name, fingerprint, options.encode())
    else:
        given = _operation.decode(packed)
        fields |= _hash([_bytes_of(part) for part in _fields.decode(given["fields"])])
        if "eta" in given:
            fields[b"due_ms"] = b"%d" % msgspec.msgpack.decode(given["eta"])
        name, fingerprint = (msgspec.msgpack.decode(given[field]) for field in ("name", "fingerprint"))
        ttl = msgspec.msgpack.decode(given["ttl"]) if "ttl" in given else None
        origin = _origin(staged_ms, seq, ttl, name, fingerprint, _bytes_of(given["options"]))
    fields |= {b"created_ms": staged_ms, b"updated_ms": staged_ms, b"o": origin}
    record = record_of(queue, id, fields)
    record.state, record.run_id = State.STAGED, run_id
    return record


def _hash(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _origin(created: bytes, seq: bytes, ttl: int | None, name: str, fingerprint: str, options: bytes) -> bytes:
    called, body = name.encode(), fingerprint.encode()
    lives = b"-" if ttl is None else b"%d" % ttl
    return b"%b %b %b %d %d %b%b%b" % (created, seq, lives, len(called), len(body), called, body, options)
