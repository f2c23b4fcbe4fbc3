"""The slots of a worker pool: each runs one leased task after the other, and some tasks are leased ahead of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from omniq.context import Middleware, log_fields
from omniq.errors import DriverClosed, NotActive, Refused, TokenMismatch
from omniq.models import Record, from_us
from omniq.operations import Ack, Extended, Operation, Progress
from omniq.queue import AsyncTaskQueue
from omniq.runner import Holding, Runner, holding
from omniq.storage.base import Result, Transaction
from omniq.storage.sending import Unsendable
from omniq.tasks import Resolver
from omniq.turns import Turns, is_running, must_count, release

log = logging.getLogger("omniq.worker")

SHORT_TASK_S = 0.005  # only tasks shorter than this are leased ahead
AHEAD_S = 0.010  # and only as many as run in this time
MAX_AHEAD = 500
HAND_BACK_S = 0.050  # leased but not started for so long: somebody else may have a free slot


class Slots(Turns):
    """`named` are the queues to serve, in order of preference. None serves all queues that get tasks, in turn."""

    def __init__(
        self,
        queue: AsyncTaskQueue,
        resolver: Resolver,
        middleware: Sequence[Middleware],
        *,
        concurrency: int,
        poll_s: float,
        named: tuple[str, ...] | None,
        batch: int | None,
        lease_us: int | None,
    ) -> None:
        if batch is not None:
            must_count("batch", batch)
        super().__init__(
            queue.storage,
            queue.settings.retention,
            concurrency=concurrency,
            poll_s=poll_s,
            queues=named or (),
            listen_to=named or (),
            lease_us=lease_us,
            log=log,
        )
        self._named, self._batch = named, batch
        self._rotation = 0  # of the queues, so that a different one is asked first each time
        self._buffer: deque[Record] = deque()  # leased, and waiting for a slot
        self._buffered_at = 0.0  # when a slot took the last task of the buffer, or it got its first
        self._held: dict[Holding, Record] = {}  # all that is leased
        self._idle: deque[asyncio.Future[None]] = deque()  # slots that wait for a task
        self._average_s = 1.0  # how long tasks take: nothing is leased ahead before short ones have been seen
        self._slots: list[asyncio.Task[None]] = []
        self._turning: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()  # set when the last running task has ended
        self.runner = Runner(queue, resolver, middleware, self.send)
        self.runner.is_abandoned = self._is_abandoned

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when the store knows this worker. After an error, `leave` and `close` end what has begun."""
        self._loop = asyncio.get_running_loop()
        self.runner.start(self.presence.worker)
        self._turning = self._loop.create_task(self._take_turns())
        self._slots = [self._loop.create_task(self._slot()) for _ in range(self.concurrency)]
        self.presence.start()
        # A store that was closed under the pool ends the turns before the registry knows this worker.
        known = self._loop.create_task(self.known.wait())
        try:
            await asyncio.wait((known, self._turning), return_when=asyncio.FIRST_COMPLETED)
        finally:
            known.cancel()
        if self._turning.done():
            self._turning.result()

    async def _take_turns(self) -> None:
        try:
            await self.take_turns()
        except DriverClosed as exc:  # under the pool: nothing can be taken or stored any more
            self.stopping = True
            if not self.known.is_set():
                raise
            log.error("the worker stops: %s", exc, extra=self.about)

    def take_no_more(self) -> None:
        super().take_no_more()
        self._give_back_buffer()

    async def close(self) -> None:
        """After `leave()`: return when nothing of the pool runs."""
        assert self._turning is not None
        # Ends are stored by the turns, so these come first. The lock goes when nothing is left that could renew a lease.
        await asyncio.gather(self._turning, return_exceptions=True)
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await self.presence.leave()
        self.runner.close()

    def leave(self) -> None:
        self.runner.leaving = True
        super().leave()

    async def until_empty(self) -> None:
        """Return when no task runs."""
        while self.runner.running:
            self._empty.clear()
            await self._empty.wait()

    @property
    def has_work(self) -> bool:
        return bool(self._held or self._outbox)

    def _is_abandoned(self) -> bool:
        """Whether the program leaves its event loop without a `stop()`: then nothing of the pool may hold it up."""
        return self._turning is not None and self._turning.cancelling() > 0

    # -- turns -------------------------------------------------------------------------------------

    def wanted(self) -> int:
        """More than there are slots only while tasks are short, so that no worker hoards."""
        ahead = 0
        if self._average_s < SHORT_TASK_S:
            # The average hears of a long task only when it ends, and until then others would wait behind it.
            oldest = next(iter(self.runner.running.values()), None)
            if oldest is None or time.monotonic() - oldest.started < SHORT_TASK_S:
                ahead = min(int(self.concurrency * AHEAD_S / max(self._average_s, 1e-6)), MAX_AHEAD)
        wanted = max(self.concurrency + ahead - len(self._held), 0)
        return wanted if self._batch is None else min(wanted, self._batch)

    async def asked(self) -> tuple[str, ...]:
        """The list of all queues is read anew before the pool goes to sleep."""
        if self._named is not None:
            return self._named
        # While leases come back full there is enough in the queues that are known, and reading the list costs a call.
        self._asked_all = not self.queues or self._short
        if self._asked_all:
            self.queues = tuple(await self.storage.queues(fed=True))
        if len(self.queues) < 2:
            return self.queues
        self._rotation += 1
        first = self._rotation % len(self.queues)
        return self.queues[first:] + self.queues[:first]

    def take(self, tasks: Sequence[Record]) -> None:
        self.runner.telling = log.isEnabledFor(logging.DEBUG)
        if self.runner.telling:
            _tell_promoted(tasks)
        if not self._buffer:
            self._buffered_at = time.monotonic()
        self._held.update((holding(task), task) for task in tasks)
        self._buffer.extend(tasks)
        for _ in range(min(len(tasks), len(self._idle))):
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def settled(self, transaction: Transaction, answer: Result) -> None:
        op = transaction[0]
        if isinstance(answer, Refused):
            self._refused(op, answer)
        elif len(transaction) > 1 and isinstance(op, Ack):
            self.runner.joint_ended(op)
        elif isinstance(op, Progress) and cast(Extended, answer[0]).cancel_requested:
            self.runner.cancel(op)

    def _refused(self, op: Operation, refusal: Refused) -> None:
        """Mostly somebody else has the task by now: its work was done here, and will be done again there."""
        task_id = getattr(op, "id", "")
        lost = isinstance(refusal, NotActive | TokenMismatch)
        if isinstance(op, Ack) and lost:
            self.runner.joint_ended(op)
        # What a task enqueued with its ack was refused, and not the ack: then the run has failed.
        elif isinstance(op, Ack) and (again := self.runner.joint_refused(op, refusal)):
            self.send(again)
            return
        elif isinstance(refusal, Unsendable) and (instead := refusal.instead(op)):
            self.runner.failed += 1
            self.send((instead,))
            return
        log.warning("%s of task %s was refused: %s", type(op).__name__, task_id, refusal, extra={"task_id": task_id})

    async def rest(self, at_most_s: float | None = None) -> None:
        await super().rest(HAND_BACK_S if self._buffer else at_most_s)
        if self._buffer and time.monotonic() - self._buffered_at > HAND_BACK_S:
            # Nothing was started for a while, so what runs is not short any more.
            self._average_s = 1.0
            self._give_back_buffer()

    def _give_back_buffer(self) -> None:
        while self._buffer:
            task = self._buffer.popleft()
            self._held.pop(holding(task), None)
            self.send((release(task),))

    # -- slots -------------------------------------------------------------------------------------

    async def _slot(self) -> None:
        while True:
            while not self._buffer:
                # A future each, so that no more slots wake than there are tasks.
                waiter: asyncio.Future[None] = self._loop.create_future()
                self._idle.append(waiter)
                await waiter
            record = self._buffer.popleft()
            self._buffered_at = time.monotonic()
            try:
                await self._run(record)
            except BaseException:  # the task comes back when its lease runs out; the slot must live
                if self.leaving or self._is_abandoned() or not is_running(self._loop):
                    raise
                log.exception("task %s could not be ended", record.name, extra=log_fields(record))

    async def _run(self, record: Record) -> None:
        try:
            ended, took = await self.runner.run(record)
        finally:
            self._held.pop(holding(record), None)
        # Quick to believe in short tasks, which are leased ahead; slow to forget them because of a long one.
        self._average_s += (took - self._average_s) * (0.5 if took < self._average_s else 0.1)
        self.send(*ended)
        if not self.runner.running:
            self._empty.set()

    # -- what the heartbeat needs and hears --------------------------------------------------------

    def held(self) -> list[Record]:
        return list(self._held.values())

    def busy(self) -> Mapping[str, int]:
        return Counter(run.record.queue for run in list(self.runner.running.values()))

    def cancel(self, task: Record) -> None:
        self.runner.cancel(task)

    def lose(self, task: Record) -> None:
        if not self.runner.lose(task) and task in self._buffer:
            self._buffer.remove(task)
            self._held.pop(holding(task), None)
            self.send()  # there is room for another


def _tell_promoted(tasks: Iterable[Record]) -> None:
    """At DEBUG, a record for each task that waited for a time before this worker leased it."""
    for task in tasks:
        waited = task.eta_us is not None and task.eta_us > task.created_at_us
        if waited or (task.failed_at_us is not None and task.due_us > task.failed_at_us):
            due = from_us(task.due_us).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            log.debug("task %s was promoted: it was due at %s", task.name, due, extra=log_fields(task))
