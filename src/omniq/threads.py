"""Threads for synchronous tasks, one per running task. A thread that overstays is left behind and replaced."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any


class _Job:
    __slots__ = ("abandoned", "call", "context", "future", "loop")

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.call, self.loop = call, loop
        self.context = contextvars.copy_context()
        self.future: asyncio.Future[Any] = loop.create_future()
        self.abandoned = False


class TaskThreads:
    """Runs calls in daemon threads that are reused. Nobody can stop a Python thread: `abandoned` counts those left."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = 0
        self._threads = 0
        self.abandoned = 0
        self._lock = threading.Lock()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run a call in a thread. If the waiting is cancelled the thread goes on alone and its end is ignored."""
        job = _Job(call, asyncio.get_running_loop())
        with self._lock:
            if self._idle == 0:
                self._start()
            else:
                self._idle -= 1
        self._jobs.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            with self._lock:
                if not job.abandoned and not _finished(job):
                    job.abandoned = True
                    self.abandoned += 1
            raise

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()

    def close(self) -> None:
        """Let idle threads end; busy ones end after their call."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            value: Any = None
            error: BaseException | None = None
            try:
                value = job.context.run(job.call)
            except BaseException as exc:
                error = exc
            with self._lock:
                if job.abandoned:
                    self.abandoned -= 1
                    self._threads -= 1
                    return
                self._idle += 1
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, value, error)
            except RuntimeError:  # the loop was closed meanwhile
                return


def _finished(job: _Job) -> bool:
    return job.future.done() and not job.future.cancelled()


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration | GeneratorExit):  # thrown into a coroutine these mean something else
        future.set_exception(RuntimeError(f"the task raised {error!r}"))
    else:
        future.set_exception(error)
