"""What a file store finds by looking through its index, deletes when its time is over, checks and repairs."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

from omniq.models import Record, State
from omniq.operations import Filter, Page, Retention
from omniq.storage.cursors import decode_cursor, encode_cursor
from omniq.storage.file.index import Entry
from omniq.storage.file.lines import EVENTS
from omniq.storage.file.opening import CORRUPT, mend
from omniq.storage.file.writer import Section
from omniq.storage.ledger import Lane, resting
from omniq.storage.machine.staged_runs import keep_until


def find_tasks(section: Section, filter: Filter, cursor: str | None, limit: int, newest_first: bool, scan_limit: int) -> Page:
    """A page of tasks. What the index knows is asked first; only what is left is read."""
    after = decode_cursor(cursor)
    entries = section.index.few(filter, scan_limit)
    if entries is None:
        entries = list(section.index.entries.values())
    if after is not None:
        at = bisect.bisect_right(entries, after, key=lambda e: e.seq)
        entries = entries[: bisect.bisect_left(entries, after, key=lambda e: e.seq)] if newest_first else entries[at:]
    wanted = set(filter.ids)
    tasks: list[Record] = []
    last = 0
    for scanned, entry in enumerate(reversed(entries) if newest_first else entries):
        if scanned >= scan_limit:
            return Page(tasks=tasks, cursor=encode_cursor(last), partial=True)
        last = entry.seq
        if (wanted and entry.id not in wanted) or not _may_match(entry, filter):
            continue
        task = section.record(entry)
        if filter.matches(task):
            if len(tasks) == limit:
                return Page(tasks=tasks, cursor=encode_cursor(tasks[-1].seq))
            tasks.append(task)
    return Page(tasks=tasks)


def task_page(section: Section, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
    """Tasks by their numbers, and the number up to which they are all."""
    entries = list(section.index.entries.values())
    first = bisect.bisect_right(entries, after, key=lambda e: e.seq)
    found = entries[first : bisect.bisect_right(entries, upto, key=lambda e: e.seq)][:limit]
    return [section.record(entry) for entry in found], upto if len(found) < limit else found[-1].seq


def _may_match(entry: Entry, filter: Filter) -> bool:
    return (
        filter.admits(entry.state)
        and (filter.queue is None or entry.queue == filter.queue)
        and (filter.group is None or entry.group == filter.group)
        and (filter.worker is None or entry.worker == filter.worker)
    )


def purge_store(section: Section, retention: Retention, now_us: int, limit: int) -> int:
    """One bounded round; how many things went."""
    index, ledger = section.index, section.ledger
    gone = _forget(section, index.expired_results(now_us, limit))
    if retention.dead_us is not None:
        edge = now_us - retention.dead_us
        old = [e for e in index.dead.values() if (e.finished_at_us or 0) <= edge][:limit]
        gone += _forget(section, old)
    for queue, key in index.expired_keys(now_us, limit):
        ledger.delete_key(queue, key)
        gone += 1
    gone += _purge_events(section, retention, now_us, limit)
    for info in list(index.workers.values()):
        if info.seen_at_us <= now_us - retention.workers_us:
            ledger.beat(info, True, now_us)
            gone += 1
    for key in [key for key, fan_in in index.fan_ins.items() if fan_in.expires_us <= now_us]:
        ledger.delete_fan_in(key)
        gone += 1
    for run in [run for run in index.runs.values() if run.settled and keep_until(run) <= now_us][:limit]:
        ledger.delete_run(run)
        gone += 1
    lanes = (lane for known in index.lanes.values() for lane in known.values())
    news, over = resting(lanes, retention.limits_us, now_us, limit)
    for lane in news:
        ledger.save_lane(lane)
    for lane in over:
        ledger.delete_lane(lane)
    return gone + len(over)


def purge_results(section: Section, older_than_us: int) -> int:
    kept = [e for e in section.index.entries.values() if e.kept is not None and e.kept.finished_at_us < older_than_us]
    return _forget(section, kept)


def _forget(section: Section, entries: Iterable[Entry]) -> int:
    """Results go, and the ended tasks they belong to; a task that goes on (an interval, a dead queue) stays."""
    gone = 0
    for entry in entries:
        gone += 1
        if entry.state.final:
            section.ledger.remove(entry.id)
        else:
            section.ledger.remove_result(entry.id)
    return gone


def _purge_events(section: Section, retention: Retention, now_us: int, limit: int) -> int:
    """The first event that is kept moves on; segments that lie before it wholly are removed."""
    counters = section.index.counters
    first = counters.first_event
    upto = first - 1
    if retention.events_max is not None:
        upto = max(upto, min(counters.event - retention.events_max, first - 1 + limit))
    if retention.events_us is not None:
        edge = now_us - retention.events_us
        for event in section.folder.events(upto, max(limit - (upto - first + 1), 0), None):
            if event.ts_us > edge:
                break
            upto = event.seq
    counters.first_event = upto + 1
    segments = section.folder.event_segments()
    for segment, following in itertools.pairwise(segments):
        if following.number <= counters.first_event:
            section.ledger.drops.append(segment.path)
    return upto - first + 1


def check_store(section: Section, repair: bool) -> list[str]:
    """Groups are recounted; what lies in `corrupt/` is told."""
    index = section.index
    true: dict[tuple[str, str], Lane] = {}
    for entry in index.entries.values():
        if entry.group is not None and not entry.state.final and entry.state is not State.STAGED:
            lane = true.setdefault((entry.queue, entry.group), Lane(entry.queue, entry.group))
            lane.members += 1
            lane.ready += entry.state is State.READY
            lane.inflight += entry.state is State.RUNNING
    found: list[str] = []
    for lane in [lane for lanes in index.lanes.values() for lane in lanes.values()]:
        right = true.get((lane.queue, lane.group), Lane(lane.queue, lane.group))
        if (lane.ready, lane.inflight, lane.members) != (right.ready, right.inflight, right.members):
            found.append(f"group {lane.group!r} of queue {lane.queue!r} is miscounted")
            if repair:
                right.limit, right.turn = lane.limit, lane.turn
                section.ledger.save_lane(right)
    for segment, lines in section.folder.damaged():
        found.append(f"{segment.path} has {lines} damaged lines")
        if repair and segment.table == EVENTS:
            mend(section.folder, segment)
        elif repair:
            section.folder.stale = True  # whoever enters next learns everything anew, and puts aside what is damaged
    reports = [name for name, _ in section.folder.files.names(CORRUPT) if name.endswith(".report")]
    found += [
        f"{CORRUPT}/{name} tells what was put aside; delete it and what it names when you have read it" for name in reports
    ]
    return found
