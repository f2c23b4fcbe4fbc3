"""Workers: lease tasks in batches, run them, end them in batches, and lose nothing.

`turns.py` says how tasks come and go, `slots.py` where they wait and run, `runner.py` what a run is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self, TypedDict, Unpack

from omniq.config import Settings
from omniq.context import Middleware, log_fields
from omniq.errors import Invalid, StoreError
from omniq.following import waiting_again
from omniq.models import check_queue, duration_us
from omniq.portal import Portal
from omniq.queue import AsyncTaskQueue
from omniq.runner import Runner
from omniq.slots import Slots
from omniq.storage.base import BaseStorage
from omniq.storage.url import mask
from omniq.tasks import Resolver

log = logging.getLogger("omniq.worker")

INTERRUPTED_S = 5.0  # how long interrupted tasks may take to end when the pool stops


class WorkerOptions(TypedDict, total=False):
    """The keyword arguments of a worker pool that its makers only pass on, for editors and type checkers."""

    queues: Sequence[str] | None
    allow: Iterable[str] | None
    middleware: Sequence[Middleware]
    grace: float | None
    batch: int | None
    lease: float | timedelta | None


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
        self.grace = self._queue.settings.grace if grace is None else grace
        # NaN is neither more nor less, and must not pass.
        if not self.grace >= 0:
            raise Invalid(f"grace cannot be negative: {grace!r}")
        if isinstance(queues, str) or queues == []:
            raise Invalid(f"queues is a list of queue names, not {queues!r}")
        for name in queues or ():
            check_queue(name)
        self.storage = self._queue.storage
        self.concurrency, self.poll_interval = concurrency, poll_interval
        self.worker_id = ""
        self._named_queues = None if queues is None else tuple(queues)
        if allow is None and not self.storage.capabilities.local:
            # Whoever can write to a store of the network must not choose what runs on this machine.
            allow = ()
        self._make_slots = functools.partial(
            Slots,
            self._queue,
            Resolver(allow, lambda: self.storage.clock()),
            tuple(middleware),
            concurrency=concurrency,
            poll_s=poll_interval,
            named=self._named_queues,
            batch=batch,
            lease_us=None if lease is None else duration_us(lease, "lease"),
        )
        self._slots = self._make_slots()  # each start has slots, numbers and a name of its own
        self._started = False
        self._announced = False  # its start was logged, so its end is, too

    # -- life --------------------------------------------------------------------------------------

    @property
    def _runner(self) -> Runner:
        return self._slots.runner

    @property
    def started(self) -> bool:
        """Whether the pool runs."""
        return self._started

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
        if self.started:
            raise Invalid("this worker pool runs already")
        self._slots, self._announced = self._make_slots(), False
        presence = self._slots.presence
        self.worker_id = presence.worker
        await presence.arrive()
        # Before the slots start: when they fail, `stop` has to end what they began.
        self._started = True
        try:
            await self._slots.start()
        except StoreError:
            await self.stop(0)
            raise
        self._announced = True
        self._say("worker %s runs up to %d tasks at once of %s, on %s", self.concurrency, self._names_of_queues, self._place)

    def _say(self, text: str, *words: object) -> None:
        log.info(text, self.worker_id, *words, extra={"worker": self.worker_id})

    @property
    def _names_of_queues(self) -> str:
        if self._named_queues is None:
            return "all queues"
        return f"queue{'s' if len(self._named_queues) > 1 else ''} {', '.join(self._named_queues)}"

    @property
    def _place(self) -> str:
        return mask(self.storage.url) or type(self.storage).__name__

    async def stop(self, grace: float | None = None) -> None:
        """Take no more tasks, give back those not started, let running tasks finish for `grace` seconds, hand back the rest.

        Returns when nothing of the pool runs. A task that is handed back has not spent an attempt.
        """
        if not self.started:
            return
        self._slots.take_no_more()
        await self._until_empty(self.grace if grace is None else grace)
        for run in list(self._runner.running.values()):
            log.warning("handing back %s: still running after the grace time", run.record.name, extra=log_fields(run.record))
            run.interrupt("release")
        await self._until_empty(INTERRUPTED_S)
        self._slots.leave()
        await self._slots.close()
        self._started = False
        if self._announced:
            ended = (self.done, self.failed, self.retried)
            self._say("worker %s stopped: %d done, %d failed, %d retried, on %s", *ended, self._place)

    async def finish(self) -> None:
        """Take no more tasks, give back those not started, and return when running tasks have ended. `stop()` does the rest."""
        if self.started:
            self._slots.take_no_more()
            await self._until_empty(None)

    async def _until_empty(self, timeout: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._slots.until_empty()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.stop()

    async def drain(self) -> None:
        """Return when nothing is ready, running or waiting for a retry in the queues served. Tasks with a later `eta` stay.

        When nothing is left but tasks whose function this worker does not have, those are FAILED.
        """
        try:
            while True:
                seen = self.storage.changes
                served = set(self._named_queues or await self.storage.queues(fed=True))
                counts = [c for c in await self.storage.counts() if c.queue in served and not c.paused]
                if not any(c.ready + c.running for c in counts) and not self._slots.has_work:
                    again = await waiting_again(self.storage, counts)
                    # Retries are waited for. Tasks without a function are not: they wait for a worker that may never come.
                    if not again.retries:
                        self._give_up(again.unknown)
                        if not again.unknown and self.storage.changes == seen:  # else something moved between the looks
                            return
                await self.storage.wait(timeout=0.2, after=seen)
        finally:
            self._runner.given_up.clear()

    def _give_up(self, ids: Iterable[str]) -> None:
        """Fail these tasks when they come again and their function is still missing: no other worker will be asked."""
        self._runner.given_up.update(ids)


class WorkerPool:
    """The blocking twin of `AsyncWorkerPool`: runs it in a thread with a loop of its own."""

    def __init__(
        self,
        queue: AsyncTaskQueue | BaseStorage,
        *,
        concurrency: int = 1,
        poll_interval: float = 1.0,
        settings: Settings | None = None,
        **options: Unpack[WorkerOptions],
    ) -> None:
        self.pool = AsyncWorkerPool(queue, concurrency=concurrency, poll_interval=poll_interval, settings=settings, **options)
        self._portal = Portal("omniq-worker")
        self.storage, self.grace = self.pool.storage, self.pool.grace
        self.concurrency, self.poll_interval = concurrency, poll_interval

    @property
    def started(self) -> bool:
        """Whether the pool runs."""
        return self.pool.started

    @property
    def worker_id(self) -> str:
        """The name of this worker in the store, a new one with each start."""
        return self.pool.worker_id

    @property
    def done(self) -> int:
        """How many runs succeeded since `start()`."""
        return self.pool.done

    @property
    def failed(self) -> int:
        """How many tasks failed for good."""
        return self.pool.failed

    @property
    def retried(self) -> int:
        """How many runs failed and will be retried."""
        return self.pool.retried

    @property
    def running(self) -> int:
        """How many tasks run now."""
        return self.pool.running

    def start(self) -> None:
        """Return when the pool takes work."""
        try:
            self._portal.call(self.pool.start())
        finally:
            # A pool that did not start leaves no thread behind.
            if not self.pool.started:
                self._portal.close()

    def stop(self, grace: float | None = None) -> None:
        """Take no more tasks, give back those not started, let running tasks finish for `grace` seconds, hand back the rest.

        Returns when nothing of the pool runs. A task that is handed back has not spent an attempt.
        """
        if self.pool.started:
            try:
                self._portal.call(self.pool.stop(grace))
            finally:
                self._portal.close()

    def finish(self) -> None:
        """Take no more tasks, give back those not started, and return when running tasks have ended. `stop()` does the rest."""
        if self.pool.started:
            self._portal.call(self.pool.finish())

    def drain(self) -> None:
        """Return when nothing is ready, running or waiting for a retry in the queues served. Tasks with a later `eta` stay.

        When nothing is left but tasks whose function this worker does not have, those are FAILED.
        """
        if not self.pool.started:
            raise Invalid("this worker pool does not run; start() it first")
        self._portal.call(self.pool.drain())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
