"""The rows of a file store during one commit: read from their lines, changed in memory, written as new lines at its end."""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from omniq.models import Record, State, StoredResult
from omniq.operations import WorkerInfo
from omniq.storage.file.changes import Changes, NewLine
from omniq.storage.file.index import Entry, Index, Kept, KeyEntry, Place, replaced
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
from omniq.storage.ledger import FanIn, Key, Lane, QueueRow, StagedRun, WholeLedger

_TABLES = ("queues", "keys", "deferrals", "workers", "fan_ins", "runs")  # of the index, by its names for them
HELD_RECORDS = 10_000  # running tasks whose records are kept at hand, so that their end does not read their lines again


class FileLedger(WholeLedger):
    """The ledger of one commit. The index is changed at once; `undo` puts it back when the commit cannot be written."""

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
        self._before: dict[str, Entry | None] = {}  # entries that this commit touched, as they were; None: it is new
        self._events: list[bytes] = []
        self._old: dict[str, dict[Any, Any]] = {name: {} for name in _TABLES}  # rows that this commit touched, as they were
        self._old_lanes: dict[tuple[str, str], Lane | None] = {}
        self._old_members: dict[str, dict[str, int]] = {}  # all of a fan-in that went
        self._new_members: dict[str, dict[str, int]] = {}
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
        # The very same entry: every commit that changes a task, of any process, replaces it.
        if known is not None and known[0] is entry:
            return known[1]
        return cast(Record, self._read(cast(Place, entry.place)).task)

    def peek(self, entry: Entry) -> Record:
        """Returns a task as this commit sees it, only to look at."""
        return self._records.get(entry.id) or self._fetch(entry)

    def insert(self, task: Record) -> None:
        self.index.counters.seq += 1
        task.seq = self.index.counters.seq
        self._put(task, ())

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
        """Delete a task without reading its record."""
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
            self._touch(entry.id)  # it has left the line-up, so `undo` must put it back even if it is never saved
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

    # -- rows of the small tables ------------------------------------------------------------------

    def _touch_row(self, table: str, key: Any) -> dict[Any, Any]:
        rows: dict[Any, Any] = getattr(self.index, table)
        # Only the first time: later changes of the same commit must not pass for how the row was.
        self._old[table].setdefault(key, rows.get(key))
        return rows

    def _set(self, table: str, key: Any, row: Any) -> None:
        """Set a row of a table, or delete it with None."""
        _put(self._touch_row(table, key), key, row)

    # -- queues, lanes, keys -----------------------------------------------------------------------

    def queue(self, queue: str) -> QueueRow:
        row = self.index.queues.get(queue)
        # A copy, here and below: the machine changes rows in place, and `undo` needs them as they were.
        return copy.copy(row) if row is not None else QueueRow(queue)

    def save_queue(self, row: QueueRow) -> None:
        self._set("queues", row.queue, row)

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
        self._touch_row("keys", (queue, key))
        self.index.put_key(KeyEntry(KeyLine(queue, key, value.task_id, value.fingerprint, value.expires_us)))

    def delete_key(self, queue: str, key: str) -> None:
        self._set("keys", (queue, key), None)

    # -- results, dependents, events, workers ------------------------------------------------------

    def save_result(self, task: Record, result: StoredResult, expires_us: int | None) -> None:
        self._touch(task.id)
        self.results[task.id] = (result, expires_us)

    def delete_result(self, task: Record) -> None:
        self.remove_result(task.id)

    def remove_result(self, id: str) -> None:
        """Delete a result and keep the task, without reading its record."""
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
        # Oldest first as on other stores, since events are written in this order.
        return self._load_all(heapq.nsmallest(limit, waiting, key=lambda entry: entry.seq))

    def unblock(self, blocker_id: str, dependent: Record) -> None:
        entry = self._touch(dependent.id)
        if entry is not None and blocker_id in entry.waits_for:
            self.index.put(replaced(entry, waits_for=tuple(b for b in entry.waits_for if b != blocker_id)))

    def defer(self, blocker_id: str, dead: bool) -> None:
        self._set("deferrals", blocker_id, dead)

    def deferred(self, limit: int) -> list[tuple[str, bool]]:
        return list(self.index.deferrals.items())[:limit]

    def undefer(self, blocker_id: str) -> None:
        self._set("deferrals", blocker_id, None)

    def event(self, task: Record, event: str, now_us: int, data: bytes | None) -> None:
        self.index.counters.event += 1
        self._events.append(event_line(self.index.counters.event, task, event, now_us, data))

    def beat(self, info: WorkerInfo, gone: bool, now_us: int) -> None:
        self._set("workers", info.worker, None if gone else msgspec.structs.replace(info, seen_at_us=now_us))

    def fan_in(self, key: str) -> FanIn | None:
        return copy.copy(self.index.fan_ins.get(key))

    def save_fan_in(self, key: str, value: FanIn) -> None:
        self._set("fan_ins", key, value)

    def delete_fan_in(self, key: str) -> None:
        if key in self.index.fan_ins:
            self._set("fan_ins", key, None)
            self._old_members.setdefault(key, self.index.members.pop(key, {}))
            self._new_members.pop(key, None)

    def counted(self, key: str, member: str) -> int | None:
        return self.index.members.get(key, {}).get(member)

    def count(self, key: str, member: str, left: int) -> None:
        self.index.members.setdefault(key, {})[member] = left
        self._new_members.setdefault(key, {})[member] = left

    # -- staged runs -------------------------------------------------------------------------------

    def run(self, queue: str, run_id: str) -> StagedRun | None:
        return copy.copy(self.index.runs.get((queue, run_id)))

    def save_run(self, run: StagedRun) -> None:
        self._set("runs", (run.queue, run.run_id), copy.copy(run))

    def delete_run(self, run: StagedRun) -> None:
        self._set("runs", (run.queue, run.run_id), None)

    def unsettled(self, now_us: int, limit: int) -> list[StagedRun]:
        runs = (run for run in self.index.runs.values() if run.unsettled(now_us))
        return [copy.copy(run) for run in itertools.islice(runs, limit)]

    def staged(self, run: StagedRun, limit: int) -> list[Record]:
        return self._load_all(self.index.staged(run, limit))

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
        """Returns the result of a task as this commit sees it."""
        if id in self.results:
            dirty = self.results[id]
            return None if dirty is None else dirty[0]
        entry = self.index.entries.get(id)
        return None if entry is None or entry.kept is None else self._read(entry.kept.place).result

    # -- the end of the commit ---------------------------------------------------------------------

    def changes(self) -> Changes:
        """Returns all that must be written for the folder to agree with the index."""
        found = Changes(drops=self.drops, first_event=self._counters.event + 1 if self._events else 0)
        for id, old in self._before.items():
            new = self.index.entries.get(id)
            if new is not old or id in self.results:
                self._change(id, old, new, found)
        for place, key in self._old["keys"].items():
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
        # A task that goes on, as a dead letter or with its next round, has its result on a line of its own.
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
        rows.queues, _ = self._told("queues")
        rows.workers, rows.workers_gone = self._told("workers")
        rows.runs, rows.runs_gone = self._told("runs")
        lanes = {place: index.lane(*place) for place in self._old_lanes}
        rows.lanes = [lane for lane in lanes.values() if lane is not None]
        rows.lanes_gone = [place for place, lane in lanes.items() if lane is None]
        rows.deferred = {id: index.deferrals[id] for id in self._old["deferrals"] if id in index.deferrals}
        rows.undeferred = [id for id in self._old["deferrals"] if id not in index.deferrals]
        rows.fan_ins = {key: index.fan_ins[key] for key in self._old["fan_ins"] if key in index.fan_ins}
        rows.fan_ins_gone = list(self._old_members)  # a new one under the same key follows
        rows.members = self._new_members
        rows.claims = {id: (queue, index.claims.get(id, ())) for id, (queue, _) in self._old_claims.items()}
        if index.counters != self._counters:
            rows.counters = copy.copy(index.counters)

    def _told(self, table: str) -> tuple[list[Any], list[Any]]:
        """Returns the rows of a table that this commit changed, and the keys of those that it deleted."""
        rows: dict[Any, Any] = getattr(self.index, table)
        touched = self._old[table]
        return [rows[key] for key in touched if key in rows], [key for key in touched if key not in rows]

    def _change_key(self, place: tuple[str, str], old: KeyEntry | None, found: Changes) -> None:
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
            self.index.keys[place] = KeyEntry(line, where)

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
        """Put the index back to where it was, since the commit could not be written."""
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
        for table, old_rows in self._old.items():
            rows: dict[Any, Any] = getattr(index, table)
            for key, row in old_rows.items():
                if table == "keys" and row is not None:
                    index.put_key(row)  # it expires again
                else:
                    _put(rows, key, row)
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


def _put(rows: dict[Any, Any], key: Any, row: Any) -> None:
    if row is None:
        rows.pop(key, None)
    else:
        rows[key] = row
