"""How fast tasks come and go, where the log was not read whole, was purged, or is young."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from omniq import MemoryStorage
from omniq.cli.queues import activity as rates
from omniq.cli.queues.activity import read_rates
from omniq.operations import Enqueue, Retention
from omniq.testing import FakeClock


def scene(body: Callable[[MemoryStorage, FakeClock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = FakeClock()
        async with MemoryStorage(clock=clock) as storage:
            await body(storage, clock)

    asyncio.run(run())


async def enqueue(storage: MemoryStorage, n: int, queue: str = "mail") -> None:
    await storage.apply([(Enqueue(queue=queue, id=f"{queue}-{storage.clock()}-{i}", name="*"),) for i in range(n)])


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "CHUNK", 10)
    monkeypatch.setattr(rates, "MAX_CHUNKS", 3)


def test_a_log_that_is_read_for_less_than_ten_seconds_says_nothing() -> None:
    async def body(storage: MemoryStorage, clock: FakeClock) -> None:
        await enqueue(storage, 200)
        clock.advance(6)
        assert await read_rates(storage) is None
        clock.advance(9)
        found = await read_rates(storage)
        assert found is not None
        assert (found.span_s, found.into("mail")) == (15, 2)

    scene(body)


def test_a_log_that_was_read_whole_covers_the_minute_however_young_it_is() -> None:
    async def body(storage: MemoryStorage, clock: FakeClock) -> None:
        await enqueue(storage, 12)
        clock.advance(1)
        found = await read_rates(storage)
        assert found is not None
        assert (found.span_s, found.into("mail"), found.out_of("mail")) == (60, 0.2, 0)

    scene(body)


def test_a_log_that_was_purged_covers_what_is_left_of_it() -> None:
    async def body(storage: MemoryStorage, clock: FakeClock) -> None:
        await enqueue(storage, 6)
        clock.advance(20)
        await enqueue(storage, 10)
        clock.advance(5)
        keep = Retention(dead_us=None, events_us=None, events_max=10)
        await storage.purge(keep)
        assert await read_rates(storage) is None
        clock.advance(15)
        found = await read_rates(storage)
        assert found is not None
        assert (found.span_s, found.into("mail")) == (20, 0.5)

    scene(body)


def test_a_log_that_is_purged_while_it_is_read_says_nothing() -> None:
    async def body(storage: MemoryStorage, clock: FakeClock) -> None:
        await enqueue(storage, 12)
        clock.advance(20)
        shards = await storage.event_shards()
        await storage.purge(Retention(dead_us=None, events_us=None, events_max=0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "event_shards", lambda: asyncio.sleep(0, shards))
            assert await read_rates(storage) is None

    scene(body)


def test_a_minute_without_events_is_known_to_be_one() -> None:
    async def body(storage: MemoryStorage, clock: FakeClock) -> None:
        assert await read_rates(storage) is None
        await enqueue(storage, 200)
        clock.advance(61)
        found = await read_rates(storage)
        assert found is not None
        assert (found.span_s, found.into("mail")) == (60, 0)

    scene(body)
