"""The lines of the file store: one JSON object each, closed by a checksum of everything before it.

A line that is no longer true is overwritten with blanks, so that what can be read in a folder is what is so.
"""

from __future__ import annotations

import zlib

import msgspec

from omniq.models import Record, State, StoredResult, status_of
from omniq.operations import EventRow

PENDING, RUNNING, FAILED, RESULTS, KEYS, EVENTS = (
    "queue/pending",
    "queue/running",
    "queue/failed",
    "results",
    "queue/keys",
    "events",
)
TABLES = (PENDING, RUNNING, FAILED, RESULTS, KEYS, EVENTS)
TASK_TABLES = (PENDING, RUNNING, FAILED, RESULTS)  # in the order in which a task passes through them

_TABLE_OF = {State.RUNNING: RUNNING, State.DEAD: FAILED, State.DONE: RESULTS, State.CANCELLED: RESULTS}
_SUM_BYTES = len(b',"sum":"00000000"}')
_SPARE = 500  # JSON stays JSON if it could be nested by so much more: a reader may have more calls under way than the writer

Raw = msgspec.Raw
NOTHING = Raw()


def table_of(state: State) -> str:
    return _TABLE_OF.get(state, PENDING)


class TaskLine(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """A task, its result, or both. JSON that belongs to the user stands as it is; other bytes as base64."""

    # For whoever reads the lines with plain tools: it follows from the task, and nothing here reads it.
    status: str = ""
    task: Record | None = None
    payload: Raw = NOTHING
    payload_bytes: bytes | None = None
    progress: Raw = NOTHING
    progress_bytes: bytes | None = None
    waits_for: tuple[str, ...] = ()
    result: StoredResult | None = None
    value: Raw = NOTHING
    value_bytes: bytes | None = None
    expires_us: int | None = None


# Opening a folder reads each of its lines: fields that are not named here are skipped and not decoded.
class TaskGlimpse(msgspec.Struct, gc=False):
    """The fields of a task that the index keeps."""

    id: str
    queue: str
    seq: int = 0
    due_us: int = 0
    state: State = State.READY
    group: str | None = None
    returned: bool = False
    token: str | None = None
    worker: str | None = None
    lease_until_us: int | None = None
    finished_at_us: int | None = None
    updated_at_us: int = 0
    run_id: str | None = None


class ResultGlimpse(msgspec.Struct, gc=False):
    task_id: str
    finished_at_us: int = 0


class LineGlimpse(msgspec.Struct, gc=False):
    task: TaskGlimpse | None = None
    waits_for: tuple[str, ...] = ()
    result: ResultGlimpse | None = None
    expires_us: int | None = None


class KeyLine(msgspec.Struct, gc=False):
    queue: str
    key: str
    task_id: str
    fingerprint: str
    expires_us: int


class EventLine(msgspec.Struct, omit_defaults=True, gc=False):
    """An event. Its data stand there like a payload."""

    seq: int
    ts_us: int
    event: str
    task_id: str
    queue: str
    name: str
    group: str | None = None
    attempt: int = 0
    worker: str | None = None
    enqueued_at_us: int = 0
    due_us: int = 0
    state: State = State.READY
    data: Raw = NOTHING
    data_bytes: bytes | None = None


_encode = msgspec.json.Encoder().encode
_decode_raw = msgspec.json.Decoder(Raw).decode
_decode_task = msgspec.json.Decoder(TaskLine).decode
_decode_event = msgspec.json.Decoder(EventLine).decode
decode_glimpse = msgspec.json.Decoder(LineGlimpse).decode
decode_key = msgspec.json.Decoder(KeyLine).decode


def sealed(value: object) -> bytes:
    """A whole line: the object, its checksum, a newline."""
    text = _encode(value)
    return b'%b,"sum":"%08x"}\n' % (text[:-1], zlib.crc32(text[:-1]))


def is_sealed(line: bytes) -> bool:
    """Whether a line (without its newline) carries its own checksum."""
    body, end = line[:-_SUM_BYTES], line[-_SUM_BYTES:]
    return len(line) > _SUM_BYTES and end == b',"sum":"%08x"}' % zlib.crc32(body)


def task_line(task: Record | None, waits_for: tuple[str, ...], result: StoredResult | None, expires_us: int | None) -> bytes:
    """The line of a task, of a result, or of an ended task with its result."""
    line = TaskLine(waits_for=waits_for, expires_us=expires_us)
    # Taken off the record for the moment, instead of a copy of it: JSON of a user stands on the line as it is.
    payload = progress = value = None
    if task is not None:
        line.status, line.task = status_of(task.state, task.attempts), task
        payload, task.payload = task.payload, None
        progress, task.progress = task.progress, None
        line.payload, line.payload_bytes = _readable(payload, task.encoding)
        line.progress, line.progress_bytes = _readable(progress, "json")
    if result is not None:
        line.status, line.result = line.status or status_of(result.state, result.attempts), result
        value, result.result = result.result, None
        line.value, line.value_bytes = _readable(value, result.encoding)
    try:
        return sealed(line)
    finally:
        if task is not None:
            task.payload, task.progress = payload, progress
        if result is not None:
            result.result = value


def read_task_line(line: bytes) -> TaskLine:
    """Returns the task and the result of a line."""
    found = _decode_task(line)
    if found.task is not None:
        found.task.payload = _bytes(found.payload, found.payload_bytes)
        found.task.progress = _bytes(found.progress, found.progress_bytes)
    if found.result is not None:
        found.result.result = _bytes(found.value, found.value_bytes)
    return found


def event_line(seq: int, task: Record, event: str, now_us: int, data: bytes | None) -> bytes:
    if event == "progress":  # in it are a user's bytes; all others are JSON of our own
        text, other = _readable(data, "json")
    else:
        text, other = NOTHING if data is None else Raw(data), None
    return sealed(
        EventLine(
            seq,
            now_us,
            event,
            task.id,
            task.queue,
            task.name,
            task.group,
            task.attempts,
            task.worker,
            task.created_at_us,
            task.due_us,
            task.state,
            text,
            other,
        )
    )


def read_event_line(line: bytes) -> EventRow:
    found = _decode_event(line)
    return EventRow(
        seq=found.seq,
        ts_us=found.ts_us,
        event=found.event,
        task_id=found.task_id,
        queue=found.queue,
        name=found.name,
        group=found.group,
        attempt=found.attempt,
        worker=found.worker,
        enqueued_at_us=found.enqueued_at_us,
        due_us=found.due_us,
        state=found.state,
        data=_bytes(found.data, found.data_bytes),
    )


def _readable(data: bytes | None, encoding: str) -> tuple[Raw, bytes | None]:
    """Returns JSON that fits on a line as text, which comes back to the byte; anything else as bytes, for base64."""
    if data is None:
        return NOTHING, None
    # Blanks around JSON would not come back, and a line break would end the line.
    if encoding == "json" and data and data[0] > 32 and data[-1] > 32 and b"\n" not in data and b"\r" not in data:
        try:
            data.decode()
            found = _decode_raw(data)
            if len(data) > _SPARE and data.count(b"[") + data.count(b"{") > _SPARE:
                _decode_raw(b"[" * _SPARE + data + b"]" * _SPARE)
            return found, None
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):  # no JSON, or too deep to be read again
            pass
    return NOTHING, data


def _bytes(text: Raw, data: bytes | None) -> bytes | None:
    return data if data is not None else bytes(text) or None
