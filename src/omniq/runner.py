"""Runs tasks: finds the function, calls it under its timeout, and makes the transaction that ends the run."""

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

from omniq.context import Middleware, TaskContext, enter, leave, log_error, log_fields
from omniq.errors import Invalid, Refused, SerializationError, Unrecoverable, check_retry_after
from omniq.errors import Retry as RetryLater
from omniq.functions import Runnable, TaskThreads
from omniq.models import Record, TaskError
from omniq.operations import Ack, Cancel, Enqueue, Fail, Operation, Progress, Release
from omniq.policy import max_attempts, waits_for_function
from omniq.queue import AsyncTaskQueue
from omniq.storage.sending import Unsendable
from omniq.tasks import NotRunnable, Resolver
from omniq.translate import PAYLOAD_ONLY, called_name, decode_call, encode_result
from omniq.turns import Run, is_running, release

log = logging.getLogger("omniq.worker")

PROGRESS_S = 0.2  # how often the progress of a task is stored at most

_ENDS: dict[type[Operation], str] = {Ack: "succeeded", Cancel: "was cancelled", Release: "is handed back"}

Transaction = tuple[Operation, ...]
TaskRun = Run[TaskContext]
Holding = tuple[str, str | None]  # a worker that was frozen may hold a task a second time while its first run goes on


def holding(task: Record | Progress) -> Holding:
    return task.id, task.token


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
        self.running: dict[Holding, TaskRun] = {}
        self.leaving = False
        self.is_abandoned: Callable[[], bool] = lambda: False  # whether the loop is being torn down around the pool
        self.telling = False  # whether starts and ends are logged, asked once per batch
        self.given_up: set[str] = set()  # ids of tasks that no other worker will be asked for
        self.done = self.failed = self.retried = 0
        self._runnables: dict[tuple[str, str], Runnable] = {}
        self._joint: dict[Holding, TaskRun] = {}  # ended runs whose ack carries what they enqueued
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
        """Run a task in the current asyncio task. Returns the transactions to store, and how many seconds it took."""
        context = TaskContext(record, self._queue.batch)
        run = Run(record, context)
        run.task = cast("asyncio.Task[None]", asyncio.current_task())
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

    def _tell_end(self, run: TaskRun, transaction: Transaction) -> None:
        """Log how a run ended. Failures are logged where they happen."""
        record, end = run.record, transaction[0]
        took = time.monotonic() - run.started
        words = _ENDS.get(type(end))
        if words is not None:
            log.debug("task %s %s after %.3f s", record.name, words, took, extra=log_fields(record))
        for op in transaction[1:]:
            child = cast(Enqueue, op)
            fields = {"task_id": child.id, "queue": child.queue, "task_name": child.name}
            log.debug("%s is enqueued with the end of task %s", child.name, record.id, extra=fields)

    async def _outcome(self, run: TaskRun) -> tuple[Operation, ...] | None:
        """Run the task. Returns the transaction that ends it, or None for a task that was lost to somebody else."""
        record = run.record
        try:
            value = await self._call(run)
            data = encode_result(value, self._queue.serializer)
            extra = [op for batch in run.context.batches for op in batch.operations]
            transaction = (self._queue.succeeded(record, data, run.ran_us), *extra)
            # A small result alone cannot be refused. All else is looked at here, where it becomes the failure of this run.
            if extra or len(data) > self._queue.storage.capabilities.max_payload:
                self._queue.storage.check_call([transaction])
        except asyncio.CancelledError as exc:
            if run.ending is not None:
                # The slot goes on with another task, which must not hear of this.
                run.task.uncancel()
                return await self._interrupted(run)
            if self.leaving or self.is_abandoned():
                raise
            # Nobody here asked for it: the task cancelled itself.
            await self._calm(run.task)
            return self._failed(run, exc)
        except (NotRunnable, Unrecoverable) as exc:
            # A task that runs may raise this as well, and then it says nothing about this worker.
            if isinstance(exc, NotRunnable) and exc.unknown and not run.begun:
                return self._unknown(run, exc)
            return self._failed(run, exc, final=True)
        except RetryLater as exc:
            return self._retry_later(run, exc)
        except BaseException as exc:
            if not is_running(self._loop):
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

    async def _call(self, run: TaskRun) -> Any:
        record = run.record
        try:
            name = called_name(record, self._queue.serializer)
            # Tasks that name no function are given to the handler of their queue.
            place = (name, record.queue if name == PAYLOAD_ONLY else "")
            runnable = self._runnables.get(place)
            if runnable is None:
                runnable = self._runnables[place] = Runnable(self._resolver.resolve(*place))
            args, kwargs = decode_call(record, self._queue.serializer)
        except SerializationError as exc:
            if isinstance(exc.__cause__, ImportError | AttributeError):  # a pickle names classes
                raise NotRunnable(f"this worker cannot import the classes of its arguments: {exc}", unknown=True) from exc
            raise Unrecoverable(f"SerializationError: {exc}") from exc
        # A pickle has kept its types.
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
            if is_running(self._loop):
                await self._tell_error(run.context, exc)
            raise
        for hook in reversed(self._middleware):
            await hook.after(run.context, value)
        return value

    async def _tell_error(self, context: TaskContext, exc: BaseException) -> None:
        for hook in reversed(self._middleware):
            try:
                await hook.on_error(context, exc)
            # A hook that calls sys.exit() must not end the worker.
            except (Exception, SystemExit):
                log.exception("%s.on_error failed", type(hook).__name__, extra=log_fields(context.record))

    def _retry_later(self, run: TaskRun, exc: RetryLater) -> tuple[Operation, ...]:
        try:
            if exc.after is not None:
                check_retry_after(exc.after)
        except Invalid as invalid:
            return self._failed(run, invalid)
        return self._failed(run, exc, after=exc.after)

    async def _calm(self, task: asyncio.Task[None]) -> None:
        """Take back the cancellations of a task that cancelled itself, so that the next one in its slot hears of none."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # where a cancellation that is still to come comes out
        while task.cancelling():
            task.uncancel()
        if self.leaving:
            raise asyncio.CancelledError

    def _failed(
        self, run: TaskRun, exc: BaseException, *, final: bool = False, after: float | None = None
    ) -> tuple[Operation, ...]:
        if run.context.cancelled:
            return self._cancelled(run.record)
        return self._store_failure(run, TaskError.of(exc), final=final, after=after, exc=exc)

    def _store_failure(
        self,
        run: TaskRun,
        error: TaskError,
        *,
        final: bool = False,
        after: float | None = None,
        exc: BaseException | None = None,
    ) -> tuple[Operation, ...]:
        op = self._queue.failed(run.record, error, run.ran_us, after=after, final=final)
        fields = log_fields(run.record)
        if isinstance(op, Fail):
            self.failed += 1
            log.error("task %s failed for good: %s", run.record.name, error, extra=fields, exc_info=log_error(exc))
        else:
            self.retried += 1
            log.warning("task %s failed, it will be retried: %s", run.record.name, error, extra=fields, exc_info=log_error(exc))
        return (op,)

    def _unknown(self, run: TaskRun, exc: NotRunnable) -> tuple[Operation, ...]:
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

    async def _interrupted(self, run: TaskRun) -> tuple[Operation, ...] | None:
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

    def _limit(self, run: TaskRun, seconds: float) -> None:
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
        """Stop a run whose task somebody else has by now. Returns whether it runs here."""
        run = self.running.get(holding(record))
        if run is None:
            return False
        # A plain function cannot be interrupted: it may ask `check_cancelled()`.
        run.context.cancelled = True
        run.interrupt("lost")
        return True

    def joint_ended(self, ack: Ack) -> None:
        self._joint.pop((ack.id, ack.token), None)

    def joint_refused(self, ack: Ack, refusal: Refused) -> Transaction | None:
        """Returns the failure of a run whose ack was refused because of the tasks that it enqueued with it."""
        run = self._joint.pop((ack.id, ack.token), None)
        if run is None:
            return None
        # It was counted as done when its function returned.
        self.done -= 1
        return self._store_failure(run, refusal.error if isinstance(refusal, Unsendable) else TaskError.of(refusal))

    # -- progress ----------------------------------------------------------------------------------

    def _progress_soon(self, run: TaskRun) -> None:
        """From any thread: store the newest progress a little later, so that a busy loop costs a few writes."""
        # A thread that was left behind may outlive the loop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._schedule_progress, run)

    def _schedule_progress(self, run: TaskRun) -> None:
        if run.context.on_progress is not None:
            run.context.on_progress = None
            self._send_progress(run)
            self._loop.call_later(PROGRESS_S, self._rearm_progress, run)

    def _rearm_progress(self, run: TaskRun) -> None:
        run.context.on_progress = functools.partial(self._progress_soon, run)
        if run.context.unsent_progress is not None and self.running.get(holding(run.record)) is run:
            self._schedule_progress(run)

    def _send_progress(self, run: TaskRun) -> None:
        record, data = run.record, run.context.unsent_progress
        if data is not None and self.running.get(holding(record)) is run:
            run.context.unsent_progress = None
            self._send((_progress(record, data),))


def _progress(task: Record, data: bytes) -> Progress:
    return Progress(queue=task.queue, id=task.id, token=cast(str, task.token), late=True, data=data)
