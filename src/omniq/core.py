"""`AsyncOmniQ` and its blocking twin `OmniQ`: the library's front door."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, ParamSpec, Self, Unpack

from omniq.blocking import Blocking
from omniq.config import Settings, load_settings
from omniq.models import Event, Task, TaskResult
from omniq.operations import Filter, GroupInfo, QueueCounts, WorkerInfo
from omniq.queue import AsyncTaskQueue, Batch, Row, tell_of_text, with_schedule
from omniq.storage.base import BaseStorage, must_be_storage
from omniq.tasks import NO_OPTIONS, OptionFields, Options, TaskFunction, make_options
from omniq.worker import AsyncWorkerPool, WorkerOptions, WorkerPool

log = logging.getLogger("omniq.queue")

P = ParamSpec("P")
Func = Callable[..., Any] | str | TaskFunction[..., Any]


class _OnStore:
    """The constructors that both classes share."""

    def __init__(self, storage: BaseStorage, *, settings: Settings | None = None) -> None:
        must_be_storage(storage)
        self.storage, self.settings = storage, settings or Settings()
        self.queue = AsyncTaskQueue(storage, self.settings)

    @classmethod
    def from_env(cls) -> Self:
        """Open the store that the `OMNIQ_…` environment variables name, or SQLite in `omniq.db` if none is set."""
        settings = load_settings()
        # Else the level is what the program around this library has chosen.
        if settings.log_level is not None:
            logging.getLogger("omniq").setLevel(settings.log_level)
        return cls.from_url(settings.url, settings=settings)

    @classmethod
    def from_url(cls, url: str, *, settings: Settings | None = None) -> Self:
        """Open the store that a URL names: `sqlite:///path.db`, `file:///folder`, `redis://…`, `memory://`."""
        settings = settings or Settings()
        return cls(BaseStorage.from_url(url, events=settings.events), settings=settings)


class AsyncOmniQ(_OnStore):
    """A task queue on a store. Opens itself at its first call. Close it, or use it as `async with`."""

    async def close(self) -> None:
        """Let go of everything. Twice is harmless."""
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
        """Store a call of `func` (a function, a registered task, or `"module:callable"`). Returns the task's id.

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

    def transaction(self) -> AsyncTransactionBlock:
        """`async with oq.transaction() as tx: tx.enqueue(f, …)`: all of it is stored at the end, or nothing."""
        return AsyncTransactionBlock(self.queue)

    # -- out ---------------------------------------------------------------------------------------

    async def get_result(self, task_id: str, *, wait: bool = False, timeout: float | None = None) -> TaskResult | None:
        """Returns how a task ended. None if it has not ended, also after `timeout` seconds, and for an unknown id."""
        return await self.queue.get_result(task_id, wait=wait, timeout=timeout)

    async def get_task(self, task_id: str) -> Task | None:
        """Returns a task as it is now, or None for an unknown id."""
        return await self.queue.get_task(task_id)

    async def find(
        self, filter: Filter | None = None, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[Task], str | None]:
        """Returns the tasks that match, newest first, and the cursor of the next page."""
        return await self.queue.find(filter or Filter(), cursor, limit)

    async def counts(self) -> list[QueueCounts]:
        """Returns for each queue how many tasks it holds in each state."""
        return await self.queue.counts()

    async def groups(self, queue: str, *, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        """Returns the groups of a queue by name, and the cursor of the next page."""
        return await self.storage.groups(queue, cursor, limit)

    async def workers(self) -> list[WorkerInfo]:
        """Returns the workers that gave a sign of life within the last hour and have not said goodbye."""
        return await self.storage.workers()

    async def events(self, after: int = 0, limit: int = 1000, *, shard: str = "") -> list[Event]:
        """Returns events after number `after`, oldest first. Go on with the last `seq`. On Redis each queue is a shard."""
        return await self.queue.events(after, limit, shard)

    async def history(self, task_id: str) -> list[Event]:
        """Returns everything that happened to one task, oldest first."""
        return await self.queue.history(task_id)

    # -- steering ----------------------------------------------------------------------------------

    async def cancel(self, task_id: str) -> bool:
        """Cancel a waiting task, or ask a running one to end. Returns False if it has ended already or is unknown."""
        return await self.queue.cancel(task_id)

    async def requeue(self, task_id: str, *, reset_attempts: bool = False) -> None:
        """Run a FAILED task again."""
        await self.queue.requeue(task_id, reset_attempts=reset_attempts)

    async def remove(self, task_id: str) -> None:
        """Delete a task that is not running, with its result and its idempotency key."""
        await self.queue.remove(task_id)

    async def check(self, repair: bool = False) -> list[str]:
        """Returns a sentence for each fault of the store. With `repair`, faults that counting anew can mend are mended."""
        return await self.storage.check(repair)

    async def pause(self, queue: str) -> None:
        """Stop handing out tasks of a queue. Running tasks go on."""
        await self.storage.pause(queue)
        log.debug("paused queue %s", queue, extra={"queue": queue})

    async def resume(self, queue: str) -> bool:
        """Undo `pause`. Returns whether the queue was paused."""
        was_paused = await self.storage.resume(queue)
        log.debug("resumed queue %s", queue, extra={"queue": queue})
        return was_paused

    async def is_paused(self, queue: str) -> bool:
        """Whether `pause` holds for a queue."""
        return await self.storage.is_paused(queue)

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        """Set how many tasks of a group may run at once, from now on."""
        await self.storage.set_group_limit(queue, group, limit)
        log.debug("set the limit of group %s to %d", group, limit, extra={"queue": queue})

    async def worker(
        self, concurrency: int = 1, poll_interval: float = 1.0, **options: Unpack[WorkerOptions]
    ) -> AsyncWorkerPool:
        """A worker pool on this store, not yet started: `async with await oq.worker(concurrency=4): …`."""
        return AsyncWorkerPool(self.queue, concurrency=concurrency, poll_interval=poll_interval, **options)


class AsyncEnqueuer:
    """`AsyncOmniQ.options(…)`: enqueues with these options, typed by the function's own parameters."""

    def __init__(self, oq: AsyncOmniQ, options: Options) -> None:
        self._oq, self._options = oq, options

    async def enqueue(self, func: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Store a call of a function. Returns the task's id."""
        tell_of_text(func)
        return await self._oq.enqueue_call(func, args, kwargs, self._options)

    async def enqueue_name(self, name: str, /, *args: Any, **kwargs: Any) -> str:
        """Store a call of a task by its registered name or its path. Returns the task's id."""
        return await self._oq.enqueue_call(name, args, kwargs, self._options)

    async def enqueue_many(self, func: Func, rows: Iterable[Row]) -> list[str]:
        """Store a call per row: a tuple of positional or a dict of keyword arguments. One transaction per 1,000 rows."""
        return await self._oq.queue.enqueue_many(func, rows, self._options)

    async def enqueue_call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str:
        """`enqueue` with everything spelled out. The given options win over those of this object."""
        return await self._oq.enqueue_call(func, args, kwargs, options.over(self._options))


class AsyncTransactionBlock:
    """Collects tasks and stores them when the block ends without an exception."""

    def __init__(self, queue: AsyncTaskQueue) -> None:
        self._queue = queue
        self._batch = queue.batch()

    async def __aenter__(self) -> Batch:
        return self._batch

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._batch.ids = await self._queue.store(self._batch)


class OmniQ(_OnStore, Blocking):
    """The blocking twin of `AsyncOmniQ`: the same methods, for scripts, threads and code inside a running event loop."""

    def __init__(self, storage: BaseStorage, *, settings: Settings | None = None) -> None:
        _OnStore.__init__(self, storage, settings=settings)
        Blocking.__init__(self, storage)
        # Its calls end in the thread of the caller. `self.queue` is on the store itself, for calls that need a loop.
        self._async = AsyncOmniQ(self._in_thread, settings=self.settings)

    # -- in ----------------------------------------------------------------------------------------

    def enqueue(
        self,
        func: Func,
        *args: Any,
        eta: datetime | timedelta | None = None,
        interval: timedelta | float | None = None,
        **kwargs: Any,
    ) -> str:
        """Store a call of `func` (a function, a registered task, or `"module:callable"`). Returns the task's id.

        `eta` is when it may run at the earliest (an aware datetime, or a timedelta from now), `interval` how often it
        repeats. All other options are given by `options(…)`. Raises `TypeError` for arguments that do not fit the
        function and `SerializationError` for those that cannot be stored.
        """
        tell_of_text(func)
        return self.enqueue_call(func, args, kwargs, with_schedule(NO_OPTIONS, eta, interval))

    def enqueue_call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str:
        """`enqueue` with everything spelled out."""
        return self._call(self._async.queue.enqueue(func, args, kwargs, options))

    def enqueue_many(self, func: Func, rows: Iterable[Row]) -> list[str]:
        """Store a call per row: a tuple of positional or a dict of keyword arguments. One transaction per 1,000 rows."""
        return self.options().enqueue_many(func, rows)

    def options(self, **options: Unpack[OptionFields]) -> Enqueuer:
        """Options for the calls enqueued through the returned object: `oq.options(queue="mail").enqueue(f, …)`.

        eta interval schedule max_retries timeout lease queue group group_limit idempotency_key blocked_by dead_queue
        result_ttl backoff task_id headers
        """
        return Enqueuer(self, make_options(options))

    def transaction(self) -> TransactionBlock:
        """`with oq.transaction() as tx: tx.enqueue(f, …)`: all of it is stored at the end, or nothing."""
        return TransactionBlock(self._async.transaction(), self._call)

    # -- out ---------------------------------------------------------------------------------------

    def get_result(self, task_id: str, *, wait: bool = False, timeout: float | None = None) -> TaskResult | None:
        """Returns how a task ended. None if it has not ended, also after `timeout` seconds, and for an unknown id."""
        # It waits for changes of the store again and again, so all of it runs on the loop.
        return self._call_on_loop(self.queue.get_result(task_id, wait=wait, timeout=timeout))

    def get_task(self, task_id: str) -> Task | None:
        """Returns a task as it is now, or None for an unknown id."""
        return self._call(self._async.get_task(task_id))

    def find(
        self, filter: Filter | None = None, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[Task], str | None]:
        """Returns the tasks that match, newest first, and the cursor of the next page."""
        return self._call(self._async.find(filter, cursor=cursor, limit=limit))

    def counts(self) -> list[QueueCounts]:
        """Returns for each queue how many tasks it holds in each state."""
        return self._call(self._async.counts())

    def groups(self, queue: str, *, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        """Returns the groups of a queue by name, and the cursor of the next page."""
        return self._call(self._async.groups(queue, cursor=cursor, limit=limit))

    def workers(self) -> list[WorkerInfo]:
        """Returns the workers that gave a sign of life within the last hour and have not said goodbye."""
        return self._call(self._async.workers())

    def events(self, after: int = 0, limit: int = 1000, *, shard: str = "") -> list[Event]:
        """Returns events after number `after`, oldest first. Go on with the last `seq`. On Redis each queue is a shard."""
        return self._call(self._async.events(after, limit, shard=shard))

    def history(self, task_id: str) -> list[Event]:
        """Returns everything that happened to one task, oldest first."""
        return self._call(self._async.history(task_id))

    # -- steering ----------------------------------------------------------------------------------

    def cancel(self, task_id: str) -> bool:
        """Cancel a waiting task, or ask a running one to end. Returns False if it has ended already or is unknown."""
        return self._call(self._async.cancel(task_id))

    def requeue(self, task_id: str, *, reset_attempts: bool = False) -> None:
        """Run a FAILED task again."""
        self._call(self._async.requeue(task_id, reset_attempts=reset_attempts))

    def remove(self, task_id: str) -> None:
        """Delete a task that is not running, with its result and its idempotency key."""
        self._call(self._async.remove(task_id))

    def check(self, repair: bool = False) -> list[str]:
        """Returns a sentence for each fault of the store. With `repair`, faults that counting anew can mend are mended."""
        return self._call(self._async.check(repair))

    def pause(self, queue: str) -> None:
        """Stop handing out tasks of a queue. Running tasks go on."""
        self._call(self._async.pause(queue))

    def resume(self, queue: str) -> bool:
        """Undo `pause`. Returns whether the queue was paused."""
        return self._call(self._async.resume(queue))

    def is_paused(self, queue: str) -> bool:
        """Whether `pause` holds for a queue."""
        return self._call(self._async.is_paused(queue))

    def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        """Set how many tasks of a group may run at once, from now on."""
        self._call(self._async.set_group_limit(queue, group, limit))

    def worker(self, concurrency: int = 1, poll_interval: float = 1.0, **options: Unpack[WorkerOptions]) -> WorkerPool:
        """A worker pool on this store, not yet started: `with oq.worker(concurrency=4): …`."""
        return WorkerPool(self.queue, concurrency=concurrency, poll_interval=poll_interval, **options)


class Enqueuer:
    """`OmniQ.options(…)`: enqueues with these options, typed by the function's own parameters."""

    def __init__(self, oq: OmniQ, options: Options) -> None:
        self._oq, self._options = oq, options

    def enqueue(self, func: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Store a call of a function. Returns the task's id."""
        tell_of_text(func)
        return self._oq.enqueue_call(func, args, kwargs, self._options)

    def enqueue_name(self, name: str, /, *args: Any, **kwargs: Any) -> str:
        """Store a call of a task by its registered name or its path. Returns the task's id."""
        return self._oq.enqueue_call(name, args, kwargs, self._options)

    def enqueue_many(self, func: Func, rows: Iterable[Row]) -> list[str]:
        """Store a call per row: a tuple of positional or a dict of keyword arguments. One transaction per 1,000 rows."""
        # On the loop: the next thousand rows are made while the last thousand are stored.
        return self._oq._call_on_loop(self._oq.queue.enqueue_many(func, rows, self._options))  # pyright: ignore[reportPrivateUsage]

    def enqueue_call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str:
        """`enqueue` with everything spelled out. The given options win over those of this object."""
        return self._oq.enqueue_call(func, args, kwargs, options.over(self._options))


class TransactionBlock:
    """Collects tasks and stores them when the block ends without an exception."""

    def __init__(self, half: AsyncTransactionBlock, call: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._async, self._call = half, call

    def __enter__(self) -> Batch:
        return self._call(self._async.__aenter__())

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._call(self._async.__aexit__(kind, exc, tb))
