"""`consume`: a worker of the contract, which knows a handler instead of functions."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

from omniq.context import log_error, log_fields
from omniq.contract.handlers import Handlers
from omniq.contract.words import JobContext, context_of, whole
from omniq.errors import OutcomeUnknown, Refused, StoreError, StoreFull, StoreUnavailable
from omniq.models import Record, TaskError
from omniq.operations import Ack, Fail, Operation, Retention
from omniq.policy import after_failure, next_run
from omniq.racing import woken
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.sending import Unsendable
from omniq.turns import Run, Turns, cancellations, is_running, release

log = logging.getLogger("omniq.contract")

JobRun = Run[JobContext]

PROMOTE_S = 1.0
LEAVE_S = 2.0  # how long an async handler may take to be cancelled


class Consumer(Turns):
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
        failed_ttl = None if failed_ttl_ms is None else whole(failed_ttl_ms, "failed_ttl_ms", 1) * 1000
        super().__init__(
            storage,
            Retention(dead_us=failed_ttl, limits_us=None),  # other clients keep failed jobs and limits for ever
            concurrency=concurrency,
            poll_s=poll_interval,
            queues=(queue,),
            listen_to=(queue,),
            log=log,
        )
        self._queue, self._handlers = queue, handlers
        self._runs: set[JobRun] = set()
        self._ended = asyncio.Event()  # ends the promotion
        self._abandoned = False  # handlers that are cancelled from now on have not failed
        self._telling = False  # whether starts and ends are logged, asked once per lease

    # -- life --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more jobs, and let `run` return when running jobs have ended."""
        if not self.stopping:
            log.info("stopping: %d jobs of %s may finish", len(self._runs), self._queue, extra={"queue": self._queue})
        self.take_no_more()
        self._leave_when_idle()

    def abandon(self) -> None:
        """Hand back the running jobs, and let `run` return."""
        if not self._abandoned:
            log.warning("leaving: %d jobs of %s are handed back", len(self._runs), self._queue, extra={"queue": self._queue})
        self._abandoned = True
        self.take_no_more()
        self._interrupt()
        if self._runs:
            self._loop.call_later(LEAVE_S, self._leave_behind)
        self._leave_when_idle()

    def _interrupt(self) -> None:
        for run in self._runs:
            run.context.lost.set()
            run.task.cancel()

    def _leave_behind(self) -> None:
        for run in list(self._runs):
            log.warning("job %s is handed back while its handler runs on", run.record.id, extra=log_fields(run.record))
            self._end(run, release(run.record))

    def _leave_when_idle(self) -> None:
        if self.stopping and not self._runs:
            self.leave()

    async def run(self) -> None:
        self._loop, cancelled = asyncio.get_running_loop(), cancellations()
        if not await self._arrived():
            return
        self.presence.start()
        promoting = self._loop.create_task(self._promote())
        name, about = self.presence.worker, self.about
        log.info("consumer %s runs up to %d jobs of %s at once", name, self.concurrency, self._queue, extra=about)
        try:
            try:
                await self.take_turns(cancelled)
            except asyncio.CancelledError:
                # Handing jobs back takes turns as well, which must not end at the cancellation that was heard just now.
                self.abandon()
                await self.take_turns(cancellations())
                raise
        finally:
            self._interrupt()  # only if the storage was closed under them
            self._ended.set()
            await asyncio.gather(promoting, return_exceptions=True)
            await self.presence.leave()
            log.info("consumer %s stopped", name, extra=about)

    @property
    def about(self) -> dict[str, Any]:
        return {"queue": self._queue, "worker": self.presence.worker}

    async def _arrived(self) -> bool:
        """Wait for a store that cannot be reached yet. Returns False if the consumer was told to stop meanwhile."""
        while not self.stopping:
            try:
                await self.presence.arrive()
                return True
            except (StoreUnavailable, StoreFull, OutcomeUnknown) as exc:
                if self.storage.capabilities.local:  # what keeps it from being opened does not go by itself
                    raise
                await self.back_off(exc)
        return False

    async def _promote(self) -> None:
        """Move due jobs to their lanes, on stores that have lanes. Other stores find due jobs by their time."""
        while not self.storage.capabilities.due_order and not self._ended.is_set():
            try:
                moved = await self.storage.promote(self._queue)
                if moved:
                    log.debug("promoted %d delayed jobs of %s", moved, self._queue, extra={"queue": self._queue})
            except StoreError as exc:
                log.warning("delayed jobs could not be promoted, it will be tried again: %s", exc, extra={"queue": self._queue})
            await woken(self._ended, PROMOTE_S * random.uniform(0.8, 1.2))  # noqa: S311

    # -- turns -------------------------------------------------------------------------------------

    def wanted(self) -> int:
        return self.concurrency - len(self._runs)

    def take(self, tasks: Sequence[Record]) -> None:
        self._telling = log.isEnabledFor(logging.DEBUG)
        for record in tasks:
            run = Run(record, context_of(record))
            self._runs.add(run)
            run.task = self._loop.create_task(self._run(run))

    def settled(self, transaction: Transaction, answer: Result) -> None:
        op = transaction[0]
        if isinstance(answer, Unsendable) and (instead := answer.instead(op)):
            self.send((instead,))
        elif isinstance(answer, Refused):  # somebody else has the job by now, and will do it again
            job_id = getattr(op, "id", "")
            log.warning("%s of job %s was refused: %s", type(op).__name__, job_id, answer, extra={"task_id": job_id})

    # -- jobs --------------------------------------------------------------------------------------

    async def _run(self, run: JobRun) -> None:
        record = run.record
        if self._telling:
            log.debug("job %s starts, attempt %d", record.id, record.attempts, extra=log_fields(record))
        try:
            await self._handlers.run(run.context)
        except asyncio.CancelledError as exc:
            ended: Operation = release(record) if self._abandoned else self._failed(run, exc)
        except BaseException as exc:
            if not is_running(self._loop):  # Python closes what is left of a loop that is gone
                raise
            ended = self._failed(run, exc)
        else:
            again = next_run(record, self.storage.clock()) if record.interval_us else None
            token = cast(str, record.token)
            ran_us = run.ran_us
            ended = Ack(queue=record.queue, id=record.id, token=token, late=True, ran_us=ran_us, again_us=again, listed=True)
            if self._telling:
                log.debug("job %s succeeded after %.3f s", record.id, ran_us / 1e6, extra=log_fields(record))
        self._end(run, ended)

    def _end(self, run: JobRun, ended: Operation) -> None:
        # Once only: a job that was handed back may still have a handler that ends.
        if run in self._runs:
            self._runs.remove(run)
            self.send(*(((ended,),) if run.ending is None else ()))
            self._leave_when_idle()

    def _failed(self, run: JobRun, exc: BaseException) -> Operation:
        error = TaskError.of(exc)
        op = after_failure(run.record, error, self.storage.clock(), random.random(), ran_us=run.ran_us)  # noqa: S311
        if run.ending is None:
            what = "failed for good" if isinstance(op, Fail) else "failed, it will be retried"
            log.warning("job %s %s: %s", run.record.id, what, error, extra=log_fields(run.record), exc_info=log_error(exc))
        return op

    # -- what the heartbeat needs and hears --------------------------------------------------------

    def held(self) -> list[Record]:
        # A copy, since the heartbeat asks in its own thread.
        return [run.record for run in list(self._runs) if run.ending is None]

    def busy(self) -> Mapping[str, int]:
        return {self._queue: len(self._runs)} if self._runs else {}

    def cancel(self, task: Record) -> None:
        """Takes effect when the job ends: a failed run is then not retried."""

    def lose(self, task: Record) -> None:
        for run in self._runs:
            if run.record is task and run.ending is None:
                run.ending = "lost"
                run.context.lost.set()
                log.warning("the lease of job %s was lost; its end will not be stored", task.id, extra=log_fields(task))
                if self._handlers.interruptible:
                    run.task.cancel()
