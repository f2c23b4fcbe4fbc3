"""How a store knows its workers: a name, a lock, a row in the registry, heartbeats, and a share of the upkeep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from omniq.errors import Refused, StoreError
from omniq.models import DEFAULT_LEASE_US, Record, new_id
from omniq.operations import Beat, Extend, Extended, Operation, Retention, WorkerInfo
from omniq.storage.base import BaseStorage
from omniq.storage.sending import Sending, Unsendable
from omniq.upkeep import Upkeep

log = logging.getLogger("omniq.worker")

TELL_S = 1.0  # how soon the registry hears that other functions run; what is over by then is not told
BATCH = 500  # tasks in one call, so that turns need not wait long behind it
SILENT_S = 10.0  # and how long it hears nothing at most, however long the leases are


class Presence:
    """A holder of leases in its store, from `arrive` to `leave`.

    `held`, `queues` and `busy` are also asked in the thread of the heartbeat. `on_cancel` and `on_lost` are called on the event
    loop, for a task that somebody wants to end and for one whose lease is gone.
    """

    def __init__(
        self,
        storage: BaseStorage,
        retention: Retention,
        *,
        held: Callable[[], Sequence[Record]],
        queues: Callable[[], tuple[str, ...]],
        busy: Callable[[], Mapping[str, int]],
        on_cancel: Callable[[Record], None],
        on_lost: Callable[[Record], None],
        concurrency: int = 0,
        lease_us: int | None = None,
        prefix: str = "",
    ) -> None:
        # Host and process are for people. The end tells two pools of a process apart, and two processes of one number.
        self.worker = f"{prefix}{socket.gethostname()}:{os.getpid()}:{new_id()[-8:]}"
        self._storage, self._retention, self._held = storage, retention, held
        self._queues, self._busy, self._concurrency = queues, busy, concurrency
        self._on_cancel, self._on_lost, self._lease_us = on_cancel, on_lost, lease_us
        self._started_us = 0
        self._heartbeat: Heartbeat | None = None

    async def arrive(self) -> None:
        """Take the lock that shows that this process lives."""
        await self._storage.hold_worker(self.worker)
        self._started_us = self._storage.clock()

    def start(self) -> None:
        """Begin with heartbeats and upkeep. The caller stores the first `beat` itself, together with its first lease."""
        self._loop = asyncio.get_running_loop()
        self._upkeep = Upkeep(self._storage, self._retention, self.worker)
        self._keeping = self._loop.create_task(self._upkeep.run())
        lost, cancelled = self._on_loop(self._on_lost), self._on_loop(self._on_cancel)
        self._heartbeat = Heartbeat(self._storage, self._held, self.info, cancelled, lost, self._lease_us)
        self._heartbeat.start()

    def _on_loop(self, call: Callable[[Record], None]) -> Callable[[Record], None]:
        def soon(task: Record) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(call, task)

        return soon

    def take(self, tasks: Sequence[Record]) -> None:
        """Keep the leases of these tasks, too."""
        assert self._heartbeat is not None
        self._heartbeat.take(tasks)

    def info(self) -> WorkerInfo:
        busy = dict(self._busy())
        return WorkerInfo(
            worker=self.worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._queues(),
            running=sum(busy.values()),
            busy=busy,
            concurrency=self._concurrency,
            started_at_us=self._started_us,
        )

    def beat(self, *, gone: bool = False) -> tuple[Operation, ...]:
        return (Beat(info=self.info(), gone=gone),)

    async def leave(self) -> None:
        """End heartbeats and upkeep, if they began, and leave the registry."""
        if self._heartbeat is not None:
            self._upkeep.end.set()
            await asyncio.gather(self._keeping, return_exceptions=True)
            # In a thread, since a beat that is under way may wait for its store.
            await asyncio.to_thread(self._heartbeat.stop)
        try:
            await self._storage.apply([self.beat(gone=True)])
        except StoreError as exc:
            log.warning("leaving without a word to the store: %s", exc, extra={"worker": self.worker})
        # After the row: a row whose lock is free is what a killed worker leaves.
        await self._storage.release_worker(self.worker)


class Heartbeat:
    """Prolongs the leases of a worker at a third of the shortest one, and hears of cancellations and lost leases.

    Between these beats it tells the registry of workers when other functions run than before. `on_cancel` and `on_lost` are
    called in the thread. `lease_us` is how long leases are, where it is not as each task says.
    """

    def __init__(
        self,
        storage: BaseStorage,
        held: Callable[[], Sequence[Record]],
        info: Callable[[], WorkerInfo],
        on_cancel: Callable[[Record], None],
        on_lost: Callable[[Record], None],
        lease_us: int | None = None,
    ) -> None:
        self._storage, self._held, self._info = storage, held, info
        self._on_cancel, self._on_lost = on_cancel, on_lost
        self._lease_us = lease_us
        self._shortest_us = self._shortest(())
        self._told = info()  # whoever starts a heartbeat has just registered, or is about to
        self._changed = threading.Event()
        # Nothing is held and the registry knows: the thread sleeps, and a task that is taken has to wake it.
        self._at_rest = False
        self._ending = False
        # Not on the event loop, where a task that blocks it would cost all others their leases.
        self._thread = threading.Thread(target=self._beat_on, name="omniq-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending = True
        self._changed.set()
        self._thread.join()

    def take(self, tasks: Sequence[Record]) -> None:
        """Hold these tasks, too. A shorter lease makes the next beat come earlier."""
        shortest = self._shortest(tasks)
        if shortest < self._shortest_us or self._at_rest:
            self._shortest_us, self._at_rest = min(shortest, self._shortest_us), False
            self._changed.set()

    def _beat_on(self) -> None:
        beaten = spoken = time.monotonic()
        watched: float | None = None  # since when other functions may run than the registry was told
        while not self._ending:
            now = time.monotonic()
            if watched is None and self._may_have_news():
                watched = now
            full, word = beaten + self._shortest_us / 3e6, spoken + SILENT_S
            if watched is not None:
                word = min(word, watched + TELL_S)
            # Never without a pause: a beat on a slow store may take longer than a third of the lease.
            if self._changed.wait(max(min(full, word) - now, 0.005)):
                self._changed.clear()
                watched = watched or now  # without a look: short tasks that come one by one wake this thread once in TELL_S
                continue
            watched, now = None, time.monotonic()
            try:
                if now >= full:
                    beaten = spoken = now
                    self._beat()
                elif self._is_news() or now >= spoken + SILENT_S:
                    spoken = now
                    self._storage.apply_blocking([(self._word(),)])
            except Exception as exc:  # the next beat may succeed; a lease lasts three of them
                log.error("heartbeat failed: %s", exc, extra={"worker": self._info().worker})

    def _may_have_news(self) -> bool:
        self._at_rest = True  # before the look, so that nothing that is taken meanwhile is missed
        self._at_rest = not (self._held() or self._told.busy)
        return not self._at_rest

    def _is_news(self) -> bool:
        info = self._info()
        return (info.busy, info.queues) != (self._told.busy, self._told.queues)

    def _word(self) -> Beat:
        self._told = self._info()
        return Beat(info=self._told)

    def _beat(self) -> None:
        held = list(self._held())
        # Also with nothing to prolong: the call carries the sign of life.
        for start in range(0, max(len(held), 1), BATCH):
            self._prolong(held[start : start + BATCH])
        self._shortest_us = self._shortest(held)

    def _prolong(self, tasks: Sequence[Record]) -> None:
        # Late: after a pause of the whole process a lease may be over and its task still nobody else's.
        beats: list[tuple[Operation, ...]] = [
            (Extend(queue=t.queue, id=t.id, token=cast(str, t.token), lease_us=self._lease_us, late=True),) for t in tasks
        ]
        answers = Sending([*beats, (self._word(),)]).send_blocking(self._storage)
        # The last answer is that to the sign of life.
        for task, answer in zip(tasks, answers, strict=False):
            if isinstance(answer, Unsendable):
                continue
            if isinstance(answer, Refused):
                self._on_lost(task)
            elif cast(Extended, answer[0]).cancel_requested:
                self._on_cancel(task)

    def _shortest(self, tasks: Sequence[Record]) -> int:
        if self._lease_us is not None:
            return self._lease_us
        return min((task.lease_us or DEFAULT_LEASE_US for task in tasks), default=DEFAULT_LEASE_US)
