"""Runs tasks: finds the function, calls it under its timeout, and says what is to be stored of the run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from omniq.context import TaskContext, enter, leave, log_error, log_fields
from omniq.errors import Invalid, Refused, SerializationError, Unrecoverable, check_retry_after
from omniq.errors import Retry as RetryLater
from omniq.middleware import Middleware
from omniq.models import Record, TaskError
from omniq.operations import Ack, Cancel, Enqueue, Fail, Operation, Progress, Release
from omniq.policy import max_attempts, waits_for_function
from omniq.queue import AsyncTaskQueue
from omniq.runnable import Runnable
from omniq.storage.sending import Unsendable
from omniq.tasks import NotRunnable, Resolver
from omniq.threads import TaskThreads
from omniq.translate import PAYLOAD_ONLY, called_name, decode_call, encode_result

log = logging.getLogger("omniq.worker")

PROGRESS_S = 0.2  # how often the progress of a task is stored at most

_ENDS: dict[type[Operation], str] = {Ack: "succeeded", Cancel: "was cancelled", Release: "is handed back"}

Transaction = tuple[Operation, ...]
Holding = tuple[str, str | None]  # a worker that was frozen may hold a task a second time while its first run goes on


def holding(task: Record | Progress) -> Holding:
    return task.id, task.token


class Run:
    """A task in a slot."""

    __slots__ = ("begun", "context", "deadline", "ending", "is_async", "record", "started", "task")

    def __init__(self, record: Record, context: TaskContext, task: asyncio.Task[None]) -> None:
        self.record, self.context, self.task = record, context, task
        self.started = time.monotonic()
        self.is_async = self.begun = False  # until its function is found
        self.ending: str | None = None  # why it was interrupted: "timeout", "cancel", "lost" or "release"
        self.deadline = math.inf

    def interrupt(self, reason: str) -> None:
        if self.ending is None:
            self.ending = reason
            self.task.cancel()


class Runner:
    """Everything between a leased task and the transactions that end it. `send` takes progress on the way."""

    def __init__(
        self,
        queue: AsyncTaskQueue,
        resolver: Resolver,
        middleware: Sequence[Middleware],
        send: Callable[[Transaction], None],
    ) -> None:
        self._queue, self._resolver, self._middleware, self._send = queue, resolver, tuple(middleware), send
        self.running: dict[Holding, Run] = {}
        self.leaving = False
        self.is_abandoned: Callable[[], bool] = lambda: False  # whether the loop is being torn down around the pool
        self.telling = False  # whether starts and ends are logged, asked once per batch
        self.given_up: set[str] = set()  # ids of tasks that no other worker will be asked for
        self.done = self.failed = self.retried = 0
        self._runnables: dict[tuple[str, str], Runnable] = {}
        self._joint: dict[Holding, Run] = {}  # ended runs whose ack carries what they enqueued
        self._next_deadline = math.inf
        self._deadline_timer: asyncio.TimerHandle | None = None

    def start(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = TaskThreads(f"omniq-task-{name}")

    def close(self) -> None:
        self._threads.close()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()

    async def run(self, record: Record) -> tuple[list[Transaction], float]:
        """Run a task in the current asyncio task; what to store of it, and how many seconds it took."""
        context = TaskContext(record, self._queue.batch)
        run = Run(record, context, cast("asyncio.Task[None]", asyncio.current_task()))
        self.running[holding(record)] = run
        context.on_progress = functools.partial(self._progress_soon, run)
        token = enter(context)
        if self.telling:
            fields = log_fields(record)
            log.debug("task %s starts, attempt %d of %d", record.name, record.attempts, max_attempts(record), extra=fields)
        try:
            transaction = await self._outcome(run)
        finally:
            leave(token)
            del self.running[holding(record)]
        ended: list[Transaction] = []
        if self.telling and transaction is not None:
            self._tell_end(run, transaction)
        if transaction is not None:
            if context.unsent_progress is not None:  # the last word, said just before the end
                ended.append((_progress(record, context.unsent_progress),))
            ended.append(transaction)
            if len(transaction) > 1:
                self._joint[holding(record)] = run
        return ended, time.monotonic() - run.started

    def _tell_end(self, run: Run, transaction: Transaction) -> None:
        """How it ended; failures are told where they happen."""
        record, end = run.record, transaction[0]
        took = time.monotonic() - run.started
        words = _ENDS.get(type(end))
        if words is not None:
            log.debug("task %s %s after %.3f s", record.name, words, took, extra=log_fields(record))
        for op in transaction[1:]:
            child = cast(Enqueue, op)
            fields = {"task_id": child.id, "queue": child.queue, "task_name": child.name}
            log.debug("%s is enqueued with the end of task %s", child.name, record.id, extra=fields)

    async def _outcome(self, run: Run) -> tuple[Operation, ...] | None:
        """Run the task and say what is to be stored of it; None for a task that was lost to somebody else."""
        record = run.record
        try:
            value = await self._call(run)
            data = encode_result(value, self._queue.serializer)
            extra = [op for batch in run.context.batches for op in batch.operations]
            transaction = (self._queue.succeeded(record, data, _ran_us(run)), *extra)
            if extra or len(data) > self._queue.storage.capabilities.max_payload:
                self._queue.storage.check_call([transaction])
        except asyncio.CancelledError as exc:
            if run.ending is not None:
                run.task.uncancel()
                return await self._interrupted(run)
            if self.leaving or self.is_abandoned():
                raise
            await self._calm(run.task)
            return self._failed(run, exc)
        except (NotRunnable, Unrecoverable) as exc:
            if isinstance(exc, NotRunnable) and exc.unknown and not run.begun:
                return self._unknown(run, exc)
            return self._failed(run, exc, final=True)
        except RetryLater as exc:
            return self._retry_later(run, exc)
        except BaseException as exc:
            if not self.is_running():
                raise
            return self._failed(run, exc)
        if run.ending is not None:  # it finished, or caught the interruption, at the last moment
            run.task.uncancel()
            if run.ending != "release":
                return await self._interrupted(run)
        elif run.task.cancelling() and not self.leaving and not self.is_abandoned():
            await self._calm(run.task)  # it cancelled itself and then returned all the same
        if run.context.cancelled:
            return self._cancelled(record)
        self.done += 1
        return transaction

    async def _call(self, run: Run) -> Any:
        record = run.record
        try:
            name = called_name(record, self._queue.serializer)
            place = (name, record.queue if name == PAYLOAD_ONLY else "")
            runnable = self._runnables.get(place)
            if runnable is None:
                runnable = self._runnables[place] = Runnable(self._resolver.resolve(*place))
            args, kwargs = decode_call(record, self._queue.serializer)
        except SerializationError as exc:
            if isinstance(exc.__cause__, ImportError | AttributeError):  # a pickle names classes
                raise NotRunnable(f"this worker has not what its arguments are made of: {exc}", unknown=True) from exc
            raise Unrecoverable(f"SerializationError: {exc}") from exc
        if record.encoding == "json":
            runnable.restore(args, kwargs)
        run.is_async, run.begun = runnable.is_async, True
        if record.timeout_us is not None:
            self._limit(run, record.timeout_us / 1e6)
        for hook in self._middleware:
            await hook.before(run.context)
        try:
            if runnable.is_async:
                value = await runnable.func(*args, **kwargs)
            else:
                value = await self._threads.run(functools.partial(runnable.func, *args, **kwargs))
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            if self.is_running():
                await self._tell_error(run.context, exc)
            raise
        for hook in reversed(self._middleware):
            await hook.after(run.context, value)
        return value

    async def _tell_error(self, context: TaskContext, exc: BaseException) -> None:
        for hook in reversed(self._middleware):
            try:
                await hook.on_error(context, exc)
            except (Exception, SystemExit):
                log.exception("%s.on_error failed", type(hook).__name__, extra=log_fields(context.record))

    def _retry_later(self, run: Run, exc: RetryLater) -> tuple[Operation, ...]:
        try:
            if exc.after is not None:
                check_retry_after(exc.after)
        except Invalid as invalid:
            return self._failed(run, invalid)
        return self._failed(run, exc, after=exc.after)

    async def _calm(self, task: asyncio.Task[None]) -> None:
        """Undo what a task did that cancelled itself, so that the next one in its slot does not hear of it."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # where a cancellation that is still to come comes out
        while task.cancelling():
            task.uncancel()
        if self.leaving:
            raise asyncio.CancelledError

    def is_running(self) -> bool:
        """Whether an error came from the task: Python also throws GeneratorExit into a slot whose event loop is gone."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _failed(
        self, run: Run, exc: BaseException, *, final: bool = False, after: float | None = None
    ) -> tuple[Operation, ...]:
        if run.context.cancelled:
            return self._cancelled(run.record)
        return self._store_failure(run, TaskError.of(exc), final=final, after=after, exc=exc)

    def _store_failure(
        self,
        run: Run,
        error: TaskError,
        *,
        final: bool = False,
        after: float | None = None,
        exc: BaseException | None = None,
    ) -> tuple[Operation, ...]:
        op = self._queue.failed(run.record, error, _ran_us(run), after=after, final=final)
        fields = log_fields(run.record)
        if isinstance(op, Fail):
            self.failed += 1
            log.error("task %s failed for good: %s", run.record.name, error, extra=fields, exc_info=log_error(exc))
        else:
            self.retried += 1
            log.warning("task %s failed, it will be retried: %s", run.record.name, error, extra=fields, exc_info=log_error(exc))
        return (op,)

    def _unknown(self, run: Run, exc: NotRunnable) -> tuple[Operation, ...]:
        record = run.record
        if run.context.cancelled:
            return self._cancelled(record)
        error, cause = TaskError.of(exc), exc.__cause__
        if cause is not None:  # of a module that failed: where
            error = msgspec.structs.replace(error, traceback=TaskError.of(cause).traceback)
        op = self._queue.unknown(record, error, last=record.id in self.given_up)
        fields, where = log_fields(record), log_error(cause)
        if isinstance(op, Fail):
            self.failed += 1
            log.error("task %s failed for good: %s", record.name, op.error, extra=fields, exc_info=where)
        else:
            level = logging.DEBUG if waits_for_function(record) else logging.WARNING  # the first time is news
            log.log(level, "task %s is left to another worker: %s", record.name, exc, extra=fields, exc_info=where)
        return (op,)

    def _cancelled(self, record: Record) -> tuple[Operation, ...]:
        return (Cancel(queue=record.queue, id=record.id, token=cast(str, record.token)),)

    async def _interrupted(self, run: Run) -> tuple[Operation, ...] | None:
        record = run.record
        if run.ending == "cancel":
            return self._cancelled(record)
        if run.ending == "release":
            return (release(record),)
        if run.ending == "lost":
            log.warning("task %s was lost: its lease ran out", record.name, extra=log_fields(record))
            return None
        if not run.is_async:
            log.warning(
                "task %s ran into its timeout; its thread cannot be stopped and is left to finish (%d such threads)",
                record.name,
                self._threads.abandoned,
                extra=log_fields(record),
            )
        late = TimeoutError(f"the task ran longer than its timeout of {cast(int, record.timeout_us) / 1e6:g} s")
        await self._tell_error(run.context, late)
        return self._store_failure(run, TaskError.of(late))

    def _limit(self, run: Run, seconds: float) -> None:
        """One timer for all tasks, set to the earliest deadline: most tasks end long before theirs."""
        run.deadline = self._loop.time() + seconds
        if run.deadline < self._next_deadline:
            self._next_deadline = run.deadline
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            self._deadline_timer = self._loop.call_at(run.deadline, self._end_overdue)

    def _end_overdue(self) -> None:
        now = self._loop.time()
        for run in list(self.running.values()):
            if run.deadline <= now:
                run.deadline = math.inf
                run.interrupt("timeout")
        self._next_deadline = min((r.deadline for r in self.running.values()), default=math.inf)
        later = self._next_deadline < math.inf
        self._deadline_timer = self._loop.call_at(self._next_deadline, self._end_overdue) if later else None

    # -- from outside -----------------------------------------------------------------------------

    def cancel(self, task: Record | Progress) -> None:
        """Somebody asked for the task to end: an async function is cancelled, any other can ask `check_cancelled()`."""
        run = self.running.get(holding(task))
        if run is not None and not run.context.cancelled:
            run.context.cancelled = True
            if run.is_async:
                run.interrupt("cancel")

    def lose(self, record: Record) -> bool:
        """Somebody else has the task by now: stop working on it. Whether it runs here."""
        run = self.running.get(holding(record))
        if run is None:
            return False
        run.context.cancelled = True
        run.interrupt("lost")
        return True

    def joint_ended(self, ack: Ack) -> None:
        self._joint.pop((ack.id, ack.token), None)

    def joint_refused(self, ack: Ack, refusal: Refused) -> Transaction | None:
        """The store refused what a task enqueued together with its ack: then the run has failed, and says why."""
        run = self._joint.pop((ack.id, ack.token), None)
        if run is None:
            return None
        self.done -= 1
        return self._store_failure(run, refusal.error if isinstance(refusal, Unsendable) else TaskError.of(refusal))

    # -- progress ----------------------------------------------------------------------------------

    def _progress_soon(self, run: Run) -> None:
        """From any thread: store the newest progress a little later, so that a busy loop costs a few writes."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._schedule_progress, run)

    def _schedule_progress(self, run: Run) -> None:
        if run.context.on_progress is not None:
            run.context.on_progress = None
            self._send_progress(run)
            self._loop.call_later(PROGRESS_S, self._rearm_progress, run)

    def _rearm_progress(self, run: Run) -> None:
        run.context.on_progress = functools.partial(self._progress_soon, run)
        if run.context.unsent_progress is not None and self.running.get(holding(run.record)) is run:
            self._schedule_progress(run)

    def _send_progress(self, run: Run) -> None:
        record, data = run.record, run.context.unsent_progress
        if data is not None and self.running.get(holding(record)) is run:
            run.context.unsent_progress = None
            self._send((_progress(record, data),))


def release(task: Record) -> Release:
    """Hand a task back unused."""
    return Release(queue=task.queue, id=task.id, token=cast(str, task.token), late=True)


def _progress(task: Record, data: bytes) -> Progress:
    return Progress(queue=task.queue, id=task.id, token=cast(str, task.token), late=True, data=data)


def _ran_us(run: Run) -> int:
    return int((time.monotonic() - run.started) * 1e6)
