"""Workers: lease tasks in batches, run them, end them in batches, and lose nothing.

A *turn* is one call of `storage.apply`: what finished, what is handed back, and the lease of the next tasks. While a turn is
under way tasks go on running and what they leave gathers for the next one, so turns grow with the load and stay small
without it. Heartbeats come from a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, cast

from omniq.config import Settings
from omniq.context import log_fields
from omniq.errors import (
    DriverClosed,
    Invalid,
    NotActive,
    OutcomeUnknown,
    Refused,
    StoreError,
    StoreFull,
    TokenMismatch,
)
from omniq.heartbeat import Heartbeat
from omniq.middleware import Middleware
from omniq.models import Record, State, check_queue, duration_us, new_id, new_token
from omniq.operations import Ack, Beat, Enqueue, Extended, Filter, Operation, Progress, Reserve, Reserved, WorkerInfo
from omniq.queue import AsyncTaskQueue
from omniq.runner import Holding, Runner, holding, release
from omniq.storage.base import BaseStorage, Result
from omniq.tasks import Resolver
from omniq.upkeep import Upkeep

log = logging.getLogger("omniq.worker")

SHORT_TASK_S = 0.005  # only tasks shorter than this are leased ahead
AHEAD_S = 0.010  # and only as many as run in this time
MAX_AHEAD = 500
HAND_BACK_S = 0.050  # leased but not started for so long: somebody else may have a free slot
OVERDUE_S = 0.050  # how soon to look again for what is overdue, such as a lease that somebody must take back first
LAST_TRIES = 4  # when the store is away while the pool stops


class AsyncWorkerPool:
    """Runs tasks of a store, `concurrency` at a time. Async functions on this loop, others in threads.

    `queues` names the queues to serve, in order of preference; None serves all that tasks are enqueued to, in turn. `allow`
    names modules whose functions may run beside registered tasks; None means any on local stores and none on network stores.
    `poll_interval` is the fallback where no wake-up arrives. `batch` is how many tasks are leased at once at most, `lease` how
    long a lease lasts instead of what each task says. May be started again after `stop()`.
    """

    def __init__(
        self,
        queue: AsyncTaskQueue | BaseStorage,
        *,
        concurrency: int = 1,
        poll_interval: float = 1.0,
        queues: Sequence[str] | None = None,
        allow: Iterable[str] | None = None,
        middleware: Sequence[Middleware] = (),
        grace: float | None = None,
        batch: int | None = None,
        lease: float | timedelta | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._queue = queue if isinstance(queue, AsyncTaskQueue) else AsyncTaskQueue(queue, settings)
        _must_count("concurrency", concurrency)
        if batch is not None:
            _must_count("batch", batch)
        if not 0 < poll_interval < 86_400:
            raise Invalid(f"poll_interval must be more than 0 seconds, not {poll_interval!r}")
        self.grace = self._queue.settings.grace if grace is None else grace
        if not self.grace >= 0:
            raise Invalid(f"grace cannot be negative: {grace!r}")
        if isinstance(queues, str) or queues == []:
            raise Invalid(f"queues is a list of queue names, not {queues!r}")
        for name in queues or ():
            check_queue(name)
        self.storage = self._queue.storage
        self.concurrency, self.poll_interval = concurrency, poll_interval
        self._batch = batch
        self._lease_us = None if lease is None else duration_us(lease, "lease")
        self.worker_id = ""
        self._named_queues = None if queues is None else tuple(queues)
        self._queues: tuple[str, ...] = self._named_queues or ()
        self._rotation = 0
        if allow is None and not self.storage.capabilities.local:
            allow = ()
        self._resolver = Resolver(allow)
        self._middleware = tuple(middleware)
        self._tasks: list[asyncio.Task[None]] = []
        self._reset()

    def _reset(self) -> None:
        self._buffer: deque[Record] = deque()
        self._buffered_at = 0.0
        self._held: dict[Holding, Record] = {}
        self._outbox: list[tuple[Operation, ...]] = []
        self._unsent: tuple[list[tuple[Operation, ...]], bool] | None = None
        self._idle_slots: deque[asyncio.Future[None]] = deque()
        self._average_s = 1.0
        self._dry = False
        self._list_is_new, self._list_is_old = False, True
        self._seen = 0
        self._next_at_us: int | None = None
        self._paused = False
        self._stopping = self._leaving = False
        self._failures = 0
        self._runner = Runner(self._queue, self._resolver, self._middleware, self._send)

    # -- life --------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return bool(self._tasks)

    @property
    def done(self) -> int:
        """How many runs succeeded since `start()`."""
        return self._runner.done

    @property
    def failed(self) -> int:
        """How many tasks failed for good."""
        return self._runner.failed

    @property
    def retried(self) -> int:
        """How many runs failed and will be retried."""
        return self._runner.retried

    @property
    def running(self) -> int:
        """How many tasks run now."""
        return len(self._runner.running)

    async def start(self) -> None:
        """Return when the pool takes work."""
        if self._tasks:
            raise Invalid("this worker pool runs already")
        self._reset()
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}:{new_id()[-8:]}"
        await self.storage.hold_worker(self.worker_id)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._started_us = self.storage.clock()
        self._runner.start(self.worker_id)
        self._first_turn: asyncio.Future[None] = self._loop.create_future()
        self._upkeep = Upkeep(self.storage, self._queue.settings.retention, self.worker_id)
        self._tasks = [self._spawn(self._turns()), self._spawn(self._upkeep.run())]
        self._slots = [self._spawn(self._slot()) for _ in range(self.concurrency)]
        on_cancel = functools.partial(self._from_thread, self._runner.cancel)
        on_lost = functools.partial(self._from_thread, self._lose)
        self._heartbeat = Heartbeat(self.storage, self._held_now, self._info, on_cancel, on_lost, self._lease_us)
        self._heartbeat.start()
        try:
            await asyncio.shield(self._first_turn)
        except StoreError:
            await self.stop(0)
            raise

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._loop.create_task(coroutine)

    async def stop(self, grace: float | None = None) -> None:
        """Stop taking, give back what has not started, let running tasks finish for `grace` seconds, then hand the rest back.

        Returns when nothing of the pool runs. A task that is handed back has not spent an attempt.
        """
        if not self._tasks:
            return
        self._take_no_more()
        await self._until_empty(self.grace if grace is None else grace)
        for run in list(self._runner.running.values()):
            log.warning("handing back %s: still running after the grace time", run.record.name, extra=log_fields(run.record))
            run.interrupt("release")
        await self._until_empty(5.0)
        self._leaving = self._runner.leaving = True
        self._upkeep.end.set()
        self._wake.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.to_thread(self._heartbeat.stop)
        with contextlib.suppress(StoreError):
            await self.storage.apply([(Beat(info=self._info(), gone=True),)])
        await self.storage.release_worker(self.worker_id)
        self._runner.close()
        self._tasks = []

    async def finish(self) -> None:
        """Take no more tasks, give back what has not started, and return when what runs has ended; `stop()` does the rest."""
        if self._tasks:
            self._take_no_more()
            await self._until_empty(None)

    def _take_no_more(self) -> None:
        self._stopping = True
        self._give_back_buffer()
        self._wake.set()

    async def _until_empty(self, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self._runner.running:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            pass

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.stop()

    async def drain(self) -> None:
        """Return when nothing is ready, running or waiting for a retry in the queues served; later `eta`s stay."""
        while True:
            seen = self.storage.changes
            served = set(self._named_queues or await self.storage.queues(fed=True))
            counts = [c for c in await self.storage.counts() if c.queue in served and not c.paused]
            if not any(c.ready + c.running for c in counts) and not self._held and not self._outbox:
                retrying = [Filter(states=(State.SCHEDULED,), min_attempts=1, queue=q) for q in served]
                waiting = any([(await self.storage.find(f, limit=1)).tasks for f in retrying])
                if not waiting and self.storage.changes == seen:  # else something moved between the two looks
                    return
            await self.storage.wait(timeout=0.2, after=seen)

    # -- turns -------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._turn()
            except DriverClosed as exc:
                self._end_without_store(exc)
                return
            if self._leaving and not self._outbox and self._unsent is None:
                return
            if self._leaving and self._failures >= LAST_TRIES:
                log.error(
                    "leaving without the store; what was not stored comes back by its lease", extra={"worker": self.worker_id}
                )
                return
            if not self._outbox and (self._stopping or self._dry or not self._wanted()):
                await self._sleep()

    def _end_without_store(self, exc: DriverClosed) -> None:
        """The storage object was closed under the pool: nothing can be taken or stored any more."""
        self._stopping = True
        if self._first_turn.done():
            log.error("the worker stops: %s", exc, extra={"worker": self.worker_id})
        else:
            self._first_turn.set_exception(exc)

    async def _turn(self) -> None:
        if self._unsent is None:
            try:
                reserve = await self._next_reserve()
            except StoreError as exc:
                if isinstance(exc, DriverClosed):
                    raise
                await self._back_off(exc)
                return
            transactions, self._outbox = self._outbox, []
            if reserve is not None:
                transactions.append((reserve,))
            if not self._first_turn.done():
                transactions.append((Beat(info=self._info()),))
            if not transactions:
                return
            self._unsent = transactions, False
        transactions, repeat = self._unsent
        try:
            answers = await self.storage.apply(transactions, repeat=repeat)
        except StoreError as exc:
            if isinstance(exc, DriverClosed):
                raise
            full = exc if isinstance(exc, StoreFull) else exc.__cause__  # a cluster may have one node that is
            if isinstance(full, StoreFull):
                transactions = [self._without_new_tasks(transaction, full) for transaction in transactions]
            self._unsent = transactions, repeat or isinstance(exc, OutcomeUnknown)
            await self._back_off(exc)
            return
        except Exception as exc:  # not the store's fault: nothing of this call can be sent; its tasks come back by their lease
            self._unsent = None
            log.exception("a turn could not be sent", extra={"worker": self.worker_id})
            await self._back_off(exc)
            return
        self._unsent, self._failures = None, 0
        if not self._first_turn.done():
            self._first_turn.set_result(None)
        self._take_answers(transactions, answers)

    def _without_new_tasks(self, transaction: tuple[Operation, ...], exc: StoreFull) -> tuple[Operation, ...]:
        """A full store takes no new tasks. A run whose end brings some has failed, so that all others can end."""
        op = transaction[0]
        if isinstance(op, Ack) and any(isinstance(more, Enqueue) for more in transaction):
            return self._runner.joint_refused(op, exc) or transaction
        return transaction

    async def _next_reserve(self) -> Reserve | None:
        wanted = self._wanted()
        if not wanted or self._stopping or (self._dry and not self._outbox):
            return None
        self._seen = self.storage.changes  # before the look, so that nothing after it is missed
        queues = await self._served()
        if not queues:
            self._dry = True
            return None
        limit = wanted if self._batch is None else min(wanted, self._batch)
        return Reserve(queues=queues, limit=limit, token=new_token(), lease_us=self._lease_us, worker=self.worker_id)

    def _take_answers(self, transactions: list[tuple[Operation, ...]], answers: list[Result]) -> None:
        for transaction, answer in zip(transactions, answers, strict=True):
            op = transaction[0]
            if len(transaction) > 1 and isinstance(op, Ack) and not isinstance(answer, Refused):
                self._runner.joint_ended(op)
            if isinstance(op, Reserve):
                if not isinstance(answer, Refused):
                    self._take(op, cast(Reserved, answer[0]))
            elif isinstance(answer, Refused):
                self._refused(op, answer)
            elif isinstance(op, Progress) and cast(Extended, answer[0]).cancel_requested:
                self._runner.cancel(op)

    def _take(self, op: Reserve, reserved: Reserved) -> None:
        tasks = reserved.tasks
        self._dry = len(tasks) < op.limit
        if self._dry and self._named_queues is None:
            self._list_is_old = True  # there may be queues that were not looked at
            self._dry = self._list_is_new
        self._next_at_us, self._paused = reserved.next_at_us, bool(reserved.paused)
        if self._stopping:
            self._send(*((release(task),) for task in tasks))
            return
        if not tasks:
            return
        if not self._buffer:
            self._buffered_at = time.monotonic()
        self._held.update((holding(task), task) for task in tasks)
        self._buffer.extend(tasks)
        self._heartbeat.take(tasks)
        for _ in range(min(len(tasks), len(self._idle_slots))):
            waiter = self._idle_slots.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _refused(self, op: Operation, refusal: Refused) -> None:
        """Somebody else has the task by now; the work was done, and another will do it again."""
        task_id = getattr(op, "id", "")
        lost = isinstance(refusal, NotActive | TokenMismatch)
        if isinstance(op, Ack) and lost:
            self._runner.joint_ended(op)
        elif isinstance(op, Ack) and (again := self._runner.joint_refused(op, refusal)):
            self._send(again)
            return
        log.warning("%s of task %s was refused: %s", type(op).__name__, task_id, refusal, extra={"task_id": task_id})

    def _wanted(self) -> int:
        """How many more tasks to hold. More than the slots only while tasks are short: nobody hoards."""
        ahead = 0
        if self._average_s < SHORT_TASK_S:
            oldest = next(iter(self._runner.running.values()), None)
            if oldest is None or time.monotonic() - oldest.started < SHORT_TASK_S:
                ahead = min(int(self.concurrency * AHEAD_S / max(self._average_s, 1e-6)), MAX_AHEAD)
        return max(self.concurrency + ahead - len(self._held), 0)

    async def _served(self) -> tuple[str, ...]:
        """The queues to look at, a different one first each time. The list is read anew before the pool goes to sleep."""
        if self._named_queues is not None:
            return self._named_queues
        self._list_is_new = not self._queues or self._list_is_old
        if self._list_is_new:
            self._queues, self._list_is_old = tuple(await self.storage.queues(fed=True)), False
        if len(self._queues) < 2:
            return self._queues
        self._rotation += 1
        first = self._rotation % len(self._queues)
        return self._queues[first:] + self._queues[:first]

    async def _sleep(self) -> None:
        """Until something finished, the store rang, a time has come, or leased tasks must be handed back."""
        timeout = self.poll_interval
        if self._next_at_us is not None:
            left = (self._next_at_us - self.storage.clock()) / 1e6
            if left > 0 or not self._paused:  # what is overdue in a paused queue stays so
                timeout = min(timeout, max(left, 0.001) if left > 0 else OVERDUE_S)
        if self._buffer:
            timeout = min(timeout, HAND_BACK_S)
        if not self._dry or self._stopping or not self._wanted():  # nothing the store could say matters now
            await self._woken(timeout)
        else:
            bell = self._loop.create_task(self.storage.wait(self._named_queues or (), timeout=timeout, after=self._seen))
            waiting = self._loop.create_task(self._wake.wait())
            try:
                await asyncio.wait((bell, waiting), return_when=asyncio.FIRST_COMPLETED)
                self._dry = self._dry and not bell.done()
                if bell.done() and bell.exception() is not None:
                    await self._back_off(cast(BaseException, bell.exception()))
            finally:
                for task in (bell, waiting):
                    task.cancel()
                await asyncio.gather(bell, waiting, return_exceptions=True)
        if self._buffer and time.monotonic() - self._buffered_at > HAND_BACK_S:
            self._average_s = 1.0
            self._give_back_buffer()

    async def _woken(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            self._dry = False

    def _give_back_buffer(self) -> None:
        while self._buffer:
            task = self._buffer.popleft()
            self._held.pop(holding(task), None)
            self._send((release(task),))

    async def _back_off(self, exc: BaseException) -> None:
        self._failures += 1
        pause = min(0.05 * 2 ** min(self._failures, 8), 5.0) * random.uniform(0.5, 1)  # noqa: S311
        log.error("the store failed (%s); trying again in %.1f s", exc, pause, extra={"worker": self.worker_id})
        await asyncio.sleep(pause)

    # -- slots -------------------------------------------------------------------------------------

    async def _slot(self) -> None:
        while True:
            while not self._buffer:
                waiter: asyncio.Future[None] = self._loop.create_future()
                self._idle_slots.append(waiter)
                await waiter
            record = self._buffer.popleft()
            self._buffered_at = time.monotonic()
            try:
                await self._run(record)
            except Exception:  # the task comes back when its lease runs out; the slot must live
                log.exception("task %s could not be ended", record.name, extra=log_fields(record))

    async def _run(self, record: Record) -> None:
        try:
            ended, took = await self._runner.run(record)
        finally:
            self._held.pop(holding(record), None)
        self._average_s += (took - self._average_s) * (0.5 if took < self._average_s else 0.1)
        self._send(*ended)
        if not self._runner.running:
            self._empty.set()

    def _send(self, *transactions: tuple[Operation, ...]) -> None:
        self._outbox += transactions
        self._wake.set()

    # -- what the heartbeat needs and hears -------------------------------------------------------

    def _lose(self, record: Record) -> None:
        if not self._runner.lose(record) and record in self._buffer:
            self._buffer.remove(record)
            self._held.pop(holding(record), None)

    def _info(self) -> WorkerInfo:
        return WorkerInfo(
            worker=self.worker_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._queues,
            running=len(self._runner.running),
            concurrency=self.concurrency,
            started_at_us=self._started_us,
        )

    def _held_now(self) -> list[Record]:
        return list(self._held.values())

    def _from_thread(self, call: Callable[[Record], None], record: Record) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(call, record)


def _must_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Invalid(f"{name} must be a whole number of at least 1, not {value!r}")


class WorkerPool:
    """The blocking twin of `AsyncWorkerPool`: runs it in a thread with a loop of its own."""

    def __init__(self, queue: AsyncTaskQueue | BaseStorage, **options: Any) -> None:
        self._pool = AsyncWorkerPool(queue, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def pool(self) -> AsyncWorkerPool:
        return self._pool

    def start(self) -> None:
        """Return when the pool takes work."""
        if self._thread is not None:
            raise Invalid("this worker pool runs already")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omniq-worker", daemon=True)
        self._thread.start()
        try:
            self._call(self._pool.start())
        except BaseException:
            self._end_loop()
            raise

    def stop(self, grace: float | None = None) -> None:
        """Return when nothing of the pool runs; see `AsyncWorkerPool.stop`."""
        if self._thread is None:
            return
        try:
            self._call(self._pool.stop(grace))
        finally:
            self._end_loop()

    def drain(self) -> None:
        """Return when nothing is ready, running or waiting for a retry."""
        self._call(self._pool.drain())

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            coroutine.close()
            raise Invalid("this worker pool does not run; start() it first")
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
