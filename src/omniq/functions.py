"""A task's function on the worker's side: how its arguments regain their types after JSON, and threads if it is not async."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import enum
import inspect
import queue
import threading
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

import msgspec

# What JSON turns into something else. Few functions have such a parameter; for all others a call converts nothing.
_RICH = (
    datetime,
    date,
    time,
    timedelta,
    Decimal,
    UUID,
    bytes,
    bytearray,
    set,
    frozenset,
    tuple,
    msgspec.Struct,
    enum.Enum,
)


class Runnable:
    """A function that gets back the types that JSON lost, such as dates and dataclasses, by its annotations."""

    __slots__ = ("_by_name", "_by_place", "func", "is_async")

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        target = func if inspect.isroutine(func) else getattr(func, "__call__", func)  # noqa: B004 - its code is wanted
        self.is_async = inspect.iscoroutinefunction(target)
        self._by_name = _rich_parameters(func)
        self._by_place: list[Any] = []
        if self._by_name:
            names = [p.name for p in inspect.signature(func).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
            self._by_place = [self._by_name.get(name) for name in names]

    def restore(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Convert in place. A value that does not fit its annotation stays as it is: Python does not enforce them either."""
        if not self._by_name:
            return
        for index, hint in enumerate(self._by_place[: len(args)]):
            if hint is not None:
                args[index] = _convert(args[index], hint)
        for name, value in kwargs.items():
            if name in self._by_name:
                kwargs[name] = _convert(value, self._by_name[name])


def _rich_parameters(func: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(func)
        names = inspect.signature(func).parameters
    except Exception:  # annotations may name what cannot be imported here; then nothing is converted
        return {}
    return {name: hint for name, hint in hints.items() if name in names and _is_rich(hint)}


def _is_rich(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, _RICH) or dataclasses.is_dataclass(cast(Any, hint))
    origin: Any = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if isinstance(origin, type):
        kind = cast("type[Any]", origin)
        if issubclass(kind, _RICH) or (issubclass(kind, dict) and inner[:1] not in ((), (str,))):
            return True
    return any(_is_rich(part) for part in inner)


def _convert(value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, str_keys=True)
    except (msgspec.ValidationError, TypeError):
        return value


class _ThreadCall:
    __slots__ = ("abandoned", "call", "context", "future", "loop")

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.call, self.loop = call, loop
        # So that `current_task()` and the program's own context variables hold in the thread, too.
        self.context = contextvars.copy_context()
        self.future: asyncio.Future[Any] = loop.create_future()
        self.abandoned = False


class TaskThreads:
    """Runs calls in daemon threads that are reused. A Python thread cannot be stopped: `abandoned` counts those left behind."""

    def __init__(self, name: str) -> None:
        # Not an executor: Python joins its threads at exit, and a task that never returns would keep the program from ending.
        self._name = name
        self._calls: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        # Threads that are free, less the calls that are on their way to them.
        self._idle = 0
        self._threads = 0
        self.abandoned = 0
        self._lock = threading.Lock()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run a call in a thread. If the waiting is cancelled the thread goes on alone and its end is ignored."""
        made = _ThreadCall(call, asyncio.get_running_loop())
        with self._lock:
            if self._idle == 0:
                self._start()
            else:
                self._idle -= 1
        self._calls.put(made)
        try:
            return await made.future
        except asyncio.CancelledError:
            with self._lock:
                if not made.abandoned and not _finished(made):
                    made.abandoned = True
                    self.abandoned += 1
            raise

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()

    def close(self) -> None:
        """Let idle threads end. Busy threads end after their call."""
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            value: Any = None
            error: BaseException | None = None
            try:
                value = call.context.run(call.call)
            except BaseException as exc:
                error = exc
            with self._lock:
                # This thread was replaced when it was left behind, so it is one too many.
                if call.abandoned:
                    self.abandoned -= 1
                    self._threads -= 1
                    return
                self._idle += 1
            try:
                call.loop.call_soon_threadsafe(_settle, call.future, value, error)
            except RuntimeError:  # the loop was closed meanwhile
                return


def _finished(call: _ThreadCall) -> bool:
    return call.future.done() and not call.future.cancelled()


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration | GeneratorExit):  # thrown into a coroutine these mean something else
        future.set_exception(RuntimeError(f"the task raised {error!r}"))
    else:
        future.set_exception(error)
