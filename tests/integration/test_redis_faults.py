"""What a Redis queue survives: lost scripts, lost answers, broken connections, a server that is killed."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.proxy import Proxy
from support.redis_server import Server, running
from support.waiting import eventually

from omniq import AsyncOmniQ, Settings
from omniq.errors import OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from omniq.models import State, new_token
from omniq.operations import Ack, Acked, Enqueue, Enqueued, OpenRun, Reserve, Reserved, Stage
from omniq.storage.bulk import open_bulk
from omniq.storage.redis import RedisStorage

RESUME_S = 2.0
QUICK = Settings(backoff_base=0.01, grace=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    with server.client() as client:
        client.flushall()
    return server.url


@pytest.fixture
def proxy(server: Server, url: str) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def square(n: int) -> int:
    return n * n


def enqueue(id: str) -> list[tuple[Enqueue]]:
    return [(Enqueue(id=id, name="job", payload=b"[]"),)]


async def test_a_flushed_script_is_sent_again(server: Server, url: str) -> None:
    async with RedisStorage(url) as storage:
        for n in range(3):
            with server.client() as client:
                client.script_flush()
            await storage.apply(enqueue(f"a{n}"))
            with server.client() as client:
                client.script_flush()
            storage.apply_blocking(enqueue(f"b{n}"))
        assert (await storage.counts())[0].ready == 6


async def test_an_enqueue_whose_answer_got_lost_is_not_stored_twice(proxy: Proxy, url: str) -> None:
    async with RedisStorage(proxy.url) as storage:
        await storage.apply(enqueue("warm"))
        proxy.swallow_reply()
        with pytest.raises(OutcomeUnknown):
            await storage.apply(enqueue("a"))
        assert await storage.apply(enqueue("a"), repeat=True) == [[Enqueued(id="a", existed=True, state=State.READY)]]
        assert (await storage.counts())[0].ready == 2


def test_a_run_whose_answers_get_lost_is_staged_and_committed_once(proxy: Proxy, url: str) -> None:
    rows = [Enqueue(id=f"t{n}", name="job", payload=b"[]", idempotency_key=f"k{n}") for n in range(2000)]
    with open_bulk(proxy.url) as bulk:
        proxy.swallow_reply()
        bulk.open_run("r", "default")
        for part in (rows[:1200], rows[800:]):  # several calls are on their way when an answer is lost
            proxy.swallow_reply()
            new, there = bulk.stage("r", part)
            assert new + there == 1200
        proxy.swallow_reply()
        done = bulk.commit_run("r")
    assert (done.new, done.released, done.settled) == (2000, 2000, True)

    async def ready() -> int:
        async with RedisStorage(url) as storage:
            assert await storage.check() == []
            return (await storage.counts())[0].ready

    assert asyncio.run(ready()) == 2000


async def test_a_script_that_is_forgotten_while_calls_fly_leaves_the_outcome_open(server: Server, proxy: Proxy) -> None:
    rows = [Enqueue(id=f"t{n}", name="job") for n in range(1500)]
    stages = [(Stage(queue="default", run_id="r", tasks=tuple(rows[at : at + 500])),) for at in range(0, 1500, 500)]
    async with RedisStorage(proxy.url) as storage:
        await storage.apply([(OpenRun(queue="default", run_id="r"),)])
        with server.client() as client:
            proxy.before_request = client.script_flush
            with pytest.raises(OutcomeUnknown, match="No matching script"):
                await asyncio.to_thread(storage.apply_blocking, stages)
            proxy.before_request = lambda: None
        answers = await asyncio.to_thread(storage.apply_blocking, stages, repeat=True)
        assert sum(answer[0].new + answer[0].there for answer in answers if isinstance(answer, list)) == 1500  # type: ignore[attr-defined]
        assert (await storage.counts())[0].staged == 1500


async def test_a_reserve_whose_answer_got_lost_gives_the_same_leases_again(proxy: Proxy, url: str) -> None:
    async with RedisStorage(proxy.url) as storage:
        await storage.apply([*enqueue("a"), *enqueue("b"), *enqueue("c")])
        op = Reserve(queues=("default",), limit=2, token=new_token())
        proxy.swallow_reply()
        with pytest.raises(OutcomeUnknown):
            await storage.apply([(op,)])
        (answer,) = await storage.apply([(op,)], repeat=True)
        assert isinstance(answer, list)
        assert isinstance(answer[0], Reserved)
        assert sorted(t.id for t in answer[0].tasks) == ["a", "b"]
        assert {t.attempts for t in answer[0].tasks} == {1}
        ack = [(Ack(queue="default", id="a", token=op.token),)]
        proxy.swallow_reply()
        with pytest.raises(OutcomeUnknown):
            await storage.apply(ack)
        assert await storage.apply(ack) == [[Acked(state=State.DONE, already=True)]]


async def test_a_blocking_call_whose_answer_got_lost_says_so(proxy: Proxy, url: str) -> None:
    async with RedisStorage(proxy.url) as storage:
        storage.apply_blocking(enqueue("warm"))
        proxy.swallow_reply()
        with pytest.raises(OutcomeUnknown):
            storage.apply_blocking(enqueue("a"))
        (answer,) = storage.apply_blocking(enqueue("a"), repeat=True)
        assert answer == [Enqueued(id="a", existed=True, state=State.READY)]


async def test_a_server_that_is_silent_leaves_the_outcome_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.storage.redis.client.ANSWER_S", 0.3)
    with running(tmp_path / "redis") as server:
        async with RedisStorage(server.url) as storage:
            await storage.apply(enqueue("warm"))
            storage.apply_blocking(enqueue("warm too"))
            os.kill(server.pid, signal.SIGSTOP)
            try:
                with pytest.raises(OutcomeUnknown):
                    await storage.apply(enqueue("a"))
                with pytest.raises(OutcomeUnknown):
                    storage.apply_blocking(enqueue("b"))
                with pytest.raises(StoreUnavailable):
                    await storage.get("a", "default")
            finally:
                os.kill(server.pid, signal.SIGCONT)
            for id in "ab":
                assert await storage.apply(enqueue(id), repeat=True) == [[Enqueued(id=id, existed=True, state=State.READY)]]


async def test_a_cancelled_call_is_cancelled_whenever_it_comes(url: str) -> None:
    """Before Python 3.12 the client library's own timeout swallowed it, and a loop of calls could not be ended."""
    async with RedisStorage(url) as storage:
        stop = False

        async def call_on(name: str) -> None:
            n = 0
            while not stop:
                n += 1
                await storage.apply(enqueue(f"{name}-{n}"))

        for n in range(40):
            calls = asyncio.create_task(call_on(f"p{n}"))
            await asyncio.sleep(n * 0.0003)
            calls.cancel()
            done, _ = await asyncio.wait({calls}, timeout=2)
            stop = not done
            await asyncio.wait({calls})
            assert done, "the cancellation was swallowed"
        assert await storage.check() == []


async def test_a_server_that_is_away_is_unavailable_and_nothing_happened(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", appendonly="yes", appendfsync="always").start()
    try:
        async with RedisStorage(server.url) as storage:
            await storage.apply(enqueue("a"))
            assert (await storage.info()).capabilities.durability == "power"
            server.kill()
            with pytest.raises((StoreUnavailable, OutcomeUnknown)):  # on the connection that the server has just left
                await storage.apply(enqueue("b"))
            for call in (storage.apply, storage.apply, lambda _: storage.get("a"), lambda _: storage.allocate_ids(1)):
                with pytest.raises(StoreUnavailable):
                    await call(enqueue("b"))
            with pytest.raises(StoreUnavailable):
                storage.apply_blocking(enqueue("b"))
            await asyncio.to_thread(server.start)
            await storage.apply(enqueue("c"))
            assert [i for i in "abc" if await storage.get(i) is not None] == ["a", "c"]
    finally:
        server.stop()


async def test_a_full_server_takes_no_task_and_still_ends_old_ones(server: Server, url: str) -> None:
    async with RedisStorage(url) as storage:
        await storage.apply(enqueue("a"))
        op = Reserve(queues=("default",), token=new_token())
        await storage.apply([(op,)])
        with server.client() as client:
            client.config_set("maxmemory", "1")
        try:
            with pytest.raises(StoreFull):
                await storage.apply(enqueue("b"))
        finally:
            with server.client() as client:
                client.config_set("maxmemory", "0")
        assert await storage.get("b") is None
        await storage.apply([(Ack(queue="default", id="a", token=op.token),)])
        assert await storage.check() == []


# -- workers -----------------------------------------------------------------------------------------


@asynccontextmanager
async def working(url: str) -> AsyncIterator[AsyncOmniQ]:
    async with AsyncOmniQ.from_url(url, settings=QUICK) as oq, await oq.worker(4, allow=[__name__]):
        yield oq


async def resumes(direct: AsyncOmniQ, n: int) -> float:
    """Seconds until a new task is done."""
    start = time.monotonic()
    task_id = await direct.enqueue(square, n)
    result = await direct.get_result(task_id, wait=True, timeout=30)
    assert result is not None
    assert result.result == n * n
    return time.monotonic() - start


async def break_often(proxy: Proxy, url: str, rounds: int) -> list[float]:
    chance = random.Random(rounds)
    took: list[float] = []
    async with AsyncOmniQ.from_url(url, settings=QUICK) as direct, working(proxy.url):
        for n in range(rounds):
            await direct.enqueue_many(square, [(m,) for m in range(chance.randrange(20))])
            await asyncio.sleep(chance.random() * 0.05)
            assert proxy.drop()
            took.append(await resumes(direct, n))
        async with AsyncOmniQ.from_url(url, settings=QUICK) as looking:
            await eventually(lambda: _quiet(looking), within=30)
            assert await looking.queue.storage.check() == []
    return took


async def _quiet(oq: AsyncOmniQ) -> bool:
    (counts,) = await oq.counts()
    return counts.ready + counts.running + counts.scheduled + counts.dead == 0


async def test_work_goes_on_after_20_broken_connections(proxy: Proxy, url: str) -> None:
    took = await break_often(proxy, url, 20)
    assert max(took) < RESUME_S, took


@pytest.mark.slow
async def test_work_goes_on_after_200_broken_connections(proxy: Proxy, url: str) -> None:
    took = await break_often(proxy, url, 200)
    assert max(took) < RESUME_S, max(took)


async def killed_under_load(server: Server, rounds: int) -> tuple[list[str], list[float]]:
    """Producers and a worker while the server is killed and restarted; the ids that were answered, and the pauses."""
    answered: list[str] = []
    stop = asyncio.Event()

    async def produce(name: str, oq: AsyncOmniQ) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            try:
                answered.append(await oq.options(task_id=f"{name}-{n}").enqueue(square, n))
            except StoreError:
                await asyncio.sleep(0.02)

    pauses: list[float] = []
    async with AsyncOmniQ.from_url(server.url, settings=QUICK) as oq, working(server.url):
        producers = [asyncio.create_task(produce(f"p{k}-{os.getpid()}", oq)) for k in range(4)]
        for n in range(rounds):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            pauses.append(await resumes_after_restart(oq, n))
        stop.set()
        await asyncio.gather(*producers)
        await eventually(lambda: _quiet(oq), within=60)
    return answered, pauses


async def resumes_after_restart(oq: AsyncOmniQ, n: int) -> float:
    start = time.monotonic()
    while True:
        try:
            return await resumes(oq, n) + time.monotonic() - start
        except StoreError:
            assert time.monotonic() - start < 30
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_nothing_that_was_answered_is_lost_with_appendfsync_always(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", appendonly="yes", appendfsync="always").start()
    try:
        answered, _ = await killed_under_load(server, 3)
        async with RedisStorage(server.url) as storage:
            missing = [i for i in answered if await storage.get(i, "default") is None]
            assert missing == []
            assert len(answered) > 100
    finally:
        server.stop()


@pytest.mark.slow
async def test_workers_resume_within_two_seconds_with_appendfsync_everysec(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", appendonly="yes", appendfsync="everysec").start()
    try:
        _, pauses = await killed_under_load(server, 3)
        assert max(pauses) < RESUME_S, pauses
    finally:
        server.stop()
