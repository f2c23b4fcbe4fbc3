"""Several processes on one folder: catching up with others, opening while they write, being interrupted."""

import asyncio
import random
import signal
import time
from pathlib import Path

import fault_jobs
import pytest
from fault_processes import Fleet, on_each_store, until
from support.faulty_files import FaultyFiles, LayeredStorage, Stopped
from support.inside import InsideStorage

from omniq import FileStorage, OmniQ
from omniq.models import State, new_token
from omniq.operations import Ack, Enqueue, Reserve, Reserved, Retention
from omniq.storage.file import folder as file_folder
from omniq.storage.file import writer as file_writer
from omniq.storage.file.folder import Folder
from omniq.storage.file.opening import load
from omniq.testing import FakeClock

on_files = pytest.mark.parametrize("fleet", ["file"], indirect=True)


def new(count: int, start: int = 0) -> list[tuple[Enqueue]]:
    return [(Enqueue(id=f"t{n}", name="job", payload=b'"' + b"x" * 400 + b'"'),) for n in range(start, start + count)]


async def ids_in(storage: FileStorage) -> int:
    return sum(c.ready for c in await storage.counts())


async def test_one_who_lags_behind_more_journals_than_are_kept_learns_everything_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_folder, "JOURNAL_BYTES", 8 << 10)
    async with FileStorage(tmp_path) as late, FileStorage(tmp_path) as busy:
        for n in range(5):
            await busy.apply(new(20, n * 20))
        assert await ids_in(late) == 100
        kept = set(tmp_path.glob("journal/*"))
        await busy.pause("silent")
        await busy.set_group_limit("default", "g", 7)
        for n in range(5, 15):
            await busy.apply(new(20, n * 20))
        assert not kept & set(tmp_path.glob("journal/*")), "what the late one knows has gone"
        assert len(list(tmp_path.glob("journal/*"))) <= 3
        assert await ids_in(late) == 300
        assert await late.is_paused("silent")
        assert [g.limit for g in (await late.groups("default"))[0]] == [7]
        await late.apply(new(10, 300))
        assert await ids_in(busy) == 310
        assert await busy.check() == await late.check() == []
    async with FileStorage(tmp_path) as again:
        assert await ids_in(again) == 310
        assert await again.is_paused("silent")


async def test_two_who_write_in_turn_follow_each_other_from_journal_to_journal_without_learning_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Folder] = []

    def noted(folder: Folder) -> None:
        loads.append(folder)
        load(folder)

    monkeypatch.setattr(file_folder, "JOURNAL_BYTES", 8 << 10)
    monkeypatch.setattr(file_writer, "load", noted)
    async with FileStorage(tmp_path, durability="process") as one, FileStorage(tmp_path, durability="process") as two:
        await one.apply(new(1))
        await two.apply(new(1, 1))
        assert len(loads) == 2
        loads.clear()
        for n in range(1, 50):
            await one.apply(new(2, n * 4))
            await two.apply(new(2, n * 4 + 2))
        assert loads == []
        assert await ids_in(one) == await ids_in(two) == 198


async def test_one_who_only_enqueues_remembers_nothing_of_what_others_have_run(tmp_path: Path) -> None:
    each, clock = 50, FakeClock()

    def task(n: int) -> tuple[Enqueue]:
        return (
            Enqueue(
                id=f"t{n}",
                name="job",
                group="g" if n % 2 else None,
                group_limit=each,
                delay_us=1 if n % 5 == 0 else None,
                idempotency_key=f"k{n}",
                key_ttl_us=1,
                result_ttl_us=1,
            ),
        )

    async with (
        InsideStorage(tmp_path, clock=clock, durability="process") as producer,
        FileStorage(tmp_path, clock=clock, durability="process") as worker,
    ):
        most: list[int] = []
        for start in range(0, 20 * each, each):
            await producer.apply([task(n) for n in range(start, start + each)])
            clock.advance(1)
            token = new_token()
            (answer,) = await worker.apply([(Reserve(queues=("default",), token=token, limit=each, worker="w"),)])
            assert isinstance(answer, list)
            assert isinstance(answer[0], Reserved)
            assert len(answer[0].tasks) == each
            await worker.apply([(Ack(queue="default", id=task.id, token=token),) for task in answer[0].tasks])
            clock.advance(1)
            while await worker.purge(Retention()):
                pass
            most.append(await producer.inside(lambda section: section.index.remembered))
        assert most[-1] <= most[2], most


class Condemned(FaultyFiles):
    """Of a process that is killed right after the record of a commit, once it is condemned."""

    condemned = False

    def write(self, path: str, offset: int, data: bytes) -> None:
        super().write(path, offset, data)
        if self.condemned and path.startswith("journal/"):
            self.arm(1, "stop")


@pytest.mark.parametrize("lag", [0, 3])
async def test_one_who_lags_behind_finishes_what_a_dead_process_had_begun(tmp_path: Path, lag: int) -> None:
    async with FileStorage(tmp_path) as late, LayeredStorage(tmp_path, Condemned) as dying:
        token = new_token()
        await dying.apply(new(1))
        (answer,) = await dying.apply([(Reserve(queues=("default",), token=token, worker="w"),)])
        assert isinstance(answer, list)
        assert isinstance(answer[0], Reserved)
        await late.counts()
        for n in range(lag):
            await dying.apply(new(1, n + 1))
        assert isinstance(dying.files, Condemned)
        dying.files.condemned = True
        with pytest.raises(Stopped):
            await dying.apply([(Ack(queue="default", id="t0", token=token, result=b"1"),)])
        await dying.close()
        task = await late.get("t0")
        assert task is not None
        assert task.state is State.DONE
        running = b"".join(path.read_bytes() for path in tmp_path.glob("queue/running/*"))
        assert b"{" not in running, "what is no longer true is blanked"


@on_files
def test_a_folder_can_be_opened_while_many_write_and_is_whole_each_time(fleet: Fleet, seed: int) -> None:
    workers = [fleet.worker(concurrency=4) for _ in range(2)]
    producers = [fleet.producer(f"{seed}-{n}", per_second=1000, lease=30) for n in range(2)]
    for worker in workers:
        worker.ready()
    until(lambda: all(len(p.lines) >= 5 for p in producers), "the producers to begin")
    end = time.monotonic() + 2
    opened = 0
    while time.monotonic() < end:
        before = {i for p in producers for line in p.lines for i in line.split()}
        asyncio.run(look(fleet.store, random.Random(seed + opened).sample(sorted(before), 5)))
        opened += 1
    assert opened > 1
    for process in [*producers, *workers]:
        assert process.finish() == 0, process.errors
        assert "Traceback" not in process.noise, process.errors
    assert list(fleet.store.glob("corrupt/*")) == []


async def look(store: Path, known: list[str]) -> None:
    async with FileStorage(store) as storage:
        assert [i for i in known if await storage.get(i) is None] == []
        assert await storage.check() == []


INTERRUPTED = """
import select, signal, sys
import fault_jobs, fault_small_files
from omniq import OmniQ

inside = False

def interrupt(*_):
    global inside
    if inside:
        inside = False
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
with OmniQ.from_url(sys.argv[1]) as oq:
    oq.counts()
    print("ready", flush=True)
    while not select.select([0], [], [], 0)[0]:
        try:
            inside, said = True, "interrupted"
            said = oq.enqueue(fault_jobs.nothing)
            inside = False
        except KeyboardInterrupt:
            pass
        print(said, flush=True)
"""


@on_each_store
def test_control_c_in_the_middle_of_a_write_leaves_a_store_that_goes_on(fleet: Fleet, seed: int) -> None:
    dice = random.Random(seed)
    process = fleet.start("interrupted", "-c", INTERRUPTED, fleet.url).ready()
    with OmniQ.from_url(fleet.url) as oq:
        for n in range(100):
            process.send(signal.SIGINT)
            time.sleep(dice.uniform(0.001, 0.01))
            if n % 20 == 0:
                oq.enqueue(fault_jobs.nothing)
        assert process.finish(20) == 0, process.errors
        said = process.lines[1:]
        ids = [line for line in said if line != "interrupted"]
        interrupts = len(said) - len(ids)
        assert interrupts > 0
        assert ids
        assert [i for i in ids if oq.get_task(i) is None] == []
        assert len(ids) + 5 <= sum(c.ready for c in oq.counts()) <= len(said) + 5
        assert oq.check() == []
