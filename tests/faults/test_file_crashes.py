"""A file store whose process fails or dies at every call to the file system, and whose machine loses its power at any."""

import asyncio
import errno
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fault_processes import until
from file_scenes import BRIEF, SCENES, TOKEN, Scene, clock, do, furnish, job
from file_truth import Dump, check_folder, check_works, difference, dump
from support.faulty_files import FaultyFiles, How, LayeredStorage, LossyFiles, Stopped
from support.inside import InsideStorage

from omniq.errors import OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from omniq.operations import Ack, Enqueue, Filter, Operation, Reserve, Reserved
from omniq.storage.base import Result, Transaction
from omniq.storage.file import FileStorage
from omniq.storage.file import folder as file_folder
from omniq.storage.machine import staged_runs as runs
from omniq.storage.machine import transitions

ROUNDS = int(os.environ.get("ROUNDS") or 20)
STEP = max(20 // ROUNDS, 1)  # the slow tests break off at every call, or at every so many of them

_names = itertools.count()


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with something of everything in it; tests work on copies."""
    path = tmp_path_factory.mktemp("furnished") / "store"
    asyncio.run(furnish(path))
    return path


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit begins new files, compacts an old one, begins a new journal and syncs everything."""
    monkeypatch.setattr(file_folder, "JOURNAL_BYTES", 1)
    monkeypatch.setattr(file_folder, "SEGMENT_BYTES", 400)
    monkeypatch.setattr(file_folder, "TIDY_BYTES", 100)


@pytest.fixture(autouse=True)
def room(tmp_path: Path) -> Iterator[Path]:
    """Where copies go; thousands of them, so each goes when it has served."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def copied(store: Path, room: Path) -> Path:
    path = room / f"{next(_names)}"
    shutil.copytree(store, path)
    return path


async def told(path: Path) -> Dump:
    """What a new process learns from a folder, which must be what can be read in it; and it goes on from there."""
    async with InsideStorage(path, clock=clock(), durability="process") as storage:
        found = await dump(storage)
        check_folder(path, found)
        assert await storage.check() == []
        await check_works(storage)
    return found


async def before_and_after(store: Path, scene: Scene, room: Path) -> tuple[Dump, Dump, list[str]]:
    """The two states that a crash may leave, and the calls on the way from one to the other."""
    path = copied(store, room)
    async with LayeredStorage(path, clock=clock()) as storage:
        before = await dump(storage)
        storage.files.kinds.clear()
        await scene(storage)
        kinds = list(storage.files.kinds)
        after = await dump(storage)
    assert difference(after, await told(path)) == [], "a new process sees something else"
    assert before != after
    return before, after, kinds


async def attempt(storage: LayeredStorage, scene: Scene, at: int, how: How, error: int, torn: bool) -> Exception | None:
    storage.files.arm(at, how, error, torn)
    try:
        await scene(storage)
    except (StoreError, Stopped) as exc:
        return exc
    finally:
        if how == "fail":
            storage.files.disarm()
    return None


def one_of(found: Dump, before: Dump, after: Dump, raised: object, where: str, strict: bool) -> None:
    """A call that returned has happened; one that was cut off has happened or not, and never in part."""
    if raised is None:
        assert difference(found, after) == [], f"{where}: it returned, but did not happen"
    elif found != before and (strict or found != after):
        raise AssertionError(f"{where}: neither before nor after: {difference(found, before)} / {difference(found, after)}")


async def stop_everywhere(store: Path, scene: Scene, room: Path, live: bool) -> int:
    """Die at each call; then a new process, or one that was there all the time, finds all or nothing of it."""
    before, after, kinds = await before_and_after(store, scene, room)
    tried = 0
    for at, torn in _points(kinds):
        path = copied(store, room)
        neighbour = InsideStorage(path, clock=clock(), durability="process")
        if live:
            await neighbour.open()
        storage = LayeredStorage(path, clock=clock())
        await storage.open()
        raised = await attempt(storage, scene, at, "stop", errno.EIO, torn)
        assert storage.files.fired, f"call {at} of {len(kinds)} did not come"
        await storage.close()
        where = f"stopped at call {at} ({kinds[at - 1]}{', torn' if torn else ''})"
        if live:
            found = await dump(neighbour)
            one_of(found, before, after, raised, where, strict=False)
            check_folder(path, found)
            await check_works(neighbour)
            found = await dump(neighbour)
            await neighbour.close()
            async with InsideStorage(path, clock=clock(), durability="process") as third:
                assert difference(await dump(third), found) == [], where
        else:
            one_of(await told(path), before, after, raised, where, strict=False)
        shutil.rmtree(path)
        tried += 1
    return tried


async def fail_everywhere(store: Path, scene: Scene, room: Path) -> int:
    """Fail once at each call; the same storage object goes on, and so does a new one."""
    before, after, kinds = await before_and_after(store, scene, room)
    tried = 0
    for at, torn in _points(kinds):
        if kinds[at - 1] == "unlock":
            continue
        path = copied(store, room)
        error, kind = (errno.ENOSPC, StoreFull) if torn or at % 2 else (errno.EIO, StoreUnavailable)
        where = f"failed at call {at} ({kinds[at - 1]}{', torn' if torn else ''})"
        async with LayeredStorage(path, clock=clock()) as storage:
            raised = await attempt(storage, scene, at, "fail", error, torn)
            assert storage.files.fired, where
            assert raised is None or isinstance(raised, kind), f"{where}: {raised!r}"
            found = await dump(storage)
            one_of(found, before, after, raised, where, strict=True)
            check_folder(path, found)
            if raised is not None:
                await scene(storage)
            found = await dump(storage)
            assert difference(found, after) == [], f"{where}, then once more"
            check_folder(path, found)
        assert difference(await told(path), after) == [], f"{where}: a new process sees something else"
        shutil.rmtree(path)
        tried += 1
    return tried


def _points(kinds: list[str]) -> list[tuple[int, bool]]:
    """Every call, and every write a second time, to be done in half."""
    return [(at, torn) for at, kind in enumerate(kinds, 1) for torn in ((False, True) if kind == "write" else (False,))]


# -- every call of every operation ---------------------------------------------------------------------


class Noting(FileStorage):
    """Notes which operations pass through it."""

    seen: ClassVar[set[type[Operation]]] = set()

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        self.seen.update(type(op) for transaction in transactions for op in transaction)
        return await super()._apply(transactions, now_us, repeat)


async def test_every_operation_of_the_contract_is_among_those_that_are_interrupted(furnished: Path, room: Path) -> None:
    for scene in SCENES.values():
        async with Noting(copied(furnished, room), clock=clock(), durability="process") as storage:
            await scene(storage)
    kinds = list(Operation.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.__name__ for kind in kinds if not kind.__subclasses__()} == {kind.__name__ for kind in Noting.seen}


@pytest.mark.parametrize("name", SCENES)
async def test_a_process_that_dies_at_any_call_leaves_all_or_nothing(furnished: Path, room: Path, name: str) -> None:
    assert await stop_everywhere(furnished, SCENES[name], room, live=False) > 6


@pytest.mark.parametrize("name", BRIEF)
async def test_a_process_that_is_there_takes_over_from_one_that_dies_at_any_call(
    furnished: Path, room: Path, name: str
) -> None:
    await stop_everywhere(furnished, SCENES[name], room, live=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if n % 3 == 0 else pytest.mark.slow) for n, name in enumerate(SCENES)]
)
async def test_a_call_that_fails_has_not_happened_and_can_be_repeated(furnished: Path, room: Path, name: str) -> None:
    assert await fail_everywhere(furnished, SCENES[name], room) > 6


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("how", [stop_everywhere, fail_everywhere], ids=["stops", "fails"])
async def test_new_files_compaction_and_a_new_journal_may_be_interrupted_anywhere(
    furnished: Path, room: Path, how: Any
) -> None:
    more = {"live": False} if how is stop_everywhere else {}
    await how(furnished, SCENES["ack"], room, **more)


@pytest.mark.slow
@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", list(SCENES)[:: (STEP + 1) // 2])
async def test_every_operation_may_be_interrupted_while_all_files_are_renewed(furnished: Path, room: Path, name: str) -> None:
    await stop_everywhere(furnished, SCENES[name], room, live=False)
    await stop_everywhere(furnished, SCENES[name], room, live=True)
    await fail_everywhere(furnished, SCENES[name], room)


@pytest.mark.parametrize("name", ["fail with a cascade", "ack that frees", "commit a run", "abort a run"])
async def test_a_sweep_may_be_interrupted_anywhere(
    furnished: Path, room: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(transitions, "CASCADE_LIMIT", 2)
    monkeypatch.setattr(runs, "SETTLE_LIMIT", 2)
    store = copied(furnished, room)
    async with FileStorage(store, clock=clock(), durability="process") as storage:
        await SCENES[name](storage)
    await stop_everywhere(store, lambda s: s.sweep(limit=1), room, live=False)
    if name != "fail with a cascade":  # of two cascades, a failure may change which is finished first
        await fail_everywhere(store, lambda s: s.sweep(limit=1), room)


# -- opening -------------------------------------------------------------------------------------------


async def stop_while_opening(store: Path | None, room: Path, expected: Dump | None) -> int:
    for at in itertools.count(1):
        for torn in (False, True):
            path = copied(store, room) if store is not None else room / f"{next(_names)}"
            files: list[FaultyFiles] = []
            storage = LayeredStorage(path, _armed(at, torn, files), clock=clock())
            try:
                await storage.open()
            except Stopped:
                pass
            finally:
                await storage.close()
            found = await told(path)
            if expected is not None:
                assert difference(found, expected) == [], f"stopped at call {at} of opening"
            shutil.rmtree(path)
            if not files[0].fired:
                return at
    raise AssertionError


def _armed(at: int, torn: bool, made: list[FaultyFiles]) -> Callable[[Any], FaultyFiles]:
    def layer(inner: Any) -> FaultyFiles:
        files = FaultyFiles(inner)
        files.arm(at, "stop", torn=torn)
        made.append(files)
        return files

    return layer


async def test_a_process_may_die_at_any_call_while_it_makes_a_store(room: Path) -> None:
    assert await stop_while_opening(None, room, None) > 20


async def test_a_process_may_die_at_any_call_while_it_opens_a_store(furnished: Path, room: Path) -> None:
    expected = await told(copied(furnished, room))
    assert await stop_while_opening(furnished, room, expected) > 20


async def first_commit(storage: FileStorage) -> None:
    await do(storage, (*job("one", group="g", idempotency_key="k"), *job("two", delay_us=1)))


async def test_the_first_commit_of_a_store_may_be_interrupted_anywhere(room: Path) -> None:
    store = room / "new"
    await _plain(store)
    await stop_everywhere(store, first_commit, room, live=False)
    await stop_everywhere(store, first_commit, room, live=True)
    await fail_everywhere(store, first_commit, room)


async def remains(store: Path, scene: Scene, room: Path, at: int) -> Path:
    """The folder that a process leaves which dies at this call."""
    path = copied(store, room)
    storage = LayeredStorage(path, clock=clock())
    await storage.open()
    await attempt(storage, scene, at, "stop", errno.EIO, torn=False)
    await storage.close()
    return path


async def die_again(store: Path, scene: Scene, room: Path, every: int) -> None:
    _, _, kinds = await before_and_after(store, scene, room)
    for at in range(2, len(kinds), every):
        left = await remains(store, scene, room, at)
        expected = await told(copied(left, room))
        await stop_while_opening(left, room, expected)


async def test_whoever_mends_what_a_dead_process_left_may_die_anywhere_too(furnished: Path, room: Path) -> None:
    await die_again(furnished, SCENES["transaction"], room, every=14)


@pytest.mark.slow
@pytest.mark.parametrize("name", BRIEF)
async def test_whoever_mends_may_die_anywhere_whatever_was_left(furnished: Path, room: Path, name: str) -> None:
    await die_again(furnished, SCENES[name], room, every=STEP)


async def fail_while_opening(store: Path, room: Path) -> None:
    expected = await told(copied(store, room))
    for at in itertools.count(1):
        path = copied(store, room)
        files: list[FaultyFiles] = []

        def layer(inner: Any, at: int = at, files: list[FaultyFiles] = files) -> FaultyFiles:
            made = FaultyFiles(inner)
            if not files:
                made.arm(at, "fail", errno.EIO)
            files.append(made)
            return made

        storage = LayeredStorage(path, layer, clock=clock())
        try:
            await storage.open()
        except StoreUnavailable:
            await storage.open()
        assert difference(await dump(storage), expected) == [], f"failed at call {at} of opening"
        await storage.close()
        shutil.rmtree(path)
        if not files[0].fired:
            return


async def test_a_store_that_could_not_be_opened_can_be_opened_by_the_same_object_later(furnished: Path, room: Path) -> None:
    await fail_while_opening(furnished, room)


# -- neighbours in one commit --------------------------------------------------------------------------


async def together(storage: LayeredStorage, calls: list[Awaitable[Any]], at: int) -> list[Any]:
    """Send calls so that they share a commit, which fails at a call."""
    gate, inside = threading.Event(), threading.Event()

    def block(_: object) -> None:
        inside.set()
        gate.wait(10)
        storage.files.arm(at + 1, "fail", errno.EIO)  # one more call ends this commit

    blocked = asyncio.ensure_future(storage.inside(block))
    await asyncio.to_thread(inside.wait, 10)
    sent = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)  # all of them are with the writer now
    gate.set()
    await blocked
    return await asyncio.gather(*sent, return_exceptions=True)


async def fail_among_neighbours(store: Path, room: Path) -> int:
    for at in itertools.count(1):
        path = copied(store, room)
        async with LayeredStorage(path, clock=clock()) as storage:
            tokens = [f"{n:024x}" for n in range(3)]
            calls: list[Awaitable[Any]] = [
                *(storage.apply([(Reserve(queues=("q",), token=token, limit=2),)]) for token in tokens),
                storage.apply([job("new")]),
                storage.apply([(Ack(queue="r", id="run-ack", token=TOKEN, result=b"1"),)]),
                storage.allocate_ids(1),
            ]
            answers = await together(storage, calls, at)
            fired = storage.files.fired
            storage.files.disarm()
            assert not [a for a in answers if isinstance(a, BaseException)], f"failed at call {at}: {answers}"
            granted = {task.id: token for token, a in zip(tokens, answers, strict=False) for task in a[0][0].tasks}
            running = (await storage.find(Filter(queue="q", worker=None), limit=1000)).tasks
            leased = {task.id: task.token for task in running if task.token is not None}
            assert leased == granted, f"failed at call {at}: leased to nobody"
            found = await dump(storage)
            assert found["tasks"]["new"] is not None
            check_folder(path, found)
        assert difference(await told(path), found) == []
        shutil.rmtree(path)
        if not fired:
            return at
    raise AssertionError


@pytest.mark.parametrize("renewed", [False, True], ids=["plain", "renewed"])
async def test_a_failure_that_hits_a_shared_commit_hurts_nobody_and_nothing_happens_twice(
    furnished: Path, room: Path, renewed: bool, request: pytest.FixtureRequest
) -> None:
    if renewed:
        request.getfixturevalue("tight")
    assert await fail_among_neighbours(furnished, room) > 10


async def test_a_disk_that_stays_broken_fails_every_call_and_heals(furnished: Path, room: Path) -> None:
    path = copied(furnished, room)
    async with LayeredStorage(path, clock=clock()) as storage:
        before = await dump(storage)
        for kind in ("write", "sync", "truncate", "remove", "rename"):
            setattr(storage.files, kind, _refuse)
        for n in range(3):
            with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                await do(storage, job(f"new-{n}"))
        for kind in ("write", "sync", "truncate", "remove", "rename"):
            delattr(storage.files, kind)
        assert difference(await dump(storage), before) == []
        await check_works(storage)
        found = await dump(storage)
        check_folder(path, found)
    assert difference(await _plain(path), found) == []


def _refuse(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def _plain(path: Path) -> Dump:
    async with InsideStorage(path, clock=clock(), durability="process") as storage:
        return await dump(storage)


# -- power cuts ----------------------------------------------------------------------------------------


async def play(store: Path, names: list[str]) -> tuple[LossyFiles, list[tuple[int, Dump]]]:
    """Play scenes; the layer that remembers it all, and after each scene how many changes there were and what was so."""
    storage = LayeredStorage(store, lambda inner: LossyFiles(inner, store), clock=clock())
    await storage.open()
    files = storage.files
    assert isinstance(files, LossyFiles)
    states = [(0, await dump(storage))]
    for name in names:
        await SCENES[name](storage)
        states.append((len(files.changes), await dump(storage)))
    await storage.close()
    return files, states


async def cut_power(files: LossyFiles, states: list[tuple[int, Dump]], room: Path, cut: int, luck: float, seed: int) -> None:
    path = room / f"{next(_names)}"
    files.after_power_cut(path, cut, random.Random(f"{seed}-{cut}"), luck)
    done = max(n for n, (position, _) in enumerate(states) if position <= cut)
    where = f"power cut after change {cut} of {len(files.changes)} {files.changes[cut - 1 : cut]}, luck {luck}"
    found = await told(path)
    if found != states[done][1] and (done + 1 == len(states) or found != states[done + 1][1]):
        raise AssertionError(f"{where}: {difference(found, states[done][1])}")
    shutil.rmtree(path)


PLAY = [
    "enqueue",
    "reserve",
    "ack",
    "fail with a cascade",
    "requeue",
    "remove with a key",
    "pause",
    "purge",
    "several transactions",
]


def cut_everywhere(furnished: Path, room: Path, monkeypatch: pytest.MonkeyPatch, every: int, seeds: list[int]) -> None:
    async def main() -> None:
        files, states = await play(copied(furnished, room), PLAY)
        monkeypatch.setattr("omniq.storage.file.driver.boot_id", lambda: "another-boot")
        for cut in range(0, len(files.changes) + 1, every):
            for seed in seeds:
                for luck in (0.0, 0.5, 1.0) if seed == seeds[0] else (0.3, 0.7):
                    await cut_power(files, states, room, cut, luck, seed)

    asyncio.run(main())


def test_a_power_cut_loses_nothing_that_was_answered(
    furnished: Path, room: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    cut_everywhere(furnished, room, monkeypatch, every=2, seeds=[seed])


@pytest.mark.usefixtures("tight")
def test_a_power_cut_while_files_are_renewed_loses_nothing_that_was_answered(
    furnished: Path, room: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    cut_everywhere(furnished, room, monkeypatch, every=29, seeds=[seed])


@pytest.mark.slow
@pytest.mark.parametrize("renewed", [False, True], ids=["plain", "renewed"])
def test_power_cuts_at_every_change_lose_nothing_that_was_answered(
    furnished: Path, room: Path, monkeypatch: pytest.MonkeyPatch, seed: int, renewed: bool, request: pytest.FixtureRequest
) -> None:
    if renewed:
        request.getfixturevalue("tight")
    cut_everywhere(furnished, room, monkeypatch, every=STEP, seeds=[seed + n for n in range(max(ROUNDS // 5, 1))])


async def test_the_way_to_a_new_store_is_on_the_disk_as_well(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    await _plain(room / "a" / "b" / "store")
    assert {str(room / "a" / "b"), str(room / "a"), str(room)} <= set(synced)


# -- two at once ---------------------------------------------------------------------------------------


async def both_agree(store: Path, room: Path, names: Iterable[str], alternate: bool) -> None:
    """Two storages on one folder; what one of them does, the other learns, and so does whoever comes later."""
    path = copied(store, room)
    pair = [InsideStorage(path, clock=clock(), durability="process") for _ in range(2)]
    await pair[1].open()
    for n, name in enumerate(names):
        await SCENES[name](pair[n % 2 if alternate else 0])
    found = [await dump(storage) for storage in pair]
    assert difference(*found) == []
    check_folder(path, found[0])
    for n, storage in enumerate(pair):
        await check_works(storage, f"works-{n}")
        await storage.close()
    async with InsideStorage(path, clock=clock(), durability="process") as third:
        seen = await dump(third)
        assert {k: v for k, v in seen["tasks"].items() if not k.startswith("works")} == found[0]["tasks"]
        check_folder(path, seen)
    shutil.rmtree(path)


@pytest.mark.parametrize("renewed", [False, True], ids=["plain", "renewed"])
async def test_two_storages_on_one_folder_agree_whatever_one_of_them_does(
    furnished: Path, room: Path, renewed: bool, request: pytest.FixtureRequest
) -> None:
    if renewed:
        request.getfixturevalue("tight")
    for name in SCENES:
        await both_agree(furnished, room, [name], alternate=False)
    await both_agree(furnished, room, PLAY, alternate=False)
    await both_agree(furnished, room, PLAY, alternate=True)


def work_until_killed(path: Path, answered: int, name: str) -> None:
    """In a forked child: pass task after task through the store, and write down what was answered."""

    async def main() -> None:
        storage = FileStorage(path, clock=clock(), durability="process")
        for n in itertools.count():
            ids, token = [f"{name}-{n}-{m}" for m in range(3)], f"{name}-{n}".rjust(24, "0")
            await do(storage, *((Enqueue(id=id, name="job", queue=name, idempotency_key=id),) for id in ids))
            os.write(answered, b"".join(b"E %b\n" % id.encode() for id in ids))
            (got,) = await storage.apply([(Reserve(queues=(name,), token=token, limit=2),)])
            assert isinstance(got, list)
            assert isinstance(got[0], Reserved)
            held = [task.id for task in got[0].tasks]
            await do(storage, tuple(Ack(queue=name, id=id, token=token, result=b'"%b"' % id.encode()) for id in held))
            os.write(answered, b"".join(b"A %b\n" % id.encode() for id in held))

    try:
        asyncio.run(main())
    finally:
        os._exit(1)


def kill_one_of_two(path: Path, notes: Path, rounds: int, dice: random.Random) -> None:
    """Kill child after child in the middle of its work; a storage that lives all the time goes on each time."""
    storage = InsideStorage(path, clock=clock(), durability="process")
    enqueued: set[str] = set()
    acked: set[str] = set()

    async def look(number: int) -> None:
        found = await dump(storage)
        assert enqueued <= set(found["tasks"]), "a task that was answered is gone"
        assert acked <= set(found["results"]), "a result that was answered is gone"
        check_folder(path, found)
        await check_works(storage, f"works-{number}")

    try:
        asyncio.run(storage.open())
        for number in range(rounds):
            answered = os.open(notes, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            child = os.fork()
            if child == 0:
                work_until_killed(path, answered, f"child-{number}")
            try:
                until(lambda: notes.stat().st_size, "the child to begin", 20)
                time.sleep(dice.uniform(0, 0.02))
            finally:
                os.kill(child, signal.SIGKILL)
                assert os.waitpid(child, 0)[1] == signal.SIGKILL
                os.close(answered)
            for line in notes.read_text().splitlines():
                (enqueued if line[0] == "E" else acked).add(line[2:])
            asyncio.run(look(number))
        found = asyncio.run(dump(storage))
    finally:
        asyncio.run(storage.close())
    assert difference(asyncio.run(_plain(path)), found) == []
    assert not list((path / "corrupt").iterdir())


@pytest.mark.parametrize("renewed", [False, True], ids=["plain", "renewed"])
def test_one_of_two_processes_killed_in_its_commit_costs_the_other_nothing(
    room: Path, seed: int, renewed: bool, request: pytest.FixtureRequest
) -> None:
    if renewed:
        request.getfixturevalue("tight")
    kill_one_of_two(room / "store", room / "notes", 12, random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("renewed", [False, True], ids=["plain", "renewed"])
def test_many_processes_killed_in_their_commits_cost_the_last_one_nothing(
    room: Path, seed: int, renewed: bool, request: pytest.FixtureRequest
) -> None:
    if renewed:
        request.getfixturevalue("tight")
    for n in range(ROUNDS):
        kill_one_of_two(room / f"store-{n}", room / "notes", 25, random.Random(seed + n))
