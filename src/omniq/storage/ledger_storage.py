"""A whole driver over any ledger: what changes, what looks and what keeps house, written once.

A driver brings a ledger and `_do_blocking`, which carries a piece of work out inside an atomic section and keeps what it
changed. It overrides what it can do faster.
"""

from __future__ import annotations

import abc
import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar, cast

import msgspec

from omniq.errors import EventsLost
from omniq.models import MAX_AT_ONCE, Record, State, StoredResult, check_count, check_queue, check_text
from omniq.operations import (
    KEY_TTL_US,
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    Page,
    QueueCounts,
    RunInfo,
    Saved,
    Shard,
    WorkerInfo,
)
from omniq.retention import CutOffs
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.cursors import decode_cursor, encode_cursor, few
from omniq.storage.ledger import Lane, Ledger, TaskRow, WholeLedger
from omniq.storage.machine.machine import Machine
from omniq.storage.machine.restoring import restore_events, restore_tasks

DUE_CAP = 10_000  # of scheduled tasks that are due so many are counted as ready, at least; a count shall cost little

L_co = TypeVar("L_co", bound=Ledger, covariant=True)
T = TypeVar("T")


class Section(Generic[L_co]):
    """The ledger and its machine for one piece of work, while nobody else works on the store."""

    def __init__(self, ledger: L_co) -> None:
        self.ledger = ledger
        self.machine = Machine(ledger)


S = TypeVar("S", bound=Section[Ledger])


class LedgerStorage(BaseStorage, Generic[S]):
    """A driver on a ledger. Looking needs a `WholeLedger`, unless all of it is overridden."""

    @abc.abstractmethod
    def _do_blocking(self, work: Callable[[S], T], weight: int = 1) -> T:
        """Carry out a piece of work, of so many operations, by one thread at a time, keep what it changed, and `_wake`.

        When it raises, nothing may stay of what it changed.
        """

    async def _do(self, work: Callable[[S], T], weight: int = 1) -> T:
        # Work may wait for a disk or for other processes, which must not hold up the event loop.
        return await asyncio.to_thread(self._do_blocking, work, weight)

    def _wake(self, machine: Machine) -> None:
        """After the commit: tell those whom it concerns."""
        if machine.ready_queues or machine.ended_tasks:
            self.waiters.notify(machine.ready_queues, machine.ended_tasks)

    def _now(self, now_us: int | None) -> int:
        return self.clock() if now_us is None else now_us

    # -- changing ----------------------------------------------------------------------------------

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        return await self._do(self._running(transactions, now_us, repeat))

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        return self._do_blocking(self._running(transactions, now_us, repeat))

    def _running(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> Callable[[S], list[Result]]:
        def work(section: S) -> list[Result]:
            # Each transaction has its own moment: what one frees stands behind what the one before it enqueued.
            return [section.machine.run(t, self._now(now_us), repeat) for t in transactions]

        return work

    async def allocate_ids(self, n: int) -> int:
        check_count(n, "allocate_ids", 1, MAX_AT_ONCE)
        return await self._do(lambda section: section.ledger.allocate(n))

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        return await self._do(lambda section: section.machine.sweep(self._now(now_us), limit))

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        return await self._do(lambda section: section.machine.promote(queue, self._now(now_us), limit))

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        # Weighed by its rows, so that no commit keeps other writers waiting for longer than theirs do.
        return await self._do(lambda section: restore_tasks(section.machine, tasks, key_ttl_us, self.clock()), len(tasks))

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        await self._do(lambda section: restore_events(section.ledger, rows), len(rows))

    async def pause(self, queue: str) -> None:
        check_queue(queue)
        await self._do(lambda section: _set_paused(section, queue, True))

    async def resume(self, queue: str) -> bool:
        check_queue(queue)
        return await self._do(lambda section: _set_paused(section, queue, False))

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        check_queue(queue)
        check_text(group, "group")
        check_count(limit, "group limit", 1)
        await self._do(lambda section: section.machine.set_group_limit(queue, group, limit))

    # -- upkeep ------------------------------------------------------------------------------------

    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        now, lost = self._now(now_us), set(lost_workers)

        def work(section: S) -> list[Lease]:
            ledger = _whole(section)
            running = [t for t in ledger.in_state(State.RUNNING, None) if queues is None or t.queue in queues]
            over = self._over(section, running, now, lost, whole=queues is None, given=now_us is not None)[:limit]
            return [Lease(record=ledger.record(t), lost="worker_lost" if t.worker in lost else "expired") for t in over]

        return await self._do(work)

    def _over(
        self, section: S, running: Sequence[TaskRow], now_us: int, lost: set[str], *, whole: bool, given: bool
    ) -> Sequence[TaskRow]:
        """Returns the tasks whose lease is over or whose worker is lost, the longest over first.

        `whole`: `running` is all that runs. `given`: the moment comes from the caller, not from the store's clock.
        """
        over = [t for t in running if t.worker in lost or (t.lease_until_us or 0) <= now_us]
        return sorted(over, key=lambda t: (t.lease_until_us or 0, t.seq))

    async def _purge(self, cut: CutOffs) -> int:
        return await self._look(lambda ledger: purge(ledger, cut))

    async def _purge_results(self, older_than_us: int) -> int:
        return await self._look(lambda ledger: _forget(ledger, ledger.results_before(older_than_us)))

    async def check(self, repair: bool = False) -> list[str]:
        return await self._look(lambda ledger: check_groups(ledger, repair))

    # -- looking -----------------------------------------------------------------------------------

    async def _look(self, work: Callable[[WholeLedger], T]) -> T:
        return await self._do(lambda section: work(_whole(section)))

    async def get(self, id: str, queue: str | None = None) -> Record | None:

        def work(ledger: WholeLedger) -> Record | None:
            row = ledger.task_row(id)
            return None if row is None or (queue is not None and row.queue != queue) else ledger.record(row)

        return await self._look(work)

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:

        def work(ledger: WholeLedger) -> dict[str, StoredResult]:
            return {id: result for id in ids if (result := ledger.result(id)) is not None}

        return await self._look(work)

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page:
        after = decode_cursor(cursor)
        return await self._look(lambda ledger: find_page(ledger, filter, after, limit, newest_first, self.scan_limit))

    async def counts(self, now_us: int | None = None) -> list[QueueCounts]:
        now = self._now(now_us)

        def work(ledger: WholeLedger) -> list[QueueCounts]:
            return [_count(ledger, row.queue, row.paused, now) for row in ledger.queue_rows()]

        return sorted(await self._look(work), key=lambda counts: counts.queue)

    async def queues(self, fed: bool = False) -> list[str]:
        return await self._look(lambda ledger: sorted(row.queue for row in ledger.queue_rows() if row.fed or not fed))

    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        def work(ledger: WholeLedger) -> tuple[list[GroupInfo], str | None]:
            lanes = {x.group: x for x in ledger.lane_rows(queue) if cursor is None or x.group > cursor}
            names = sorted(lanes)
            infos = [
                GroupInfo(queue=queue, group=x.group, limit=x.limit or 1, inflight=x.inflight, ready=x.ready)
                for x in map(lanes.__getitem__, names[:limit])
            ]
            return infos, names[limit - 1] if len(names) > limit else None

        return await self._look(work)

    async def workers(self, now_us: int | None = None) -> list[WorkerInfo]:
        return await self._look(lambda ledger: sorted(ledger.worker_rows(), key=lambda info: info.worker))

    async def is_paused(self, queue: str) -> bool:
        check_queue(queue)
        return await self._do(lambda section: section.ledger.queue(queue).paused)

    # -- events, and reading in bulk ---------------------------------------------------------------

    async def event_shards(self) -> list[Shard]:
        first, last = await self._look(lambda ledger: ledger.event_span())
        return [Shard(name="", first=first, last=last)]

    async def events(self, shard: str = "", after: int = 0, limit: int = 1000, upto: int | None = None) -> list[EventRow]:
        def work(ledger: WholeLedger) -> list[EventRow]:
            first, _ = ledger.event_span()
            # Asked in the section that reads: a purge in between would leave a gap that the reader never hears of.
            if after < first - 1:
                raise EventsLost(f"events up to {first - 1} were purged; go on from there")
            return ledger.events(after, limit, upto)

        return await self._look(work)

    async def events_of(self, id: str) -> list[EventRow]:
        return await self._look(lambda ledger: ledger.events_of(id))

    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        def work(section: S) -> RunInfo | None:
            run = section.ledger.run(queue, run_id)
            return None if run is None else run.info()

        return await self._do(work)

    async def task_shards(self) -> list[Shard]:
        def work(ledger: WholeLedger) -> list[Shard]:
            rows = list(ledger.task_rows())
            return [Shard(name="", first=rows[0].seq if rows else 1, last=rows[-1].seq if rows else 0)]

        return await self._look(work)

    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        def work(ledger: WholeLedger) -> tuple[list[Record], int]:
            rows = list(ledger.task_rows())
            found = rows[_place(rows, after) : _place(rows, upto)][:limit]
            return [ledger.record(row) for row in found], upto if len(found) < limit else found[-1].seq

        return await self._look(work)


def _whole(section: Section[Ledger]) -> WholeLedger:
    # A driver whose ledger is not whole has overridden everything that asks for this.
    return cast(WholeLedger, section.ledger)


def _place(rows: Sequence[TaskRow], seq: int) -> int:
    """Returns the number of rows up to this `seq`."""
    return bisect.bisect_right(rows, seq, key=lambda row: row.seq)


def _set_paused(section: Section[Ledger], queue: str, paused: bool) -> bool:
    row = section.ledger.queue(queue)
    was, row.paused = row.paused, paused
    if was is not paused:
        section.ledger.save_queue(row)
    if was and not paused:
        # Workers that slept beside a paused queue look again.
        section.machine.ready_queues.add(queue)
    return was


# -- looking ---------------------------------------------------------------------------------------


def _count(ledger: WholeLedger, queue: str, paused: bool, now_us: int) -> QueueCounts:
    late = ledger.late(queue, now_us)
    counts = {state.name.lower(): ledger.number(queue, state) for state in State}
    # A task that is due runs at the next `Reserve`, which promotes it first: to whoever counts it is ready.
    counts["scheduled"] -= len(late)
    counts["ready"] += len(late)
    return QueueCounts(queue=queue, paused=paused, oldest_ready_us=min([*late, *ledger.heads(queue)], default=None), **counts)


def find_page(ledger: WholeLedger, filter: Filter, after: int | None, limit: int, newest_first: bool, scan_limit: int) -> Page:
    """Returns a page of tasks. Rows are tested first, and only tasks whose rows pass are read."""
    rows = _few(ledger, filter, scan_limit)
    if rows is None:
        rows = list(ledger.task_rows())
    if after is not None:
        rows = rows[: _place(rows, after - 1)] if newest_first else rows[_place(rows, after) :]
    wanted = set(filter.ids)
    tasks: list[Record] = []
    last = 0
    for scanned, row in enumerate(reversed(rows) if newest_first else rows):
        if scanned >= scan_limit:
            return Page(tasks=tasks, cursor=encode_cursor(last), partial=True)
        last = row.seq
        if (wanted and row.id not in wanted) or not _may_match(row, filter):
            continue
        task = ledger.record(row)
        if filter.matches(task):
            if len(tasks) == limit:
                return Page(tasks=tasks, cursor=encode_cursor(tasks[-1].seq))
            tasks.append(task)
    return Page(tasks=tasks)


def _few(ledger: WholeLedger, filter: Filter, scan_limit: int) -> list[TaskRow] | None:
    """Returns the few tasks that can match, oldest first, with some that do not; None if no order leads to few."""
    if filter.ids:
        found = {row.seq: row for id in filter.ids if (row := ledger.task_row(id)) is not None}
        return _by_age(found) if len(filter.ids) <= scan_limit else None
    states = filter.possible
    queues = [filter.queue] if filter.queue is not None else [row.queue for row in ledger.queue_rows()]
    there = sum(ledger.number(queue, state) for queue in queues for state in states)
    if not few(there, len(ledger.task_rows()), scan_limit):
        return None
    found = {row.seq: row for state in states for row in ledger.in_state(state, filter.queue)}
    # Fewer than counted: some ended tasks came from another store without a result, by which ended ones are found.
    return _by_age(found) if len(found) == there else None


def _by_age(rows: dict[int, TaskRow]) -> list[TaskRow]:
    return [rows[seq] for seq in sorted(rows)]


def _may_match(row: TaskRow, filter: Filter) -> bool:
    return (
        filter.admits(row.state)
        and (filter.queue is None or row.queue == filter.queue)
        and (filter.group is None or row.group == filter.group)
        and (filter.worker is None or row.worker == filter.worker)
    )


# -- upkeep ----------------------------------------------------------------------------------------


def purge(ledger: WholeLedger, cut: CutOffs) -> int:
    """One round; the rules are those of `omniq.retention`."""
    gone = _forget(ledger, ledger.expired_results(cut.now_us, cut.limit))
    if cut.dead_us is not None:
        old = (row for row in ledger.in_state(State.DEAD, None) if (row.finished_at_us or 0) <= cut.dead_us)
        # Lists here and below: what goes is deleted from the very rows that are gone through.
        gone += _forget(ledger, list(itertools.islice(old, cut.limit)))
    for queue, key in ledger.expired_keys(cut.now_us, cut.limit):
        ledger.delete_key(queue, key)
        gone += 1
    silent = (info for info in ledger.worker_rows() if info.seen_at_us <= cut.workers_us)
    for info in list(itertools.islice(silent, cut.limit)):
        ledger.beat(info, True, cut.now_us)
        gone += 1
    over = (key for key, fan_in in ledger.fan_in_rows() if fan_in.expires_us <= cut.now_us)
    for key in list(itertools.islice(over, cut.limit)):
        ledger.delete_fan_in(key)
        gone += 1
    ended = (x for x in ledger.run_rows() if x.settled and cut.run_is_over(x.ended_at_us or x.opened_at_us, x.key_ttl_us))
    for run in list(itertools.islice(ended, cut.limit)):
        ledger.delete_run(run)
        gone += 1
    return gone + _purge_events(ledger, cut) + _purge_groups(ledger, cut)


def _forget(ledger: WholeLedger, rows: Iterable[TaskRow]) -> int:
    gone = 0
    for row in rows:
        ledger.forget(row)
        gone += 1
    return gone


def _purge_events(ledger: WholeLedger, cut: CutOffs) -> int:
    first, last = ledger.event_span()
    upto = cut.events_upto(first, last, ledger.events)
    ledger.drop_events(upto)
    return upto + 1 - first


def _purge_groups(ledger: WholeLedger, cut: CutOffs) -> int:
    gone = noted = 0
    for lane in [lane for lane in ledger.lane_rows() if not lane.members]:
        fate = cut.group(lane.limit, lane.rests_since_us)
        if fate == "forget":
            ledger.delete_lane(lane)
            gone += 1
        elif fate == "note":
            ledger.save_lane(msgspec.structs.replace(lane, turn=-cut.now_us))
            noted += 1
        if gone + noted >= cut.limit:
            break
    return gone


def check_groups(ledger: WholeLedger, repair: bool) -> list[str]:
    """Compares the counters of groups with their tasks; with `repair`, sets them right."""
    true: dict[tuple[str, str], Lane] = {}
    for row in ledger.task_rows():
        if row.group is not None and not row.state.final and row.state is not State.STAGED:
            lane = true.setdefault((row.queue, row.group), Lane(row.queue, row.group))
            lane.members += 1
            lane.ready += row.state is State.READY
            lane.inflight += row.state is State.RUNNING
    found: list[str] = []
    for lane in list(ledger.lane_rows()):
        right = true.get((lane.queue, lane.group), Lane(lane.queue, lane.group))
        if (lane.ready, lane.inflight, lane.members) != (right.ready, right.inflight, right.members):
            found.append(f"group {lane.group!r} of queue {lane.queue!r} is miscounted")
            if repair:
                # Counts follow from the tasks. A limit and a turn follow from nothing, so they stay.
                right.limit, right.turn = lane.limit, lane.turn
                ledger.save_lane(right)
    return found
