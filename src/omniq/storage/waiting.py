"""Waiting inside one process: a commit wakes exactly those whom it concerns, a bell from outside wakes all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable


class _Waiter:
    __slots__ = ("events", "future", "loop", "queues", "tasks")

    def __init__(self, queues: frozenset[str], tasks: frozenset[str], events: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.queues, self.tasks, self.events = queues, tasks, events

    def wants(self, queues: Iterable[str], tasks: Iterable[str]) -> bool:
        if self.events or not (self.queues or self.tasks):
            return True
        return not self.queues.isdisjoint(queues) or not self.tasks.isdisjoint(tasks)

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Waiters:
    """`changes` counts what happened, so that a caller who read it before looking cannot miss a change after."""

    def __init__(self) -> None:
        self.changes = 0
        self.on_waiting: Callable[[], None] | None = None  # told after somebody began to wait
        self._lock = threading.Lock()
        self._waiting: set[_Waiter] = set()

    async def wait(
        self,
        queues: Iterable[str] = (),
        tasks: Iterable[str] = (),
        events: bool = False,
        timeout: float | None = None,
        after: int | None = None,
    ) -> None:
        waiter = _Waiter(frozenset(queues), frozenset(tasks), events)
        with self._lock:
            # Under the lock, so that no change comes between this look and the place in the set.
            if after is not None and self.changes != after:
                return
            self._waiting.add(waiter)
        if self.on_waiting is not None:
            self.on_waiting()
        try:
            async with asyncio.timeout(timeout):
                await waiter.future
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiting.discard(waiter)

    def anyone(self) -> bool:
        return bool(self._waiting)

    def notify(self, queues: Iterable[str] = (), tasks: Iterable[str] = ()) -> None:
        """A commit made tasks of these queues ready and ended these tasks. From any thread."""
        with self._lock:
            self.changes += 1
            if not self._waiting:
                return
            woken = [w for w in self._waiting if w.wants(queues, tasks)]
            # Out of the set now, not when their loops get to it: the next commit need not wake them again.
            self._waiting.difference_update(woken)
        self._wake(woken)

    def notify_all(self) -> None:
        with self._lock:
            self.changes += 1
            woken, self._waiting = list(self._waiting), set()
        self._wake(woken)

    @staticmethod
    def _wake(woken: list[_Waiter]) -> None:
        for waiter in woken:
            try:
                waiter.loop.call_soon_threadsafe(waiter.wake)
            except RuntimeError:  # its loop was closed while it waited
                continue
