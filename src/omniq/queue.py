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

import msgspec
from msgspec import UNSET

from omniq.config import Settings
from omniq.errors import ConfigError, Invalid, Refused, TaskNotFound
from omniq.models import (
    MAX_COUNT,
    Blocker,
    Event,
    Record,
    State,
    Task,
    TaskError,
    TaskResult,
    check_count,
    check_id,
    check_queue,
    check_text,
    duration_us,
    new_id,
    to_us,
)
from omniq.operations import (
    Ack,
    Cancel,
    Cancelled,
    Enqueue,
    Enqueued,
    Fail,
    Filter,
    Operation,
    QueueCounts,
    Remove,
    Requeue,
    Retry,
)
from omniq.policy import Backoff, after_failure, after_unknown, next_run, parse_backoff
from omniq.script import MAIN
from omniq.serialization import Serializer, make_serializer
from omniq.storage.base import BaseStorage
from omniq.tasks import NO_OPTIONS, REGISTRY, Callee, OptionFields, Options, callee, make_options
from omniq.translate import encode_call, event_of, fingerprint, result_of, task_of

log = logging.getLogger("omniq.queue")

ROWS_PER_TRANSACTION = 1000
MAX_TEMPLATES = 10_000
Template = Callable[[Sequence[Any], dict[str, Any]], Enqueue]
Row = Sequence[Any] | dict[str, Any]


class AsyncTaskQueue:
    """Enqueues, ends, retries, cancels and finds tasks by one policy, whatever the store."""

    def __init__(self, storage: BaseStorage, settings: Settings | None = None) -> None:
        self.storage = storage
        self.settings = settings or Settings()
        self.serializer: Serializer = make_serializer(self.settings.serializer)
        self._templates: dict[Callee, Template] = {}
        self._retry_policy = self.settings.backoff
        self._lease_us = duration_us(self.settings.lease, "lease")
        self._timeout_us = (
            None if self.settings.default_timeout is None else duration_us(self.settings.default_timeout, "timeout")
        )
        self._ttl_us = duration_us(self.settings.result_ttl_seconds, "result_ttl", zero=True)
        self._key_ttl_us = duration_us(self.settings.idempotency_ttl, "idempotency_ttl")
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
        """What all calls of one function with one set of options share, checked once; the rest per call."""
        if options is NO_OPTIONS and (known := self._templates.get(func)) is not None:
            return known
        own = options
        options = options.over(func.options)
        fields = self._fields(func.name, options)
        if own.group_limit is not UNSET and fields["group"] is None:
            raise Invalid(f"group_limit={own.group_limit!r} without a group: give group=… too, whose tasks it limits")
        if func.name.startswith(f"{MAIN}:") and self.storage.capabilities.durability != "none":
            _warn_of_main(func.name)
        own_id = _set(options.task_id, None)
        if own_id is not None:
            check_id(own_id)
        # What a second enqueue under the same id or key must repeat. Where nothing can repeat, nothing is hashed.
        wants_hash = own_id is not None or fields["idempotency_key"] is not None
        body = [fields[name] for name in _BODY]
        serializer = self.serializer

        def make(args: Sequence[Any], kwargs: dict[str, Any]) -> Enqueue:
            func.check(args, kwargs)
            payload = encode_call(args, kwargs, serializer, func.parameters)
            mark = fingerprint(payload, *body) if wants_hash else ""
            return Enqueue(id=own_id or new_id(), payload=payload, fingerprint=mark, **fields)

        if own is NO_OPTIONS and len(self._templates) < MAX_TEMPLATES:
            self._templates[func] = make
        return make

    def _fields(self, name: str, options: Options) -> dict[str, Any]:
        """The fields of an `Enqueue` that options and settings decide; nonsense is refused here."""
        eta_us, delay_us, interval_us = _schedule_of(options)
        queue = _set(options.queue, self.settings.default_queue)
        check_queue(queue)
        key = _optional(options.idempotency_key)
        if key is not None:
            check_text(key, "idempotency_key")
        backoff = _set(options.backoff, self._retry_policy)
        if not isinstance(backoff, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"backoff is text like {Backoff()!s}, not {backoff!r}")
        parse_backoff(backoff)
        return {
            "name": name,
            "queue": queue,
            "encoding": self.serializer.name,
            "headers": _headers_of(options),
            "eta_us": eta_us,
            "delay_us": delay_us,
            "interval_us": interval_us,
            "timeout_us": _duration(options.timeout, "timeout", self._timeout_us),
            "lease_us": _duration(options.lease, "lease", self._lease_us),
            "result_ttl_us": _duration(options.result_ttl, "result_ttl", self._ttl_us, zero=True),
            "max_attempts": 1 + _whole(options.max_retries, "max_retries", self.settings.default_max_retries, 0),
            "backoff": backoff,
            "group": _optional(options.group),
            "group_limit": _whole(options.group_limit, "group_limit", 0, 1),
            "dead_queue": _optional(options.dead_queue),
            "blocked_by": _blockers_of(options),
            "idempotency_key": key,
            "key_ttl_us": self._key_ttl_us,
        }

    async def enqueue(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], options: Options) -> str:
        """Store one call; the id of the task, or of the first one with the same idempotency key."""
        op = self.template(callee(func), options)(args, kwargs)
        (answer,) = await self.storage.send([(op,)])
        if isinstance(answer, Refused):
            raise answer
        tell_enqueued((op,), answer)
        return cast(Enqueued, answer[0]).id

    def enqueue_blocking(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], options: Options) -> str:
        """`enqueue` from a thread without an event loop."""
        op = self.template(callee(func), options)(args, kwargs)
        (answer,) = self.storage.send_blocking([(op,)])
        if isinstance(answer, Refused):
            raise answer
        tell_enqueued((op,), answer)
        return cast(Enqueued, answer[0]).id

    async def enqueue_many(self, func: Any, rows: Iterable[Row], options: Options) -> list[str]:
        """Store a call per row, a tuple of positional or a dict of keyword arguments; their ids, in order."""
        if options.task_id is not UNSET or options.idempotency_key is not UNSET:
            raise Invalid("enqueue_many makes many tasks: an id or an idempotency key belongs to one")
        make = self.template(callee(func), options)
        ids: list[str] = []
        chunk: list[Enqueue] = []
        pending: asyncio.Future[None] | None = None
        try:
            for place, row in enumerate(rows):
                chunk.append(_make_row(make, place, row))
                if len(chunk) == ROWS_PER_TRANSACTION:
                    if pending is not None:
                        await pending
                    pending = asyncio.ensure_future(self._store(chunk))  # the next chunk is made while this one is stored
                    ids += [op.id for op in chunk]
                    chunk = []
                    await asyncio.sleep(0)
        finally:
            if pending is not None:
                await pending
        if chunk:
            await self._store(chunk)
            ids += [op.id for op in chunk]
        return ids

    async def _store(self, chunk: list[Enqueue]) -> None:
        (answer,) = await self.storage.send([tuple(chunk)])
        if isinstance(answer, Refused):
            raise answer
        tell_enqueued(chunk, answer)

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
        """What follows when a worker does not have the task's function; `last`: no other will be asked."""
        return after_unknown(task, error, self.storage.clock(), self._unknown_us, last=last)

    # -- steering one task -------------------------------------------------------------------------

    async def cancel(self, task_id: str) -> bool:
        """End a waiting task, or ask a running one to end. False for one that has ended or never was."""
        _must_be_id(task_id)
        for _ in range(3):  # it may move to its dead queue between the look and the call
            record = await self.storage.get(task_id)
            if record is None or record.state.final:
                return False
            try:
                outcome = await self.apply_one(Cancel(queue=record.queue, id=task_id))
            except TaskNotFound:
                continue
            _tell("cancel", record)
            return cast(Cancelled, outcome).state in (State.CANCELLED, State.RUNNING)
        return False

    async def requeue(self, task_id: str, *, reset_attempts: bool = False) -> None:
        """Bring a FAILED task back. Raises `NotDead` for any other, `TaskNotFound` for an unknown id."""
        _must_be_id(task_id)
        record = await self.storage.get(task_id)
        if record is None:
            raise TaskNotFound(f"no task {task_id!r} in this store")
        await self.apply_one(Requeue(queue=record.queue, id=task_id, reset_attempts=reset_attempts))
        _tell("requeue", record)

    async def remove(self, task_id: str) -> None:
        """Delete a task that is not running. Raises `NotWaiting` for one that is, `TaskNotFound` for an unknown id."""
        _must_be_id(task_id)
        record = await self.storage.get(task_id)
        if record is None:
            raise TaskNotFound(f"no task {task_id!r} in this store")
        await self.apply_one(Remove(queue=record.queue, id=task_id))
        _tell("remove", record)

    # -- out ---------------------------------------------------------------------------------------

    async def get_task(self, task_id: str) -> Task | None:
        _must_be_id(task_id)
        record = await self.storage.get(task_id)
        return None if record is None else task_of(record, self.serializer)

    async def get_result(self, task_id: str, *, wait: bool = False, timeout: float | None = None) -> TaskResult | None:
        """The result of a task that has ended, else None; with `wait`, after its end or `timeout` seconds.

        Waiting for an unknown id returns None at once.
        """
        _must_be_id(task_id)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"timeout is a number of seconds, zero or more, not {timeout!r}")
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            seen = self.storage.changes
            stored = (await self.storage.results([task_id])).get(task_id)
            if stored is not None:
                return result_of(stored, self.serializer)
            if not wait:
                return None
            record = await self.storage.get(task_id)
            if record is None:
                stored = (await self.storage.results([task_id])).get(task_id)
                return None if stored is None else result_of(stored, self.serializer)
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return None
            await self.storage.wait(tasks=[task_id], timeout=1.0 if left is None else min(left, 1.0), after=seen)

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

    # -- one or several operations -----------------------------------------------------------------

    async def apply_one(self, op: Operation) -> Any:
        (answer,) = await self.storage.send([(op,)])
        if isinstance(answer, Refused):
            raise answer
        return answer[0]

    async def store(self, batch: Batch) -> list[str]:
        """Write a batch, all or nothing; the ids its tasks have."""
        if not batch.operations:
            return []
        (answer,) = await self.storage.send([tuple(batch.operations)])
        if isinstance(answer, Refused):
            raise answer
        tell_enqueued(batch.operations, answer)
        return [cast(Enqueued, outcome).id for outcome in answer]


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
    """Tasks to be stored together. `enqueue` gives ids at once; nothing is written before the end."""

    def __init__(self, queue: AsyncTaskQueue, options: Options | None = None, operations: list[Enqueue] | None = None) -> None:
        self._queue = queue
        self._options = options or Options()
        self.operations: list[Enqueue] = [] if operations is None else operations
        self.ids: list[str] = []

    def options(self, **options: Unpack[OptionFields]) -> Batch:
        """The same batch, with options for what is enqueued through the returned object."""
        return Batch(self._queue, make_options(options).over(self._options), self.operations)

    def enqueue(
        self,
        func: Any,
        *args: Any,
        eta: datetime | timedelta | None = None,
        interval: timedelta | float | None = None,
        **kwargs: Any,
    ) -> str:
        """Add a call; its id. With an idempotency key that is taken, `ids` has the first task's id after the end."""
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
    """Warn once of a text that is no path and no task that is known here: it may be what a call of a function returned."""
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
    """The seed's two keyword options, over the others."""
    if eta is None and interval is None:
        return options
    given: dict[str, Any] = {}
    if eta is not None:
        given["eta"] = eta
    if interval is not None:
        given["interval"] = interval
    return msgspec.structs.replace(options, **given)


def _must_be_id(task_id: object) -> None:
    """Each store would say something else of it, or nothing."""
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


def _schedule_of(options: Options) -> tuple[int | None, int | None, int | None]:
    """eta, delay and interval in microseconds; a timedelta as `eta` is a delay on the store's clock."""
    eta, interval = options.eta, options.interval
    if options.schedule is not UNSET:
        eta, interval = options.schedule.eta, options.schedule.interval
    interval_us = _duration(interval, "interval", None)
    if eta is UNSET or eta is None:
        return None, None, interval_us
    if isinstance(eta, timedelta):
        return None, duration_us(eta, "eta", zero=True), interval_us
    if not isinstance(eta, datetime):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"eta must be a datetime with a time zone or a timedelta, not {eta!r}")
    return to_us(eta), None, interval_us


def _blockers_of(options: Options) -> tuple[Blocker, ...]:
    ids = _set(options.blocked_by, ())
    if isinstance(ids, str):
        raise Invalid(f"blocked_by is a list of task ids, not the text {ids!r}")
    for blocker in ids:
        check_id(blocker)
    return tuple(Blocker(i) for i in ids)


def _headers_of(options: Options) -> dict[str, str] | None:
    headers = _optional(options.headers)
    try:
        return None if headers is None else msgspec.convert(headers, dict[str, str])
    except msgspec.ValidationError as exc:
        raise Invalid(f"headers are a dict of text to text, not {headers!r}") from exc


def _whole(value: Any, what: str, default: int, least: int) -> int:
    if value is UNSET:
        return default
    if type(value) is not int or value < least:
        raise Invalid(f"{what} must be a whole number of at least {least}, not {value!r}")
    check_count(value, what, least, MAX_COUNT - 1)
    return value


def _set(value: Any, default: Any) -> Any:
    return default if value is UNSET else value


def _optional(value: Any) -> Any:
    return None if value is UNSET else value


def _duration(value: Any, what: str, default: int | None, *, zero: bool = False) -> int | None:
    if value is UNSET:
        return default
    return None if value is None else duration_us(value, what, zero=zero)
