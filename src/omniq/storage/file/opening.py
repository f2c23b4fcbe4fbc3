"""Opening a file store: making it, learning all that is in it, mending what a crash or a hand left behind."""

from __future__ import annotations

import logging
import re
from typing import cast

import msgspec

from omniq.errors import StoreForeign, StoreTooNew
from omniq.models import Record, State, new_id, now_us
from omniq.storage.file.damage import CORRUPT, lines_of, mend, put_aside
from omniq.storage.file.disk import Kind
from omniq.storage.file.folder import FORMAT, META, Folder, Meta, is_segment, segment_of, unsealed_file
from omniq.storage.file.index import Entry, Index, Kept, KeyEntry, Place, Segment, entry_of, merged
from omniq.storage.file.journal import FOLDER as JOURNAL
from omniq.storage.file.journal import Commit, JournalRecord, journal_path, next_start, read_record
from omniq.storage.file.lines import (
    EVENTS,
    KEYS,
    TABLES,
    TASK_TABLES,
    decode_glimpse,
    decode_key,
    is_sealed,
)
from omniq.storage.ledger import Lane, QueueRow, StagedRun

log = logging.getLogger("omniq.storage")

FORMAT_FILE = "format.json"
MARKS = frozenset({FORMAT_FILE, META})  # a folder with one of these is a store
RUN_TTL_US = 86_400_000_000  # how long a run whose row was lost stays open
_DAMAGED = -1 << 62  # instead of a count: this segment has to be written anew
FOLDERS = ("queue", *TABLES, JOURNAL, CORRUPT, "locks", "locks/workers")

README = """\
This folder is a job queue of omniq (Python). Every line is one JSON object and ends with a checksum.

queue/pending   tasks that wait: ready, scheduled, blocked, to be retried, or staged by a run that is not committed
queue/running   tasks that a worker holds, with the worker and the end of its lease
queue/failed    dead letters: tasks that failed for good
queue/keys      idempotency keys
results         results of tasks that ended; a task that needs nothing more stands there with its result
events          what happened, in order
journal         each commit, before it is so; what a crash interrupted is finished from it
corrupt         what could not be read, put aside, with a report beside it
locks           who writes, who lives
format.json     the version of this format and the id of this store
state.json      pauses, groups, runs and counters as they were when the current journal was begun

What is no longer true is overwritten with blanks, so look at it like this:

    grep -h '{' queue/pending/* | head

Look at anything, also while workers run. Change nothing by hand: a line that does not fit its checksum is put aside into
corrupt/. Copy the folder with `omniq backup`, or while nobody uses it. Durations and times are in microseconds (UTC).
"""


# Read by itself first, as a newer format may have its other fields in another form.
class Version(msgspec.Struct):
    format: int


class Format(Version):
    store_id: str


def prepare(folder: Folder) -> None:
    """Make the store if there is none. Refuse a folder of another program, and a newer store."""
    _refuse_newer(folder)
    _refuse_foreign(folder)
    for name in FOLDERS:
        folder.files.make_folder(name)
    if "README" not in dict(folder.files.names("")):
        folder.files.write("README", 0, README.encode())


def _refuse_newer(folder: Folder) -> None:
    """Raise `StoreTooNew` before anything is touched: a file that is strange to us may belong to a newer format."""
    there = dict(folder.files.names(""))
    for name in (FORMAT_FILE, META):
        if there.get(name) != "file":
            continue
        folder.files.forget(name)  # another process may have put a new one in its place
        try:
            found = unsealed_file(folder.files.read(name), Version)
        except (FileNotFoundError, ValueError):
            continue
        if found.format > FORMAT:
            raise StoreTooNew(
                f"{folder.where} has format {found.format}, this omniq knows up to {FORMAT}: install a newer omniq to open it"
            )


def _refuse_foreign(folder: Folder) -> None:
    """Raise `StoreForeign` rather than take the files of another program for ours, and move them aside."""
    files = folder.files
    there = dict(files.names(""))
    if _is_store(folder, there):
        return
    ours = {"queue": {name.rpartition("/")[2] for name in TABLES if "/" in name}, "results": None, "events": None}
    for name, allowed in ours.items():
        inside = files.names(name) if there.get(name) == "folder" else [("", "other")] if name in there else []
        # Other programs have folders of these names too; ours are known by what is in them.
        if not all(n in allowed if allowed is not None else is_segment(n) for n, _ in inside):
            _refuse(folder, name)
    if JOURNAL in there and not all(is_journal(n) for n, _ in files.names(JOURNAL)):
        _refuse(folder, JOURNAL)
    if "queue" not in there:  # else they are ours, and damaged
        for name in (FORMAT_FILE, META):
            if name in there:
                _refuse(folder, name)


def _is_store(folder: Folder, there: dict[str, Kind]) -> bool:
    for name, kind in ((FORMAT_FILE, Format), (META, Meta)):
        if there.get(name) == "file":
            try:
                unsealed_file(folder.files.read(name), kind)
                return True
            except ValueError:
                continue
    return False


def _refuse(folder: Folder, name: str) -> None:
    raise StoreForeign(
        f"{folder.where} is not a store of omniq but has a {name!r} of its own; choose another or an empty folder"
    )


def load(folder: Folder) -> None:
    """Learn everything from the folder itself, under the lock. What cannot be read goes to `corrupt/`."""
    folder.clear()
    _refuse_newer(folder)
    meta = _read_meta(folder)
    _read_format(folder, meta)
    _tidy(folder)
    if folder.files.size(META) is None and not any(folder.files.names(name) for name in (JOURNAL, *TABLES)):
        meta = _begin(folder)
    control = folder.control()
    rebooted = control is None or not control.boot or control.boot != folder.boot
    interrupted = rebooted or (control is not None and control.busy)
    found, damaged = _read_journals(folder, meta.journal, interrupted)
    # Only journals are synced at a commit. While the machine runs, whatever was written is there; after that no commit is
    # sure to have been carried out, and all are again.
    done = 0 if rebooted or control is None else control.commit
    sizes = _sizes(folder, meta, found, control.commit if control is not None else 0)
    if interrupted:
        # A file that a later commit removed must not come back.
        dropped = {path for record in found for path in record.head.drops}
        for record in found:
            if record.head.commit > done:
                _redo(folder, record, dropped)
        if sizes is not None:
            folder.cut_back(sizes)
    elif sizes is not None:
        damaged = _bring_back(folder, sizes, found) or damaged
    for rows in (meta.rows, *(record.head.rows for record in found)):  # first: a lane that went takes its line-up with it
        rows.apply(folder.index)
    _read_segments(folder)
    folder.commit = max(meta.commit, found[-1].head.commit if found else 0, control.commit if control is not None else 0)
    _reconcile(folder.index, list(folder.segments.values()))
    folder.set_control(busy=False)
    folder.stale = False
    if damaged:
        # Others would stop at the damage, so nothing new may be written behind it.
        folder.skip_journal()
    _mend(folder)


# -- format, state and journals ------------------------------------------------------------------------


def _read_meta(folder: Folder) -> Meta:
    for name, kind in folder.files.names(""):
        if name in (FORMAT_FILE, META, "README") and kind != "file":
            put_aside(folder, name, "it is not a file")
    for name, kind in folder.files.names("locks"):
        if name == "bell" and kind != "file":
            put_aside(folder, "locks/bell", "it is not a file")
    meta = folder.read_meta()
    if meta is None and folder.files.size(META) is not None:
        put_aside(folder, META, "its checksum is wrong; the journal and the lines tell the rest")
    return meta or Meta()


def _read_format(folder: Folder, meta: Meta) -> None:
    found = Format(meta.format, meta.store_id) if meta.store_id else None
    try:
        found = unsealed_file(folder.files.read(FORMAT_FILE), Format)
    except FileNotFoundError:
        pass
    except ValueError:
        put_aside(folder, FORMAT_FILE, "its checksum is wrong; it was written anew")
    folder.store_id = found.store_id if found is not None else new_id()
    if folder.files.size(FORMAT_FILE) is None:
        folder.replace_file(FORMAT_FILE, Format(FORMAT, folder.store_id))


def _begin(folder: Folder) -> Meta:
    """A new store: from now on a journal that is not there is one that was lost."""
    meta = Meta(store_id=folder.store_id)
    # The journal is on the disk before the state that counts on it.
    folder.files.write(journal_path(meta.journal), 0, b"")
    folder.files.sync(journal_path(meta.journal))
    folder.files.sync_folder(JOURNAL)
    folder.write_meta(meta)
    return meta


def _read_journals(folder: Folder, first: int, interrupted: bool) -> tuple[list[JournalRecord], bool]:
    """Returns the records of the journals that count, in order, and whether any was damaged. Cuts a torn end off the last."""
    names = [name for name, _ in folder.files.names(JOURNAL)]
    numbers = [n for n in (int(name[:12]) for name in names) if n >= first]
    found: list[JournalRecord] = []
    any_damaged = False
    folder.journal, folder.journal_end = first, 0
    for number in numbers:
        data = folder.files.read(journal_path(number))
        at, damaged = 0, False
        folder.journal, folder.journal_end = number, 0
        while at < len(data):
            record = read_record(data, at)
            if record is not None:
                found.append(record)
                at = folder.journal_end = record.end
                continue
            following = next_start(data, at)
            # A torn end is what a dead process leaves behind the last record. Anywhere else a record that was whole is damaged.
            damaged = damaged or following is not None or not interrupted or number != numbers[-1]
            if following is None:
                break
            at = following
        if damaged:
            any_damaged = True
            put_aside(folder, journal_path(number), "part of this journal cannot be read", copy=True)
        elif folder.journal_end < len(data):
            folder.files.truncate(journal_path(number), folder.journal_end)
    return found, any_damaged


def _redo(folder: Folder, record: JournalRecord, dropped: set[str]) -> None:
    at = 0
    head = record.head
    for path, offset, length in head.puts:
        if path not in dropped:
            folder.files.write(path, offset, record.body[at : at + length])
        at += length
    folder.carry_out(Commit(commit=head.commit, blanks=[b for b in head.blanks if b[0] not in dropped], drops=head.drops))


def _sizes(folder: Folder, meta: Meta, found: list[JournalRecord], carried_out: int) -> dict[str, int] | None:
    """Returns the size that commits gave each segment; None if some of these commits are not known."""
    last = found[-1].head.commit if found else meta.commit
    gapless = all(record.head.commit == number for number, record in enumerate(found, meta.commit + 1))
    begun = bool(meta.store_id) and folder.files.size(journal_path(meta.journal)) is not None
    # By an incomplete history a segment seems too long, and lines that were committed would be cut off.
    if not begun or not gapless or last < carried_out:
        return None
    sizes = dict(meta.segments)
    for record in found:
        for path, offset, length in record.head.puts:
            sizes[path] = offset + length
        for path in record.head.drops:
            sizes.pop(path, None)
    return sizes


def _bring_back(folder: Folder, sizes: dict[str, int], found: list[JournalRecord]) -> bool:
    """Write again what segments lost at their end, as far as the journals tell it. Returns whether any had lost something."""
    short = [(path, size) for path, size in sizes.items() if (folder.files.size(path) or 0) < size]
    for path, size in short:
        data = folder.files.read(path) if folder.files.size(path) is not None else b""
        why = f"it has {len(data)} of {size} bytes"
        whole = _with_lost_end(path, data, found)
        if len(whole) >= size:
            put_aside(folder, path, f"{why}; the journal knew the others", copy=True)
            folder.files.write(path, 0, whole)
        elif data.endswith(b"\n") or not data:  # else its last line is damaged, which is told below
            put_aside(folder, path, why, copy=True)
    return bool(short)


def _with_lost_end(path: str, data: bytes, found: list[JournalRecord]) -> bytes:
    there = bytearray(data)
    for record in found:
        at = 0
        for name, offset, length in record.head.puts:
            if name == path and offset <= len(there):
                there[offset : offset + length] = record.body[at : at + length]
            at += length
        # The blanks as well, or what is no longer true would come back with the rest.
        for name, offset, length in record.head.blanks:
            if name == path and offset + length <= len(there):
                there[offset : offset + length] = b" " * (length - 1) + b"\n"
    return bytes(there)


def is_journal(name: str) -> bool:
    return re.fullmatch(r"\d{12}\.log", name, re.ASCII) is not None


# -- lines ---------------------------------------------------------------------------------------------


def _tidy(folder: Folder) -> None:
    """Put aside what is not ours in our folders. Links are moved, never followed."""
    files = folder.files
    known = {name.rpartition("/")[2] for name in TABLES if name.startswith("queue/")}
    for name, kind in files.names("queue"):
        if name not in known or kind != "folder":
            put_aside(folder, f"queue/{name}", "it does not belong here")
    for table in TABLES:
        for name, kind in files.names(table):
            if kind != "file" or not is_segment(name):
                put_aside(folder, f"{table}/{name}", "it does not belong here")
    for name, kind in files.names(JOURNAL):
        if kind != "file" or not is_journal(name):
            put_aside(folder, f"{JOURNAL}/{name}", "it does not belong here")


def _read(folder: Folder, segment: Segment) -> bytes:
    """Returns the bytes of a segment. A last line that lost nothing but its newline gets it back."""
    data = folder.files.read(segment.path)
    if not data.endswith(b"\n") and is_sealed(data[data.rfind(b"\n") + 1 :]):
        folder.files.write(segment.path, len(data), b"\n")
        data += b"\n"
        segment.size = len(data)
    return data


class _Reading:
    """The tasks and results that were read. Of a task that stands on two lines the later one counts."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.tasks: dict[str, Entry] = {}
        self.results: dict[str, Kept] = {}
        self.stale: list[Place] = []

    def add(self, line: bytes, place: Place) -> None:
        glimpse = decode_glimpse(line)
        kept = None
        if glimpse.result is not None:
            kept = Kept(place, glimpse.expires_us, glimpse.result.finished_at_us)
        if glimpse.task is not None:
            entry = entry_of(glimpse, place, kept)
            old = self.tasks.get(entry.id)
            if old is not None:
                old, entry = sorted((old, entry), key=self._age)
                self.stale.append(cast(Place, old.place))
            self.tasks[entry.id] = entry
        elif glimpse.result is not None and kept is not None:
            known = self.results.get(glimpse.result.task_id)
            if known is not None:
                known, kept = sorted((known, kept), key=lambda result: result.finished_at_us)
                self.stale.append(known.place)
            self.results[glimpse.result.task_id] = kept

    def _age(self, entry: Entry) -> tuple[int, int, int]:
        place = cast(Place, entry.place)
        task = cast(Record, self._folder.line(place).task)
        # Of two lines that changed in the same moment the one counts that is further on its way.
        return entry.seq, task.updated_at_us, TASK_TABLES.index(place.segment.table)

    def join(self) -> list[Entry]:
        """Returns each task with its result, in the order of `seq`. A result without its task is stale."""
        for id, kept in self.results.items():
            entry = self.tasks.get(id)
            if entry is None or (entry.kept is not None and entry.kept.finished_at_us >= kept.finished_at_us):
                self.stale.append(kept.place)
            else:
                entry.kept = kept
        return sorted(self.tasks.values(), key=lambda entry: entry.seq)


def _read_segments(folder: Folder) -> None:
    """Make the index from the lines."""
    reading = _Reading(folder)
    for table in TABLES:
        for name, _ in folder.files.names(table):
            segment = segment_of(f"{table}/{name}")
            segment.size = folder.files.size(segment.path) or 0
            folder.adopt(segment)
            if table == EVENTS:
                segment.live = segment.size
                continue
            for offset, line, whole in lines_of(_read(folder, segment)):
                place = Place(segment, offset, len(line))
                if not whole:
                    segment.live = _DAMAGED
                    continue
                segment.live += len(line)
                if table == KEYS:
                    folder.index.put_key(KeyEntry(decode_key(line), place))
                else:
                    reading.add(line, place)
    for entry in reading.join():
        folder.index.put(entry)
    for segment, offset, length in merged(reading.stale):
        segment.live -= length
        folder.files.write(segment.path, offset, b" " * (length - 1) + b"\n")


def _reconcile(index: Index, segments: list[Segment]) -> None:
    """Make counts from the tasks; flags, limits and turns were read."""
    lanes: dict[tuple[str, str], Lane] = {}
    for entry in index.entries.values():
        # Known by its tasks alone, as when the state file is lost: what is known only there begins anew.
        if entry.queue not in index.queues:
            index.queues[entry.queue] = QueueRow(entry.queue, fed=True)
        if entry.state is State.STAGED:
            _know_run(index, entry)
        elif entry.group is not None:
            index.queues[entry.queue].has_groups = True
            if not entry.state.final:
                lane = lanes.setdefault((entry.queue, entry.group), Lane(entry.queue, entry.group))
                lane.members += 1
                lane.ready += entry.state is State.READY
                lane.inflight += entry.state is State.RUNNING
        for blocker in entry.waits_for:
            if blocker not in index.entries:  # it was lost; those who wait for it must not wait for ever
                index.deferrals.setdefault(blocker, True)
    index.forget_lost_claims()
    counters = index.counters
    for old in [lane for known in index.lanes.values() for lane in known.values()]:
        lane = lanes.setdefault((old.queue, old.group), Lane(old.queue, old.group))
        lane.limit, lane.turn = old.limit, old.turn
    for lane in lanes.values():
        if lane.members:
            lane.wake()
        if lane.open and not lane.turn:
            counters.turn += 1
            lane.turn = counters.turn
        index.put_lane(lane)
    last = next(reversed(index.entries.values()), None)
    counters.seq = max(counters.seq, last.seq if last is not None else 0)
    counters.segment = max([counters.segment, *(s.number for s in segments if s.table != EVENTS)])
    first_kept = min((s.number for s in segments if s.table == EVENTS), default=None)
    if first_kept is not None:
        counters.first_event = max(counters.first_event, first_kept)


def _know_run(index: Index, entry: Entry) -> None:
    """A run that was lost with the state file is open again: whoever has it can go on, and after its time it is aborted."""
    place = (entry.queue, cast(str, entry.run_id))
    if place not in index.runs:
        index.runs[place] = StagedRun(*place, now_us(), now_us() + RUN_TTL_US)


def _mend(folder: Folder) -> None:
    """Write segments anew that have lines which cannot be read."""
    _check_last_events(folder)
    for segment in [s for s in folder.segments.values() if s.live < 0]:
        mend(folder, segment)


def _check_last_events(folder: Folder) -> None:
    """Learn the number of the last event. Closed segments of events are checked when they are read."""
    segments = folder.event_log.in_order()
    if not segments:
        return
    for offset, line, whole in lines_of(_read(folder, segments[-1])):
        if not whole:
            segments[-1].live = _DAMAGED
        else:
            seq = folder.event_log.mark(segments[-1], line, offset)
            folder.index.counters.event = max(folder.index.counters.event, seq)
