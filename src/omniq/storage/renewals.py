"""Which leases are renewed by a living holder, though by this process's clock they are over.

A clock that is ahead, or was set forward, makes every lease look overdue. So a store that can tell by a lock of the kernel
that the holder lives also watches its leases, by a clock that nobody sets: one that moved has a holder that renews it. One that
stood still for most of its length is over, whatever else its holder does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

PATIENCE = 0.6  # of its length: a holder renews after a third, so this one missed a renewal at least
WATCHED_FROM = 2 / 3  # of its length is left: one that is renewed in time seldom gets there
MAX_SEEN = 10_000


class Held(msgspec.Struct, frozen=True, gc=False):
    """A lease. `length_us`: how long it was, by its holder's clock, when it was granted or its holder last renewed any."""

    seq: int
    token: str
    worker: str
    until_us: int
    length_us: int


class Renewals:
    """What this process saw of the leases of a store. `lives` tells whether a worker's process does."""

    def __init__(self, lives: Callable[[str], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._lives, self._clock = lives, clock
        self._seen: dict[tuple[int, str], tuple[int, float]] = {}  # until when it went, and since when it has
        self._lock = threading.Lock()

    def over(self, held: Sequence[Held], now_us: int, lost: Collection[str], *, whole: bool, given: bool = False) -> list[Held]:
        """Those that are over or whose worker is lost, first the longest over.

        `whole`: these are all that are watched. `given`: the moment is the caller's word, which no clock can contradict.
        """
        moment = self._clock()
        with self._lock:
            before = self._seen
            seen = {} if whole or len(before) > MAX_SEEN else dict(before)
            for lease in held:
                place = lease.seq, lease.token
                last = before.get(place)
                seen[place] = last if last is not None and last[0] == lease.until_us else (lease.until_us, moment)
            self._seen = seen
        alive: dict[str, bool] = {}
        found = [
            lease
            for lease in held
            if lease.worker in lost
            or (
                lease.until_us <= now_us
                and (given or not self._may_be_renewed(lease, moment - seen[lease.seq, lease.token][1], alive))
            )
        ]
        return sorted(found, key=lambda lease: (lease.until_us, lease.seq))

    def _may_be_renewed(self, lease: Held, watched_s: float, alive: dict[str, bool]) -> bool:
        if watched_s * 1e6 >= lease.length_us * PATIENCE:
            return False
        if lease.worker not in alive:
            alive[lease.worker] = bool(lease.worker) and self._lives(lease.worker)
        return alive[lease.worker]
