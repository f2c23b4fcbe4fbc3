"""`AsyncTaskQueue`: the semantics of tasks over any store. Doors speak to it, drivers know nothing of it."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, Unpack, cast

from msgspec import UNSET
from msgspec.structs import replace

from omniq import following
from omniq.config import Settings
from omniq.errors import Invalid, TaskNotFound
from omniq.models import (
    Event,
    Record,
    State,
    StoredResult,
    Task,
    TaskError,
    TaskResult,
    check_count,
    duration_us,
    new_id,
)
from omniq.operations import (
    Ack,
    Enqueue,
    Enqueued,
    Fail,
    Filter,
    QueueCounts,
    Remove,
    Requeue,
    Retry,
)
from omniq.policy import after_failure, after_unknown, next_run
from omniq.serialization import Serializer, make_serializer
from omniq.storage.base import BaseStorage
from omniq.tasks import MAIN, NO_OPTIONS, REGISTRY, Callee, OptionFields, Options, callee, make_options
from omniq.template import form_of, plain_form
from omniq.translate import encode_call, event_of, fingerprint, result_of, task_of

log = logging.getLogger("omniq.queue")

# A commit that a thousand rows share hardly counts, and other writers do not wait long behind it.
ROWS_PER_TRANSACTION = 1000
# A program may make new functions all the time, and none of them is forgotten.
MAX_TEMPLATES = 10_000
Template = Callable[[Sequence[Any], dict[str, Any]], Enqueue]
Row = Sequence[Any] | dict[str, Any]


class AsyncTaskQueue:
    """Enqueues, ends, retries, cancels and finds tasks by one policy, whatever the store."""

    def __init__(self, storage: BaseStorage, settings: Settings | None = None) -> None:
        self.storage = storage
        self.settings = settings or Settings()
        self.serializer: Serializer = make_serializer(self.settings.serializer)
        self._plain = replace(plain_form(self.settings), encoding=self.serializer.name)
        self._templates: dict[Callee, Template] = {}  # of calls without options: nearly all of them
        self._unknown_us = duration_us(self.settings.unknown_function_s, "unknown_function_s", zero=True)

    async def close(self) -> None:
        await self.storage.close()

    async def __aenter__(self) -> Self:
        await self.storage.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    # -- in ----------------------------------------------------------------------------------------

    def template(self, func: Callee, options: Options) -> Template:
        """Returns a function that makes the operation of each call. What all calls share is checked here, once."""
        if options is NO_OPTIONS and (known := self._templates.get(func)) is not None:
            return known
        form = form_of(func, options, self._plain)
        # A store that ends with this process is seen by no other.
        if func.name.startswith(f"{MAIN}:") and self.storage.capabilities.durability != "none":
            _warn_of_main(func.name)
        # What a second enqueue under the same id or key must repeat. Where nothing can repeat, nothing is hashed.
        wants_hash = form.id != "" or form.idempotency_key is not None
        body = [getattr(form, name) for name in _BODY]
        serializer = self.serializer

        def make(args: Sequence[Any], kwargs: dict[str, Any]) -> Enqueue:
            func.check(args, kwargs)
            payload = encode_call(args, kwargs, serializer, func.parameters)
            mark = fingerprint(payload, *body) if wants_hash else ""
            return replace(form, id=form.id or new_id(), payload=payload, fingerprint=mark)

        if options is NO_OPTIONS and len(self._templates) < MAX_TEMPLATES:
            self._templates[func] = make
        return make

    async def enqueue(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], options: Options) -> str:
        """Store one call. Returns the id of the task, or of the first one with the same idempotency key."""
        op = self.template(callee(func), options)(args, kwargs)
        (outcome,) = cast("list[Enqueued]", await self.storage.transact((op,)))
        tell_enqueued((op,), (outcome,))
        return outcome.id

    async def enqueue_many(self, func: Any, rows: Iterable[Row], options: Options) -> list[str]:
        """Store a call per row, a tuple of positional or a dict of keyword arguments. Returns their ids, in order."""
        if options.task_id is not UNSET or options.idempotency_key is not UNSET:
            raise Invalid("enqueue_many makes many tasks: an id or an idempotency key belongs to one")
        make = self.template(callee(func), options)
        ids: list[str] = []
        chunk: list[Enqueue] = []
        storing: asyncio.Future[list[str]] | None = None
        try:
            for place, row in enumerate(rows):
                chunk.append(_make_row(make, place, row))
                if len(chunk) == ROWS_PER_TRANSACTION:
                    if storing is not None:
                        ids += await storing
                    storing = asyncio.ensure_future(self._store(chunk))  # the next chunk is made while this one is stored
                    chunk = []
                    # The storing begins when this coroutine lets others run.
                    await asyncio.sleep(0)
        finally:
            # Also after a bad row: nothing may go on unseen when this call has ended.
            if storing is not None:
                ids += await storing
        return ids + await self._store(chunk)

    async def store(self, batch: Batch) -> list[str]:
        """Write a batch, all or nothing. Returns the ids that its tasks have."""
        return await self._store(batch.operations)

    async def _store(self, ops: Sequence[Enqueue]) -> list[str]:
        if not ops:
            return []
        outcomes = cast("list[Enqueued]", await self.storage.transact(tuple(ops)))
        tell_enqueued(ops, outcomes)
        return [outcome.id for outcome in outcomes]

    def batch(self) -> Batch:
        return Batch(self)

    # -- how a run ends (decisions: policy.py) -----------------------------------------------------

    def succeeded(self, task: Record, result: bytes, ran_us: int) -> Ack:
        again = next_run(task, self.storage.clock()) if task.interval_us else None
        return Ack(
            queue=task.queue,
            id=task.id,
            token=cast(str, task.token),
            late=True,
            result=result,
            encoding=self.serializer.name,
            ran_us=ran_us,
            again_us=again,
        )

    def failed(
        self, task: Record, error: TaskError, ran_us: int, *, after: float | None = None, final: bool = False
    ) -> Retry | Fail:
        after_us = None if after is None else round(after * 1e6)
        now = self.storage.clock()
        return after_failure(task, error, now, random.random(), after_us=after_us, final=final, ran_us=ran_us)  # noqa: S311

    def unknown(self, task: Record, error: TaskError, *, last: bool = False) -> Retry | Fail:
        """Returns what follows when a worker lacks the task's function. With `last`, no other worker will be asked."""
        return after_unknown(task, error, self.storage.clock(), self._unknown_us, last=last)

    # -- steering one task -------------------------------------------------------------------------

    async def cancel(self, task_id: str) -> bool:
        """End a waiting task, or ask a running one to end. False for one that has ended or never was."""
        _must_be_id(task_id)
        found = await following.cancel(self.storage, task_id)
        if found is None or found[0].state.final:
            return False
        _tell("asked to cancel", found[0])
        return found[1] in (State.CANCELLED, State.RUNNING)

    async def requeue(self, task_id: str, *, reset_attempts: bool = False) -> None:
        """Bring a FAILED task back. Raises `NotDead` for any other, `TaskNotFound` for an unknown id."""
        record = await self._there(task_id)
        await self.storage.transact((Requeue(queue=record.queue, id=task_id, reset_attempts=reset_attempts),))
        _tell("requeued", record)

    async def remove(self, task_id: str) -> None:
        """Delete a task that is not running. Raises `NotWaiting` for one that is, `TaskNotFound` for an unknown id."""
        record = await self._there(task_id)
        await self.storage.transact((Remove(queue=record.queue, id=task_id),))
        _tell("removed", record)

    async def _there(self, task_id: str) -> Record:
        _must_be_id(task_id)
        record = await self.storage.get(task_id)
        if record is None:
            raise TaskNotFound(f"no task {task_id!r} in this store")
        return record

    # -- out ---------------------------------------------------------------------------------------

    async def get_task(self, task_id: str) -> Task | None:
        _must_be_id(task_id)
        record = await self.storage.get(task_id)
        return None if record is None else task_of(record, self.serializer)

    async def get_result(self, task_id: str, *, wait: bool = False, timeout: float | None = None) -> TaskResult | None:
        """Returns the result of a task, or None if it has not ended. With `wait`, waits for the end or `timeout` seconds.

        Waiting for an unknown id returns None at once.
        """
        _must_be_id(task_id)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"timeout is a number of seconds, zero or more, not {timeout!r}")
        if wait:
            found = await following.until_ended(self.storage, task_id, timeout)
        else:
            found = (await self.storage.results([task_id])).get(task_id)
        return result_of(found, self.serializer) if isinstance(found, StoredResult) else None

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50) -> tuple[list[Task], str | None]:
        if not isinstance(filter, Filter):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the filter is a Filter such as Filter(statuses=(TaskStatus.FAILED,)), not {filter!r}")
        check_count(limit, "limit", 1)
        page = await self.storage.find(filter, cursor, limit)
        return [task_of(r, self.serializer) for r in page.tasks], page.cursor

    async def counts(self) -> list[QueueCounts]:
        return await self.storage.counts()

    async def events(self, after: int = 0, limit: int = 1000, shard: str = "") -> list[Event]:
        return [event_of(row) for row in await self.storage.events(shard, after=after, limit=limit)]

    async def history(self, task_id: str) -> list[Event]:
        _must_be_id(task_id)
        return [event_of(row) for row in await self.storage.events_of(task_id)]


def tell_enqueued(ops: Sequence[Enqueue], outcomes: Sequence[Any]) -> None:
    """At DEBUG, a record per task that was stored, or that was there already."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for op, outcome in zip(ops, outcomes, strict=True):
        fields = {"task_id": outcome.id, "queue": op.queue, "task_name": op.name}
        log.debug("%s was there already" if outcome.existed else "enqueued %s", op.name, extra=fields)


def _tell(what: str, task: Record) -> None:
    log.debug("%s %s", what, task.name, extra={"task_id": task.id, "queue": task.queue, "task_name": task.name})


class Batch:
    """Tasks to be stored together. `enqueue` returns ids at once, and nothing is written before the end."""

    def __init__(self, queue: AsyncTaskQueue, options: Options | None = None, operations: list[Enqueue] | None = None) -> None:
        self._queue = queue
        self._options = options or Options()
        self.operations: list[Enqueue] = [] if operations is None else operations
        self.ids: list[str] = []

    def options(self, **options: Unpack[OptionFields]) -> Batch:
        """Returns the same batch, with options for the calls that are enqueued through the returned object."""
        return Batch(self._queue, make_options(options).over(self._options), self.operations)

    def enqueue(
        self,
        func: Any,
        *args: Any,
        eta: datetime | timedelta | None = None,
        interval: timedelta | float | None = None,
        **kwargs: Any,
    ) -> str:
        """Add a call. Returns its id. If its idempotency key is taken, `ids` has the first task's id after the end."""
        tell_of_text(func)
        options = with_schedule(self._options, eta, interval)
        op = self._queue.template(callee(func), options)(args, kwargs)
        self.operations.append(op)
        return op.id

    def enqueue_many(self, func: Any, rows: Iterable[Row]) -> list[str]:
        make = self._queue.template(callee(func), self._options)
        made = [_make_row(make, place, row) for place, row in enumerate(rows)]
        self.operations += made
        return [op.id for op in made]


@functools.lru_cache(maxsize=1024)  # once for each function
def _warn_of_main(name: str) -> None:
    log.warning("only a worker in this process can run %s: move it into a module that other workers can import", name)


def tell_of_text(func: object) -> None:
    """Warn once of a text that is neither a path nor a task known here: a call of the function may have returned it."""
    if isinstance(func, str) and ":" not in func and func not in REGISTRY:
        _warn_of_text(func)


@functools.lru_cache(maxsize=1024)
def _warn_of_text(name: str) -> None:
    log.warning(
        "no task %r is registered here: only workers that have a task of this name can run it. "
        "If a function returned this text, enqueue the function: enqueue(f, …) instead of enqueue(f(…)). If the name is "
        "meant, options(…).enqueue_name(name, …) says so",
        name,
    )


def with_schedule(options: Options, eta: datetime | timedelta | None, interval: timedelta | float | None) -> Options:
    """Returns the options with the two that `enqueue` takes as keywords."""
    if eta is None and interval is None:
        return options
    given: dict[str, Any] = {}
    if eta is not None:
        given["eta"] = eta
    if interval is not None:
        given["interval"] = interval
    return replace(options, **given)


def _must_be_id(task_id: object) -> None:
    """Checked here, since each store would say something else, or nothing."""
    if not isinstance(task_id, str):
        raise TypeError(f"the id of a task is the text that enqueue returned, not {task_id!r}")


def _make_row(make: Template, place: int, row: Row) -> Enqueue:
    try:
        if isinstance(row, dict):
            return make((), row)
        if isinstance(row, tuple | list):
            return make(row, {})
    except TypeError as exc:  # which is what a value that cannot be stored raises, too
        raise type(exc)(f"rows[{place}]: {exc}") from exc
    raise TypeError(
        f"rows[{place}]: a row is a tuple of positional or a dict of keyword arguments, not {row!r}; write ({row!r},)"
    )


_BODY = ("name", "eta_us", "delay_us", "interval_us", "timeout_us", "max_attempts", "group", "dead_queue")
