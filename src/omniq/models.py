"""The task: as users see it (`Task`, `TaskResult`, `Event`, …) and as drivers do (`Record`, `State`).

Users see datetimes and decoded values; between core and driver all times are integer microseconds since the epoch, UTC.
"""

from __future__ import annotations

import enum
import os
import random
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any

import msgspec

from omniq.errors import Invalid, LimitExceeded, NameRequired, QueueRequired, TaskIdRequired

DEFAULT_QUEUE = "default"
DEFAULT_LEASE_US = 30_000_000
MAX_ERROR_CHARS = 16 * 1024
# As many as the line protocol allows, for all doors.
MAX_BLOCKERS = 255

# Not `$`, which lets a line end pass.
_QUEUE = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
# Frames of these lie between the worker and the task's own code.
_NOT_OWN = frozenset({"omniq", "importlib"})
_RESERVED_QUEUES = frozenset({"omniq.store"})  # what belongs to no queue lives under this name on Redis
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
MAX_TIME_US = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
MAX_DURATION_US = 10**17  # some 3,000 years: added to any time of today it still has a date
MAX_COUNT = 2**63 - 1  # what every store can keep
MAX_AT_ONCE = 10**9  # tasks or ids that one call may ask for


class State(enum.IntEnum):
    """Where a task stands for a driver; `TaskStatus` is the coarser view that users see."""

    # Stores keep these numbers, and their order is used: from BLOCKED to READY a task waits, from DONE on it has ended.
    STAGED = 0
    BLOCKED = 1
    SCHEDULED = 2
    READY = 3
    RUNNING = 4
    DONE = 5
    DEAD = 6
    CANCELLED = 7

    @property
    def waiting(self) -> bool:
        return State.BLOCKED <= self <= State.READY

    @property
    def final(self) -> bool:
        return self >= State.DONE


class TaskStatus(enum.StrEnum):
    """Where a task stands, in the words of the API."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    RETRYING = "RETRYING"
    CANCELLED = "CANCELLED"


_STATUS = {
    State.RUNNING: TaskStatus.RUNNING,
    State.DONE: TaskStatus.SUCCESS,
    State.DEAD: TaskStatus.FAILED,
    State.CANCELLED: TaskStatus.CANCELLED,
}


def status_of(state: State, attempts: int) -> TaskStatus:
    """The user's word for a driver's state."""
    status = _STATUS.get(state)
    if status is None:
        return TaskStatus.RETRYING if attempts > 0 else TaskStatus.PENDING
    return status


class TaskError(msgspec.Struct, frozen=True):
    """Why a run failed, as text; it is never turned back into an exception class.

    What UTF-8 cannot hold, such as half a surrogate pair of an odd file name, becomes a question mark, so that every error can
    be stored.
    """

    type: str
    message: str = ""
    traceback: str = ""

    def __post_init__(self) -> None:
        # Quick to see, and true of nearly all errors.
        if not (self.type.isascii() and self.message.isascii() and self.traceback.isascii()):
            for name in ("type", "message", "traceback"):
                msgspec.structs.force_setattr(self, name, getattr(self, name).encode("utf-8", "replace").decode())

    @classmethod
    def of(cls, exc: BaseException) -> TaskError:
        """The error of a run; the traceback begins in the task's own code."""
        import traceback

        frames = own_frames(exc)
        try:
            message = str(exc)
            text = "" if frames is None else "".join(traceback.format_exception(type(exc), exc, frames))
        except Exception as broken:  # an exception may fail to describe itself
            message, text = f"(its text cannot be made: {type(broken).__name__})", ""
        return cls(type(exc).__name__, message, text).cut()

    @classmethod
    def from_text(cls, text: str) -> TaskError:
        """An error that arrived as one text, such as `ValueError: no such page`; `str()` gives the text back."""
        kind, colon, message = text.partition(": ")
        if colon and message and all(part.isidentifier() for part in kind.split(".")):
            return cls(kind, message).cut()
        return cls("", text).cut()

    def cut(self) -> TaskError:
        """Returns the same error within the size that a store keeps. Of a long traceback the end stays, which tells most."""
        if len(self.type) + len(self.message) + len(self.traceback) <= MAX_ERROR_CHARS:
            return self
        kind, message = self.type[:255], self.message[: MAX_ERROR_CHARS // 4]
        # The 8 are the length of the mark that stands for what was cut.
        room = MAX_ERROR_CHARS - len(kind) - len(message) - 8
        return TaskError(kind, message, "[cut] …\n" + self.traceback[-room:])

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message


def own_frames(exc: BaseException) -> TracebackType | None:
    """Returns the traceback from the task's own code on, or from a module that it imports. None if there is no such part."""
    frames = exc.__traceback__
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_OWN:
        frames = frames.tb_next
    return frames


class Blocker(msgspec.Struct, frozen=True, array_like=True):
    """A task that must end before another may start. `queue` is filled in before the store is asked."""

    id: str
    queue: str = ""


# gc=False: records come by the thousand and hold no cycles, so the garbage collector need not visit them.
class Record(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """A task as drivers store it and hand it out. `seq` and the fields after it belong to the driver."""

    id: str
    queue: str
    name: str
    payload: bytes | None = None
    encoding: str = "json"
    headers: dict[str, str] | None = None
    origin: str = ""
    eta_us: int | None = None
    due_us: int = 0
    timeout_us: int | None = None
    lease_us: int | None = None
    interval_us: int | None = None
    result_ttl_us: int | None = None
    attempts: int = 0
    max_attempts: int = 0
    backoff: str = ""
    token: str | None = None
    lease_until_us: int | None = None
    ended_by: str | None = None
    worker: str | None = None
    cancel_requested: bool = False
    group: str | None = None
    dead_queue: str | None = None
    blocked_by: tuple[Blocker, ...] = ()
    run_id: str | None = None
    idempotency_key: str | None = None
    fingerprint: str = ""
    created_at_us: int = 0
    updated_at_us: int = 0
    started_at_us: int | None = None
    finished_at_us: int | None = None
    last_error: TaskError | None = None
    failed_at_us: int | None = None
    progress: bytes | None = None
    state: State = State.READY
    seq: int = 0
    returned: bool = False
    blockers_left: int = 0
    has_dependents: bool = False

    @property
    def status(self) -> TaskStatus:
        return status_of(self.state, self.attempts)


class StoredResult(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """How a task's last run ended, as drivers keep it: `result` is encoded."""

    task_id: str
    state: State
    result: bytes | None = None
    encoding: str = "json"
    error: TaskError | None = None
    finished_at_us: int = 0
    attempts: int = 0
    started_at_us: int | None = None


class Schedule(msgspec.Struct, frozen=True):
    """When a task runs: not before `eta`, and then every `interval` if one is given."""

    eta: datetime | None = None
    interval: timedelta | None = None

    def next_run(self, now: datetime) -> datetime | None:
        """Returns the first moment of the series after `now`. None for a task that does not repeat."""
        if self.interval is None:
            return None
        first = self.eta or now
        if first > now:
            return first
        return first + self.interval * ((now - first) // self.interval + 1)


class Task(msgspec.Struct, kw_only=True):
    """A task as its users see it: the call, its options and where it stands."""

    id: str = ""
    func_path: str
    args: list[Any] = msgspec.field(default_factory=list[Any])
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    eta: datetime | None = None
    interval: timedelta | None = None
    max_retries: int = 3
    timeout: float | None = None
    created_at: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))
    updated_at: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))
    queue: str = DEFAULT_QUEUE
    status: TaskStatus = TaskStatus.PENDING
    attempts: int = 0
    payload: Any = None
    lease: float | None = None
    group: str | None = None
    group_limit: int | None = None
    dead_queue: str | None = None
    blocked_by: list[str] = msgspec.field(default_factory=list[str])
    idempotency_key: str | None = None
    backoff: str = ""
    result_ttl: float | None = None
    headers: dict[str, str] | None = None
    worker: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    last_error: TaskError | None = None
    progress: Any = None
    cancel_requested: bool = False

    def __post_init__(self) -> None:
        if not self.id:
            self.id = new_id()

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.eta, self.interval)


class TaskResult(msgspec.Struct, kw_only=True):
    """How a task ended. `result` is the decoded value of a successful run, `error` the reason of a failed one."""

    task_id: str
    status: TaskStatus
    result: Any = None
    error: TaskError | None = None
    finished_at: datetime | None = None
    attempts: int = 0
    last_attempt_at: datetime | None = None

    @property
    def ok(self) -> bool:
        return self.status is TaskStatus.SUCCESS


class Event(msgspec.Struct, kw_only=True):
    """One transition of one task. `seq` grows without end; read on from the last one you saw."""

    seq: int
    ts: datetime
    event: str
    task_id: str
    queue: str
    name: str
    group: str | None = None
    attempt: int = 0
    worker: str | None = None
    data: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


# -- times ---------------------------------------------------------------------------------------


def now_us() -> int:
    """This machine's clock, in microseconds."""
    return time.time_ns() // 1000


def to_us(moment: datetime) -> int:
    """Microseconds of an aware datetime. A naive one is refused, since nobody can know what it means, and one that is after
    the year 9999 in UTC, since nothing could show it."""
    if moment.tzinfo is None:
        raise Invalid(f"{moment!r} has no time zone: use datetime.now(timezone.utc) or .astimezone()")
    us = (moment - _EPOCH) // _MICROSECOND
    if us > MAX_TIME_US:
        raise Invalid(f"{moment} is after the year 9999 in UTC: choose an earlier time")
    return us


def from_us(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)


def maybe_from_us(us: int | None) -> datetime | None:
    return None if us is None else from_us(us)


def duration_us(value: float | timedelta, what: str, *, zero: bool = False) -> int:
    """Microseconds of a duration given in seconds or as a timedelta; it must be positive (or 0 with `zero`)."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"{what} must be seconds or a timedelta, not {value!r}")
    if not (0 <= seconds < MAX_DURATION_US / 1e6) or (seconds == 0 and not zero):  # also refuses NaN
        least = "zero or more" if zero else "more than zero"
        raise Invalid(f"{what} must be {least} seconds, up to some 3,000 years, not {value!r}")
    microseconds = round(seconds * 1_000_000)
    if microseconds == 0 and not zero:
        raise Invalid(f"{what} of {value!r} seconds is shorter than a microsecond")
    return microseconds


# -- names and ids -------------------------------------------------------------------------------


def check_encodable(text: str, what: str, kind: type[Invalid] = Invalid) -> None:
    """Raise for text that UTF-8 cannot hold, such as half a surrogate pair: no store keeps it, no other program reads it."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        odd = text[exc.start : exc.start + 1]
        raise kind(
            f"{what} {text[:40]!r} cannot be stored: {odd!r} is half a character, as in file names that are not UTF-8; "
            "replace it first"
        ) from None


def check_id(task_id: str) -> None:
    if not isinstance(task_id, str) or not task_id:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TaskIdRequired("a task needs an id; leave it out and omniq makes one")
    if len(task_id) > 255 or "\0" in task_id:
        raise TaskIdRequired(f"task id {task_id[:40]!r}…: 1 to 255 characters without NUL")
    if not task_id.isascii():
        check_encodable(task_id, "task id", TaskIdRequired)


def check_queue(queue: str) -> None:
    if not isinstance(queue, str) or not queue:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise QueueRequired("a queue name is required; the usual one is 'default'")
    if not _QUEUE.match(queue) or queue in _RESERVED_QUEUES:
        raise QueueRequired(f"queue name {queue[:140]!r}: use 1 to 128 of A-Z a-z 0-9 . _ - (not 'omniq.store')")


def check_name(name: str) -> None:
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NameRequired("a task needs a name: 'module:callable', a registered name, or '*' for payload only")
    if len(name) > 1024 or "\0" in name:
        raise NameRequired(f"task name {name[:40]!r}…: at most 1024 characters without NUL")
    if not name.isascii():
        check_encodable(name, "task name", NameRequired)


def check_text(value: str, what: str) -> None:
    if not isinstance(value, str) or not value:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"{what} must be text of 1 to 255 characters, not {value!r}")
    if len(value) > 255 or "\0" in value:
        raise LimitExceeded(f"{what} {value[:40]!r}…: at most 255 characters without NUL")
    check_encodable(value, what)


def check_count(value: int, what: str, least: int = 0, most: int = MAX_COUNT) -> None:
    """Raise for a number that is too small, or too large for some store."""
    if not isinstance(value, int) or not least <= value <= most:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"{what} must be a whole number from {least} to {most}, not {value!r}")


_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_ids_lock = threading.Lock()
_random = random.Random(os.urandom(32))  # noqa: S311 - os.urandom for each id lets go of the GIL and waits to get it back
_last_ms = 0
_id_prefix = ""  # the time and 50 random bits; the last 30 bits count
_id_count = 0


def new_id() -> str:
    """Returns a fresh ULID. Ids made by one process sort in the order in which they were made."""
    global _last_ms, _id_prefix, _id_count
    with _ids_lock:
        ms = time.time_ns() // 1_000_000
        if ms > _last_ms:
            bits = (ms << 80) | _random.getrandbits(80)
            _last_ms, _id_prefix = ms, "".join([_PAIRS[(bits >> shift) & 1023] for shift in range(120, 29, -10)])
            _id_count = bits & 0x1FFF_FFFF  # the free top bit leaves room to count
        else:
            # Also while the clock is behind the last id, as after a correction: ids keep their order and not the time.
            _id_count += 1
        prefix, count = _id_prefix, _id_count
    return prefix + _PAIRS[(count >> 20) & 1023] + _PAIRS[(count >> 10) & 1023] + _PAIRS[count & 1023]


# A child begins with the random state of its parent, and would make the same ids.
def _reseed_after_fork() -> None:
    global _last_ms
    _last_ms = 0
    _random.seed(os.urandom(32))


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_reseed_after_fork)


def new_token() -> str:
    """Returns a lease token: 128 random bits."""
    # Not from `_random`: whoever sees some tokens must not be able to guess the next one.
    return os.urandom(16).hex()
