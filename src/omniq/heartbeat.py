"""Heartbeats of a worker, from a thread of their own: a function that blocks the event loop does not lose its lease."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

from omniq.errors import Refused
from omniq.models import DEFAULT_LEASE_US, Record
from omniq.operations import Beat, Extend, Extended, Operation, WorkerInfo
from omniq.storage.base import BaseStorage
from omniq.storage.sending import Sending, Unsendable

log = logging.getLogger("omniq.worker")

TELL_S = 1.0  # how soon the registry hears that other functions run; what is over by then is not told
SILENT_S = 10.0  # and how long it hears nothing at most, however long the leases are


class Heartbeat:
    """Prolongs what a worker holds at a third of the shortest lease, and hears of cancellations and lost leases.

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
        self._at_rest = False
        self._ending = False
        self._thread = threading.Thread(target=self._beat_on, name="omniq-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending = True
        self._changed.set()
        self._thread.join()

    def take(self, tasks: Sequence[Record]) -> None:
        """New tasks are held; one with a shorter lease makes the next beat come earlier."""
        shortest = self._shortest(tasks)
        if shortest < self._shortest_us or self._at_rest:
            self._shortest_us, self._at_rest = min(shortest, self._shortest_us), False
            self._changed.set()

    def _beat_on(self) -> None:
        beaten = spoken = time.monotonic()
        watched: float | None = None  # since when other functions may run than the registry was told
        while not self._ending:
            now = time.monotonic()
            watched = (watched or now) if self._may_have_news() else None
            full, word = beaten + self._shortest_us / 3e6, spoken + SILENT_S
            if watched is not None:
                word = min(word, watched + TELL_S)
            if self._changed.wait(max(min(full, word) - now, 0.005)):
                self._changed.clear()
                continue
            watched = now = time.monotonic()
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
        beats: list[tuple[Operation, ...]] = [
            (Extend(queue=t.queue, id=t.id, token=cast(str, t.token), lease_us=self._lease_us, late=True),) for t in held
        ]
        answers = Sending([*beats, (self._word(),)]).send_blocking(self._storage)
        self._shortest_us = self._shortest(held)
        for task, answer in zip(held, answers, strict=False):
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
