"""`consume`: a worker of the contract, which knows a handler instead of functions.

A *turn* is one call of `storage.apply`: what ended, and the lease of as many jobs as there is room for. Heartbeats come from
a thread of their own, so a handler that blocks does not lose its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from typing import cast

from omniq.context import log_error, log_fields
from omniq.contract.handlers import Handlers
from omniq.contract.words import context_of, whole
from omniq.errors import DriverClosed, Invalid, OutcomeUnknown, Refused, StoreError, StoreFull, StoreUnavailable
from omniq.heartbeat import Heartbeat
from omniq.models import Record, TaskError, new_id, new_token
from omniq.operations import Ack, Beat, Fail, Operation, Reserve, Reserved, Retention, WorkerInfo
from omniq.policy import after_failure, next_run
from omniq.runner import release
from omniq.storage.base import BaseStorage, Result
from omniq.storage.sending import Sending, Unsendable
from omniq.upkeep import Upkeep

log = logging.getLogger("omniq.contract")

PROMOTE_S = 1.0
PAUSED_S = 0.5  # how soon to look again at a paused queue, if no wake-up comes
OVERDUE_S = 0.05  # how soon to look again for what somebody must take back first
MAX_BACK_OFF_S = 1.0  # while the store is away
LAST_TRIES = 6  # when the store is away while the consumer stops
LEAVE_S = 2.0  # how long an async handler may take to be cancelled


class _Run:
    """A job in hand."""

    __slots__ = ("context", "lost", "record", "started", "task")

    def __init__(self, record: Record) -> None:
        self.record, self.context = record, context_of(record)
        self.started = time.monotonic()
        self.lost = False
        self.task: asyncio.Task[None] | None = None


class Consumer:
    """Runs jobs of one queue until it is told to stop."""

    def __init__(
        self,
        storage: BaseStorage,
        queue: str,
        handlers: Handlers,
        *,
        concurrency: int,
        poll_interval: float,
        failed_ttl_ms: int | None,
    ) -> None:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"concurrency must be a whole number of at least 1, not {concurrency!r}")
        if not 0 < poll_interval < 86_400:
            raise Invalid(f"poll_interval must be more than 0 seconds, not {poll_interval!r}")
        failed_ttl = None if failed_ttl_ms is None else whole(failed_ttl_ms, "failed_ttl_ms", 1) * 1000
        self._retention = Retention(dead_us=failed_ttl, limits_us=None)  # other clients keep failed jobs and limits for ever
        self._storage, self._queue, self._handlers = storage, queue, handlers
        self._concurrency, self._poll_s = concurrency, poll_interval
        self._worker = f"{socket.gethostname()}:{os.getpid()}:{new_id()[-8:]}"
        self._runs: set[_Run] = set()
        self._outbox: list[tuple[Operation, ...]] = []
        self._unsent: Sending | None = None
        self._wake, self._ended = asyncio.Event(), asyncio.Event()
        self._stopping = self._abandoned = False
        self._dry = self._paused = self._known = self._telling = False
        self._seen = self._failures = 0
        self._next_at_us: int | None = None

    # -- life --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more jobs, and let `run` return when those in hand have ended."""
        if not self._stopping:
            log.info("stopping: %d jobs of %s may finish", len(self._runs), self._queue, extra={"queue": self._queue})
        self._stopping = True
        self._wake.set()

    def abandon(self) -> None:
        """Hand back what is in hand, and let `run` return."""
        if not self._abandoned:
            log.warning("leaving: %d jobs of %s are handed back", len(self._runs), self._queue, extra={"queue": self._queue})
        self._stopping = self._abandoned = True
        for run in self._runs:
            run.context.lost.set()
            if run.task is not None:
                run.task.cancel()
        if self._runs:
            self._loop.call_later(LEAVE_S, self._leave_behind)
        self._wake.set()

    def _leave_behind(self) -> None:
        for run in list(self._runs):
            log.warning("job %s is handed back while its handler runs on", run.record.id, extra=log_fields(run.record))
            self._end(run, release(run.record))

    async def run(self) -> None:
        self._loop, self._cancelled_before = asyncio.get_running_loop(), _cancelling()
        if not await self._held_in_store():
            return
        self._started_us = self._storage.clock()
        upkeep = Upkeep(self._storage, self._retention, self._worker)
        helpers = [self._loop.create_task(upkeep.run()), self._loop.create_task(self._promote())]
        self._heartbeat = Heartbeat(self._storage, self._held, self._info, _ignore, self._lost_in_thread)
        self._heartbeat.start()
        about = {"queue": self._queue, "worker": self._worker}
        log.info("consumer %s runs up to %d jobs of %s at once", self._worker, self._concurrency, self._queue, extra=about)
        try:
            try:
                await self._turns()
            except asyncio.CancelledError:
                self.abandon()
                await self._turns()
                raise
        finally:
            for run in self._runs:  # only if the storage was closed under them
                run.context.lost.set()
                cast("asyncio.Task[None]", run.task).cancel()
            upkeep.end.set()
            self._ended.set()
            await asyncio.gather(*helpers, return_exceptions=True)
            await asyncio.to_thread(self._heartbeat.stop)
            with contextlib.suppress(StoreError):
                await self._storage.apply([(Beat(info=self._info(), gone=True),)])
            await self._storage.release_worker(self._worker)
            log.info("consumer %s stopped", self._worker, extra=about)

    async def _held_in_store(self) -> bool:
        """Wait for a store that cannot be reached yet; False if the consumer was told to stop before it could be."""
        while not self._stopping:
            try:
                await self._storage.hold_worker(self._worker)
                return True
            except (StoreUnavailable, StoreFull, OutcomeUnknown) as exc:
                if self._storage.capabilities.local:  # what keeps it from being opened does not go by itself
                    raise
                self._failures += 1
                log.error("the store failed, it will be tried again: %s", exc, extra={"queue": self._queue})
            await self._pause_after_failure()
        return False

    async def _pause_after_failure(self) -> None:
        pause = min(0.05 * 2 ** min(self._failures, 8), MAX_BACK_OFF_S)
        await _first(self._wake, pause * random.uniform(0.5, 1))  # noqa: S311

    async def _promote(self) -> None:
        """On stores with lanes; others find due jobs by their time."""
        while not self._storage.capabilities.due_order and not self._ended.is_set():
            try:
                moved = await self._storage.promote(self._queue)
                if moved:
                    log.debug("promoted %d delayed jobs of %s", moved, self._queue, extra={"queue": self._queue})
            except StoreError as exc:
                log.warning("delayed jobs could not be promoted, it will be tried again: %s", exc, extra={"queue": self._queue})
            await _first(self._ended, PROMOTE_S * random.uniform(0.8, 1.2))  # noqa: S311

    # -- turns -------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        while True:
            self._wake.clear()
            sent = await self._turn()
            if not self._abandoned and _cancelling() > self._cancelled_before:
                raise asyncio.CancelledError  # a client library below may have swallowed it
            if self._stopping and not self._runs and not self._outbox and self._unsent is None:
                return
            if not sent:
                if self._stopping and self._failures >= LAST_TRIES:
                    log.error("leaving without the store; what was not stored comes back by its lease")
                    return
                await self._pause_after_failure()
            elif not self._outbox:
                await self._rest()

    async def _turn(self) -> bool:
        """Whether the store answered."""
        if self._unsent is None:
            transactions, self._outbox = self._outbox, []
            room = self._concurrency - len(self._runs)
            if room > 0 and not self._stopping:
                self._seen = self._storage.changes  # before the look, so that nothing after it is missed
                reserve = Reserve(queues=(self._queue,), limit=room, token=new_token(), worker=self._worker)
                transactions.append((reserve,))
            if not self._known:
                transactions.append((Beat(info=self._info()),))
            if not transactions:
                return True
            self._unsent = Sending(transactions)
        sending = self._unsent
        try:
            answers = await sending.send(self._storage)
        except StoreError as exc:
            if isinstance(exc, DriverClosed):
                raise
            self._failures += 1
            log.error("the store failed, it will be tried again: %s", exc, extra={"queue": self._queue})
            return False
        self._unsent, self._known = None, True
        served = True
        for transaction, answer in zip(sending.transactions, answers, strict=True):
            self._take_answer(transaction[0], answer)
            served = served and not (isinstance(transaction[0], Reserve) and isinstance(answer, Refused))
        self._failures = 0 if served else self._failures + 1
        return served

    def _take_answer(self, op: Operation, answer: Result) -> None:
        if isinstance(answer, Unsendable) and (instead := answer.instead(op)):
            self._outbox.append((instead,))
        elif isinstance(answer, Refused):  # somebody else has the job by now, and will do it again
            job_id = getattr(op, "id", "")
            log.warning("%s of job %s was refused: %s", type(op).__name__, job_id, answer, extra={"task_id": job_id})
        elif isinstance(op, Reserve):
            self._take(op, cast(Reserved, answer[0]))

    def _take(self, op: Reserve, reserved: Reserved) -> None:
        self._dry = len(reserved.tasks) < op.limit
        self._paused, self._next_at_us = bool(reserved.paused), reserved.next_at_us
        if self._stopping:
            self._outbox += [(release(task),) for task in reserved.tasks]
            return
        self._telling = log.isEnabledFor(logging.DEBUG)
        for task in reserved.tasks:
            run = _Run(task)
            self._runs.add(run)
            run.task = self._loop.create_task(self._run(run))
        if reserved.tasks:
            self._heartbeat.take(reserved.tasks)

    async def _rest(self) -> None:
        """Until a job has ended, the store rang, or a time has come."""
        if self._stopping or len(self._runs) >= self._concurrency:
            await self._wake.wait()
            return
        if not self._dry:
            return
        bell = self._loop.create_task(self._storage.wait([self._queue], timeout=self._pause_s(), after=self._seen))
        waiting = self._loop.create_task(self._wake.wait())
        try:
            await asyncio.wait((bell, waiting), return_when=asyncio.FIRST_COMPLETED)
            if bell.done() and isinstance(bell.exception(), StoreError):
                await _first(self._wake, OVERDUE_S)
        finally:
            for task in (bell, waiting):
                task.cancel()
            await asyncio.gather(bell, waiting, return_exceptions=True)

    def _pause_s(self) -> float:
        if self._paused:
            return max(self._poll_s, PAUSED_S)
        if self._next_at_us is None:
            return self._poll_s
        left = (self._next_at_us - self._storage.clock()) / 1e6
        return min(self._poll_s, left if left > 0 else OVERDUE_S)

    # -- jobs --------------------------------------------------------------------------------------

    async def _run(self, run: _Run) -> None:
        record = run.record
        if self._telling:
            log.debug("job %s starts, attempt %d", record.id, record.attempts, extra=log_fields(record))
        try:
            await self._handlers.run(run.context)
        except asyncio.CancelledError as exc:
            ended: Operation = release(record) if self._abandoned else self._failed(run, exc)
        except BaseException as exc:
            if not self._is_running():  # Python closes what is left of a loop that is gone
                raise
            ended = self._failed(run, exc)
        else:
            again = next_run(record, self._storage.clock()) if record.interval_us else None
            token = cast(str, record.token)
            ran_us = _ran_us(run)
            ended = Ack(queue=record.queue, id=record.id, token=token, late=True, ran_us=ran_us, again_us=again, listed=True)
            if self._telling:
                log.debug("job %s succeeded after %.3f s", record.id, ran_us / 1e6, extra=log_fields(record))
        self._end(run, ended)

    def _is_running(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _end(self, run: _Run, ended: Operation) -> None:
        if run in self._runs:
            self._runs.remove(run)
            if not run.lost:
                self._outbox.append((ended,))
        self._wake.set()

    def _failed(self, run: _Run, exc: BaseException) -> Operation:
        error = TaskError.of(exc)
        op = after_failure(run.record, error, self._storage.clock(), random.random(), ran_us=_ran_us(run))  # noqa: S311
        if not run.lost:
            what = "failed for good" if isinstance(op, Fail) else "failed, it will be retried"
            log.warning("job %s %s: %s", run.record.id, what, error, extra=log_fields(run.record), exc_info=log_error(exc))
        return op

    # -- what the heartbeat needs and hears --------------------------------------------------------

    def _held(self) -> list[Record]:
        return [run.record for run in list(self._runs) if not run.lost]

    def _info(self) -> WorkerInfo:
        return WorkerInfo(
            worker=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=(self._queue,),
            running=len(self._runs),
            busy={self._queue: len(self._runs)} if self._runs else {},
            concurrency=self._concurrency,
            started_at_us=self._started_us,
        )

    def _lost_in_thread(self, record: Record) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._lose, record)

    def _lose(self, record: Record) -> None:
        for run in self._runs:
            if run.record is record and not run.lost:
                run.lost = True
                run.context.lost.set()
                log.warning("the lease of job %s was lost; its end will not be stored", record.id, extra=log_fields(record))
                if self._handlers.interruptible and run.task is not None:
                    run.task.cancel()


async def _first(event: asyncio.Event, timeout: float) -> None:
    """Until the event is set or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()


def _cancelling() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _ran_us(run: _Run) -> int:
    return int((time.monotonic() - run.started) * 1e6)


def _ignore(record: Record) -> None:
    """A cancel that was asked for takes effect when the job ends: a failed run is then not retried."""
