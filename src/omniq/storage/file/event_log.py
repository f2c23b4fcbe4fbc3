"""The event log of a folder: segments of events in the order of their numbers, found by the places of a few of them."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from omniq.operations import EventRow
from omniq.storage.file.disk import Files
from omniq.storage.file.index import Segment
from omniq.storage.file.lines import EVENTS, is_sealed, read_event_line

# How far apart the known places in a segment are: so much is read at most before the event that is wanted.
MARK_BYTES = 64 << 10


class EventLog:
    """The events that are in the committed part of a folder's segments."""

    def __init__(self, files: Files, segments: Mapping[str, Segment]) -> None:
        self._files = files
        self._segments = segments
        self._marks: dict[Segment, list[tuple[int, int]]] = defaultdict(list)  # the number and the place of some events

    def read(self, after: int, limit: int, upto: int | None) -> list[EventRow]:
        """Returns events after a number, oldest first."""
        found: list[EventRow] = []
        segments = self.in_order()
        first = max(bisect.bisect_right(segments, after + 1, key=lambda s: s.number) - 1, 0)
        for segment in segments[first:]:
            marks = self._marks[segment]
            at = bisect.bisect_right(marks, (after + 1, 1 << 62)) - 1
            offset = marks[at][1] if at >= 0 else 0
            for line in self._files.read(segment.path, offset, segment.size - offset).split(b"\n"):
                # A damaged event is told of by `check`, and keeps nobody from the others.
                if not line.strip() or not is_sealed(line):
                    continue
                event = read_event_line(line)
                if event.seq <= after:
                    continue
                if len(found) == limit or (upto is not None and event.seq > upto):
                    return found
                found.append(event)
        return found

    def in_order(self) -> list[Segment]:
        return sorted((s for s in self._segments.values() if s.table == EVENTS), key=lambda s: s.number)

    def of_task(self, id: str, first: int) -> list[EventRow]:
        """Returns the events of a task from a number on, found by reading the log."""
        # Found in the raw bytes: to decode each event of the log would take far longer than to read it.
        needle = b'"task_id":%b' % msgspec.json.encode(id)
        found: list[EventRow] = []
        for segment in self.in_order():
            data = self._files.read(segment.path, 0, segment.size)
            at = data.find(needle)
            while at >= 0:
                start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
                line = data[start:end]
                if is_sealed(line):
                    event = read_event_line(line)
                    if event.task_id == id and event.seq >= first:
                        found.append(event)
                at = data.find(needle, end)
        return found

    def mark(self, segment: Segment, data: bytes, offset: int) -> int:
        """Remember the place of events now and then. Returns the number of the first event in `data`."""
        seq, marks = first_seq(data), self._marks[segment]
        if not marks or offset - marks[-1][1] >= MARK_BYTES:
            marks.append((seq, offset))
        return seq

    def forget(self, segment: Segment) -> None:
        self._marks.pop(segment, None)


def first_seq(data: bytes) -> int:
    """Returns the number of the event with which these lines begin."""
    return int(data[len(b'{"seq":') : data.index(b",")])
