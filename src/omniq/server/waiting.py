"""Who waits for tasks: one line per list of queues, one watch and one `Reserve` for all who stand in it."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from omniq.errors import StoreError
from omniq.models import Record
from omniq.operations import Reserved
from omniq.storage.base import BaseStorage

if TYPE_CHECKING:
    from omniq.server.session import Session

PUSHED_POLL_S = 5.0  # where the store rings, this is only a net
POLL_S = 0.05
OVERDUE_S = 0.05

_arrivals = itertools.count()


class Waiter:
    """A FETCH, or several of one connection in a row, that want `want` tasks."""

    __slots__ = ("arrival", "got", "session", "want")

    def __init__(self, session: Session, want: int) -> None:
        self.session, self.want = session, want
        self.arrival = -1
        self.got: list[Record] = []


class Line:
    """The waiters of one list of queues, first come, first served."""

    def __init__(self, queues: tuple[str, ...], storage: BaseStorage, wake: Callable[[Line], None]) -> None:
        self.queues = queues
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.wanted = 0
        self.fresh: list[Waiter] = []  # those for whom the store has not said yet that nothing is there
        self._storage, self._wake = storage, wake
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._poll_s = PUSHED_POLL_S if storage.capabilities.push_wait else POLL_S

    @property
    def first(self) -> Waiter:
        return next(iter(self.waiters))

    def join(self, waiter: Waiter) -> None:
        waiter.arrival = next(_arrivals)
        self.waiters[waiter] = None
        self.wanted += waiter.want
        self.fresh.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        if waiter in self.waiters:
            del self.waiters[waiter]
            self.wanted -= waiter.want

    def deal(self, tasks: list[Record]) -> tuple[list[Waiter], list[Record]]:
        """Give the tasks to the waiters in turn; who got some, and the tasks that nobody wants any more."""
        served: dict[Waiter, None] = {}
        for place, task in enumerate(tasks):
            if not self.waiters:
                return list(served), tasks[place:]
            waiter, _ = self.waiters.popitem(last=False)
            waiter.got.append(task)
            waiter.want -= 1
            self.wanted -= 1
            served[waiter] = None
            if waiter.want:  # whoever wants more stands at the end again
                self.waiters[waiter] = None
                waiter.arrival = next(_arrivals)
        self.fresh += [waiter for waiter in served if waiter.want]
        return list(served), []

    def newcomers(self) -> list[Waiter]:
        """Those for whom the store was asked for the first time."""
        fresh, self.fresh = self.fresh, []
        return [waiter for waiter in fresh if waiter in self.waiters]

    async def _watching(self, seen: int) -> None:
        """Wakes the line when the store says that there may be work.

        From the second time on the next wait is under way before the line is served, so nothing is missed in between.
        """
        after: int | None = seen
        failures = 0
        while True:
            try:
                await self._storage.wait(self.queues, timeout=self._poll_s, after=after)
                failures = 0
            except StoreError:
                failures += 1
                await asyncio.sleep(min(0.1 * 2**failures, 5.0))
            after = None
            self._wake(self)

    def sleep(self, reserved: Reserved, seen: int) -> None:
        """Nothing is there now: look again when the store rings, the next task falls due or the next lease ends.

        `seen` is what the store's count of changes was before it was asked.
        """
        if self._watch is None:
            self._watch = self._loop.create_task(self._watching(seen))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if reserved.next_at_us is None:
            return
        left = (reserved.next_at_us - self._storage.clock()) / 1e6
        if left <= 0 and reserved.paused:  # what is overdue in a paused queue stays so
            return
        self._timer = self._loop.call_later(left + 0.0005 if left > 0 else OVERDUE_S, self._wake, self)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Lines:
    """All lines, and which of them are to be served next."""

    def __init__(self, storage: BaseStorage, kick: Callable[[], None]) -> None:
        self._storage, self._kick = storage, kick
        self._lines: dict[tuple[str, ...], Line] = {}
        self._by_queue: dict[str, set[Line]] = {}
        self._hungry: dict[Line, None] = {}

    def __len__(self) -> int:
        return sum(len(line.waiters) for line in list(self._lines.values()))  # also asked from another thread

    @property
    def queues(self) -> set[str]:
        """The queues that somebody waits for."""
        return {queue for line in self._lines.values() if line.waiters for queue in line.queues}

    @property
    def hungry(self) -> bool:
        return bool(self._hungry)

    def join(self, queues: tuple[str, ...], waiter: Waiter) -> Line:
        line = self._lines.get(queues)
        if line is None:
            line = self._lines[queues] = Line(queues, self._storage, self.wake)
            for queue in queues:
                self._by_queue.setdefault(queue, set()).add(line)
        line.join(waiter)
        self.wake(line)
        return line

    def leave(self, line: Line, waiter: Waiter) -> None:
        line.leave(waiter)
        if not line.waiters and self._lines.get(line.queues) is line:
            self._close(line)

    def wake(self, line: Line) -> None:
        """The line, and every other that wants of the same queues: the one who waits longest comes first."""
        if line.queues and line.waiters:
            self._hungry[line] = None
            for other in self._overlapping(line):
                self._hungry[other] = None
            self._kick()

    def to_serve(self) -> list[tuple[Line, int]]:
        """The hungry lines in the order of their first waiters, and how many tasks each may take now."""
        hungry = sorted((line for line in self._hungry if line.waiters), key=lambda line: line.first.arrival)
        self._hungry.clear()
        return [(line, self._share(line)) for line in hungry]

    def _share(self, line: Line) -> int:
        """All that its waiters want; where lines overlap, only for those who came before anybody in another line."""
        others = self._overlapping(line)
        if not others:
            return line.wanted
        first = min(other.first.arrival for other in others)
        return sum(waiter.want for waiter in line.waiters if waiter.arrival < first) or line.first.want

    def _overlapping(self, line: Line) -> set[Line]:
        found: set[Line] = set()
        for queue in line.queues:
            lines = self._by_queue[queue]
            if len(lines) > 1:
                found |= lines
        found.discard(line)
        return {other for other in found if other.waiters}

    def _close(self, line: Line) -> None:
        line.close()
        self._hungry.pop(line, None)
        del self._lines[line.queues]
        for queue in line.queues:
            self._by_queue[queue].discard(line)
            if not self._by_queue[queue]:
                del self._by_queue[queue]

    def close_all(self) -> None:
        for line in list(self._lines.values()):
            self._close(line)
