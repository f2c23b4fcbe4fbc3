"""Turns: how leases and ends travel between a store and the workers that run its tasks.

A *turn* is one call of `storage.apply`: what finished, what is handed back, and the lease of the next tasks. While a turn is
under way tasks go on running and what they leave gathers for the next one, so turns grow with the load and stay small
without it. Workers and consumers are `Turns`. The TCP server answers its clients instead of trying again, so it has turns
of its own; it shares `Watch`.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from omniq.errors import DriverClosed, Invalid, Refused, StoreError
from omniq.models import Record, new_token
from omniq.operations import Ack, Release, Reserve, Reserved, Retention
from omniq.presence import Presence
from omniq.racing import woken
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.sending import Sending, pause_s

Context = TypeVar("Context")

OVERDUE_S = 0.05  # how soon to look again for what is overdue, such as a lease that somebody must take back first
# Some two seconds with the pauses between them: a short failover is waited for, and a program that was told to end does end.
LAST_TRIES = 6  # when the store is away at the end
LAST_PAUSE_S = 1.0


class Turns(abc.ABC):
    """Leases tasks for a subclass that runs them, stores what became of them, and shows the store who it is.

    `queues` are those that are served, `listen_to` those whose bell is heard: none means all.
    """

    def __init__(
        self,
        storage: BaseStorage,
        retention: Retention,
        *,
        concurrency: int,
        poll_s: float,
        queues: tuple[str, ...],
        listen_to: tuple[str, ...] = (),
        lease_us: int | None = None,
        log: logging.Logger,
    ) -> None:
        must_count("concurrency", concurrency)
        if not 0 < poll_s < 86_400:
            raise Invalid(f"poll_interval must be more than 0 seconds, not {poll_s!r}")
        self.storage, self.concurrency, self.queues = storage, concurrency, queues
        self.presence = Presence(
            storage,
            retention,
            held=self.held,
            queues=lambda: self.queues,
            busy=self.busy,
            on_cancel=self.cancel,
            on_lost=self.lose,
            concurrency=concurrency,
            lease_us=lease_us,
        )
        self._lease_us, self._log = lease_us, log
        self._watch = Watch(storage, listen_to, poll_s, self._rung)
        self._outbox: list[Transaction] = []
        self._unsent: Sending | None = None  # a call without all of its answers; nothing overtakes it
        self._wake = asyncio.Event()  # there is something to do
        self._hurry = asyncio.Event()  # ends the pause after a failure: whoever asks to leave need not wait
        self._failures = 0  # in a row
        self.known = asyncio.Event()  # the registry has this worker; until then each call brings a beat
        self._seen = 0  # the store's count of changes before the last look
        self._short = False  # the last lease brought less than was wanted
        self._asked_all = True  # of a worker of all queues: the last lease was asked of a list that was new
        self._dry = False  # nothing is left to lease, until the store rings or something finishes
        self._next_at_us: int | None = None  # when something of the queues falls due or runs out
        self._paused = False  # a queue was skipped: what is overdue in it stays so
        self.stopping = False  # no new leases; what runs may finish
        self.leaving = False  # nothing runs any more: only what gathered is still stored

    # -- what a subclass brings --------------------------------------------------------------------

    @abc.abstractmethod
    def wanted(self) -> int:
        """How many more tasks to lease now."""

    @abc.abstractmethod
    def take(self, tasks: Sequence[Record]) -> None:
        """These tasks were leased: run them."""

    @abc.abstractmethod
    def settled(self, transaction: Transaction, answer: Result) -> None:
        """The store has answered a transaction. Not called for an ack alone that was taken, as most answers are."""

    @abc.abstractmethod
    def held(self) -> list[Record]:
        """The tasks whose leases are to be kept. Called in another thread."""

    @abc.abstractmethod
    def busy(self) -> Mapping[str, int]:
        """How many tasks of each queue run. Called in another thread."""

    @abc.abstractmethod
    def cancel(self, task: Record) -> None:
        """Somebody asked for the task to end."""

    @abc.abstractmethod
    def lose(self, task: Record) -> None:
        """The lease of the task is gone: somebody else may have it by now."""

    async def asked(self) -> tuple[str, ...]:
        """The queues to lease from, in order."""
        return self.queues

    # -- what it does ------------------------------------------------------------------------------

    def send(self, *transactions: Transaction) -> None:
        """Store these in the next turn."""
        self._outbox += transactions
        self._wake.set()

    def take_no_more(self) -> None:
        self.stopping = True
        self._wake.set()

    def leave(self) -> None:
        """Let `take_turns` return when everything is stored, or after some tries."""
        self.stopping = self.leaving = True
        self._hurry.set()
        self._wake.set()

    async def take_turns(self, cancelled: int = 0) -> None:
        """Take turns until `leave()`. Raises `DriverClosed` when the storage object was closed meanwhile.

        `cancelled` is how many cancellations of the asyncio task were heard before: a client library below may swallow another.
        """
        while True:
            self._wake.clear()
            await self._turn()
            if cancellations() > cancelled:
                raise asyncio.CancelledError
            at_rest = not self._outbox and self._unsent is None
            if self.leaving and at_rest:
                return
            if self.leaving and self._failures >= LAST_TRIES:
                self._log.error("leaving without the store; what was not stored comes back by its lease", extra=self.about)
                return
            if at_rest and (self.stopping or self._dry or not self.wanted()):
                await self.rest()

    @property
    def about(self) -> dict[str, Any]:
        """The fields of its log lines."""
        return {"worker": self.presence.worker}

    async def _turn(self) -> None:
        try:
            if self._unsent is None:
                transactions = await self._gathered()
                if not transactions:
                    return
                self._unsent = Sending(transactions)
            sending = self._unsent
            answers = await sending.send(self.storage)
        except DriverClosed:
            raise
        except StoreError as exc:
            await self.back_off(exc)
            return
        self._unsent = None
        self.known.set()
        # Looked at when all answers were read: acks of the same turn have been stored whatever became of its lease.
        refusal: Refused | None = None
        for transaction, answer in zip(sending.transactions, answers, strict=True):
            op = transaction[0]
            if isinstance(op, Reserve):
                if isinstance(answer, Refused):
                    refusal = answer
                else:
                    self._leased(op, cast(Reserved, answer[0]))
            # Nearly all answers are those to an ack alone, which was taken and concerns nobody: they cost no call.
            elif len(transaction) > 1 or isinstance(answer, Refused) or not isinstance(op, Ack):
                self.settled(transaction, answer)
        if refusal is not None:
            await self.back_off(refusal)
        else:
            self._failures = 0

    async def _gathered(self) -> list[Transaction]:
        reserve = await self._next_reserve()  # may fail: the outbox is emptied only then
        transactions, self._outbox = self._outbox, []
        if reserve is not None:
            transactions.append((reserve,))
        if not self.known.is_set():
            transactions.append(self.presence.beat())
        return transactions

    async def _next_reserve(self) -> Reserve | None:
        wanted = self.wanted()
        # What ends may make room in its group or free its dependents: then the call that is made anyway also asks for tasks.
        if not wanted or self.stopping or (self._dry and not self._outbox):
            return None
        self._seen = self.storage.changes  # before the look, so that nothing after it is missed
        queues = await self.asked()
        if not queues:
            self._dry = True
            return None
        worker = self.presence.worker
        return Reserve(queues=queues, limit=wanted, token=new_token(), lease_us=self._lease_us, worker=worker)

    def _leased(self, op: Reserve, reserved: Reserved) -> None:
        tasks = reserved.tasks
        self._short = len(tasks) < op.limit
        self._dry = self._short and self._asked_all  # else there may be queues that were not looked at
        self._next_at_us, self._paused = reserved.next_at_us, bool(reserved.paused)
        if self.stopping:
            self.send(*((release(task),) for task in tasks))
        elif tasks:
            self.take(tasks)
            self.presence.take(tasks)

    async def rest(self, at_most_s: float | None = None) -> None:
        """Wait until something has finished, the store rings, or a time has come."""
        if self._dry and not self.stopping and self.wanted():  # else nothing that the store could say matters now
            self._watch.begin(self._seen, self._next_at_us, paused=self._paused)
        try:
            await woken(self._wake, at_most_s)
        finally:
            self._watch.end()

    def _rung(self) -> None:
        self._dry = False
        self._wake.set()

    async def back_off(self, exc: Exception) -> None:
        self._failures += 1
        # Spread, so that not all workers meet a store in the moment in which it is back.
        pause = pause_s(self._failures) * random.uniform(0.5, 1)  # noqa: S311
        self._log.error("the store failed, it will be tried again in %.1f s: %s", pause, exc, extra=self.about)
        if self.leaving:
            await asyncio.sleep(min(pause, LAST_PAUSE_S))
        else:
            await woken(self._hurry, pause)


class Watch:
    """Rings when there may be something to lease: the store says so, the next task falls due, or the next lease ends."""

    def __init__(self, storage: BaseStorage, queues: Sequence[str], poll_s: float, ring: Callable[[], None]) -> None:
        self._storage, self._queues, self._poll_s, self._ring = storage, queues, poll_s, ring
        self._listening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seen: int, next_at_us: int | None, *, paused: bool) -> None:
        """Begin to watch, since nothing is there now. `seen` is the store's count of changes from before it was asked."""
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen(seen))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_at_us is None:
            return
        left = (next_at_us - self._storage.clock()) / 1e6
        if left > 0 or not paused:  # what is overdue in a paused queue stays so
            # A little after the moment: the store's clock must have passed it.
            pause = left + 0.0005 if left > 0 else OVERDUE_S
            self._timer = asyncio.get_running_loop().call_later(pause, self._ring)

    async def _listen(self, seen: int) -> None:
        """From the second time on the next wait is under way before anybody looks, so nothing is missed in between."""
        after: int | None = seen
        failures = 0
        while True:
            try:
                await self._storage.wait(self._queues, timeout=self._poll_s, after=after)
                failures = 0
            except Exception:  # whoever looks then hears what is wrong
                failures += 1
                await asyncio.sleep(pause_s(failures))
            after = None
            self._ring()

    def end(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Run(Generic[Context]):
    """A leased task while it runs."""

    __slots__ = ("begun", "context", "deadline", "ending", "is_async", "record", "started", "task")
    task: asyncio.Task[None]  # set by whoever starts it

    def __init__(self, record: Record, context: Context) -> None:
        self.record, self.context = record, context
        self.started = time.monotonic()
        self.is_async = self.begun = False  # until its function is found
        self.ending: str | None = None  # why it was interrupted: "timeout", "cancel", "lost" or "release"
        self.deadline = math.inf

    def interrupt(self, reason: str) -> None:
        if self.ending is None:
            self.ending = reason
            self.task.cancel()

    @property
    def ran_us(self) -> int:
        return int((time.monotonic() - self.started) * 1e6)


def must_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Invalid(f"{name} must be a whole number of at least 1, not {value!r}")


def release(task: Record) -> Release:
    """Hand a task back unused."""
    return Release(queue=task.queue, id=task.id, token=cast(str, task.token), late=True)


def cancellations() -> int:
    """How often somebody asked the asyncio task that runs now to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop still runs: Python also throws GeneratorExit into coroutines whose loop is gone."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
