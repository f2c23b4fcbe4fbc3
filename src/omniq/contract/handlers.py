"""Where handlers run: on the event loop, in threads, or in the thread that called `consume`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import queue
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from omniq.contract.words import JobContext
from omniq.functions import Runnable, TaskThreads

Handler = Callable[[JobContext], object]


class Handlers(Protocol):
    """Runs a handler for a consumer. `interruptible`: cancelling the call ends the handler, not only the waiting for it."""

    interruptible: bool

    async def run(self, context: JobContext) -> None: ...


def must_take_a_job(handler: object) -> None:
    """Raise `TypeError` for a handler that would fail every job of the queue."""
    if not callable(handler):
        raise TypeError(f"a handler is a function that takes the job, not {handler!r}")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # some built-ins have none
        return
    try:
        signature.bind(None)
    except TypeError as exc:
        raise TypeError(f"a handler takes one argument, the job; {handler!r} takes {signature}: {exc}") from None


class InThreads:
    """A plain handler, one thread per running job."""

    interruptible = False

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._threads = TaskThreads("omniq-consumer")

    async def run(self, context: JobContext) -> None:
        value = await self._threads.run(functools.partial(self._handler, context))
        if inspect.isawaitable(value):  # an async function in disguise
            await value

    def close(self) -> None:
        self._threads.close()


class OnLoop(InThreads):
    """An async handler on the loop, any other in threads."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(handler)
        self.interruptible = Runnable(handler).is_async

    async def run(self, context: JobContext) -> None:
        if self.interruptible:
            await cast("Awaitable[object]", self._handler(context))
        else:
            await super().run(context)


class Abandoned(BaseException):
    """Raised inside a handler that runs in the main thread, when the consumer has to leave now."""


class _Call:
    __slots__ = ("context", "future", "loop")

    def __init__(self, context: JobContext) -> None:
        self.context, self.loop = context, asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()


class InCaller:
    """A plain handler in the thread that called `consume`, one job at a time. It may use objects that belong to that thread."""

    interruptible = False

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.busy = False

    async def run(self, context: JobContext) -> None:
        call = _Call(context)
        self._calls.put(call)
        await call.future

    def close(self) -> None:
        """From any thread: let `serve` return."""
        self._calls.put(None)

    def serve(self, timeout: float) -> bool:
        """In the caller's thread: wait for one job and run it. Returns False when there will be no more jobs."""
        try:
            call = self._calls.get(timeout=timeout)
        except queue.Empty:
            return True
        if call is None:
            return False
        if call.future.cancelled():
            return True
        error: BaseException | None = None
        try:
            self.busy = True  # from here on a signal may interrupt
            self._handler(call.context)
        # What else is raised here, such as KeyboardInterrupt, is not about the job and goes on to the caller.
        except (Exception, SystemExit, GeneratorExit, asyncio.CancelledError) as exc:
            error = exc
        finally:
            self.busy = False
        call.loop.call_soon_threadsafe(_settle, call.future, error)
        return True

    def discard(self) -> None:
        """In the caller's thread: wait for the end without running anything."""
        while True:
            with contextlib.suppress(queue.Empty):
                if self._calls.get(timeout=0.1) is None:
                    return


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    elif isinstance(error, StopIteration | GeneratorExit):  # thrown into a coroutine these mean something else
        future.set_exception(RuntimeError(f"the handler raised {error!r}"))
    else:
        future.set_exception(error)
