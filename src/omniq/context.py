"""What a running task can ask and say: `omniq.current_task()`."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import OmniQError, SerializationError
from omniq.models import Record, TaskError, own_frames
from omniq.storage.checks import MAX_PROGRESS

if TYPE_CHECKING:
    from omniq.queue import Batch

_current: contextvars.ContextVar[TaskContext] = contextvars.ContextVar("omniq_current_task")


class TaskCancelled(OmniQError):
    """Raised by `check_cancelled()` in a task that was cancelled."""


class TaskContext:
    """The task that runs now. Safe to use from the event loop and from threads."""

    def __init__(self, record: Record, make_batch: Callable[[], Batch]) -> None:
        self.record = record
        self.cancelled = False
        self.batches: list[Batch] = []
        self.unsent_progress: bytes | None = None
        self.on_progress: Callable[[], None] | None = None
        self._make_batch = make_batch

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def queue(self) -> str:
        return self.record.queue

    @property
    def attempt(self) -> int:
        """1 for the first run."""
        return self.record.attempts

    @property
    def max_attempts(self) -> int:
        return self.record.max_attempts

    @property
    def headers(self) -> dict[str, str]:
        return self.record.headers or {}

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines carry the task's id, queue, name and attempt."""
        return logging.LoggerAdapter(logging.getLogger("omniq.task"), log_fields(self.record))

    def progress(self, done: float | None = None, total: float | None = None, note: str | None = None, **data: Any) -> None:
        """Say how far the task is; stored within a moment, the last word wins. At most 4 KiB."""
        given = {k: v for k, v in {"done": done, "total": total, "note": note, **data}.items() if v is not None}
        try:
            encoded = msgspec.json.encode(given)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise SerializationError(f"progress cannot be stored as JSON: {exc}; pass plain values") from exc
        if len(encoded) > MAX_PROGRESS:
            raise ValueError(f"progress of {len(encoded)} bytes; the limit is {MAX_PROGRESS}")
        self.unsent_progress = encoded
        if self.on_progress is not None:
            self.on_progress()

    def check_cancelled(self) -> None:
        """Raise `TaskCancelled` if somebody asked for this task to end; for loops of synchronous functions."""
        if self.cancelled:
            raise TaskCancelled(f"task {self.id} was cancelled")

    def transaction(self) -> TaskTransaction:
        """`async with` (or `with`): what is enqueued inside is stored together with this task's own success, or not at all."""
        return TaskTransaction(self, self._make_batch())


class TaskTransaction:
    """Joins the ack of the running task; what a failing block or a failing task has enqueued is never stored."""

    def __init__(self, context: TaskContext, batch: Batch) -> None:
        self._context, self._batch = context, batch

    def __enter__(self) -> Batch:
        return self._batch

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._context.batches.append(self._batch)

    async def __aenter__(self) -> Batch:
        return self._batch

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.__exit__(kind, exc, tb)


def current_task() -> TaskContext:
    """The context of the task that runs here; raises `LookupError` outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError("omniq.current_task() works only inside a running task") from None


def enter(context: TaskContext) -> contextvars.Token[TaskContext]:
    return _current.set(context)


def leave(token: contextvars.Token[TaskContext]) -> None:
    _current.reset(token)


def log_error(exc: BaseException | None) -> tuple[type[BaseException], BaseException, TracebackType] | None:
    """For `exc_info`: an error with the part of its traceback that is the task's own; None where there is no such part."""
    frames = None if exc is None else own_frames(exc)
    if exc is None or frames is None:
        return None
    if not _is_text(exc):
        exc = _named_like(exc)
    return type(exc), exc, frames


def _is_text(exc: BaseException) -> bool:
    """Whether a log file can hold what an error and those behind it say: half a character, as in odd file names, it cannot."""
    behind: BaseException | None = exc
    for _ in range(20):
        if behind is None:
            break
        with contextlib.suppress(Exception):  # one that cannot describe itself is shown as such
            if not _encodes(str(behind)):
                return False
        behind = behind.__cause__ or behind.__context__
    return True


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named_like(exc: BaseException) -> BaseException:
    kind = type(exc)
    shown: type[Exception] = type(kind.__name__, (Exception,), {"__module__": kind.__module__})
    return shown(TaskError.of(exc).message)


def log_fields(record: Record) -> dict[str, Any]:
    """What a log line says about a task; never its arguments."""
    return {
        "task_id": record.id,
        "queue": record.queue,
        "task_name": record.name,
        "attempt": record.attempts,
        "worker": record.worker,
    }
