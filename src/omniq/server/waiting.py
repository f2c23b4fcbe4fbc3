"""FETCH commands that wait for tasks: one line per list of queues, with one watch and one `Reserve` for the whole line."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from omniq.models import Record
from omniq.storage.base import BaseStorage
from omniq.turns import Watch

if TYPE_CHECKING:
    from omniq.server.session import Session

PUSHED_POLL_S = 5.0  # where the store rings, this is only a net
POLL_S = 0.05

_arrivals = itertools.count()


class WaitingFetch:
    """A FETCH, or several of one connection in a row, that want `want` tasks."""

    __slots__ = ("arrival", "got", "session", "want")

    def __init__(self, session: Session, want: int) -> None:
        self.session, self.want = session, want
        self.arrival = -1
        self.got: list[Record] = []


class WaitingLine:
    """The waiters of one list of queues, first come, first served."""

    def __init__(self, queues: tuple[str, ...], storage: BaseStorage, wake: Callable[[WaitingLine], None]) -> None:
        self.queues = queues
        self.waiters: OrderedDict[WaitingFetch, None] = OrderedDict()
        self.wanted = 0
        self.fresh: list[WaitingFetch] = []  # those for whom the store has not said yet that nothing is there
        poll_s = PUSHED_POLL_S if storage.capabilities.push_wait else POLL_S
        self.watch = Watch(storage, queues, poll_s, lambda: wake(self))  # while nothing is there

    @property
    def first(self) -> WaitingFetch:
        return next(iter(self.waiters))

    def join(self, waiter: WaitingFetch) -> None:
        waiter.arrival = next(_arrivals)
        self.waiters[waiter] = None
        self.wanted += waiter.want
        self.fresh.append(waiter)

    def leave(self, waiter: WaitingFetch) -> None:
        if waiter in self.waiters:
            del self.waiters[waiter]
            self.wanted -= waiter.want

    def deal(self, tasks: list[Record]) -> tuple[list[WaitingFetch], list[Record]]:
        """Give the tasks to the waiters in turn. Returns who got some, and the tasks that nobody wants any more."""
        served: dict[WaitingFetch, None] = {}
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

    def newcomers(self) -> list[WaitingFetch]:
        """Returns the waiters for whom the store was asked for the first time."""
        fresh, self.fresh = self.fresh, []
        return [waiter for waiter in fresh if waiter in self.waiters]


class WaitingLines:
    """All lines, and which of them are to be served next."""

    def __init__(self, storage: BaseStorage, kick: Callable[[], None]) -> None:
        self._storage, self._kick = storage, kick
        self._lines: dict[tuple[str, ...], WaitingLine] = {}
        self._by_queue: dict[str, set[WaitingLine]] = {}
        self._hungry: dict[WaitingLine, None] = {}

    def __len__(self) -> int:
        return sum(len(line.waiters) for line in list(self._lines.values()))  # also asked from another thread

    @property
    def queues(self) -> set[str]:
        """The queues that somebody waits for. Also asked in another thread."""
        return {queue for line in list(self._lines.values()) if line.waiters for queue in line.queues}

    @property
    def hungry(self) -> bool:
        return bool(self._hungry)

    def join(self, queues: tuple[str, ...], waiter: WaitingFetch) -> WaitingLine:
        line = self._lines.get(queues)
        if line is None:
            line = self._lines[queues] = WaitingLine(queues, self._storage, self.wake)
            for queue in queues:
                self._by_queue.setdefault(queue, set()).add(line)
        line.join(waiter)
        self.wake(line)
        return line

    def leave(self, line: WaitingLine, waiter: WaitingFetch) -> None:
        line.leave(waiter)
        if not line.waiters and self._lines.get(line.queues) is line:
            self._close(line)

    def wake(self, line: WaitingLine) -> None:
        """The line, and every other that wants of the same queues: the one who waits longest comes first."""
        if line.queues and line.waiters:
            self._hungry[line] = None
            for other in self._overlapping(line):
                self._hungry[other] = None
            self._kick()

    def to_serve(self) -> list[tuple[WaitingLine, int]]:
        """Returns the hungry lines in the order of their first waiters, and how many tasks each may take now."""
        hungry = sorted((line for line in self._hungry if line.waiters), key=lambda line: line.first.arrival)
        self._hungry.clear()
        return [(line, self._share(line)) for line in hungry]

    def _share(self, line: WaitingLine) -> int:
        """Returns how many tasks a line may take: all or, if lines overlap, those of waiters who came before the others."""
        others = self._overlapping(line)
        if not others:
            return line.wanted
        first = min(other.first.arrival for other in others)
        return sum(waiter.want for waiter in line.waiters if waiter.arrival < first) or line.first.want

    def _overlapping(self, line: WaitingLine) -> set[WaitingLine]:
        found: set[WaitingLine] = set()
        for queue in line.queues:
            lines = self._by_queue[queue]
            if len(lines) > 1:
                found |= lines
        found.discard(line)
        return {other for other in found if other.waiters}

    def _close(self, line: WaitingLine) -> None:
        line.watch.end()
        self._hungry.pop(line, None)
        del self._lines[line.queues]
        for queue in line.queues:
            self._by_queue[queue].discard(line)
            if not self._by_queue[queue]:
                del self._by_queue[queue]

    def close_all(self) -> None:
        for line in list(self._lines.values()):
            self._close(line)
