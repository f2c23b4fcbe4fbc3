"""The rules of `purge`: what it deletes and when, decided here for every driver.

    kind       goes
    results    when their own time is over, together with the ended task that they belong to
    letters    dead letters: `dead_us` after they died, together with their result
    keys       when their own time is over and their task has ended or is gone
    events     `events_us` after they happened, and those before the last `events_max`; in order, so that no gap comes about
    workers    `workers_us` after their last beat
    runs       settled ones when their longest key would be over, and not within `RUN_KEPT_US`
    fan-ins    when their own time is over
    groups     without tasks at once; those with a limit `limits_us` after a purge first found them without tasks

`BaseStorage.purge` makes the cut-offs of a round, and the driver deletes up to them, about `limit` things of each kind. Like
`policy` this module knows no store; drivers in Python ask the methods, those in another language get the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

from omniq.operations import Retention

RUN_KEPT_US = 86_400_000_000  # so long a client that lost its answer can still ask what became of its run


class Happened(Protocol):
    """The part of an event that its rule looks at."""

    @property
    def seq(self) -> int: ...
    @property
    def ts_us(self) -> int: ...


class CutOffs(msgspec.Struct, frozen=True, kw_only=True):
    """The moments of one round: things that are as old go. With None, nothing of that kind goes by age."""

    now_us: int
    limit: int
    dead_us: int | None
    events_us: int | None
    events_max: int | None
    workers_us: int
    groups_us: int | None

    def run_is_over(self, ended_us: int, key_ttl_us: int) -> bool:
        """Whether a settled run is forgotten: its keys would still recognise its tasks before that."""
        return ended_us + max(key_ttl_us, RUN_KEPT_US) <= self.now_us

    def group(self, limit: int, rests_since_us: int | None) -> Literal["forget", "note", "keep"]:
        """Returns what becomes of a group without tasks. `note` asks the driver to write down that it rests from now on."""
        if limit == 0:
            return "forget"
        if rests_since_us is None:
            # The first look since its last task: its time begins now, and no task had to write down when it left.
            return "note"
        return "forget" if self.groups_us is not None and rests_since_us <= self.groups_us else "keep"

    def events_upto(self, first: int, last: int, read: Callable[[int, int], Iterable[Happened]]) -> int:
        """Returns the number up to which events go; `read(after, limit)` gives some of them, oldest first.

        The first event that is young enough stops the round: events of another store that were taken in later may be older.
        """
        most = first - 1 + self.limit
        upto = first - 1 if self.events_max is None else min(max(first - 1, last - self.events_max), most)
        if self.events_us is not None and upto < most:
            for event in read(upto, most - upto):
                if event.ts_us > self.events_us:
                    break
                upto = event.seq
        return upto


def cut_offs(retention: Retention, now_us: int, limit: int) -> CutOffs:
    return CutOffs(
        now_us=now_us,
        limit=limit,
        dead_us=_before(now_us, retention.dead_us),
        events_us=_before(now_us, retention.events_us),
        events_max=retention.events_max,
        workers_us=now_us - retention.workers_us,
        groups_us=_before(now_us, retention.limits_us),
    )


def _before(now_us: int, kept_us: int | None) -> int | None:
    return None if kept_us is None else now_us - kept_us
