"""A store's folder as one process sees it: commits, what other processes committed, and the lines themselves.

A commit holds the write lock from `enter` to `leave` and goes like this:

    1. mark the folder busy                              a dead process leaves the mark behind
    2. append the new lines to their files               not yet true: the committed size ends before them
    3. append the record to the journal, and sync it     now it has happened
    4. blank what is no longer true, remove empty files
    5. mark the folder idle

A failure up to 3 cuts the files back and nothing has happened. A death after 3 is made good by whoever comes next: the record
says what was left to do. So nothing but the journal has to be synced; the other files are when a new journal is begun.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from omniq.errors import OutcomeUnknown, StoreUnavailable
from omniq.models import Record
from omniq.storage.file.changes import Changes, NewLine, Rows
from omniq.storage.file.disk import WRITE_LOCK, Files
from omniq.storage.file.event_log import EventLog
from omniq.storage.file.index import Entry, Index, Kept, KeyEntry, Place, Segment, entry_of, merged
from omniq.storage.file.journal import Commit, JournalRecord, journal_path, record_of, records
from omniq.storage.file.lines import (
    EVENTS,
    KEYS,
    TABLES,
    LineGlimpse,
    TaskLine,
    decode_glimpse,
    decode_key,
    is_sealed,
    read_task_line,
)

T = TypeVar("T")

log = logging.getLogger("omniq.storage")

FORMAT = 1
SEGMENT_BYTES = 4 << 20  # a segment is closed when it has grown over this
TIDY_BYTES = 16 << 10  # a segment with nothing left in it goes when it is larger than this
JOURNAL_BYTES = 16 << 20  # a new journal begins after this; the files are synced then
META = "state.json"

Put = tuple[Segment, int, bytes, list[NewLine]]  # which bytes go where in a segment, and their lines


class Control(msgspec.Struct, frozen=True):
    """The contents of the lock file: the last commit that was carried out, whether one is under way, and since which boot."""

    commit: int
    busy: bool
    boot: str


class Meta(msgspec.Struct, kw_only=True):
    """Everything that is in no line, as it was when a journal was begun."""

    format: int = FORMAT
    store_id: str = ""
    commit: int = 0
    journal: int = 1
    segments: dict[str, int] = {}
    rows: Rows = msgspec.field(default_factory=Rows)


class Folder:
    """A store's folder. Used by one thread at a time, and between `enter` and `leave` by one process."""

    def __init__(self, files: Files, where: str, durable: bool, boot: str, load: Callable[[Folder], None]) -> None:
        self.files = files
        self.where = where
        self.durable = durable
        self.boot = boot
        self._load = load
        self._synced_journal = 0  # the number of the journal whose name is known to be on the disk
        self.store_id = ""
        self.held: dict[str, tuple[Entry, Record]] = {}  # good only while the entry is the one that the index has
        self.wants_compacting = False  # a segment was closed since the last look through them
        self.checkpoint_due: Meta | None = None  # a journal was begun: the files are synced after the lock was let go
        self.clear()

    def clear(self) -> None:
        """Forget everything that was read."""
        self.index = Index()
        self.segments: dict[str, Segment] = {}
        self.stale = True  # until everything has been read
        self.commit = 0
        self.journal = 1
        self.journal_end = 0  # behind the last whole record; what lies there is torn, or of a commit not yet learnt
        self._current: dict[str, Segment] = {}
        self.event_log = EventLog(self.files, self.segments)
        self.held.clear()

    # -- taking turns ------------------------------------------------------------------------------

    def enter(self) -> None:
        """Wait for this process's turn, then learn what the others did."""
        self.files.lock()
        try:
            control = self.control()
            # A control file that is gone, or behind us, was deleted or put back by hand, and the lines with it for all we know.
            if self.stale or control is None or control.commit < self.commit:
                self._load(self)
            elif control.busy:
                self._take_over(control)
            elif control.commit > self.commit:
                self._catch_up(control.commit)
        except BaseException:
            self.files.unlock()
            raise

    def leave(self) -> None:
        self.files.unlock()

    def control(self) -> Control | None:
        try:
            commit, state, boot = self.files.read(WRITE_LOCK, 0, 200).decode().split()
            return Control(int(commit), state != "idle", "" if boot == "-" else boot)
        except (ValueError, FileNotFoundError):
            return None

    def set_control(self, busy: bool) -> None:
        text = f"{self.commit:020d} {'busy' if busy else 'idle'} {self.boot or '-':<36}\n"  # as long as the last one
        # Not synced: after a reboot it is not believed, which its last word tells.
        self.files.write(WRITE_LOCK, 0, text.encode())

    def _catch_up(self, upto: int) -> None:
        """Learn the commits of other processes from the journal."""
        while self.commit < upto:
            for found in self._new_records():
                if found.head.commit > upto:  # of one that died: it is not only to be learnt but to be finished
                    break
            if self.commit < upto:
                if self.files.size(journal_path(self.journal + 1)) is None:  # too far behind, or it cannot be read
                    self._load(self)
                    return
                self.journal, self.journal_end = self.journal + 1, 0

    def _new_records(self) -> Iterator[JournalRecord]:
        """Yields the records behind those that are known. Each is known when the next is asked for."""
        start = self.journal_end
        try:
            data = self.files.read(journal_path(self.journal), start)
        except FileNotFoundError:
            return
        for found in records(data):
            if found.head.commit != self.commit + 1:
                return
            yield found
            self.replay(found.head, found.body)
            self.journal_end = start + found.end

    def _take_over(self, control: Control) -> None:
        """Finish the commit in the middle of which a process died if its record is whole, else drop it."""
        self._catch_up(control.commit)
        if self.files.size(journal_path(self.journal + 1)) is not None:
            self.journal, self.journal_end = self.journal + 1, 0
        finished = 0
        for found in self._new_records():
            self.redo(found)
            finished += 1
        # A record that is not whole never happened, and the next one begins where it does.
        if (self.files.size(journal_path(self.journal)) or 0) > self.journal_end:
            self.files.truncate(journal_path(self.journal), self.journal_end)
        self.cut_back({path: segment.size for path, segment in self.segments.items()})
        self.set_control(busy=False)
        log.warning("%s: a process died while it wrote; its commit was %s", self.where, "finished" if finished else "dropped")

    def cut_back(self, sizes: dict[str, int]) -> None:
        """Remove what lies behind the committed end of each file, and files that no commit knows."""
        for table in TABLES:
            for name, kind in self.files.names(table):
                path = f"{table}/{name}"
                size = self.files.size(path) if kind == "file" and is_segment(name) else None
                if size is None:
                    continue
                if path not in sizes:
                    self.files.remove(path)
                elif size > sizes[path]:
                    self.files.truncate(path, sizes[path])

    def redo(self, found: JournalRecord) -> None:
        """Write again what a record says."""
        at = 0
        for path, offset, length in found.head.puts:
            self.files.write(path, offset, found.body[at : at + length])
            at += length
        self.carry_out(found.head)

    def carry_out(self, head: Commit) -> None:
        for path, offset, length in head.blanks:
            self.files.write(path, offset, b" " * (length - 1) + b"\n")
        for path in head.drops:
            self.files.remove(path)

    # -- committing --------------------------------------------------------------------------------

    def write(self, changes: Changes) -> None:
        """One commit. Raises when it did not happen; then the folder is as before."""
        before = self.journal, self.journal_end
        if self.journal_end >= JOURNAL_BYTES:
            self.begin_journal()
        head = Commit(
            commit=self.commit + 1,
            gone=changes.gone,
            unkept=changes.unkept,
            keys_gone=changes.keys_gone,
            rows=changes.rows,
        )
        puts: list[Put] = []
        for table, lines in _by_table(changes.lines).items():
            segment = self._segment_for(table, changes)
            data = b"".join([line.data for line in lines])
            puts.append((segment, segment.size, data, lines))
            head.puts.append((segment.path, segment.size, len(data)))
        self._plan_blanks(changes, head, {segment.path for segment, *_ in puts})
        try:
            self._append(head, puts)
        except BaseException:
            if before != (self.journal, self.journal_end):  # what the checkpoint would tell has not happened
                (self.journal, self.journal_end), self.checkpoint_due = before, None
            raise
        try:
            for segment, offset, data, lines in puts:
                self.adopt(segment)
                segment.size, segment.live = offset + len(data), segment.live + len(data)
                for line in lines:
                    if line.placed is not None:
                        line.placed(Place(segment, offset, len(line.data)))
                    elif line.table == EVENTS:
                        self.event_log.mark(segment, line.data, offset)
                    offset += len(line.data)
            self._forget(head)
            self.commit += 1
            self._finish(head)
        except BaseException:
            self.stale = True  # an interrupt in the middle of this: learn everything anew
            raise

    def _commit_as_told(self, head: Commit, puts: list[Put]) -> None:
        """Make a commit of the folder's own, and learn it as those of other processes are learnt."""
        self._append(head, puts)
        try:
            self.replay(head, b"".join(data for _, _, data, _ in puts))
            self._finish(head)
        except BaseException:
            self.stale = True
            raise

    def _finish(self, head: Commit) -> None:
        try:
            self.carry_out(head)
            self.set_control(busy=False)
        except OSError as exc:  # it has happened; the busy mark makes the next one finish it, and must not be wiped before
            self.stale = True
            log.warning("%s: commit %d is safe but not finished: %s", self.where, self.commit, exc)

    def _append(self, head: Commit, puts: list[Put]) -> None:
        record = record_of(head, [data for _, _, data, _ in puts])
        path = journal_path(self.journal)
        try:
            self.set_control(busy=True)  # before the first byte: whoever comes after a death must know to look
            for segment, offset, data, _ in puts:
                self.files.write(segment.path, offset, data)
            self.files.write(path, self.journal_end, record)
            if self.durable:
                self.files.sync(path)
                if self._synced_journal != self.journal:  # its name, too, whoever made it
                    self.files.sync_folder("journal")
                    self._synced_journal = self.journal
        except BaseException as exc:
            if not self._retract([segment for segment, *_ in puts]) and isinstance(exc, OSError):
                raise OutcomeUnknown(
                    f"{self.where}: {exc.strerror or exc}; whether it was stored shows at the next call"
                ) from exc
            raise
        self.journal_end += len(record)

    def _retract(self, segments: Iterable[Segment]) -> bool:
        """Cut the files back to what is committed. Returns whether that worked."""
        try:
            if self.files.size(journal_path(self.journal)) is not None:
                self.files.truncate(journal_path(self.journal), self.journal_end)
            for segment in segments:
                if segment.path not in self.segments:
                    self.files.remove(segment.path)
                elif (self.files.size(segment.path) or 0) > segment.size:
                    self.files.truncate(segment.path, segment.size)
            self.set_control(busy=False)
        except OSError as exc:  # the busy mark stays: the next one to enter cuts back
            log.warning("%s: could not take back a commit that failed: %s", self.where, exc)
            return False
        return True

    def _segment_for(self, table: str, changes: Changes) -> Segment:
        segment = self._current.get(table)
        if segment is not None and segment.size < SEGMENT_BYTES:
            return segment
        self.wants_compacting = True
        if table == EVENTS:
            return self._new_segment(table, changes.first_event)
        self.index.counters.segment += 1
        # The changes were gathered before this number was given, and it must never be given again.
        changes.rows.counters = msgspec.structs.replace(self.index.counters)
        return self._new_segment(table, self.index.counters.segment)

    @staticmethod
    def _new_segment(table: str, number: int, generation: int = 0) -> Segment:
        name = f"{number:012d}-{generation}" if generation else f"{number:012d}"
        return Segment(f"{table}/{name}.jsonl", table, number)

    def _plan_blanks(self, changes: Changes, head: Commit, written: set[str]) -> None:
        freed: dict[Segment, int] = defaultdict(int)
        for place in changes.blanks:
            freed[place.segment] += place.length
        empty = {
            segment
            for segment, length in freed.items()
            if segment.live == length and segment.path not in written and self._may_go(segment)
        }
        head.drops += [segment.path for segment in empty] + changes.drops
        head.blanks += [
            (segment.path, offset, length)
            for segment, offset, length in merged([place for place in changes.blanks if place.segment not in empty])
        ]

    def _may_go(self, segment: Segment) -> bool:
        # A small one that lines still go to stays although it is empty, or each task of a quiet queue would cost a new file.
        return segment.size >= TIDY_BYTES or self._current.get(segment.table) is not segment

    def adopt(self, segment: Segment) -> None:
        """Take a segment into the books; lines go to the newest of each table."""
        if segment.path not in self.segments:
            self.segments[segment.path] = segment
            newest = self._current.get(segment.table)
            if newest is None or segment.number >= newest.number:
                self._current[segment.table] = segment

    def _forget(self, head: Commit) -> None:
        for path, _, length in head.blanks:
            self.segments[path].live -= length
        for path in head.drops:
            segment = self.segments.pop(path, None)
            if segment is not None:
                self.event_log.forget(segment)
                if self._current.get(segment.table) is segment:
                    del self._current[segment.table]

    # -- what a record says ------------------------------------------------------------------------

    def replay(self, head: Commit, body: bytes) -> None:
        """Bring the index up to a commit that was not made through its own ledger."""
        index = self.index
        for id in head.gone:
            index.remove(id)
        for id in head.unkept:
            if id in index.entries:
                index.entries[id].kept = None
        for place in head.keys_gone:
            index.keys.pop(place, None)
        at = 0
        told: list[tuple[LineGlimpse, Place]] = []
        for path, offset, length in head.puts:
            segment = self.segments.get(path) or segment_of(path)
            self.adopt(segment)
            data = body[at : at + length]
            segment.size, segment.live = offset + length, segment.live + length
            if segment.table == EVENTS:
                self.event_log.mark(segment, data, offset)
            else:
                for line in data.splitlines(keepends=True):
                    place = Place(segment, offset, len(line))
                    if segment.table == KEYS:
                        index.put_key(KeyEntry(decode_key(line), place))
                    else:
                        told.append((decode_glimpse(line), place))
                    offset += len(line)
            at += length
        for glimpse, place in sorted(told, key=_order):
            self.note(glimpse, place)
        self._forget(head)
        for path in head.drops:
            self.files.forget(path)  # removed by another process; an open descriptor would keep its room on the disk
        head.rows.apply(index)
        self.commit = head.commit

    def note(self, glimpse: LineGlimpse, place: Place) -> None:
        """Learn a task, a result or both from a line."""
        kept = None
        if glimpse.result is not None:
            kept = Kept(place, glimpse.expires_us, glimpse.result.finished_at_us)
        if glimpse.task is not None:
            old = self.index.entries.get(glimpse.task.id)
            # With another number it is another task under the same id, which the old result is none of.
            if kept is None and old is not None and old.seq == glimpse.task.seq:
                kept = old.kept
            self.index.put(entry_of(glimpse, place, kept))
        elif glimpse.result is not None and kept is not None:
            entry = self.index.entries.get(glimpse.result.task_id)
            if entry is not None:
                self.index.keep(entry, kept)

    # -- reading lines -----------------------------------------------------------------------------

    def line(self, place: Place) -> TaskLine:
        """Returns the line at a place. Raises `StoreUnavailable` if it does not fit its checksum."""
        data = self.files.read(place.segment.path, place.offset, place.length)
        if not is_sealed(data[:-1]):
            self.stale = True
            raise StoreUnavailable(
                f"{self.where}/{place.segment.path} was damaged at byte {place.offset}; "
                "try again: what is damaged is put aside into corrupt/ then, and the rest goes on"
            )
        return read_task_line(data)

    def damaged(self) -> list[tuple[Segment, int]]:
        """Returns the files with lines that do not fit their checksum, and the number of these lines."""
        found: list[tuple[Segment, int]] = []
        for segment in self.segments.values():
            lines = self.files.read(segment.path, 0, segment.size).split(b"\n")
            bad = sum(1 for line in lines if line.strip() and not is_sealed(line))
            if bad:
                found.append((segment, bad))
        return found

    # -- journals and upkeep -----------------------------------------------------------------------

    def begin_journal(self) -> None:
        """Begin the next journal. Every process does so at the same size, so that all know which one comes next."""
        self.journal, self.journal_end = self.journal + 1, 0
        self.checkpoint_due = Meta(
            store_id=self.store_id,
            commit=self.commit,
            journal=self.journal,
            segments={path: segment.size for path, segment in self.segments.items()},
            rows=Rows.of(self.index),
        )

    def checkpoint(self) -> None:
        """Sync everything that the old journals told, so that they may go. Without the lock: others go on meanwhile."""
        meta, self.checkpoint_due = self.checkpoint_due, None
        if meta is not None:
            try:
                self._checkpoint(meta)
            except OSError as exc:  # the old journals stay; the next checkpoint lets them go
                log.warning("%s: could not finish a checkpoint: %s", self.where, exc)

    def _checkpoint(self, meta: Meta) -> None:
        started = time.monotonic()
        for path in meta.segments:  # whatever this process promises: others may have promised more
            try:
                self.files.sync(path)
            except FileNotFoundError:  # emptied and removed in the meantime
                continue
        for folder in (*TABLES, "queue", ""):
            self.files.sync_folder(folder)
        self.files.lock()
        try:
            on_disk = self.read_meta()
            # Another process may have finished a later checkpoint meanwhile.
            if on_disk is None or on_disk.commit < meta.commit:
                self.write_meta(meta)
                for name, _ in self.files.names("journal"):
                    number = name.partition(".")[0]
                    if number.isdigit() and int(number) < meta.journal - 1:  # one more stays, for those who lag behind
                        self.files.remove(f"journal/{name}")
        finally:
            self.files.unlock()
        log.debug("%s: checkpoint at commit %d took %.3f s", self.where, meta.commit, time.monotonic() - started)

    def read_meta(self) -> Meta | None:
        self.files.forget(META)  # another process may have put a new one in its place
        try:
            return unsealed_file(self.files.read(META), Meta)
        except (FileNotFoundError, ValueError):
            return None

    def write_meta(self, meta: Meta) -> None:
        self.replace_file(META, meta)

    def replace_file(self, path: str, value: object) -> None:
        """Replace a small file as a whole, by rename: there is the old one or the new one, never half of it."""
        self.files.remove(f"{path}.tmp")
        self.files.write(f"{path}.tmp", 0, sealed_file(value))
        self.files.sync(f"{path}.tmp")
        self.files.rename(f"{path}.tmp", path)
        self.files.sync_folder("")

    def tend(self) -> None:
        """Keep the folder small, after a commit. If this fails, the commit stands all the same."""
        try:
            if self.wants_compacting and not self.stale:
                self.compact()
        except OSError as exc:
            log.warning("%s: could not tidy up: %s", self.where, exc)

    def compact(self) -> None:
        """Move what is left out of a closed segment that is mostly blank, one at a time."""
        for segment in self.segments.values():
            # Only when three quarters of it are blank, and one file for each commit, since others wait meanwhile.
            if segment.table != EVENTS and self._current.get(segment.table) is not segment and segment.live < segment.size // 4:
                self.rewrite(segment)
                return
        self.wants_compacting = False

    def skip_journal(self) -> None:
        """Begin a new journal at once, with an empty commit, so that nobody goes on behind one that was damaged."""
        self.begin_journal()
        self._commit_as_told(Commit(commit=self.commit + 1), [])

    def rewrite(self, segment: Segment) -> None:
        """Move the good lines of a segment to a new one, and drop the old one."""
        data = self.files.read(segment.path, 0, segment.size)
        lines = [line + b"\n" for line in data.split(b"\n") if line.strip() and is_sealed(line)]
        self.index.counters.segment += 1
        counters = msgspec.structs.replace(self.index.counters)
        head = Commit(commit=self.commit + 1, drops=[segment.path], rows=Rows(counters=counters))
        puts: list[Put] = []
        if lines:
            # The number stays, by which segments are in order. The path is new: nobody may take the one file for the other.
            fresh = self._new_segment(segment.table, segment.number, counters.segment)
            body = b"".join(lines)
            head.puts = [(fresh.path, 0, len(body))]
            puts = [(fresh, 0, body, [])]
        self._commit_as_told(head, puts)


def is_segment(name: str) -> bool:
    stem, dot, ending = name.partition(".")
    number, dash, generation = stem.partition("-")
    return (
        ending == "jsonl"
        and len(number) == 12
        and number.isascii()
        and number.isdigit()
        and bool(dot)
        and (not dash or (generation.isascii() and generation.isdigit()))
    )


def segment_of(path: str) -> Segment:
    table, _, name = path.rpartition("/")
    return Segment(path, table, int(name[:12]))


def sealed_file(value: object) -> bytes:
    """Returns a small file: readable JSON, then a line with its checksum."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
    return b"%b# crc32 %08x\n" % (text, zlib.crc32(text))


def unsealed_file(data: bytes, kind: type[T]) -> T:
    """Raises `ValueError` for anything but a whole file of ours."""
    text, hash_mark, end = data.rpartition(b"# crc32 ")
    if not hash_mark or end != b"%08x\n" % zlib.crc32(text):
        raise ValueError("its checksum is wrong")
    return msgspec.json.decode(text, type=kind)


def _order(told: tuple[LineGlimpse, Place]) -> int:
    """New tasks in the order of `seq`, which is that of the index, and results after the tasks that they belong to."""
    task = told[0].task
    return task.seq if task is not None else 1 << 62


def _by_table(lines: list[NewLine]) -> dict[str, list[NewLine]]:
    found: dict[str, list[NewLine]] = defaultdict(list)
    for line in lines:
        found[line.table].append(line)
    return found
