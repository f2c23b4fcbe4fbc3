"""Bits that flip in a SQLite file, and rows that go: what is lost, or cannot be read any more, shows in `check`."""

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest

from omniq import SQLiteStorage, StoreUnavailable
from omniq.models import Blocker, TaskError, new_token
from omniq.operations import Ack, Beat, Enqueue, Fail, OpenRun, Reserve, Reserved, Stage, WorkerInfo

TASKS = 40
LOOKS = ("tasks", "results", "events", "keys", "queues", "lanes", "blocks")


async def fill(path: Path) -> None:
    """Tasks in every state."""
    async with SQLiteStorage(path, durability="process") as storage:
        for n in range(TASKS):
            group = None if n % 4 else f"group-{n % 3}"
            key = f"key-{n:03}"
            task = Enqueue(
                id=f"task-{n:03}", name="job", payload=b'{"args":["hello"],"kwargs":{}}', group=group, idempotency_key=key
            )
            await storage.apply([(task,)])
        reserve = Reserve(queues=("default",), token=new_token(), limit=30, lease_us=1 << 50, worker="w")
        ((reserved,),) = await storage.apply([(reserve,)])
        assert isinstance(reserved, Reserved)
        held = [{"queue": t.queue, "id": t.id, "token": t.token} for t in reserved.tasks]
        await storage.apply([(Ack(**h, result=b"1"),) for h in held[:8]])
        await storage.apply([(Fail(**h, error=TaskError("E", "it broke")),) for h in held[8:12]])
        blocker = (Blocker(held[20]["id"], "default"),)
        await storage.apply([(Enqueue(id="blocked", name="job", blocked_by=blocker),)])
        await storage.apply([(Enqueue(id="scheduled", name="job", delay_us=1 << 50),)])
        await storage.apply([(OpenRun(queue="default", run_id="r", ttl_us=1 << 50),)])
        await storage.apply([(Stage(queue="default", run_id="r", tasks=(Enqueue(id="staged", name="job"),)),)])
        await storage.apply([(Beat(info=WorkerInfo(worker="w")),)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "q.db"
    asyncio.run(fill(path))
    assert asyncio.run(check(path)) == []
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, whole: bytes) -> Path:
    made = tmp_path / "q.db"
    made.write_bytes(whole)
    return made


async def check(path: Path) -> list[str]:
    async with SQLiteStorage(path, durability="process") as storage:
        return await storage.check()


def flipped(path: Path, data: bytes, place: int, bit: int) -> None:
    damaged = bytearray(data)
    damaged[place] ^= bit
    path.write_bytes(damaged)
    for name in ("q.db-wal", "q.db-shm"):
        path.with_name(name).unlink(missing_ok=True)


async def test_a_flipped_bit_that_hides_a_task_is_found(path: Path, whole: bytes) -> None:
    """A task's id stands in its row and in the index that leads there."""
    hiding, place = 0, whole.find(b"task-035")
    while place >= 0:
        flipped(path, whole, place + 7, 1)
        async with SQLiteStorage(path, durability="process") as storage:
            hidden, told = await storage.get("task-035") is None, await storage.check()
        assert told or not hidden
        hiding += hidden
        place = whole.find(b"task-035", place + 1)
    assert hiding


async def test_a_row_that_cannot_be_read_any_more_is_named(path: Path, whole: bytes) -> None:
    place = whole.rindex(b'["hello"]')
    flipped(path, whole, place + 3, 0x80)
    (told,) = await check(path)
    assert told.startswith("row ")
    assert told.endswith(" of table tasks cannot be read")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("DELETE FROM events WHERE seq BETWEEN 5 AND 6", "the events 5 to 6 are missing"),
        ("DELETE FROM events WHERE seq = (SELECT max(seq) FROM events)", "are missing"),
        ("DELETE FROM tasks WHERE id = 'blocked'", "waits for task"),
        ("DELETE FROM blocks", "task 'blocked' waits for others, and nobody knows for whom"),
        ("DELETE FROM tasks WHERE state = 5 AND id = (SELECT task_id FROM results LIMIT 1)", "has no task"),
        ("DELETE FROM lanes", "which its queue does not know"),
        ("DELETE FROM runs", "staged task 'staged' is of run 'r', which there is none of"),
        ("DELETE FROM queues", "is of queue 'default', which there is none of"),
        ("UPDATE tasks SET state = 12 WHERE id = 'blocked'", "task 'blocked' has state 12 and status 'PENDING'"),
        ("UPDATE tasks SET token = NULL WHERE state = 4", "runs without a lease"),
        ("UPDATE tasks SET seq = 1000 WHERE id = 'scheduled'", "task 'scheduled' has the number 1000"),
        ("UPDATE results SET error = '{\"type\":' WHERE status = 'FAILED'", "of table results cannot be read"),
        ("UPDATE tasks SET args = '[1' WHERE id = 'task-001'", "row 2 of table tasks cannot be read"),
        ("UPDATE events SET data = '{' WHERE seq = 1", "row 1 of table events cannot be read"),
        ("UPDATE workers SET info = x'ff'", "row 1 of table workers cannot be read"),
    ],
)
async def test_what_cannot_be_is_told(path: Path, damage: str, told: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(damage)
    connection.commit()
    connection.close()
    assert any(told in sentence for sentence in await check(path))


async def test_much_of_a_kind_is_counted(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE events SET data = '{'")
    connection.commit()
    connection.close()
    told = [sentence for sentence in await check(path) if "events" in sentence]
    assert len(told) == 21
    assert told[-1].startswith("and ")


def rows(path: Path) -> dict[str, int]:
    """How many rows of each table can be read; none of one that cannot be read at all."""
    connection = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    connection.text_factory = bytes
    found: dict[str, int] = {}
    for table in LOOKS:
        try:
            found[table] = len(connection.execute(f"SELECT * FROM {table} NOT INDEXED").fetchall())
        except (sqlite3.Error, UnicodeDecodeError):
            found[table] = 0
    connection.close()
    return found


@pytest.mark.slow
async def test_no_bit_takes_a_row_without_being_told_of(path: Path, whole: bytes, seed: int) -> None:
    random_place = random.Random(seed)
    all_rows, losses = {}, 0
    path.write_bytes(whole)
    all_rows = rows(path)
    for _ in range(600):
        place, bit = random_place.randrange(len(whole)), 1 << random_place.randrange(8)
        flipped(path, whole, place, bit)
        lost = rows(path) != all_rows
        losses += lost
        try:
            assert await check(path) or not lost, f"bit {bit} of byte {place}"
        except StoreUnavailable:
            continue
    assert losses
