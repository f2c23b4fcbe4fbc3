"""`AsyncOmniQ` and its blocking twin `OmniQ`: the library's front door."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, Unpack

from omniq.config import Settings, load_settings
from omniq.errors import DriverClosed
from omniq.middleware import Middleware
from omniq.models import Event, Task, TaskResult
from omniq.operations import Filter, GroupInfo, QueueCounts, WorkerInfo
from omniq.portal import Portal
from omniq.queue import AsyncTaskQueue, Batch, Row, tell_of_text, with_schedule
from omniq.storage.base import BaseStorage, must_be_storage
from omniq.tasks import NO_OPTIONS, OptionFields, Options, TaskFunction, make_options
from omniq.worker import AsyncWorkerPool, WorkerPool

log = logging.getLogger("omniq.queue")

P = ParamSpec("P")
T = TypeVar("T")
Func = Callable[..., Any] | str | TaskFunction[..., Any]


def _storage(settings: Settings, url: str | None = None) -> BaseStorage:
    return BaseStorage.from_url(settings.url if url is None else url, events=settings.events)


def _use_log_level(settings: Settings) -> None:
    if settings.log_level is not None:
        logging.getLogger("omniq").setLevel(settings.log_level)


class AsyncOmniQ:
    """A task queue on a store. Opens itself at its first call; close it, or use it as `async with`."""

    def __init__(self, storage: BaseStorage, *, settings: Settings | None = None) -> None:
        must_be_storage(storage)
        self.settings = settings or Settings()
        self.storage = storage
        self.queue = AsyncTaskQueue(storage, self.settings)

    @classmethod
    def from_env(cls) -> Self:
        """As the `OMNIQ_…` environment variables say; SQLite in `omniq.db` without any."""
        settings = load_settings()
        _use_log_level(settings)
        return cls(_storage(settings), settings=settings)

    @classmethod
    def from_url(cls, url: str, *, settings: Settings | None = None) -> Self:
        settings = settings or Settings()
        return cls(_storage(settings, url), settings=settings)

    async def close(self) -> None:
        await self.storage.close()

    async def __aenter__(self) -> Self:
        await self.storage.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    # -- in ----------------------------------------------------------------------------------------

    async def enqueue(
        self,
        func: Func,
        *args: Any,
        eta: datetime | timedelta | None = None,
        interval: timedelta | float | None = None,
        **kwargs: Any,
    ) -> str:
        """Store a call of `func` (a function, a registered task, or `"module:callable"`); the task's id.

        `eta` is when it may run at the earliest (an aware datetime, or a timedelta from now), `interval` how often it
        repeats. All other options are given by `options(…)`. Raises `TypeError` for arguments that do not fit the
        function and `SerializationError` for those that cannot be stored.
        """
        tell_of_text(func)
        return await self.enqueue_call(func, args, kwargs, with_schedule(NO_OPTIONS, eta, interval))

    async def enqueue_call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str:
        """`enqueue` with everything spelled out."""
        return await self.queue.enqueue(func, args, kwargs, options)

    async def enqueue_many(self, func: Func, rows: Iterable[Row]) -> list[str]:
        """Store a call per row: a tuple of positional or a dict of keyword arguments. One transaction per 1,000 rows."""
        return await self.queue.enqueue_many(func, rows, NO_OPTIONS)

    def options(self, **options: Unpack[OptionFields]) -> AsyncEnqueuer:
        """Options for the calls enqueued through the returned object: `oq.options(queue="mail").enqueue(f, …)`.

        eta interval schedule max_retries timeout lease queue group group_limit idempotency_key blocked_by dead_queue
        result_ttl backoff task_id headers
        """
        return AsyncEnqueuer(self, make_options(options))

    def transaction(self) -> AsyncTransaction:
        """`async with oq.transaction() as tx: tx.enqueue(f, …)`: all of it is stored at the end, or nothing."""
        return AsyncTransaction(self.queue)

    # -- out ---------------------------------------------------------------------------------------

    async def get_result(self, task_id: str, *, wait: bool = False, timeout: float | None = None) -> TaskResult | None:
        """How a task ended; None while it has not, for an unknown id, and when `timeout` seconds have passed."""
        return await self.queue.get_result(task_id, wait=wait, timeout=timeout)

    async def get_task(self, task_id: str) -> Task | None:
        """A task as it stands, or None."""
        return await self.queue.get_task(task_id)

    async def find(
        self, filter: Filter | None = None, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[Task], str | None]:
        """Tasks that match, newest first, and the cursor of the next page."""
        return await self.queue.find(filter or Filter(), cursor, limit)

    async def counts(self) -> list[QueueCounts]:
        """What each queue holds."""
        return await self.queue.counts()

    async def groups(self, queue: str, *, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        """The groups of a queue by name, and the cursor of the next page."""
        return await self.storage.groups(queue, cursor, limit)

    async def workers(self) -> list[WorkerInfo]:
        """The workers that gave a sign of life within the last hour and have not said goodbye."""
        return await self.storage.workers()

    async def events(self, after: int = 0, limit: int = 1000, *, shard: str = "") -> list[Event]:
        """Events after sequence number `after`, oldest first; go on with the last `seq`. On Redis each queue is a shard."""
        return await self.queue.events(after, limit, shard)

    async def history(self, task_id: str) -> list[Event]:
        """Everything that happened to one task."""
        return await self.queue.history(task_id)

    # -- steering ----------------------------------------------------------------------------------

    async def cancel(self, task_id: str) -> bool:
        """Cancel a waiting task, or ask a running one to end; False if it has ended already or is unknown."""
        return await self.queue.cancel(task_id)

    async def requeue(self, task_id: str, *, reset_attempts: bool = False) -> None:
        """Run a FAILED task again."""
        await self.queue.requeue(task_id, reset_attempts=reset_attempts)

    async def remove(self, task_id: str) -> None:
        """Delete a task that is not running, with its result and its idempotency key."""
        await self.queue.remove(task_id)

    async def check(self, repair: bool = False) -> list[str]:
        """What is wrong with the store, one sentence each; with `repair`, what can be counted anew is set right."""
        return await self.storage.check(repair)

    async def pause(self, queue: str) -> None:
        """Stop handing out tasks of a queue; running ones go on."""
        await self.storage.pause(queue)
        log.debug("pause queue %s", queue, extra={"queue": queue})

    async def resume(self, queue: str) -> bool:
        """Undo `pause`; whether the queue was paused."""
        was_paused = await self.storage.resume(queue)
        log.debug("resume queue %s", queue, extra={"queue": queue})
        return was_paused

    async def is_paused(self, queue: str) -> bool:
        return await self.storage.is_paused(queue)

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        """How many tasks of a group may run at once."""
        await self.storage.set_group_limit(queue, group, limit)
        log.debug("limit of group %s: %d at once", group, limit, extra={"queue": queue})

    async def worker(
        self,
        concurrency: int = 1,
        poll_interval: float = 1.0,
        *,
        queues: Sequence[str] | None = None,
        allow: Iterable[str] | None = None,
        middleware: Sequence[Middleware] = (),
        grace: float | None = None,
        batch: int | None = None,
        lease: float | timedelta | None = None,
    ) -> AsyncWorkerPool:
        """A worker pool on this store, not yet started: `async with await oq.worker(concurrency=4): …`."""
        return AsyncWorkerPool(
            self.queue,
            concurrency=concurrency,
            poll_interval=poll_interval,
            queues=queues,
            allow=allow,
            middleware=middleware,
            grace=grace,
            batch=batch,
            lease=lease,
        )


class AsyncEnqueuer:
    """`AsyncOmniQ.options(…)`: enqueues with these options, typed by the function's own parameters."""

    def __init__(self, oq: AsyncOmniQ, options: Options) -> None:
        self._oq, self._options = oq, options

    async def enqueue(self, func: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> str:
        tell_of_text(func)
        return await self._oq.enqueue_call(func, args, kwargs, self._options)

    async def enqueue_name(self, name: str, /, *args: Any, **kwargs: Any) -> str:
        """For a registered name or a path instead of a function."""
        return await self._oq.enqueue_call(name, args, kwargs, self._options)

    async def enqueue_many(self, func: Func, rows: Iterable[Row]) -> list[str]:
        return await self._oq.queue.enqueue_many(func, rows, self._options)

    async def enqueue_call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str:
        return await self._oq.enqueue_call(func, args, kwargs, options.over(self._options))


class AsyncTransaction:
    """Collects tasks and stores them when the block ends without an exception."""

    def __init__(self, queue: AsyncTaskQueue) -> None:
        self._queue = queue
        self._batch = queue.batch()

    async def __aenter__(self) -> Batch:
        return self._batch

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._batch.ids = await self._queue.store(self._batch)


class OmniQ:
    """The blocking twin of `AsyncOmniQ`: the same methods, for scripts, threads and code inside a running event loop."""

    def __init__(self, storage: BaseStorage, *, settings: Settings | None = None) -> None:
        self._async = AsyncOmniQ(storage, settings=settings)
        self._portal = Portal()
        self._closed = False
        self.settings, self.storage, self.queue = self._async.settings, storage, self._async.queue

    @classmethod
    def from_env(cls) -> Self:
        """As the `OMNIQ_…` environment variables say; SQLite in `omniq.db` without any."""
        settings = load_settings()
        _use_log_level(settings)
        return cls(_storage(settings), settings=settings)

    @classmethod
    def from_url(cls, url: str, *, settings: Settings | None = None) -> Self:
        settings = settings or Settings()
        return cls(_storage(settings, url), settings=settings)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise DriverClosed("this OmniQ was closed; make a new one")
        return self._portal.call(coroutine)

    def close(self) -> None:
        if not self._closed:
            self._call(self._async.close())
            self._closed = True
            self._portal.close()

    def __enter__(self) -> Self:
        self._call(self.storage.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def enqueue(
        self,
        func: Func,
        *args: Any,
        eta: datetime | timedelta | None = None,
        interval: timedelta | float | None = None,
        **kwargs: Any,
    ) -> str:
        """See `AsyncOmniQ.enqueue`."""
        tell_of_text(func)
        return self.enqueue_call(func, args, kwargs, with_schedule(NO_OPTIONS, eta, interval))

    def enqueue_call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str:
        """`enqueue` with everything spelled out."""
        if self._closed:
            raise DriverClosed("this OmniQ was closed; make a new one")
        return self.queue.enqueue_blocking(func, args, kwargs, options)  # no loop in between: one caller, one commit

    def enqueue_many(self, func: Func, rows: Iterable[Row]) -> list[str]:
        """See `AsyncOmniQ.enqueue_many`."""
        return self._call(self._async.enqueue_many(func, rows))

    def options(self, **options: Unpack[OptionFields]) -> Enqueuer:
        """See `AsyncOmniQ.options`."""
        return Enqueuer(self, make_options(options))

    def transaction(self) -> Transaction:
        """`with oq.transaction() as tx: tx.enqueue(f, …)`: all of it is stored at the end, or nothing."""
        return Transaction(self)

    def store(self, batch: Batch) -> list[str]:
        """Write a batch, all or nothing."""
        return self._call(self.queue.store(batch))

    def get_result(self, task_id: str, *, wait: bool = False, timeout: float | None = None) -> TaskResult | None:
        """See `AsyncOmniQ.get_result`."""
        return self._call(self._async.get_result(task_id, wait=wait, timeout=timeout))

    def get_task(self, task_id: str) -> Task | None:
        """A task as it stands, or None."""
        return self._call(self._async.get_task(task_id))

    def find(
        self, filter: Filter | None = None, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[Task], str | None]:
        """Tasks that match, newest first, and the cursor of the next page."""
        return self._call(self._async.find(filter, cursor=cursor, limit=limit))

    def counts(self) -> list[QueueCounts]:
        """What each queue holds."""
        return self._call(self._async.counts())

    def groups(self, queue: str, *, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        """See `AsyncOmniQ.groups`."""
        return self._call(self._async.groups(queue, cursor=cursor, limit=limit))

    def workers(self) -> list[WorkerInfo]:
        """See `AsyncOmniQ.workers`."""
        return self._call(self._async.workers())

    def events(self, after: int = 0, limit: int = 1000, *, shard: str = "") -> list[Event]:
        """See `AsyncOmniQ.events`."""
        return self._call(self._async.events(after, limit, shard=shard))

    def history(self, task_id: str) -> list[Event]:
        """Everything that happened to one task."""
        return self._call(self._async.history(task_id))

    def cancel(self, task_id: str) -> bool:
        """See `AsyncOmniQ.cancel`."""
        return self._call(self._async.cancel(task_id))

    def requeue(self, task_id: str, *, reset_attempts: bool = False) -> None:
        """Run a FAILED task again."""
        self._call(self._async.requeue(task_id, reset_attempts=reset_attempts))

    def remove(self, task_id: str) -> None:
        """See `AsyncOmniQ.remove`."""
        self._call(self._async.remove(task_id))

    def check(self, repair: bool = False) -> list[str]:
        """See `AsyncOmniQ.check`."""
        return self._call(self._async.check(repair))

    def pause(self, queue: str) -> None:
        """Stop handing out tasks of a queue; running ones go on."""
        self._call(self._async.pause(queue))

    def resume(self, queue: str) -> bool:
        """Undo `pause`; whether the queue was paused."""
        return self._call(self._async.resume(queue))

    def is_paused(self, queue: str) -> bool:
        return self._call(self._async.is_paused(queue))

    def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        """How many tasks of a group may run at once."""
        self._call(self._async.set_group_limit(queue, group, limit))

    def worker(
        self,
        concurrency: int = 1,
        poll_interval: float = 1.0,
        *,
        queues: Sequence[str] | None = None,
        allow: Iterable[str] | None = None,
        middleware: Sequence[Middleware] = (),
        grace: float | None = None,
        batch: int | None = None,
        lease: float | timedelta | None = None,
    ) -> WorkerPool:
        """A worker pool on this store, not yet started: `with oq.worker(concurrency=4): …`."""
        return WorkerPool(
            self.queue,
            concurrency=concurrency,
            poll_interval=poll_interval,
            queues=queues,
            allow=allow,
            middleware=middleware,
            grace=grace,
            batch=batch,
            lease=lease,
        )


class Enqueuer:
    """`OmniQ.options(…)`: enqueues with these options, typed by the function's own parameters."""

    def __init__(self, oq: OmniQ, options: Options) -> None:
        self._oq, self._options = oq, options

    def enqueue(self, func: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> str:
        tell_of_text(func)
        return self._oq.enqueue_call(func, args, kwargs, self._options)

    def enqueue_name(self, name: str, /, *args: Any, **kwargs: Any) -> str:
        """For a registered name or a path instead of a function."""
        return self._oq.enqueue_call(name, args, kwargs, self._options)

    def enqueue_many(self, func: Func, rows: Iterable[Row]) -> list[str]:
        return self._oq._call(self._oq.queue.enqueue_many(func, rows, self._options))  # pyright: ignore[reportPrivateUsage]

    def enqueue_call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str:
        return self._oq.enqueue_call(func, args, kwargs, options.over(self._options))


class Transaction:
    """Collects tasks and stores them when the block ends without an exception."""

    def __init__(self, oq: OmniQ) -> None:
        self._oq = oq
        self._batch = oq.queue.batch()

    def __enter__(self) -> Batch:
        return self._batch

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._batch.ids = self._oq.store(self._batch)
