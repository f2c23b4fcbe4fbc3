"""The driver contract: drivers store, the core decides.

A driver implements `_apply`, `_apply_blocking` and the looking and steering calls; everything else here is written once
over them. A call of `apply` is a list of transactions, a transaction a tuple of operations (`omniq.operations`). Each
transaction is all or nothing; a refused one returns its error in its place while the others go on. Only failures of the
store itself are raised. All times are integer microseconds; `now_us=None` means the store's own clock.
"""

from __future__ import annotations

import abc
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from omniq.errors import Invalid, NotActive, Refused, TaskNotFound
from omniq.models import (
    Record,
    State,
    StoredResult,
    Task,
    TaskError,
    TaskResult,
    duration_us,
    new_token,
    now_us,
    to_us,
)
from omniq.operations import (
    KEY_TTL_US,
    Ack,
    Acked,
    Capabilities,
    Enqueued,
    EventRow,
    Extend,
    Extended,
    Fail,
    Failed,
    Filter,
    GroupInfo,
    Lease,
    Operation,
    Outcome,
    Page,
    QueueCounts,
    Reschedule,
    Rescheduled,
    Reserve,
    Reserved,
    Retention,
    Retried,
    Retry,
    RunInfo,
    Saved,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.policy import after_loss
from omniq.retention import CutOffs, cut_offs
from omniq.serialization import MsgspecSerializer, Serializer
from omniq.storage import arguments
from omniq.storage.checks import Transaction, check_now, check_transactions
from omniq.storage.cursors import SCAN_LIMIT
from omniq.storage.scanning import Range, ranges_of, scan_range
from omniq.storage.sending import Repeats, Sending, until_answered, until_answered_blocking
from omniq.storage.tables import Columns, Condition
from omniq.storage.url import mask, open_url
from omniq.storage.waiting import Waiters
from omniq.translate import enqueue_of, result_of, task_of

log = logging.getLogger("omniq.storage")

Result = list[Outcome] | Refused
Expected = TypeVar("Expected", bound=Outcome)


class BaseStorage(abc.ABC):
    """One store of tasks. Opens itself at its first call, is safe to use from any thread and any event loop."""

    capabilities: Capabilities
    default_url = ""  # the settings open it where they name this backend and no URL; without one they ask for a URL
    stage_rows = 5000  # tasks of one `Stage` that keep other callers waiting no longer than they should
    scan_limit = SCAN_LIMIT
    longest_wait_s: float | None = None  # how long a wait lasts at most, where writers of other programs ring no bell

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        # A driver's own methods too: no driver can forget to refuse what no store can keep.
        for name in arguments.CALLS:
            if name in cls.__dict__:
                setattr(cls, name, arguments.checked(cls.__dict__[name]))

    def __init__(self, *, clock: Callable[[], int] = now_us, serializer: Serializer | None = None, events: bool = True) -> None:
        self.clock = clock
        self.serializer: Serializer = serializer or MsgspecSerializer()
        self.events_on = events
        self.waiters = Waiters()
        self._held: dict[str, Record] = {}  # what `dequeue` handed out: seed-named calls carry no token

    @classmethod
    def from_url(cls, url: str, **options: Any) -> BaseStorage:
        """The storage that a URL names: `memory://`, `sqlite:///path.db`, `file:///dir`, or a scheme of another package."""
        return cast(BaseStorage, open_url(url, options))

    @property
    def url(self) -> str:
        """The URL that opens this store from any working folder, without options; empty for a store that has none."""
        return ""

    @property
    def place(self) -> str | None:
        """The file or folder of this machine that holds the store; None for a server, and inside a process."""
        return None

    # -- life --------------------------------------------------------------------------------------

    async def exists(self) -> bool:
        """Whether there is a store to open, without making one. Where nothing has to be made, there always is."""
        return True

    @abc.abstractmethod
    async def open(self) -> None:
        """Open and create or migrate the store; needless before other calls, harmless when repeated."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close everything. Twice is harmless; any later call raises `DriverClosed`."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    # -- the one way to change something -----------------------------------------------------------

    async def apply(
        self, transactions: Sequence[Transaction], now_us: int | None = None, *, repeat: bool = False
    ) -> list[Result]:
        """Carry out each transaction, all or nothing, in order; one answer each.

        `repeat=True` says that the same call may have been carried out already (after `OutcomeUnknown`); `send` does that by
        itself. Raises `Invalid` before anything is sent, and `StoreError` when the store failed.
        """
        self._check(transactions, now_us)
        return await self._apply(transactions, now_us, repeat)

    def apply_blocking(
        self, transactions: Sequence[Transaction], now_us: int | None = None, *, repeat: bool = False
    ) -> list[Result]:
        """`apply` from any thread, also while the event loop is blocked."""
        self._check(transactions, now_us)
        return self._apply_blocking(transactions, now_us, repeat)

    async def send(
        self, transactions: Sequence[Transaction], now_us: int | None = None, *, patient: bool = False
    ) -> list[Result]:
        """`apply` for whoever waits for this one call: what stays without an answer is sent again, for some seconds.

        With `patient`, so is what a store that is away has not taken. Raises `OutcomeUnknown` only when the repeats failed too;
        the text says what is known.
        """
        self._check(transactions, now_us)
        # Checked once, before the first call: each repeat sends the very same transactions.
        repeats = Repeats(transactions, patient=patient)
        return repeats.read(await until_answered(lambda repeat: self._apply(transactions, now_us, repeat), repeats))

    def send_blocking(
        self, transactions: Sequence[Transaction], now_us: int | None = None, *, patient: bool = False
    ) -> list[Result]:
        """`send` from any thread."""
        self._check(transactions, now_us)
        repeats = Repeats(transactions, patient=patient)
        return repeats.read(until_answered_blocking(lambda repeat: self._apply_blocking(transactions, now_us, repeat), repeats))

    async def transact(self, operations: Transaction, now_us: int | None = None) -> list[Outcome]:
        """`send` of one transaction. Raises what refuses it."""
        (answer,) = await self.send([operations], now_us)
        if isinstance(answer, Refused):
            raise answer
        return answer

    def _check(self, transactions: Sequence[Transaction], now_us: int | None) -> None:
        if now_us is not None:
            check_now(now_us)
        self.check_call(transactions)

    def check_call(self, transactions: Sequence[Transaction]) -> None:
        """Raise `Invalid` for what `apply` would not even send."""
        check_transactions(transactions, self.capabilities)

    @abc.abstractmethod
    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]: ...

    @abc.abstractmethod
    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]: ...

    @abc.abstractmethod
    async def allocate_ids(self, n: int) -> int:
        """The first of `n` consecutive integers never given before; they stay used whatever follows."""

    # -- waiting -----------------------------------------------------------------------------------

    @property
    def changes(self) -> int:
        """Counts what this process has heard of; read it before you look and pass it to `wait` as `after`."""
        return self.waiters.changes

    async def wait(
        self,
        queues: Iterable[str] = (),
        tasks: Iterable[str] = (),
        events: bool = False,
        timeout: float | None = None,
        *,
        after: int | None = None,
    ) -> None:
        """Return when one of these queues may have work, one of these tasks may have ended, or time is up.

        A hint: it may return early. With nothing named, any change wakes.
        """
        # Only an open store hears the bell of other processes, and the very first wait has to hear it too.
        await self.open()
        if self.longest_wait_s is not None:
            timeout = self.longest_wait_s if timeout is None else min(timeout, self.longest_wait_s)
        await self.waiters.wait(queues, tasks, events, timeout, after)

    # -- upkeep ------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        """Returns leases that ran out, or whose worker is lost. Reads only: `policy.after_loss` decides what to apply."""

    @abc.abstractmethod
    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        """Finish what was decided but too much for one transaction. Returns how many tasks moved."""

    @arguments.checked
    async def purge(self, retention: Retention, now_us: int | None = None, limit: int = 1000) -> int:
        """Delete what is past its time, at most about `limit` of each kind. Returns how many things went."""
        return await self._purge(cut_offs(retention, await self._moment(now_us), limit))

    @abc.abstractmethod
    async def _purge(self, cut: CutOffs) -> int:
        """Delete up to the cut-offs, which `omniq.retention` explains. Returns how many things went."""

    async def _moment(self, now_us: int | None) -> int:
        """Returns the moment of a call: a given one, or now by the store's own clock."""
        return self.clock() if now_us is None else now_us

    @abc.abstractmethod
    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        """Make due tasks ready now rather than at the next `Reserve`. Returns how many there were."""

    async def hold_worker(self, worker: str) -> None:  # noqa: B027 - an optional ability
        """Take a lock that the kernel lets go when this process dies, where the driver can."""

    async def release_worker(self, worker: str) -> None:  # noqa: B027
        """Release the lock of `hold_worker`."""

    async def lost_workers(self) -> list[str]:
        """Workers on this host whose process died; elsewhere the lease decides."""
        return []

    @abc.abstractmethod
    async def check(self, repair: bool = False) -> list[str]:
        """Returns what is wrong with the store, one sentence each. With `repair`, counters and lanes are recounted."""

    async def backup(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of the store, as it is at one moment, to a path that is not there yet, while others work on.

        Raises `Invalid` where there is something, and on a store that is not made of files.
        """
        raise Invalid(f"{type(self).__name__} has no files to copy: back up what it runs on, by its own means")

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        """Take in tasks of another store as they stand, blockers before their dependents. Returns how many were new.

        A task whose id is there stays as it is. A running one comes back unused, since its holder works elsewhere. A staged one
        is left out, since its run is not here; one that is staged here goes, as when its id is enqueued. An idempotency key
        lives `key_ttl_us` from its task's creation. Writes no events; only with `capabilities.restores`.
        """
        raise Invalid(f"{type(self).__name__} cannot take in the tasks of another store")

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        """Append events of another store, in the order given and with their own times; they get numbers of this store."""
        raise Invalid(f"{type(self).__name__} cannot take in the events of another store")

    # -- looking -----------------------------------------------------------------------------------

    @abc.abstractmethod
    async def get(self, id: str, queue: str | None = None) -> Record | None: ...

    @abc.abstractmethod
    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        """Returns the results of those tasks that have one, by task id."""

    @abc.abstractmethod
    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page: ...

    @abc.abstractmethod
    async def counts(self, now_us: int | None = None) -> list[QueueCounts]: ...

    @abc.abstractmethod
    async def queues(self, fed: bool = False) -> list[str]:
        """The queues of this store; with `fed`, only those that tasks were enqueued to (no mere dead queues)."""

    @abc.abstractmethod
    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]: ...

    @abc.abstractmethod
    async def workers(self, now_us: int | None = None) -> list[WorkerInfo]: ...

    @abc.abstractmethod
    async def info(self) -> StoreInfo: ...

    @abc.abstractmethod
    async def event_shards(self) -> list[Shard]: ...

    @abc.abstractmethod
    async def events(self, shard: str = "", after: int = 0, limit: int = 1000, upto: int | None = None) -> list[EventRow]:
        """Events after `after`, oldest first. Raises `EventsLost` when some of them were purged."""

    @abc.abstractmethod
    async def events_of(self, id: str) -> list[EventRow]: ...

    @abc.abstractmethod
    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        """Returns a staged run as the store counts it; None for one that was never opened or is long over."""

    @abc.abstractmethod
    async def task_shards(self) -> list[Shard]:
        """Returns the first and last number of the kept tasks, for each part of the store that counts on its own."""

    @abc.abstractmethod
    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        """Returns tasks with numbers after `after` and up to `upto`, oldest first, and the last number that the page covers."""

    async def ranges(self, table: str, parts: int) -> list[Range]:
        return await ranges_of(self, table, parts)

    def scan(self, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int) -> AsyncIterator[Columns]:
        """The rows of a range as column batches; drivers that can do better than records do it here."""
        return scan_range(self, range, columns, where, rows)

    def scan_blocking(
        self, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int
    ) -> Iterator[Columns] | None:
        """The same in the thread of the caller, from drivers that can; None means `scan`."""
        return None

    async def locate(self, id: str) -> str | None:
        """Returns the queue that a task is in now; None for an unknown id."""
        task = await self.get(id)
        return None if task is None else task.queue

    # -- steering ----------------------------------------------------------------------------------

    @abc.abstractmethod
    async def pause(self, queue: str) -> None:
        """Stop granting tasks of this queue from the moment this returns; everything else goes on."""

    @abc.abstractmethod
    async def resume(self, queue: str) -> bool:
        """Undo `pause`. Returns whether the queue was paused."""

    @abc.abstractmethod
    async def is_paused(self, queue: str) -> bool: ...

    @abc.abstractmethod
    async def set_group_limit(self, queue: str, group: str, limit: int) -> None: ...

    # -- the library's names (tasks, datetimes, no tokens) -----------------------------------------

    async def enqueue(self, task: Task) -> str:
        """Store a task, return its id. The same task again changes nothing; another body under its id raises `DuplicateId`."""
        outcome = await self._one(enqueue_of(task, self.serializer), Enqueued)
        return outcome.id

    async def dequeue(self, now: datetime) -> Task | None:
        """Lease the next due task of any queue, or None. This storage object remembers the token."""
        at = to_us(now)
        # No worker's upkeep need be running beside these calls, so whoever asks for a task takes back the lost ones first.
        await self.reclaim(at)
        queues = tuple(await self.queues(fed=True))
        if not queues:
            return None
        reserved = await self._one(Reserve(queues=queues, token=new_token()), Reserved, at)
        if not reserved.tasks:
            return None
        record = reserved.tasks[0]
        self._held[record.id] = record
        return task_of(record, self.serializer)

    async def mark_running(self, task_id: str) -> None:
        """Say that a dequeued task runs; it does since `dequeue`, so this only checks that it is held here."""
        self._holding(task_id)

    async def mark_done(self, task_id: str, result: TaskResult) -> None:
        held = self._holding(task_id)
        data = self.serializer.encode(result.result)
        await self._one(Ack(**_held(held), result=data, encoding=self.serializer.name), Acked)
        del self._held[task_id]

    async def mark_failed(self, task_id: str, error: TaskError, will_retry: bool) -> None:
        """Record a failed run: at once ready again with `will_retry`, else a dead letter."""
        held = self._holding(task_id)
        if will_retry:
            await self._one(Retry(**_held(held), error=error.cut()), Retried)
        else:
            await self._one(Fail(**_held(held), error=error.cut()), Failed)
        del self._held[task_id]

    async def get_result(self, task_id: str) -> TaskResult | None:
        """Returns the decoded result of a task that has ended; None before, and for an unknown id."""
        stored = (await self.results([task_id])).get(task_id)
        return None if stored is None else result_of(stored, self.serializer)

    async def purge_results(self, older_than: datetime) -> int:
        """Delete results that were stored before `older_than`, with their ended tasks. Returns how many results there were."""
        return await self._purge_results(to_us(older_than))

    @abc.abstractmethod
    async def _purge_results(self, older_than_us: int) -> int: ...

    async def reschedule(self, task_id: str, new_eta: datetime) -> None:
        queue = await self.locate(task_id)
        if queue is None:
            raise TaskNotFound(f"no task {task_id!r} in this store")
        await self._one(Reschedule(queue=queue, id=task_id, eta_us=to_us(new_eta)), Rescheduled)

    # -- the driver's names (strict: a lease that ran out is refused) ------------------------------

    async def reserve(
        self, queue: str, lease: float | timedelta, *, now: datetime | None = None, worker: str = ""
    ) -> Record | None:
        """Lease one task of a queue; expired leases are reclaimed first."""
        at = None if now is None else to_us(now)
        await self.reclaim(at, [queue])
        op = Reserve(queues=(queue,), token=new_token(), lease_us=_lease_us(lease), worker=worker)
        tasks = (await self._one(op, Reserved, at)).tasks
        return tasks[0] if tasks else None

    async def ack(
        self, id: str, token: str, *, result: Any = None, queue: str | None = None, now: datetime | None = None
    ) -> None:
        held: dict[str, Any] = {"queue": queue or await self._queue_of(id), "id": id, "token": token}
        data = None if result is None else self.serializer.encode(result)
        await self._one(Ack(**held, result=data, encoding=self.serializer.name), Acked, _at(now))

    async def retry(
        self,
        id: str,
        token: str,
        *,
        run_at: datetime | None = None,
        attempts: int | None = None,
        error: TaskError | None = None,
        queue: str | None = None,
        now: datetime | None = None,
    ) -> None:
        held: dict[str, Any] = {"queue": queue or await self._queue_of(id), "id": id, "token": token}
        op = Retry(**held, due_us=_at(run_at), attempts=attempts, error=error)
        await self._one(op, Retried, _at(now))

    async def fail(
        self,
        id: str,
        token: str,
        *,
        error: TaskError | None = None,
        queue: str | None = None,
        now: datetime | None = None,
    ) -> None:
        held: dict[str, Any] = {"queue": queue or await self._queue_of(id), "id": id, "token": token}
        await self._one(Fail(**held, error=error), Failed, _at(now))

    async def extend_lease(
        self, id: str, token: str, lease: float | timedelta, *, queue: str | None = None, now: datetime | None = None
    ) -> int:
        """Returns the new end of the lease, in microseconds."""
        held: dict[str, Any] = {"queue": queue or await self._queue_of(id), "id": id, "token": token}
        return (await self._one(Extend(**held, lease_us=_lease_us(lease)), Extended, _at(now))).lease_until_us

    # -- reaping -----------------------------------------------------------------------------------

    async def reclaim(
        self,
        now_us: int | None = None,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
        limit: int = 1000,
    ) -> int:
        """Take back leases that ran out or whose worker is lost: read, decide, apply. Returns the number of them."""
        lost = await self.expired(now_us, limit, queues, lost_workers)
        if not lost:
            return 0
        at = self.clock() if now_us is None else now_us
        # The random number parts tasks that were lost together: one that kills its worker shall not meet the others again.
        ends = [after_loss(lease, at, random.random()) for lease in lost]  # noqa: S311
        answers = await Sending([(end,) for end in ends], now_us).send(self)
        taken = [not isinstance(answer, Refused) for answer in answers]  # a refusal only means that another was faster
        for lease, end, done in zip(lost, ends, taken, strict=True):
            if done:
                _tell_loss(lease.record, end)
        return sum(taken)

    # -- one operation -----------------------------------------------------------------------------

    async def _one(self, op: Operation, kind: type[Expected], at: int | None = None) -> Expected:
        return cast(Expected, (await self.transact((op,), at))[0])

    def _holding(self, task_id: str) -> Record:
        held = self._held.get(task_id)
        if held is None:
            raise NotActive(f"task {task_id!r} was not dequeued through this storage object")
        return held

    async def _queue_of(self, id: str) -> str:
        queue = await self.locate(id)
        if queue is None:
            raise TaskNotFound(f"no task {id!r} in this store")
        return queue


def must_be_storage(storage: object) -> None:
    """Raise `TypeError` for a URL or a class in the place of a storage, before it fails somewhere inside."""
    if not isinstance(storage, BaseStorage):
        shown = mask(repr(storage))
        raise TypeError(f"give a storage, such as SQLiteStorage('omniq.db'), not {shown}; a URL is for from_url(…)")


def _tell_loss(task: Record, end: Operation) -> None:
    fields = {"task_id": task.id, "queue": task.queue, "task_name": task.name, "attempt": task.attempts, "worker": task.worker}
    if isinstance(end, Fail):
        log.error("task %s failed for good: %s", task.name, end.error, extra=fields)
    else:
        log.debug("task %s is taken back: %s", task.name, getattr(end, "error", None), extra=fields)


def _held(task: Record) -> dict[str, Any]:
    return {"queue": task.queue, "id": task.id, "token": task.token}


def _at(moment: datetime | None) -> int | None:
    return None if moment is None else to_us(moment)


def _lease_us(lease: float | timedelta) -> int:
    from omniq.errors import InvalidLease

    try:
        return duration_us(lease, "lease")
    except Invalid as exc:
        raise InvalidLease(str(exc)) from None


__all__ = ["BaseStorage", "Result", "State", "Transaction"]
