"""Files of a store that were cut, flipped, planted or made unwritable: what was not touched stays, and the store goes on."""

import asyncio
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_scenes import START_US, TOKEN, clock, do, job
from file_truth import TABLES, Dump, check_folder, check_works, difference, dump, read_lines, reports
from support.faulty_files import LayeredStorage
from support.inside import InsideStorage

from omniq.errors import Invalid, OutcomeUnknown, StoreForeign, StoreFull, StoreTooNew, StoreUnavailable
from omniq.models import State, TaskError
from omniq.operations import AbortRun, Ack, CommitRun, Enqueue, Fail, OpenRun, Progress, Reserve, Retention, Stage
from omniq.storage.file import FileStorage
from omniq.storage.file import folder as file_folder
from omniq.storage.file.folder import sealed_file
from omniq.storage.file.opening import FOLDERS
from omniq.testing import FakeClock

POINTS = 24  # places in each file that the quick tests damage
STEP = max(20 // int(os.environ.get("ROUNDS") or 20), 1)  # the slow ones damage every byte, or every so many of them
KINDS = (*TABLES, "journal", "format.json", "state.json", "README", "locks/write", "locks/bell")

_names = itertools.count()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has every kind of file, with a few lines in each."""
    path = tmp_path_factory.mktemp("small") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_folder, "JOURNAL_BYTES", 4000)
        asyncio.run(_fill(path))
    return path


async def _fill(path: Path) -> None:
    async with FileStorage(path, clock=FakeClock(START_US), durability="process") as storage:
        await do(storage, *(job(f"done-{n}", "d") for n in range(2)), job("dead", "d"), job("moves", "d", dead_queue="dq"))
        await do(storage, (Reserve(queues=("d",), token=TOKEN, limit=9, lease_us=1 << 40),))
        for n in range(2):
            await do(storage, (Ack(queue="d", id=f"done-{n}", token=TOKEN, result=b'{"n":%d}' % n),))
        await do(storage, *((Fail(queue="d", id=i, token=TOKEN, error=TaskError("E")),) for i in ("dead", "moves")))
        await do(storage, *(job(f"keyed-{n}", idempotency_key=f"k-{n}") for n in range(2)))
        await do(storage, *(job(f"grouped-{n}", group="g") for n in range(2)))
        await do(storage, *(job(f"held-{n}", "r") for n in range(2)))
        await do(storage, (Reserve(queues=("r",), token=TOKEN, limit=9, lease_us=1 << 40),))
        await storage.pause("p")
    assert (path / "state.json").exists()


@pytest.fixture(autouse=True)
def room(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def copied(store: Path, room: Path) -> Path:
    path = room / f"{next(_names)}"
    shutil.copytree(store, path)
    return path


def opened(path: Path) -> InsideStorage:
    return InsideStorage(path, clock=clock(), durability="process")


async def told(path: Path) -> Dump:
    async with opened(path) as storage:
        return await dump(storage)


def file_of(store: Path, kind: str) -> Path:
    """The newest file of a kind."""
    return store / kind if (store / kind).is_file() else max((store / kind).iterdir())


# -- one damaged file ----------------------------------------------------------------------------------


def touched_lines(data: bytes, first: int, last: int) -> list[Any]:
    """The lines that bytes from `first` to `last` belong to, as far as they say something."""
    found: list[Any] = []
    at = 0
    for line in data.splitlines(keepends=True):
        if at < last + 1 and at + len(line) > first and line.strip():
            found.append(json.loads(line))
        at += len(line)
    return found


def lost_with(lines: list[Any], kind: str) -> dict[str, set[Any]]:
    """What goes when these lines of a table go."""
    if kind == "events":
        return {"events": {line["seq"] for line in lines}}
    if kind == "queue/keys":
        return {"keys": {(line["queue"], line["key"]) for line in lines}}
    tasks = {line["task"]["id"] for line in lines if "task" in line}
    return {"tasks": tasks, "results": tasks | {line["result"]["task_id"] for line in lines if "result" in line}}


def check_rest(before: Dump, found: Dump, lost: dict[str, set[Any]], where: str) -> None:
    """Whatever is not among the lost is as it was, and nothing is there that was not."""
    for part in ("tasks", "results"):
        was = before[part]
        assert {k: v for k, v in was.items() if k not in lost.get(part, ())}.items() <= found[part].items(), f"{where}: {part}"
        assert found[part].items() <= was.items(), f"{where}: {part} invented"
    keys = before["rows"]["keys"]
    assert {k: v for k, v in keys.items() if k not in lost.get("keys", ())}.items() <= found["rows"]["keys"].items(), where
    assert found["rows"]["keys"].items() <= keys.items(), where
    kept = [event for event in before["events"] if event["seq"] not in lost.get("events", ())]
    assert [e for e in found["events"] if e["seq"] not in lost.get("events", ())] == kept, f"{where}: events"
    assert all(event in before["events"] for event in found["events"]), f"{where}: events invented"


async def damage(store: Path, room: Path, before: Dump, kind: str, change: Callable[[bytes], bytes], at: int, to: int) -> None:
    """Change a file's bytes from `at` to `to`; open the store, and look what is left."""
    path = copied(store, room)
    file = file_of(path, kind)
    data = file.read_bytes()
    changed = change(data)
    file.write_bytes(changed)
    where = (
        f"{file.relative_to(path)}: bytes {at} to {to} of {len(data)}, {data[at - 8 : at + 8]!r} → {changed[at - 8 : at + 8]!r}"
    )
    joined = data[at : at + 1] == b"\n" and len(changed) == len(data)  # the next line is hit as well
    lines = touched_lines(data, at, to + joined) if kind in TABLES else []
    async with opened(path) as storage:
        found = await dump(storage)
        check_rest(before, found, lost_with(lines, kind) if kind in TABLES else {}, where)
        check_folder(path, found)
        await check_works(storage)
        after = await dump(storage)
    told_of = [report["file"] for report in reports(path)]
    assert set(told_of) <= {str(file.relative_to(path))}, where
    if must_report(kind, data, changed, at):
        assert told_of, f"{where}: not a word"
    assert difference(settled(await told(path)), settled(after)) == [], f"{where}: another process sees something else"
    assert len(reports(path)) == len(told_of), f"{where}: put aside again"
    shutil.rmtree(path)


def settled(found: Dump) -> Dump:
    """Without the number of the first event: where all were lost, whoever opens the store later knows it better."""
    counters = {**found["rows"]["counters"], "first_event": None}
    return {**found, "shard": None, "rows": {**found["rows"], "counters": counters}}


def must_report(kind: str, data: bytes, changed: bytes, at: int) -> bool:
    """A cut between two lines cannot be told from a file that ends there; the lock and the README say nothing of their own."""
    if kind in ("README", "locks/write", "locks/bell"):
        return False
    if len(changed) == len(data):
        return words(changed) != words(data)  # a blank line that ends in another white space has lost nothing
    if kind in ("format.json", "state.json"):
        return True
    tail = changed[changed.rfind(b"\n") + 1 :]
    if kind == "journal":
        return changed != b"" and not (changed.endswith(b'"}\n') and b'{"end":' in changed.split(b"\n")[-2])
    return bool(tail.strip()) and tail + b"\n" not in data.splitlines(keepends=True)  # else it lost nothing but its newline


def words(data: bytes) -> list[bytes]:
    """The lines that say something."""
    return [line for line in data.split(b"\n") if line.strip()]


def some(size: int, count: int, seed: int) -> list[int]:
    """Places in a file: the first and last bytes, and some between."""
    places = {0, 1, size // 2, size - 2, size - 1}
    places.update(random.Random(seed).randrange(size) for _ in range(count))
    return sorted(place for place in places if 0 <= place < size)


async def cut_and_flip(store: Path, room: Path, kind: str, count: int | None, seed: int) -> int:
    before = await told(copied(store, room))
    data = file_of(store, kind).read_bytes()
    size = len(data)
    every = [at for at in range(size) if data[at : at + 1] != b" " or at % 50 == 0]  # of a blank line, a few
    places = every[seed % STEP :: STEP] if count is None else some(size, count, seed)
    for at in places:
        bit = 1 << random.Random(f"{seed}-{at}").randrange(8)
        await damage(store, room, before, kind, lambda data, at=at: data[:at], at, size)
        await damage(
            store, room, before, kind, lambda data, at=at, bit=bit: data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :], at, at
        )
    return 2 * len(places)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_cut_or_flipped_at_some_bytes_costs_only_the_lines_that_were_hit(
    small: Path, room: Path, seed: int, kind: str
) -> None:
    assert await cut_and_flip(small, room, kind, POINTS, seed) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_cut_or_flipped_at_any_byte_costs_only_the_lines_that_were_hit(
    small: Path, room: Path, seed: int, kind: str
) -> None:
    await cut_and_flip(small, room, kind, None, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", [b"", b"\n\n\n", b"\0" * 3000, b"{}\n" * 9, b"\xff" * 8, os.urandom(2000)])
async def test_a_file_full_of_something_else_costs_only_what_was_in_it(small: Path, room: Path, kind: str, what: bytes) -> None:
    before = await told(copied(small, room))
    path = copied(small, room)
    file = file_of(path, kind)
    lost = lost_with(read_lines(file), kind) if kind in TABLES else {}
    file.write_bytes(what)
    async with opened(path) as storage:
        found = await dump(storage)
        check_rest(before, found, lost, kind)
        check_folder(path, found)
        await check_works(storage)
        after = await dump(storage)
    assert difference(settled(await told(path)), settled(after)) == []
    count = len(reports(path))
    assert count or not what.strip() or not must_report(kind, b"", what, 0)
    await told(path)
    assert len(reports(path)) == count


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_that_is_gone_costs_only_what_was_in_it(small: Path, room: Path, kind: str) -> None:
    before = await told(copied(small, room))
    path = copied(small, room)
    file = file_of(path, kind)
    lost = lost_with(read_lines(file), kind) if kind in TABLES else {}
    file.unlink()
    async with opened(path) as storage:
        found = await dump(storage)
        check_rest(before, found, lost, kind)
        check_folder(path, found)
        await check_works(storage)
        after = await dump(storage)
    assert difference(settled(await told(path)), settled(after)) == []


async def test_a_journal_that_is_gone_after_a_reboot_takes_no_line_with_it(
    small: Path, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(small, room)
    async with opened(path) as storage:
        await do(storage, *(job(f"more-{n}") for n in range(5)))
        before = await dump(storage)
    for journal in (path / "journal").iterdir():
        journal.unlink()
    monkeypatch.setattr("omniq.storage.file.driver.boot_id", lambda: "another-boot")
    check_rest(before, await told(path), {}, "no journal")


async def test_the_id_of_a_store_outlives_its_format_file_and_its_state(small: Path, room: Path) -> None:
    async def id_of(path: Path) -> str:
        async with opened(path) as storage:
            return (await storage.info()).store_id

    expected = await id_of(copied(small, room))
    for name in ("format.json", "state.json"):
        path = copied(small, room)
        (path / name).write_bytes(b"nonsense")
        assert await id_of(path) == expected, name


async def stage(storage: FileStorage, run_id: str, *ids: str) -> None:
    await do(storage, (OpenRun(queue="q", run_id=run_id),))
    await do(storage, (Stage(queue="q", run_id=run_id, tasks=tuple(op for id in ids for op in job(id))),))


async def test_a_run_whose_row_is_gone_can_still_be_committed(room: Path) -> None:
    path = room / "store"
    async with opened(path) as storage:
        await stage(storage, "r", "a", "b")
    for name in ("state.json", *(f"journal/{file.name}" for file in (path / "journal").iterdir())):
        (path / name).unlink(missing_ok=True)
    async with opened(path) as storage:
        assert [task.state for task in [await storage.get("a"), await storage.get("b")] if task] == [State.STAGED] * 2
        await do(storage, (CommitRun(queue="q", run_id="r"),))
        assert (await storage.counts())[0].ready == 2
        assert await storage.check() == []


async def test_a_staged_task_that_is_lost_does_not_hold_up_the_runs_that_want_it(room: Path) -> None:
    path = room / "store"
    async with opened(path) as storage:
        await stage(storage, "first", "lost", "kept")
        await stage(storage, "second", "lost", "kept")
    file = file_of(path, "queue/pending")
    file.write_bytes(file.read_bytes().replace(b'"lost"', b'"LOST"', 1))
    async with opened(path) as storage:
        await do(storage, (AbortRun(queue="q", run_id="first"),))
        await do(storage, (CommitRun(queue="q", run_id="second"),))
        assert [(c.staged, c.ready) for c in await storage.counts()] == [(0, 1)]
        await check_works(storage)


async def test_a_line_damaged_under_a_living_store_is_put_aside_and_the_rest_goes_on(small: Path, room: Path) -> None:
    path = copied(small, room)
    async with opened(path) as storage:
        before = await dump(storage)
        file = file_of(path, "queue/pending")
        file.write_bytes(file.read_bytes().replace(b'"keyed-0"', b'"keyed-X"', 1))
        with pytest.raises(StoreUnavailable, match="corrupt/"):
            await storage.get("keyed-0")
        assert await storage.get("keyed-0") is None
        assert await storage.get("keyed-X") is None
        found = await dump(storage)
        check_rest(before, found, {"tasks": {"keyed-0"}}, "live")
        check_folder(path, found)
        await check_works(storage)
    (report,) = reports(path)
    assert report["file"].startswith("queue/pending/")
    assert any("keyed-X" in line for line in report["lost"])


async def test_check_finds_damaged_lines_and_repairs_them(small: Path, room: Path) -> None:
    path = copied(small, room)
    async with opened(path) as storage:
        assert await storage.check() == []
        file = file_of(path, "results")
        file.write_bytes(file.read_bytes().replace(b'"done-0"', b'"done-X"', 1))
        (sentence,) = await storage.check()
        assert "results/" in sentence
        await storage.check(repair=True)
        (sentence,) = await storage.check()
        assert sentence.startswith("corrupt/")
        assert sorted(await storage.results(["done-0", "done-1"])) == ["done-1"]


async def test_a_log_that_is_repaired_in_a_call_that_fails_can_be_repaired_again(room: Path) -> None:
    def spoil(path: Path, number: int) -> None:
        file = file_of(path, "events")
        file.write_bytes(file.read_bytes().replace(b'"t-%d"' % number, b'"T-%d"' % number, 1))

    failed_after_repair = 0
    for at in itertools.count(1):
        path = room / f"{at}"
        async with LayeredStorage(path, clock=clock(), durability="process") as storage:
            await do(storage, *(job(f"t-{n}") for n in range(4)))
            spoil(path, 0)
            storage.files.arm(at, "fail")
            try:
                await storage.check(repair=True)
            except (StoreUnavailable, OutcomeUnknown):
                failed_after_repair += b'"T-0"' not in file_of(path, "events").read_bytes()
            calls = len(storage.files.kinds)
            storage.files.disarm()
            spoil(path, 1)
            await storage.check(repair=True)
            assert [event.seq for event in await storage.events()] == [3, 4], f"failed at call {at}"
        if calls < at:
            break
    assert failed_after_repair > 0


# -- foreign things ------------------------------------------------------------------------------------

PLANTS = ("file", "folder", "link to a file", "link to a folder", "dangling link", "pipe")
OURS = ("queue", *TABLES, "journal")


def plant(what: str, at: Path, outside: Path) -> None:
    if what == "file":
        at.write_bytes(b"foreign")
    elif what == "folder":
        at.mkdir()
        (at / "inside").write_bytes(b"foreign")
    elif what == "link to a file":
        at.symlink_to(outside / "secret")
    elif what == "link to a folder":
        at.symlink_to(outside)
    elif what == "dangling link":
        at.symlink_to(outside / "nothing")
    else:
        os.mkfifo(at)


def listing(folder: Path) -> dict[str, Any]:
    """Everything under a folder: kinds, modes and contents; no link is followed."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (mode, content)
    return found


@pytest.fixture
def outside(room: Path) -> Path:
    """A folder that no store may touch."""
    path = room / "outside"
    path.mkdir()
    (path / "secret").write_bytes(b"secret")
    return path


@pytest.mark.parametrize("what", PLANTS)
async def test_what_does_not_belong_there_is_put_aside_and_never_followed(
    small: Path, room: Path, outside: Path, what: str
) -> None:
    path = copied(small, room)
    untouched = listing(outside)
    latin = os.fsdecode("é".encode("latin-1"))
    names = (latin, ".hidden", "new\nline 🦜", "000000000077.jsonl", "000000000077.log", "000000000077.jsonl.tmp")
    planted: list[Path] = []
    for folder, name in itertools.product((*OURS, "", "locks", "corrupt", "locks/workers"), names):
        if what == "file" and name.endswith((".jsonl", ".log")):
            continue  # damaged, not foreign
        planted.append(path / folder / name)
        plant(what, planted[-1], outside)
    before = await told(copied(small, room))
    async with opened(path) as storage:
        found = await dump(storage)
        assert difference(found, before) == []
        check_folder(path, found)
        await check_works(storage)
        await storage.lost_workers()
        await storage.purge(Retention())
        await storage.backup(room / "backup")
    ours = [p for p in planted if str(p.parent.relative_to(path)) in OURS]
    assert not [p for p in ours if p.is_symlink() or p.exists()]
    assert sorted(report["file"] for report in reports(path) if report["file"].startswith(OURS)) == sorted(
        str(p.relative_to(path)).encode("utf-8", "backslashreplace").decode() for p in ours
    )
    assert listing(outside) == untouched


@pytest.mark.parametrize("name", ["README", "format.json", "state.json", "locks/write", "locks/bell"])
@pytest.mark.parametrize("what", PLANTS[1:])
async def test_something_else_in_the_place_of_a_file_is_put_aside_or_named(
    small: Path, room: Path, outside: Path, what: str, name: str
) -> None:
    path = copied(small, room)
    untouched = listing(outside)
    before = await told(copied(small, room))
    (path / name).unlink()
    plant(what, path / name, outside)
    storage = opened(path)
    try:
        found = await dump(storage)
        check_rest(before, found, {}, name)
        await check_works(storage)
        assert name in {report["file"] for report in reports(path)}
    except StoreUnavailable as exc:
        if name != "locks/write" or str(path / name) not in str(exc):  # that one may be held by others
            raise
    finally:
        await storage.close()
    assert listing(outside) == untouched


@pytest.mark.parametrize("name", FOLDERS)
async def test_a_folder_that_is_a_link_is_refused_by_name(small: Path, room: Path, name: str) -> None:
    path = copied(small, room)
    elsewhere = room / "elsewhere"
    shutil.move(path / name, elsewhere)
    (path / name).symlink_to(elsewhere)
    untouched = listing(elsewhere)
    storage = opened(path)
    with pytest.raises(StoreUnavailable, match="symbolic link") as caught:
        await storage.open()
    assert str(path / name) in str(caught.value)
    await storage.close()
    assert listing(elsewhere) == untouched


async def test_a_newer_store_is_refused_by_name_and_left_alone(small: Path, room: Path) -> None:
    path = copied(small, room)
    (path / "format.json").write_bytes(sealed_file({"format": 2, "store_id": "x", "shards": [1]}))
    (path / "state.json").write_bytes(sealed_file({"format": 2, "store_id": "x", "segments": [], "rows": 7}))
    (path / "queue" / "staged").mkdir()
    (path / "queue" / "pending" / "0001.bin").write_bytes(b"not a line")
    (path / "README").unlink()
    untouched = listing(path)
    storage = opened(path)
    with pytest.raises(StoreTooNew, match="format 2"):
        await storage.open()
    await storage.close()
    assert listing(path) == untouched


@pytest.mark.parametrize("name", ["queue", "results", "events"])
async def test_a_folder_of_somebody_else_is_refused_and_left_alone(room: Path, name: str) -> None:
    path = room / "mine"
    (path / name).mkdir(parents=True)
    (path / name / "letter.txt").write_text("dear")
    untouched = listing(path)
    storage = opened(path)
    with pytest.raises(StoreForeign, match=f"not a store of omniq but has a '{name}' of its own"):
        await storage.open()
    await storage.close()
    assert listing(path) == untouched


# -- names and permissions -----------------------------------------------------------------------------

HOSTILE = (
    "../x",
    "..",
    ".",
    "/etc/x",
    "a/b",
    "-rf",
    "~",
    "🦜" * 60,
    "\r\n\t\x1b[31m",
    "{}",
    '","sum":"00000000"}',
    "\u2028",
    "x" * 255,
)
REFUSED = ("\0", "a\0b", "x" * 10_000, "../" * 3000)


async def test_hostile_names_are_kept_as_they_are_and_never_leave_the_folder(room: Path) -> None:
    path = room / "house" / "store"
    path.parent.mkdir()
    async with opened(path) as storage:
        for text in HOSTILE:
            await do(
                storage, (Enqueue(id=text, name=text, group=text, idempotency_key=text, headers={text: text}, origin=text),)
            )
            await storage.set_group_limit("default", text, 3)
            await storage.hold_worker(text)
        for queue in ("..", ".", "...", "-"):
            await do(storage, job(f"in {queue}", queue))
            await storage.pause(queue)
        op = Reserve(queues=("default",), token=TOKEN, limit=99, worker=HOSTILE[0])
        await do(storage, (op,))
        for text in HOSTILE:
            await do(storage, (Ack(queue="default", id=text, token=TOKEN, result=text.encode(), encoding=text),))
        for text in REFUSED:
            for fields in ({"id": text}, {"group": text}, {"idempotency_key": text}, {"queue": text}):
                with pytest.raises(Invalid):
                    await storage.apply([(Enqueue(**{"id": "fine", "name": "job", **fields}),)])
        long = "../" * 3333
        await storage.hold_worker(long)
        await storage.hold_worker("a\0b")
        assert await storage.lost_workers() == []
        for worker in (*HOSTILE, long, "a\0b"):
            await storage.release_worker(worker)
        found = await dump(storage)
        check_folder(path, found)
    assert set(found["tasks"]) == {*HOSTILE, "in ..", "in .", "in ...", "in -"}
    assert difference(await told(path), found) == []
    assert [p.name for p in path.parent.iterdir()] == ["store"]
    assert [p.name for p in room.iterdir()] == ["house"]
    known = {*FOLDERS, "README", "format.json", "state.json", "locks/write", "locks/bell"}
    strange = [p for p in listing(path) if p not in known and not p.endswith((".jsonl", ".log"))]
    assert strange == []


DEEP = (400, 480, 500, *range(960, 1000), 1500, 5000)
HOSTILE_BYTES = (
    b"",
    b"no json",
    b'{"a":\n1}',
    b'{"a":\r1}',
    b"1],[2",
    b'"\xff"',
    b'"\\ud800"',
    b'","sum":"00000000"}',
    *(b"[" * depth + b"]" * depth for depth in DEEP),
)


async def test_hostile_payloads_results_and_progress_come_back_to_the_byte_and_spoil_nothing(room: Path) -> None:
    path = room / "store"
    async with opened(path) as storage:
        for n, data in enumerate(HOSTILE_BYTES):
            await do(storage, (Enqueue(id=f"{n}", name="job", payload=data),))
        count = len(HOSTILE_BYTES)
        await do(storage, (Reserve(queues=("default",), token=TOKEN, limit=count, lease_us=1 << 40),))
        for n, data in enumerate(HOSTILE_BYTES):
            await do(storage, (Progress(queue="default", id=f"{n}", token=TOKEN, data=data[:4096]),))
            await do(storage, (Ack(queue="default", id=f"{n}", token=TOKEN, result=data),))
        found = await told(path)
        assert difference(await dump(storage), found) == []
        tasks = [await storage.get(f"{n}") for n in range(count)]
        results = await storage.results([f"{n}" for n in range(count)])
        events = [e.data for e in await storage.events(limit=10_000) if e.event == "progress"]
        assert await storage.check() == []
    assert [task.payload for task in tasks if task] == list(HOSTILE_BYTES)
    assert [task.progress for task in tasks if task] == [data[:4096] for data in HOSTILE_BYTES]
    assert [results[f"{n}"].result for n in range(count)] == list(HOSTILE_BYTES)
    assert events == [b'{"progress":%b}' % data[:4096] for data in HOSTILE_BYTES]
    assert len(read_lines(file_of(path, "results"))) == count


@pytest.mark.parametrize("mask", [0, 0o022, 0o027, 0o077], ids=oct)
async def test_nobody_else_may_look_into_a_store_whatever_the_umask(room: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        path = room / "store"
        async with opened(path) as storage:
            await do(storage, job("one", idempotency_key="k"))
            await check_works(storage)
            await storage.hold_worker("w")
            modes = {p: p.stat().st_mode & 0o777 for p in (path, *path.rglob("*"))}
            await storage.release_worker("w")
        wrong = {p: oct(mode) for p, mode in modes.items() if mode != (0o700 if p.is_dir() else 0o600)}
        assert wrong == {}
    finally:
        os.umask(old)


async def test_nobody_else_may_look_into_a_backup_while_it_is_made(
    small: Path, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copystat", lambda *_, **__: None)  # as long as the permissions are not copied
    old = os.umask(0)
    try:
        async with opened(copied(small, room)) as storage:
            await storage.backup(room / "backup")
    finally:
        os.umask(old)
    assert (room / "backup").stat().st_mode & 0o777 == 0o700


async def test_a_sign_of_life_that_cannot_be_left_is_told_in_the_words_of_the_store(small: Path, room: Path) -> None:
    path = copied(small, room)
    async with opened(path) as storage:
        await storage.open()
        (path / "locks" / "workers").rmdir()
        (path / "locks" / "workers").write_bytes(b"")
        with pytest.raises(StoreUnavailable, match="exists"):
            await storage.hold_worker("w")


# -- no room -------------------------------------------------------------------------------------------


async def fill_up(path: Path, make_room: Callable[[], object]) -> None:
    """Enqueue until nothing more fits; what was answered is there, and after `make_room` it goes on."""
    async with InsideStorage(path, clock=clock()) as storage:
        taken: list[str] = []
        for n in itertools.count():
            try:
                await do(storage, (Enqueue(id=f"{n}", name="job", payload=b'"%b"' % (b"x" * 4000)),))
                taken.append(f"{n}")
            except StoreFull:
                break
        assert len(taken) > 10
        for _ in range(3):
            with pytest.raises(StoreFull, match="free disk space"):
                await do(storage, (Enqueue(id="more", name="job", payload=b'"%b"' % (b"x" * 4000)),))
        found = await dump(storage)
        assert list(found["tasks"]) == taken
        check_folder(path, found)
        make_room()
        await check_works(storage)
        after = await dump(storage)
        check_folder(path, after)
    assert difference(await told(path), after) == []
    assert reports(path) == []


def test_a_file_that_may_grow_no_more_fails_the_call_and_heals(room: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(room / "store")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def in_little_room(path: str) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    asyncio.run(fill_up(Path(path), lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))))


async def test_a_full_disk_fails_the_call_and_heals(room: Path) -> None:
    disk = room / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"NO FULL DISK WAS TRIED: a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * 200_000)
        await fill_up(disk / "store", ballast.unlink)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


if __name__ == "__main__":
    in_little_room(sys.argv[1])
