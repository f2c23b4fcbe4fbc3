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


class Heartbeat:
    """Prolongs what a worker holds at a third of the shortest lease, and hears of cancellations and lost leases.

    `on_cancel` and `on_lost` are called in the thread. `lease_us` is how long leases are, where it is not as each task says.
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
        self._changed = threading.Event()
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
        if shortest < self._shortest_us:
            self._shortest_us = shortest
            self._changed.set()

    def _beat_on(self) -> None:
        last = time.monotonic()
        while not self._ending:
            if self._changed.wait(max(last + self._shortest_us / 3e6 - time.monotonic(), 0.005)):
                self._changed.clear()
                continue
            last = time.monotonic()
            try:
                self._beat()
            except Exception as exc:  # the next beat may succeed; a lease lasts three of them
                log.error("heartbeat failed: %s", exc, extra={"worker": self._info().worker})

    def _beat(self) -> None:
        held = list(self._held())
        beats: list[tuple[Operation, ...]] = [
            (Extend(queue=t.queue, id=t.id, token=cast(str, t.token), lease_us=self._lease_us, late=True),) for t in held
        ]
        answers = Sending([*beats, (Beat(info=self._info()),)]).send_blocking(self._storage)
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
