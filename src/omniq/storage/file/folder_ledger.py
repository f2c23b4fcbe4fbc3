"""The ledger of a driver over a folder: rows come from its index, and from its lines only what the index does not know."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable
from typing import cast

from omniq.models import Record, State
from omniq.operations import EventRow, WorkerInfo
from omniq.storage.file.damage import CORRUPT, mend
from omniq.storage.file.folder import Folder
from omniq.storage.file.index import Entry
from omniq.storage.file.ledger import FileLedger
from omniq.storage.file.lines import EVENTS
from omniq.storage.ledger import FanIn, Lane, QueueRow, StagedRun, TaskRow
from omniq.storage.ledger_storage import DUE_CAP


class FolderLedger(FileLedger):
    """The ledger of one commit, with all that a driver asks."""

    def __init__(self, folder: Folder, events_on: bool) -> None:
        super().__init__(folder.index, folder.line, events_on, folder.held)
        self._folder = folder

    # -- tasks -------------------------------------------------------------------------------------

    def task_row(self, id: str) -> Entry | None:
        return self.index.entries.get(id)

    def task_rows(self) -> Collection[Entry]:
        return self.index.entries.values()

    def in_state(self, state: State, queue: str | None) -> list[Entry]:
        return self.index.in_state(state, queue)

    def number(self, queue: str, state: State) -> int:
        return self.index.count(queue, state)

    def late(self, queue: str, now_us: int) -> list[int]:
        scheduled = self.index.scheduled(queue)
        return [] if scheduled is None else [entry.due_us for entry in scheduled.until(now_us, DUE_CAP)]

    def heads(self, queue: str) -> list[int]:
        return [entry.due_us for entry in self.index.heads(queue)]

    def record(self, row: TaskRow) -> Record:
        return copy.copy(self.peek(cast(Entry, row)))

    def expired_results(self, now_us: int, limit: int) -> list[Entry]:
        return self.index.expired_results(now_us, limit)

    def results_before(self, finished_us: int) -> list[Entry]:
        return [e for e in self.index.entries.values() if e.kept is not None and e.kept.finished_at_us < finished_us]

    def forget(self, row: TaskRow) -> None:
        if row.state.final:
            self.remove(row.id)
        else:
            self.remove_result(row.id)

    # -- the other rows ----------------------------------------------------------------------------

    def expired_keys(self, now_us: int, limit: int) -> list[tuple[str, str]]:
        return self.index.expired_keys(now_us, limit)

    def queue_rows(self) -> Iterable[QueueRow]:
        return self.index.queues.values()

    def lane_rows(self, queue: str | None = None) -> Iterable[Lane]:
        if queue is not None:
            return self.index.lanes.get(queue, {}).values()
        return [lane for lanes in self.index.lanes.values() for lane in lanes.values()]

    def worker_rows(self) -> Iterable[WorkerInfo]:
        return self.index.workers.values()

    def fan_in_rows(self) -> Iterable[tuple[str, FanIn]]:
        return self.index.fan_ins.items()

    def run_rows(self) -> Iterable[StagedRun]:
        return self.index.runs.values()

    def allocate(self, n: int) -> int:
        self.index.counters.ids += n
        return self.index.counters.ids - n + 1

    # -- events ------------------------------------------------------------------------------------

    def event_span(self) -> tuple[int, int]:
        return self.index.counters.first_event, self.index.counters.event

    def events(self, after: int, limit: int, upto: int | None = None) -> list[EventRow]:
        return self._folder.event_log.read(after, limit, upto)

    def events_of(self, id: str) -> list[EventRow]:
        return self._folder.event_log.of_task(id, self.index.counters.first_event)

    def drop_events(self, upto: int) -> None:
        """Move the first event that is kept on. Segments that lie wholly before it are removed."""
        self.index.counters.first_event = upto + 1
        for segment, following in itertools.pairwise(self._folder.event_log.in_order()):
            if following.number <= upto + 1:
                self.drops.append(segment.path)


def check_lines(folder: Folder, repair: bool) -> list[str]:
    """Returns what lies in `corrupt/`, and which files have damaged lines; with `repair` these lines are put aside."""
    found: list[str] = []
    for segment, lines in folder.damaged():
        found.append(f"{segment.path} has {lines} damaged lines")
        # Events are not in the index, so their file can be mended under it.
        if repair and segment.table == EVENTS:
            mend(folder, segment)
        elif repair:
            folder.stale = True  # whoever enters next learns everything anew, and puts aside what is damaged
    reports = [name for name, _ in folder.files.names(CORRUPT) if name.endswith(".report")]
    return found + [
        f"{CORRUPT}/{name} tells what was put aside; delete it and what it names when you have read it" for name in reports
    ]
