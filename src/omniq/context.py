"""The running task seen from inside, `omniq.current_task()`, and the hooks around it, `Middleware`."""

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
        # What blocks of `transaction()` enqueued. It is stored with the ack, if the run succeeds.
        self.batches: list[Batch] = []
        # What was said last and is not on its way yet.
        self.unsent_progress: bytes | None = None
        # None for a moment after something was sent: a busy loop then only replaces what is unsent.
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
        """Say how far the task is, in at most 4 KiB. It is stored within a moment, and a later call replaces it."""
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
        """Raise `TaskCancelled` if somebody asked for this task to end. For loops of synchronous functions."""
        if self.cancelled:
            raise TaskCancelled(f"task {self.id} was cancelled")

    def transaction(self) -> TaskTransaction:
        """`async with` (or `with`): tasks enqueued inside are stored together with this task's own success, or not at all."""
        return TaskTransaction(self, self._make_batch())


class TaskTransaction:
    """Joins the ack of the running task. If the block or the task fails, nothing that was enqueued is stored."""

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
    """Returns the context of the task that runs here. Raises `LookupError` outside of a task."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError("omniq.current_task() works only inside a running task") from None


def enter(context: TaskContext) -> contextvars.Token[TaskContext]:
    return _current.set(context)


def leave(token: contextvars.Token[TaskContext]) -> None:
    _current.reset(token)


def log_error(exc: BaseException | None) -> tuple[type[BaseException], BaseException, TracebackType] | None:
    """Returns, for `exc_info`, an error with the task's own part of its traceback. None if there is no such part."""
    frames = None if exc is None else own_frames(exc)
    if exc is None or frames is None:
        return None
    if not _is_text(exc):
        exc = _named_like(exc)
    return type(exc), exc, frames


def _is_text(exc: BaseException) -> bool:
    """Whether a log file can hold the texts of an error and its causes: it cannot hold half a character of an odd file name."""
    behind: BaseException | None = exc
    # A chain of causes may be long, or lead back to its beginning.
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
    # Logging writes the name and the text of the error that it is given, so it gets one with a text that can be written.
    shown: type[Exception] = type(kind.__name__, (Exception,), {"__module__": kind.__module__})
    return shown(TaskError.of(exc).message)


def log_fields(record: Record) -> dict[str, Any]:
    """Returns the fields of a log line about a task. Its arguments are never among them."""
    return {
        "task_id": record.id,
        "queue": record.queue,
        "task_name": record.name,
        "attempt": record.attempts,
        "worker": record.worker,
    }


class Middleware:
    """Hooks around each run, on the event loop. `before` runs in the order given, `after` and `on_error` in reverse.

    An exception in `before` or `after` fails the run like one of the task; one in `on_error` is logged.
    """

    async def before(self, task: TaskContext) -> None:
        """The task is about to run."""

    async def after(self, task: TaskContext, result: Any) -> None:
        """The task has returned."""

    async def on_error(self, task: TaskContext, error: BaseException) -> None:
        """The run failed; it may be retried."""
