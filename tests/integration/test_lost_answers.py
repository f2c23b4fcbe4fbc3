"""An answer that gets lost is asked for again inside, at every door: callers see one task and no error."""

import asyncio
from collections.abc import Iterator

import pytest
from support import jobs
from support.proxy import Proxy
from support.redis_server import Server

from omniq import AsyncOmniQ, BaseStorage, MemoryStorage, OmniQ, OutcomeUnknown, Settings, TaskStatus
from omniq.contract import ContractClient
from omniq.models import State
from omniq.operations import Enqueue, Retention
from omniq.storage import sending
from omniq.testing import FaultyStorage

QUICK = Settings(backoff_base=0.01, grace=5)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PAUSES_S", (0.001,) * 3)


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


def count(storage: BaseStorage, state: str = "ready") -> int:
    return sum(getattr(c, state) for c in asyncio.run(storage.counts()))


def test_the_blocking_door(faulty: FaultyStorage) -> None:
    with OmniQ(faulty) as oq:
        for enqueue in (
            lambda: oq.enqueue(jobs.add, 1),
            lambda: oq.options(task_id="mine").enqueue(jobs.add, 1),
            lambda: oq.options(idempotency_key="k").enqueue(jobs.add, 1),
        ):
            faulty.strike("unknown", "unknown")
            task = oq.get_task(enqueue())
            assert task is not None
        faulty.strike("unknown", "ok", "unknown")
        assert len(oq.enqueue_many(jobs.add, [(n,) for n in range(1500)])) == 1500
        faulty.strike("unknown")
        with oq.transaction() as tx:
            tx.enqueue(jobs.add, 1)
            tx.options(idempotency_key="k").enqueue(jobs.add, 1)
        assert (len(tx.ids), len(set(tx.ids))) == (2, 2)
        assert count(faulty) == 3 + 1500 + 1
        assert faulty.script == []
        faulty.strike("unknown")
        assert oq.cancel(tx.ids[0]) is True
        faulty.strike("unknown")
        oq.remove(tx.ids[1])
        assert oq.get_task(tx.ids[1]) is None


async def test_the_async_door(faulty: FaultyStorage) -> None:
    oq = AsyncOmniQ(faulty, settings=QUICK)
    faulty.strike("unknown", "unavailable", "unknown")
    first = await oq.enqueue(jobs.add, 1)
    faulty.strike("unknown")
    async with oq.transaction() as tx:
        second = tx.enqueue(jobs.add, 2)
    faulty.strike("unknown")
    third = await oq.options(max_retries=0).enqueue(jobs.fail, "x")
    assert tx.ids == [second]
    async with await oq.worker(concurrency=2):
        for task_id in (first, second, third):
            assert await oq.get_result(task_id, wait=True, timeout=10) is not None
    faulty.strike("unknown")
    await oq.requeue(third)
    assert (await oq.get_task(third)).status is TaskStatus.RETRYING
    assert [e.event for e in await oq.history(third)].count("requeued") == 1
    assert len([e for e in await oq.events() if e.event == "enqueued"]) == 3


async def test_the_names_of_the_storage(faulty: FaultyStorage) -> None:
    await faulty.inner.apply([(Enqueue(id="a", name="job"),), (Enqueue(id="b", name="job"),)])
    faulty.strike("unknown")
    held = await faulty.reserve("default", 30)
    assert held is not None
    assert (held.id, held.attempts) == ("a", 1)
    faulty.strike("unknown")
    await faulty.ack("a", held.token or "")
    done = await faulty.get("a")
    assert done is not None
    assert done.state is State.DONE


def test_a_store_that_stays_away_leaves_an_error_that_says_what_to_look_for(faulty: FaultyStorage) -> None:
    with OmniQ(faulty) as oq:
        faulty.strike(*["unknown"] * 4)
        with pytest.raises(OutcomeUnknown) as raised:
            oq.enqueue(jobs.add, 1)
        (stored,) = oq.find()[0]
        assert repr(stored.id) in str(raised.value)
        assert "in the store before you enqueue it again" in str(raised.value)
        faulty.strike("unknown", *["unavailable"] * 3)
        with pytest.raises(OutcomeUnknown, match="stores it once"):
            oq.options(idempotency_key="k").enqueue(jobs.add, 1)
        assert oq.get_task(oq.options(idempotency_key="k").enqueue(jobs.add, 1)) is not None
        assert count(faulty) == 2


# -- on a real server ------------------------------------------------------------------------------


@pytest.fixture
def proxy(redis_server: Server, redis_url: str) -> Iterator[Proxy]:
    proxy = Proxy(redis_server.port)
    yield proxy
    proxy.close()


def test_an_answer_of_redis_that_got_lost_is_asked_for_again(proxy: Proxy, redis_url: str) -> None:
    async def of_the_loop() -> None:
        async with AsyncOmniQ.from_url(proxy.url) as oq:
            await oq.enqueue(jobs.add, 0)
            proxy.swallow_reply()
            assert await oq.get_task(await oq.enqueue(jobs.add, 1)) is not None
            proxy.swallow_reply()
            async with oq.transaction() as tx:
                tx.enqueue(jobs.add, 2)
            proxy.swallow_reply()
            await oq.enqueue_many(jobs.add, [(3,), (4,)])

    asyncio.run(of_the_loop())
    with OmniQ.from_url(proxy.url) as oq:
        oq.enqueue(jobs.add, 5)
        proxy.swallow_reply()
        assert oq.get_task(oq.enqueue(jobs.add, 6)) is not None
    with ContractClient.from_url(proxy.url) as client:
        client.publish("default", {"n": 7})
        proxy.swallow_reply()
        client.publish("default", {"n": 8})

    with OmniQ.from_url(redis_url) as oq:
        assert [c.ready for c in oq.counts()] == [9]


def test_looks_and_switches_of_redis_are_asked_for_again_too(proxy: Proxy, redis_url: str) -> None:
    """Whichever of the answers that a call takes gets lost."""

    async def body(oq: AsyncOmniQ) -> None:
        ids = [await oq.enqueue(jobs.add, n) for n in range(20)]
        for skip in range(3):
            for call in (
                lambda: oq.set_group_limit("default", "g", 2),
                lambda: oq.pause("default"),
                lambda: oq.resume("default"),
                lambda: oq.cancel(ids.pop()),
                lambda: oq.remove(ids.pop()),
                lambda: oq.get_task(ids[0]),
                lambda: oq.counts(),
                lambda: oq.storage.sweep(),
                lambda: oq.storage.purge(Retention()),
                lambda: oq.storage.allocate_ids(1),
                lambda skip=skip: oq.options(queue=f"new-{skip}").enqueue(jobs.add, 1),
            ):
                proxy.swallow_reply(after=skip)
                await call()
                proxy.swallow_none()
        assert not await oq.storage.is_paused("default")
        assert [c.ready for c in await oq.counts() if c.queue == "default"] == [14]

    async def main() -> None:
        async with AsyncOmniQ.from_url(proxy.url) as oq:
            await body(oq)

    asyncio.run(main())
    with OmniQ.from_url(redis_url) as oq:
        assert [(g.group, g.limit) for g in oq.groups("default")[0]] == [("g", 2)]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_redis_that_goes_away_with_the_answer_leaves_the_outcome_open(proxy: Proxy, redis_url: str, blocking: bool) -> None:
    async def of_the_loop() -> None:
        async with AsyncOmniQ.from_url(proxy.url) as oq:
            await oq.enqueue(jobs.add, 1)
            proxy.swallow_reply(stay_away=True)
            await oq.enqueue(jobs.add, 2)

    def of_a_thread() -> None:
        with OmniQ.from_url(proxy.url) as oq:
            oq.enqueue(jobs.add, 1)
            proxy.swallow_reply(stay_away=True)
            oq.enqueue(jobs.add, 2)

    with pytest.raises(OutcomeUnknown, match=r"sent 4 times.*look for '(\w+)' in the store") as raised:
        of_a_thread() if blocking else asyncio.run(of_the_loop())
    with OmniQ.from_url(redis_url) as oq:
        ids = {task.id for task in oq.find()[0]}
        assert len(ids) == 2
        assert any(repr(task_id) in str(raised.value) for task_id in ids)
