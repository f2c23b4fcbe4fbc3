"""What only SQLite has: files, tables, shared commits, and disks that fail."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, DriverClosed, OmniQ, Settings, SQLiteStorage, StoreUnavailable
from omniq.errors import StoreError, StoreTooNew
from omniq.models import now_us
from omniq.storage.sqlite.schema import VERSION

TASK_COLUMNS = {
    "id",
    "func_path",
    "args",
    "kwargs",
    "eta",
    "status",
    "attempts",
    "max_retries",
    "timeout",
    "created_at",
    "updated_at",
    "interval",
}
RESULT_COLUMNS = {"task_id", "status", "result", "error", "finished_at", "attempts"}


def columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with a task and its result."""
    made = tmp_path / "q.db"
    with OmniQ(SQLiteStorage(made, durability="process")) as oq, oq.worker():
        assert oq.get_result(oq.enqueue(jobs.add, 1, b=2), wait=True, timeout=5).ok
    return made


def test_the_tables_have_the_columns_of_the_specification(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        assert columns(connection, "tasks") >= TASK_COLUMNS
        assert columns(connection, "results") >= RESULT_COLUMNS
    connection.close()


def test_a_stored_task_can_be_read_with_plain_sql(path: Path) -> None:
    connection = sqlite3.connect(path)
    row = connection.execute("SELECT func_path, args, kwargs, status, attempts, max_retries FROM tasks").fetchone()
    assert row == ("support.jobs:add", "[1]", '{"b":2}', "SUCCESS", 1, 3)
    row = connection.execute("SELECT status, CAST(result AS TEXT), error, attempts FROM results").fetchone()
    assert row == ("SUCCESS", "3", None, 1)
    connection.close()


def test_indexes_contain_eta_and_status(path: Path) -> None:
    connection = sqlite3.connect(path)
    indexed: set[str] = set()
    for index in connection.execute("PRAGMA index_list(tasks)").fetchall():
        indexed |= {row[2] for row in connection.execute(f"PRAGMA index_info({index[1]})")}
    connection.close()
    assert {"eta", "status"} <= indexed


async def test_everything_beside_the_database_begins_with_its_name(tmp_path: Path) -> None:
    async with AsyncOmniQ(SQLiteStorage(tmp_path / "deep" / "er" / "q.db")) as oq, await oq.worker():
        assert (await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)).ok
        there = {p.name for p in (tmp_path / "deep" / "er").iterdir()}
    assert "q.db" in there
    assert "q.db-wal" in there
    assert all(name.startswith("q.db") for name in there)
    assert all(p.name.startswith("q.db") for p in (tmp_path / "deep" / "er").iterdir())
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]


def test_a_stopped_worker_leaves_no_lock_file(path: Path) -> None:
    locks = path.with_name("q.db-locks")
    assert not locks.exists() or list(locks.iterdir()) == []


@pytest.mark.parametrize("name", [":memory:", "sqlite://", "sqlite:///:memory:"])
async def test_a_database_in_memory_works_whole_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    async with AsyncOmniQ(SQLiteStorage(name), settings=Settings(backoff_base=0.01)) as oq:
        async with await oq.worker(concurrency=2, poll_interval=30):
            assert (await oq.get_result(await oq.enqueue(jobs.fail_until, key, 2), wait=True, timeout=5)).ok
            ids = await oq.enqueue_many(jobs.add, [(n,) for n in range(20)])
            for task_id in ids:
                assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
        assert (await oq.counts())[0].done == 21
        assert len(await oq.history(ids[0])) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_relative_path_is_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with OmniQ.from_url("sqlite:///sub/q.db") as oq:
        oq.enqueue(jobs.add, 1)
    assert (tmp_path / "sub" / "q.db").exists()


def test_a_program_that_changes_its_folder_keeps_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with OmniQ(SQLiteStorage("q.db", durability="process")) as oq:
        first = oq.enqueue(jobs.add, 1)
        os.chdir(tmp_path / "elsewhere")
        second = oq.enqueue(jobs.add, 2)
        assert {oq.get_task(first).id, oq.get_task(second).id} == {first, second}
        with oq.worker():
            assert oq.get_result(second, wait=True, timeout=5).ok
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_tasks_outlive_the_storage_object(path: Path) -> None:
    with OmniQ(SQLiteStorage(path)) as oq:
        (found,), _ = oq.find()
        assert oq.get_result(found.id).result == 3


# -- databases that are not ours -------------------------------------------------------------------


async def opening(path: Path) -> str:
    storage = SQLiteStorage(path)
    try:
        with pytest.raises(StoreError) as caught:
            await storage.open()
    finally:
        await storage.close()
    return f"{type(caught.value).__name__}: {caught.value}"


async def test_a_newer_store_is_refused_by_name(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    said = await opening(path)
    assert said.startswith(StoreTooNew.__name__)
    assert "upgrade omniq" in said


@pytest.mark.parametrize("version", [0, VERSION, VERSION + 5])
async def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE tasks (what TEXT)")
    connection.execute("INSERT INTO tasks VALUES ('mine')")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()
    said = await opening(path)
    assert said.startswith("StoreForeign")
    assert "another program (with the table 'tasks')" in said
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT what FROM tasks").fetchall() == [("mine",)]
    assert columns(connection, "results") == set()
    connection.close()


@pytest.mark.parametrize("journal", ["delete", "wal"])
@pytest.mark.parametrize("open_elsewhere", [False, True])
async def test_a_database_of_another_program_is_not_touched(tmp_path: Path, journal: str, open_elsewhere: bool) -> None:
    """Also while its program has it open, with tables that stand in its log only."""
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {journal}")
    for name in ("users", "orders", "invoices", "odd\nname"):
        connection.execute(f'CREATE TABLE "{name}" (what TEXT)')
    connection.commit()
    if not open_elsewhere:
        connection.close()
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}
    said = await opening(path)
    assert said.startswith("StoreForeign")
    if journal == "delete" or not open_elsewhere:
        assert "(with the tables 'users', 'orders', 'invoices', …)" in said
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()} == before
    connection.close()


@pytest.mark.parametrize(("name", "proposed"), [("shop.db", "omniq.db"), ("omniq.db", "omniq-tasks.db")])
async def test_the_place_that_is_proposed_is_never_the_one_that_was_refused(tmp_path: Path, name: str, proposed: str) -> None:
    connection = sqlite3.connect(tmp_path / name)
    connection.execute("CREATE TABLE users (name TEXT)")
    connection.close()
    assert f"such as {tmp_path / proposed};" in await opening(tmp_path / name)


def test_an_empty_database_and_one_whose_making_was_cut_short_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    connection = sqlite3.connect(tmp_path / "begun.db")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    assert (tmp_path / "begun.db").stat().st_size > 0
    for name in ("empty.db", "begun.db"):
        with OmniQ(SQLiteStorage(tmp_path / name, durability="process")) as oq:
            assert oq.enqueue(jobs.add, 1)


def test_a_store_that_was_just_made_and_never_closed_is_known_by_its_log(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    with OmniQ(SQLiteStorage(path, durability="process")) as first:
        first.enqueue(jobs.add, 1)
        with OmniQ(SQLiteStorage(path, durability="process")) as second:
            assert sum(c.ready for c in second.counts()) == 1


def test_opening_a_file_twice_in_a_process_costs_the_first_neither_its_locks_nor_its_tasks(tmp_path: Path) -> None:
    """Another process that closes the store must not take itself for the last one and delete the log."""
    path = tmp_path / "q.db"
    look = (
        "import sys; from omniq import OmniQ\nwith OmniQ.from_url(sys.argv[1]) as oq: print(sum(c.ready for c in oq.counts()))"
    )
    with OmniQ(SQLiteStorage(path, durability="process")) as first:
        first.enqueue(jobs.add, 1)
        with OmniQ(SQLiteStorage(path, durability="process")) as second:
            assert sum(c.ready for c in second.counts()) == 1
            for ready in (1, 2):
                command = [sys.executable, "-c", look, f"sqlite:///{path}"]
                assert int(subprocess.run(command, capture_output=True, check=True).stdout) == ready
                assert Path(f"{path}-wal").exists()
                first.enqueue(jobs.add, 2)
        assert sum(c.ready for c in first.counts()) == 3


def test_a_store_to_which_somebody_added_tables_stays_a_store(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE users (name TEXT)")
    connection.commit()
    connection.close()
    with OmniQ(SQLiteStorage(path)) as oq:
        assert sum(c.done for c in oq.counts()) == 1
        assert oq.check() == []


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, " * 500)
    assert "not a database" in await opening(path)
    assert path.read_text().startswith("these are notes")


async def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "folder" in await opening(tmp_path)


async def test_a_pipe_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device" in await opening(tmp_path / "pipe")


async def test_a_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = await opening(tmp_path / "file" / "sub" / "q.db")
    assert said.startswith("StoreUnavailable")


async def test_a_storage_that_failed_to_open_can_be_tried_again(tmp_path: Path) -> None:
    blocker = tmp_path / "sub"
    blocker.write_text("")
    storage = SQLiteStorage(blocker / "q.db", durability="process")
    with pytest.raises(StoreUnavailable):
        await storage.open()
    blocker.unlink()
    async with AsyncOmniQ(storage) as oq:
        assert await oq.enqueue(jobs.add, 1)


# -- closed and removed ----------------------------------------------------------------------------


async def test_a_closed_storage_says_so(tmp_path: Path) -> None:
    storage = SQLiteStorage(tmp_path / "q.db")
    oq = AsyncOmniQ(storage)
    task_id = await oq.enqueue(jobs.add, 1)
    await oq.get_task(task_id)
    await oq.close()
    await oq.close()
    for call in (
        oq.enqueue(jobs.add, 1),
        oq.get_task(task_id),
        oq.get_result(task_id),
        oq.get_result(task_id, wait=True, timeout=1),
        oq.counts(),
        oq.events(),
        oq.cancel(task_id),
        oq.pause("default"),
        storage.wait(timeout=0.1),
        storage.open(),
    ):
        with pytest.raises(DriverClosed):
            await call


async def test_closing_while_calls_are_under_way_answers_all_of_them(tmp_path: Path) -> None:
    oq = AsyncOmniQ(SQLiteStorage(tmp_path / "q.db", durability="process"))
    await oq.enqueue(jobs.add, 0)
    calls = [asyncio.create_task(oq.enqueue(jobs.add, n)) for n in range(50)]
    await asyncio.sleep(0)
    await oq.close()
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert all(isinstance(a, str | DriverClosed) for a in answers)


async def test_a_removed_database_is_an_error_that_says_so(path: Path) -> None:
    async with AsyncOmniQ(SQLiteStorage(path, durability="process")) as oq:
        await oq.enqueue(jobs.add, 1)
        for file in path.parent.glob("q.db*"):
            if file.is_file():
                file.unlink()
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            await oq.enqueue(jobs.add, 1)
    assert not path.exists()


# -- group commit ----------------------------------------------------------------------------------


def test_calls_of_several_threads_share_commits(tmp_path: Path) -> None:
    def slow_clock() -> int:
        time.sleep(0.001)  # a commit takes time on a disk; the folder of the test may lie in memory
        return now_us()

    def rings() -> int:
        """One for each commit that leaves tasks to run."""
        return int.from_bytes((tmp_path / "q.db-bell").read_bytes())

    with OmniQ(SQLiteStorage(tmp_path / "q.db", clock=slow_clock)) as oq:
        oq.enqueue(jobs.add, 0)
        assert rings() == 1
        barrier = threading.Barrier(8)

        def work() -> None:
            barrier.wait(5)
            for n in range(25):
                oq.enqueue(jobs.add, n)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert oq.counts()[0].ready == 201
    assert rings() - 1 < 150, "no commit was shared"


async def test_one_bad_call_does_not_spoil_the_commit_of_others(tmp_path: Path) -> None:
    async with AsyncOmniQ(SQLiteStorage(tmp_path / "q.db", durability="process")) as oq:
        await oq.options(task_id="taken").enqueue(jobs.add, 0)
        good = [oq.enqueue(jobs.add, n) for n in range(10)]
        bad = oq.options(task_id="taken").enqueue(jobs.add, 5)
        answers = await asyncio.gather(*good[:5], bad, *good[5:], return_exceptions=True)
        assert [type(a).__name__ for a in answers] == ["str"] * 5 + ["DuplicateId"] + ["str"] * 5


async def test_several_storages_on_one_file_never_see_a_lock(tmp_path: Path) -> None:
    queues = [AsyncOmniQ(SQLiteStorage(tmp_path / "q.db", durability="process")) for _ in range(4)]
    await asyncio.gather(*(oq.enqueue(jobs.add, n) for n in range(40) for oq in queues))
    assert {(await oq.counts())[0].ready for oq in queues} == {160}
    for oq in queues:
        await oq.close()


async def test_a_lock_of_another_program_is_waited_for(tmp_path: Path) -> None:
    async with AsyncOmniQ(SQLiteStorage(tmp_path / "q.db", durability="process")) as oq:
        await oq.enqueue(jobs.add, 1)
        other = sqlite3.connect(tmp_path / "q.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        call = asyncio.create_task(oq.enqueue(jobs.add, 2))
        assert (await oq.counts())[0].ready == 1, "reading waits for writing"
        other.execute("ROLLBACK")
        other.close()
        assert await asyncio.wait_for(call, 5)


# -- a full disk -----------------------------------------------------------------------------------

FULL_DISK = """
import asyncio, resource, sys
from omniq import AsyncOmniQ, SQLiteStorage
from omniq.errors import StoreFull, StoreUnavailable
from support import jobs

async def main():
    async with AsyncOmniQ(SQLiteStorage(sys.argv[1], durability="process")) as oq:
        first = await oq.enqueue(jobs.echo, "x")
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        failed = 0
        for n in range(60):
            try:
                await oq.enqueue(jobs.echo, "x" * 20_000)
            except (StoreFull, StoreUnavailable) as exc:
                failed += 1
                said = str(exc)
        assert failed, "the limit was never reached"
        assert sys.argv[1] in said, said
        assert (await oq.get_task(first)).id == first
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        healed = await oq.enqueue(jobs.echo, "x" * 20_000)
        assert (await oq.get_task(healed)).id == healed
        (count,) = await oq.counts()
        assert count.ready == 1 + 60 - failed + 1, (count.ready, failed)
        assert await oq.storage.check() == []
    print("healed")

asyncio.run(main())
"""


def test_a_full_disk_is_a_named_error_and_heals(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "q.db")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.stdout == "healed\n", done.stderr


async def test_a_worker_lives_through_a_database_that_cannot_be_written(tmp_path: Path, key: str) -> None:
    """Another program keeps the write lock for longer than a heartbeat; the task still runs once."""
    storage = SQLiteStorage(tmp_path / "q.db", durability="process")
    async with AsyncOmniQ(storage, settings=Settings(lease=3)) as oq, await oq.worker():
        task_id = await oq.enqueue(jobs.wait_async, key)
        await eventually(lambda: jobs.runs[key])
        other = sqlite3.connect(tmp_path / "q.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        jobs.gates[key].set()
        assert await oq.get_result(task_id, wait=True, timeout=0.2) is None
        other.execute("ROLLBACK")
        other.close()
        assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
    assert jobs.runs[key] == 1


def test_a_store_of_the_first_format_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.db"
    with monkeypatch.context() as old:
        old.setattr("omniq.storage.sqlite.schema.VERSION", 1)
        with OmniQ(SQLiteStorage(path)) as oq:
            task_id = oq.enqueue(jobs.add, 1, 2)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert columns(connection, "fan_ins") == set()
    connection.close()
    with OmniQ(SQLiteStorage(path)) as oq, oq.worker():
        outcome = oq.get_result(task_id, wait=True, timeout=10)
    assert outcome is not None
    assert outcome.result == 3
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    assert columns(connection, "fan_ins") != set()
    connection.close()
