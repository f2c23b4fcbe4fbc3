"""The words of the contract: milliseconds, JSON and lanes go in, jobs and codes come out."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict, cast

import msgspec

from omniq.backoff import Backoff
from omniq.errors import Invalid
from omniq.models import DEFAULT_LEASE_US, Record, State, check_queue, new_id, new_token
from omniq.operations import Enqueue
from omniq.policy import max_attempts
from omniq.serialization import MsgspecSerializer

# Those of the published Python client. Each job carries its own, so clients with other defaults share a queue with ours.
TIMEOUT_MS = 300_000
MAX_ATTEMPTS = 5
BACKOFF_MS = 30_000
FAN_IN_TTL_MS = 30 * 86_400_000
MAX_BATCH = 100
MAX_MS = 9_999_999_999_999  # the year 2286; larger numbers would reach other clients in exponent form

Lane = Literal["wait", "gwait", "delayed", "failed", "completed"]
# Jobs of a group wait in `gwait`, all others in `wait`; to a store both are ready.
LANES: dict[str, State] = {
    "wait": State.READY,
    "gwait": State.READY,
    "delayed": State.SCHEDULED,
    "failed": State.DEAD,
    "completed": State.DONE,
}

_json = MsgspecSerializer()


# -- helpers that every client has -----------------------------------------------------------------


def queue_base(queue: str) -> str:
    """The key prefix of a queue: its name in braces, so that a cluster keeps its keys together."""
    return "{" + queue_name(queue) + "}"


def queue_name(queue: str) -> str:
    """`pdf` and `{pdf}` are the same queue."""
    name = queue[1:-1] if isinstance(queue, str) and queue.startswith("{") and queue.endswith("}") else queue  # pyright: ignore[reportUnnecessaryIsInstance]
    check_queue(name)
    return name


def now_ms() -> int:
    """Milliseconds since 1970, by this machine's clock."""
    return time.time_ns() // 1_000_000


def ulid() -> str:
    """Returns a fresh job id. Ids made by one process sort in the order in which they were made."""
    return new_id()


# -- what comes out --------------------------------------------------------------------------------


class Paused(msgspec.Struct, frozen=True):
    """`reserve` of a paused queue."""

    status: Literal["PAUSED"] = "PAUSED"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A leased job. `payload` is the JSON text as stored. `gid` is empty for a job without a group."""

    status: Literal["JOB"] = "JOB"
    job_id: str
    payload: str
    lock_until_ms: int
    attempt: int
    max_attempts: int
    gid: str
    lease_token: str
    timeout_ms: int


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """The job as its handler gets it. `lost` is set when somebody else has the job: stop, since your work will not count."""

    queue: str
    job_id: str
    payload_raw: str
    payload: Any
    attempt: int
    max_attempts: int
    lock_until_ms: int
    lease_token: str
    gid: str
    lost: threading.Event = msgspec.field(default_factory=threading.Event)


class BatchResult(NamedTuple):
    """The result of one job of a batch: `OK`, or `ERR` and the code."""

    job_id: str
    status: Literal["OK", "ERR"]
    reason: str | None = None


def job_of(task: Record) -> Job:
    return Job(
        job_id=task.id,
        payload=text_of(task),
        lock_until_ms=cast(int, task.lease_until_us) // 1000,
        attempt=task.attempts,
        max_attempts=max_attempts(task),
        gid=task.group or "",
        lease_token=cast(str, task.token),
        timeout_ms=(task.lease_us or DEFAULT_LEASE_US) // 1000,
    )


def context_of(task: Record) -> JobContext:
    text = text_of(task)
    try:
        payload = msgspec.json.decode(task.payload or b"null")
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # other clients may have stored anything; the handler decides
        payload = text
    return JobContext(
        queue=task.queue,
        job_id=task.id,
        payload_raw=text,
        payload=payload,
        attempt=task.attempts,
        max_attempts=max_attempts(task),
        lock_until_ms=cast(int, task.lease_until_us) // 1000,
        lease_token=cast(str, task.token),
        gid=task.group or "",
    )


def text_of(task: Record) -> str:
    # Other clients may have stored bytes that are no UTF-8: encoded again in this way they are the same.
    return "null" if task.payload is None else task.payload.decode("utf-8", "surrogateescape")


def due_ms(due_us: int) -> int:
    """Rounded up: at that millisecond the job is due."""
    return -(-due_us // 1000)


def moment_us(now_ms_override: int) -> int | None:
    """Returns the moment in microseconds. 0 stands for the store's own clock."""
    return whole(now_ms_override, "now_ms_override", 0) * 1000 or None


# -- what goes in ----------------------------------------------------------------------------------


def encode_payload(payload: object) -> bytes:
    """Returns the JSON text of an object or array. Raises TypeError for anything else, and ValueError for NaN and Infinity."""
    if isinstance(payload, Mapping):
        payload = dict(cast("Mapping[Any, Any]", payload))
    elif not isinstance(payload, list):
        raise TypeError(f"a payload is a JSON object or array (a dict or a list), not {type(payload).__name__}")
    return _json.encode(cast(object, payload))


class JobOptions(TypedDict, total=False):
    """The options of a job, for editors and type checkers."""

    timeout_ms: int
    max_attempts: int
    backoff_ms: int
    due_ms: int
    gid: str | None
    group_limit: int


def enqueue_of(
    queue: str,
    payload: object,
    *,
    job_id: str | None = None,
    timeout_ms: int = TIMEOUT_MS,
    max_attempts: int = MAX_ATTEMPTS,
    backoff_ms: int = BACKOFF_MS,
    due_ms: int = 0,
    gid: str | None = None,
    group_limit: int = 0,
) -> Enqueue:
    """Returns the operation that publishes a job. Values that make no sense are refused here."""
    data = encode_payload(payload)
    group = _group(gid)
    due = whole(due_ms, "due_ms", 0)
    return Enqueue(
        id=job_id or ulid(),
        name="*",
        queue=queue_name(queue),
        payload=data,
        origin="contract",
        eta_us=due * 1000 if due else None,
        lease_us=whole(timeout_ms, "timeout_ms", 1) * 1000,
        max_attempts=whole(max_attempts, "max_attempts", 1),
        backoff=fixed_backoff(whole(backoff_ms, "backoff_ms", 0)),
        group=group,
        group_limit=max(whole(group_limit, "group_limit", None), 0) if group is not None else 0,
        fingerprint=new_token(),  # names this very call: a repeat of it is recognised, a later publish of the id is not one
        on_conflict="replace_finished",
    )


def fixed_backoff(ms: int) -> str:
    """The contract waits equally long before every retry, also after a lost lease."""
    return str(Backoff(kind="fixed", base_ms=ms, max_ms=ms, jitter=0, loss="backoff"))


def whole(value: object, what: str, low: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is a whole number, not {value!r}")
    if (low is not None and value < low) or value > MAX_MS:
        raise Invalid(f"{what} is a whole number from {low or 0} to {MAX_MS}, not {value}")
    return value


def _group(gid: str | None) -> str | None:
    if gid is None:
        return None
    if not isinstance(gid, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"gid is text, not {gid!r}")
    return gid.strip() or None
