"""The rows of a file store during one commit: read from their lines, changed in memory, written as new lines at its end."""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from omniq.models import Record, State, StoredResult
from omniq.operations import Enqueue, WorkerInfo
from omniq.storage.file.index import Counters, Entry, Index, Kept, Place, replaced
from omniq.storage.file.index import Key as IndexedKey
from omniq.storage.file.lines import (
    EVENTS,
    KEYS,
    RESULTS,
    KeyLine,
    TaskLine,
    event_line,
    sealed,
    table_of,
    task_line,
)
from omniq.storage.ledger import FanIn, Key, Lane, QueueRow, Run

HELD_RECORDS = 10_000  # running tasks whose records are kept at hand for their end


class Rows(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The small tables: what a commit changed of them, or all of them."""

    queues: list[QueueRow] = []
    lanes: list[Lane] = []
    lanes_gone: list[tuple[str, str]] = []
    deferred: dict[str, bool] = {}
    undeferred: list[str] = []
    workers: list[WorkerInfo] = []
    workers_gone: list[str] = []
    fan_ins: dict[str, FanIn] = {}
    fan_ins_gone: list[str] = []
    members: dict[str, dict[str, int]] = {}  # of a fan-in: each that was counted, and what it was told
    runs: list[Run] = []
    runs_gone: list[tuple[str, str]] = []
    claims: dict[str, tuple[str, tuple[str, ...]]] = {}  # of a staged task: its queue, and the runs that claim it too
    counters: Counters | None = None

    def apply(self, index: Index) -> None:
        for row in self.queues:
            index.queues[row.queue] = row
        for queue, group in self.lanes_gone:
            index.remove_lane(queue, group)
        for lane in self.lanes:
            index.put_lane(lane)
        for id in self.undeferred:
            index.deferrals.pop(id, None)
        index.deferrals.update(self.deferred)
        for worker in self.workers_gone:
            index.workers.pop(worker, None)
        for info in self.workers:
            index.workers[info.worker] = info
        for key in self.fan_ins_gone:
            index.fan_ins.pop(key, None)
            index.members.pop(key, None)
        index.fan_ins.update(self.fan_ins)
        for key, members in self.members.items():
            index.members.setdefault(key, {}).update(members)
        for place in self.runs_gone:
            index.runs.pop(place, None)
        for run in self.runs:
            index.runs[run.queue, run.run_id] = run
        for id, (queue, runs) in self.claims.items():
            index.put_claims(id, queue, runs)
        if self.counters is not None:
            index.counters = self.counters

    @staticmethod
    def of(index: Index) -> Rows:
        return Rows(
            queues=list(index.queues.values()),
            lanes=[lane for lanes in index.lanes.values() for lane in lanes.values()],
            deferred=dict(index.deferrals),
            workers=list(index.workers.values()),
            fan_ins=dict(index.fan_ins),
            members={key: dict(members) for key, members in index.members.items()},
            runs=list(index.runs.values()),
            claims={id: (index.entries[id].queue, runs) for id, runs in index.claims.items()},
            counters=copy.copy(index.counters),
        )


class NewLine(msgspec.Struct):
    """A line that a commit will write, and what to tell the index when its place is known."""

    table: str
    data: bytes
    placed: Callable[[Place], None] | None = None


class Changes(msgspec.Struct, kw_only=True):
    """What a commit has to write."""

    lines: list[NewLine] = []
    blanks: list[Place] = []
    gone: list[str] = []
    unkept: list[str] = []
    keys_gone: list[tuple[str, str]] = []
    drops: list[str] = []
    first_event: int = 0  # the number of the first event among the lines
    rows: Rows = msgspec.field(default_factory=Rows)

    def __bool__(self) -> bool:
        return self != Changes()


class FileLedger:
    """The `Ledger` of one commit. The index is changed at once; `undo` puts it back when the commit cannot be written."""

    def __init__(
        self,
        index: Index,
        read: Callable[[Place], TaskLine],
        events_on: bool,
        held: dict[str, tuple[Entry, Record]],
    ) -> None:
        self.events_on = events_on
        self.index = index
        self.results: dict[str, tuple[StoredResult, int | None] | None] = {}
        self._read = read
        self._held = held
        self._records: dict[str, Record] = {}
        self._before: dict[str, Entry | None] = {}
        self._events: list[bytes] = []
        self._old_queues: dict[str, QueueRow | None] = {}  # what this commit touched, as it was before
        self._old_lanes: dict[tuple[str, str], Lane | None] = {}
        self._old_keys: dict[tuple[str, str], IndexedKey | None] = {}
        self._old_deferrals: dict[str, bool | None] = {}
        self._old_workers: dict[str, WorkerInfo | None] = {}
        self._old_fan_ins: dict[str, FanIn | None] = {}
        self._old_members: dict[str, dict[str, int]] = {}  # all of a fan-in that went
        self._new_members: dict[str, dict[str, int]] = {}
        self._old_runs: dict[tuple[str, str], Run | None] = {}
        self._old_claims: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._counters = copy.copy(index.counters)
        self.drops: list[str] = []

    # -- records -----------------------------------------------------------------------------------

    def load(self, id: str) -> Record | None:
        task = self._records.get(id)
        if task is None:
            entry = self.index.entries.get(id)
            if entry is None:
                return None
            task = self._records[id] = self._fetch(entry)
        return task

    def _fetch(self, entry: Entry) -> Record:
        known = self._held.get(entry.id)
        if known is not None and known[0] is entry:
            return known[1]
        return cast(Record, self._read(cast(Place, entry.place)).task)

    def peek(self, entry: Entry) -> Record:
        """A task as this commit sees it, to look at only."""
        return self._records.get(entry.id) or self._fetch(entry)

    def insert(self, task: Record) -> None:
        self.index.counters.seq += 1
        task.seq = self.index.counters.seq
        self._put(task, ())

    def insert_plain(self, op: Enqueue, now_us: int) -> bool:
        return False

    def end_plain(self, task: Record, now_us: int) -> bool:
        return False

    def save_leased(self, tasks: Sequence[Record], now_us: int) -> None:
        for task in tasks:
            self.save(task, State.READY, task.queue)
            if self.events_on:
                self.event(task, "started", now_us, None)

    def save(self, task: Record, was: State, was_queue: str) -> None:
        self._put(task, self.index.entries[task.id].waits_for if task.state is State.BLOCKED else ())

    def _put(self, task: Record, waits_for: tuple[str, ...]) -> None:
        old = self._touch(task.id)
        self._records[task.id] = task
        self.index.put(
            Entry(
                not task.returned,
                task.due_us,
                task.seq,
                task.id,
                task.queue,
                task.group,
                task.state,
                task.token,
                task.worker,
                task.lease_until_us,
                task.finished_at_us,
                waits_for,
                None,
                old.kept if old is not None else None,
                task.run_id if task.state is State.STAGED else None,
            )
        )

    def _touch(self, id: str) -> Entry | None:
        entry = self.index.entries.get(id)
        self._before.setdefault(id, entry)
        return entry

    def delete(self, task: Record) -> None:
        self.remove(task.id)

    def remove(self, id: str) -> None:
        """A task goes; its record need not be read for that."""
        self._touch(id)
        self._records.pop(id, None)
        self.results.pop(id, None)
        self.index.remove(id)

    def held(self, token: str) -> list[Record]:
        return self._load_all([e for e in self.index.running.values() if e.token == token])

    def next_ready(self, queue: str, group: str | None, limit: int) -> list[Record]:
        lineup = self.index.ready(queue, group)
        found: list[Entry] = []
        while lineup is not None and len(found) < limit:
            entry = lineup.pop()
            if entry is None:
                break
            self._touch(entry.id)
            found.append(entry)
        return self._load_all(found)

    def due(self, queue: str, now_us: int, limit: int) -> list[Record]:
        lineup = self.index.scheduled(queue)
        found: list[Entry] = []
        while lineup is not None and len(found) < limit:
            entry = lineup.first()
            if entry is None or entry.due_us > now_us:
                break
            lineup.pop()
            self._touch(entry.id)
            found.append(entry)
        return self._load_all(found)

    def _load_all(self, entries: Sequence[Entry]) -> list[Record]:
        return [cast(Record, self.load(entry.id)) for entry in entries]

    def next_at(self, queues: Sequence[str], now_us: int) -> int | None:
        moments: list[int] = []
        for queue in set(queues):
            lease = self.index.next_lease(queue)
            if lease is not None:
                moments.append(lease or now_us)
            lineup = self.index.scheduled(queue)
            first = lineup.first() if lineup is not None else None
            if first is not None:
                moments.append(first.due_us)
        return min(moments, default=None)

    # -- queues, lanes, keys -----------------------------------------------------------------------

    def queue(self, queue: str) -> QueueRow:
        row = self.index.queues.get(queue)
        return copy.copy(row) if row is not None else QueueRow(queue)

    def save_queue(self, row: QueueRow) -> None:
        self._old_queues.setdefault(row.queue, self.index.queues.get(row.queue))
        self.index.queues[row.queue] = row

    def lane(self, queue: str, group: str) -> Lane:
        lane = self.index.lane(queue, group)
        return copy.copy(lane) if lane is not None else Lane(queue, group)

    def save_lane(self, lane: Lane) -> None:
        self._old_lanes.setdefault((lane.queue, lane.group), self.index.lane(lane.queue, lane.group))
        self.index.put_lane(lane)

    def delete_lane(self, lane: Lane) -> None:
        self._old_lanes.setdefault((lane.queue, lane.group), lane)
        self.index.remove_lane(lane.queue, lane.group)

    def open_lane(self, queue: str) -> Lane | None:
        return copy.copy(self.index.open_lane(queue))

    def next_turn(self) -> int:
        self.index.counters.turn += 1
        return self.index.counters.turn

    def key(self, queue: str, key: str) -> Key | None:
        found = self.index.keys.get((queue, key))
        return None if found is None else Key(found.line.task_id, found.line.fingerprint, found.line.expires_us)

    def save_key(self, queue: str, key: str, value: Key) -> None:
        self._old_keys.setdefault((queue, key), self.index.keys.get((queue, key)))
        self.index.put_key(IndexedKey(KeyLine(queue, key, value.task_id, value.fingerprint, value.expires_us)))

    def delete_key(self, queue: str, key: str) -> None:
        self._old_keys.setdefault((queue, key), self.index.keys.get((queue, key)))
        self.index.keys.pop((queue, key), None)

    # -- results, dependents, events, workers ------------------------------------------------------

    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None:
        self._touch(task.id)
        self.results[task.id] = (result, expires_us)

    def delete_result(self, task: Record) -> None:
        self.remove_result(task.id)

    def remove_result(self, id: str) -> None:
        """A result goes, the task stays; its record need not be read for that."""
        entry = self._touch(id)
        if entry is not None and entry.kept is not None:
            self.index.put(replaced(entry, kept=None))
        self.results[id] = None

    def block(self, blocker: Record, dependent: Record) -> None:
        entry = cast(Entry, self._touch(dependent.id))
        self.index.put(replaced(entry, waits_for=(*entry.waits_for, blocker.id)))
        if not blocker.has_dependents:
            blocker.has_dependents = True
            self.save(blocker, blocker.state, blocker.queue)

    def dependents(self, blocker_id: str, limit: int) -> list[Record]:
        waiting = [self.index.entries[id] for id in self.index.blocks.get(blocker_id, ())]
        return self._load_all(heapq.nsmallest(limit, waiting, key=lambda entry: entry.seq))

    def unblock(self, blocker_id: str, dependent: Record) -> None:
        entry = self._touch(dependent.id)
        if entry is not None and blocker_id in entry.waits_for:
            self.index.put(replaced(entry, waits_for=tuple(b for b in entry.waits_for if b != blocker_id)))

    def defer(self, blocker_id: str, dead: bool) -> None:
        self._old_deferrals.setdefault(blocker_id, self.index.deferrals.get(blocker_id))
        self.index.deferrals[blocker_id] = dead

    def deferred(self, limit: int) -> list[tuple[str, bool]]:
        return list(self.index.deferrals.items())[:limit]

    def undefer(self, blocker_id: str) -> None:
        self._old_deferrals.setdefault(blocker_id, self.index.deferrals.get(blocker_id))
        self.index.deferrals.pop(blocker_id, None)

    def event(self, task: Record, event: str, now_us: int, data: bytes | None) -> None:
        self.index.counters.event += 1
        self._events.append(event_line(self.index.counters.event, task, event, now_us, data))

    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None:
        self._old_workers.setdefault(info.worker, self.index.workers.get(info.worker))
        if gone:
            self.index.workers.pop(info.worker, None)
        else:
            self.index.workers[info.worker] = msgspec.structs.replace(info, seen_at_us=now_us)

    def fan_in(self, key: str) -> FanIn | None:
        return copy.copy(self.index.fan_ins.get(key))

    def save_fan_in(self, key: str, value: FanIn) -> None:
        self._old_fan_ins.setdefault(key, self.index.fan_ins.get(key))
        self.index.fan_ins[key] = value

    def delete_fan_in(self, key: str) -> None:
        if key in self.index.fan_ins:
            self._old_fan_ins.setdefault(key, self.index.fan_ins.pop(key))
            self._old_members.setdefault(key, self.index.members.pop(key, {}))
            self._new_members.pop(key, None)

    def counted(self, key: str, member: str) -> int | None:
        return self.index.members.get(key, {}).get(member)

    def count(self, key: str, member: str, left: int) -> None:
        self.index.members.setdefault(key, {})[member] = left
        self._new_members.setdefault(key, {})[member] = left

    # -- staged runs -------------------------------------------------------------------------------

    def run(self, queue: str, run_id: str) -> Run | None:
        return copy.copy(self.index.runs.get((queue, run_id)))

    def save_run(self, run: Run) -> None:
        self._old_runs.setdefault((run.queue, run.run_id), self.index.runs.get((run.queue, run.run_id)))
        self.index.runs[run.queue, run.run_id] = copy.copy(run)

    def delete_run(self, run: Run) -> None:
        self._old_runs.setdefault((run.queue, run.run_id), run)
        self.index.runs.pop((run.queue, run.run_id), None)

    def unsettled(self, now_us: int, limit: int) -> list[Run]:
        runs = (run for run in self.index.runs.values() if run.unsettled(now_us))
        return [copy.copy(run) for run in itertools.islice(runs, limit)]

    def staged(self, run: Run, limit: int) -> list[Record]:
        return self._load_all(self.index.staged(run, limit))

    def foresee(self, queue: str, tasks: Sequence[Enqueue]) -> None:
        pass

    def stage_plain(self, op: Enqueue, run: Run, now_us: int) -> bool:
        return False

    def release_plain(self, run: Run, now_us: int, limit: int) -> int:
        return 0

    def claim(self, task: Record, run_id: str) -> None:
        self._put_claims(task, (*self.index.claims.get(task.id, ()), run_id))

    def claims(self, task: Record) -> list[str]:
        return list(self.index.claims.get(task.id, ()))

    def unclaim(self, task: Record, run_id: str) -> None:
        self._put_claims(task, tuple(known for known in self.index.claims.get(task.id, ()) if known != run_id))

    def _put_claims(self, task: Record, runs: tuple[str, ...]) -> None:
        self._old_claims.setdefault(task.id, (task.queue, self.index.claims.get(task.id, ())))
        self.index.put_claims(task.id, task.queue, runs)

    # -- results -----------------------------------------------------------------------------------

    def result(self, id: str) -> StoredResult | None:
        """The result of a task as this commit sees it."""
        if id in self.results:
            dirty = self.results[id]
            return None if dirty is None else dirty[0]
        entry = self.index.entries.get(id)
        return None if entry is None or entry.kept is None else self._read(entry.kept.place).result

    # -- the end of the commit ---------------------------------------------------------------------

    def changes(self) -> Changes:
        """Everything that must be written so that the folder says what the index says."""
        found = Changes(drops=self.drops, first_event=self._counters.event + 1 if self._events else 0)
        for id, old in self._before.items():
            new = self.index.entries.get(id)
            if new is not old or id in self.results:
                self._change(id, old, new, found)
        for place, key in self._old_keys.items():
            self._change_key(place, key, found)
        self._change_rows(found)
        if self._events:
            found.lines.append(NewLine(EVENTS, b"".join(self._events)))
        return found

    def _change(self, id: str, old: Entry | None, new: Entry | None, found: Changes) -> None:
        before = _places(old)
        if new is None:
            found.blanks += before
            if old is not None:
                found.gone.append(id)
            return
        if old is not None and old.seq != new.seq:  # another task under the same id
            found.gone.append(id)
        elif old is not None and old.kept is not None and new.kept is None:
            found.unkept.append(id)
        if id not in self._records:  # only its result went
            found.blanks += [place for place in before if place != new.place]
            return
        task, dirty = self._records[id], self.results.get(id)
        if id not in self.results and new.kept is not None and old is not None and new.kept.place == old.place:
            stored = cast(StoredResult, self._read(new.kept.place).result)  # it stands on the line that is written anew
            dirty = stored, new.kept.expires_us
        table = table_of(new.state)
        together = dirty is not None and table == RESULTS
        result, expires = dirty if dirty is not None else (None, None)

        def placed(place: Place) -> None:
            new.place = place
            if together:
                self.index.keep(new, Kept(place, expires, cast(StoredResult, result).finished_at_us))

        def result_placed(place: Place) -> None:
            self.index.keep(new, Kept(place, expires, cast(StoredResult, result).finished_at_us))

        line = task_line(task, new.waits_for, result if together else None, expires if together else None)
        found.lines.append(NewLine(table, line, placed))
        if dirty is not None and not together:
            found.lines.append(NewLine(RESULTS, task_line(None, (), result, expires), result_placed))
        stays = new.kept.place if new.kept is not None and dirty is None else None
        found.blanks += [place for place in before if place != stays]

    def _change_rows(self, found: Changes) -> None:
        index, rows = self.index, found.rows
        rows.queues += [index.queues[queue] for queue in self._old_queues]
        for place in self._old_lanes:
            lane = index.lane(*place)
            if lane is None:
                rows.lanes_gone.append(place)
            else:
                rows.lanes.append(lane)
        for id in self._old_deferrals:
            if id in index.deferrals:
                rows.deferred[id] = index.deferrals[id]
            else:
                rows.undeferred.append(id)
        for worker in self._old_workers:
            if worker in index.workers:
                rows.workers.append(index.workers[worker])
            else:
                rows.workers_gone.append(worker)
        rows.fan_ins_gone += list(self._old_members)  # a new one under the same key follows
        for key in self._old_fan_ins:
            if key in index.fan_ins:
                rows.fan_ins[key] = index.fan_ins[key]
        rows.members.update(self._new_members)
        for place in self._old_runs:
            if place in index.runs:
                rows.runs.append(index.runs[place])
            else:
                rows.runs_gone.append(place)
        for id, (queue, _) in self._old_claims.items():
            rows.claims[id] = (queue, index.claims.get(id, ()))
        if index.counters != self._counters:
            rows.counters = copy.copy(index.counters)

    def _change_key(self, place: tuple[str, str], old: IndexedKey | None, found: Changes) -> None:
        new = self.index.keys.get(place)
        if new is old:
            return
        if old is not None and old.place is not None:
            found.blanks.append(old.place)
        if new is None:
            found.keys_gone.append(place)
            return
        line = new.line

        def placed(where: Place) -> None:
            self.index.keys[place] = IndexedKey(line, where)

        found.lines.append(NewLine(KEYS, sealed(line), placed))

    def remember_held(self) -> None:
        """After the commit: keep the records of running tasks at hand, forget those of all others."""
        running, held = self.index.running, self._held
        if len(held) >= HELD_RECORDS:  # some of them ended elsewhere
            for id in [id for id, (entry, _) in held.items() if running.get(id) is not entry]:
                del held[id]
        for id, task in self._records.items():
            if task.state is State.RUNNING and id in running and len(held) < HELD_RECORDS:
                held[id] = (running[id], task)
            else:
                held.pop(id, None)

    def undo(self) -> None:
        """The commit could not be written: the index goes back to where it was."""
        index = self.index
        removed = False
        for id, old in self._before.items():
            if old is None:
                index.remove(id)
            else:
                removed = removed or id not in index.entries or index.entries[id].seq != old.seq
                index.put(replaced(old))  # a new entry: the old one's place in a line-up may still be there
        if removed:
            index.sort()
        _restore(index.queues, self._old_queues)
        for place, key in self._old_keys.items():
            if key is None:
                index.keys.pop(place, None)
            else:
                index.put_key(key)
        _restore(index.deferrals, self._old_deferrals)
        _restore(index.workers, self._old_workers)
        _restore(index.fan_ins, self._old_fan_ins)
        _restore(index.runs, self._old_runs)
        for id, (queue, runs) in self._old_claims.items():
            index.put_claims(id, queue, runs)
        for key, counted in self._new_members.items():
            for member in counted:
                index.members[key].pop(member)
        index.members.update(self._old_members)
        for place, lane in self._old_lanes.items():
            if lane is None:
                index.remove_lane(*place)
            else:
                index.put_lane(lane)
        self._counters.segment = index.counters.segment  # a repair in the same call may have made a file already
        index.counters = self._counters


def _places(entry: Entry | None) -> list[Place]:
    if entry is None or entry.place is None:
        return []
    if entry.kept is None or entry.kept.place == entry.place:
        return [entry.place]
    return [entry.place, entry.kept.place]


def _restore(table: dict[Any, Any], old: dict[Any, Any]) -> None:
    for key, row in old.items():
        if row is None:
            table.pop(key, None)
        else:
            table[key] = row
