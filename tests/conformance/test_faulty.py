"""The faulty storage: what it breaks, what it counts, and that it is a whole driver when it breaks nothing."""

import asyncio

import pytest

from omniq.errors import OutcomeUnknown, StoreUnavailable
from omniq.models import State, new_token
from omniq.operations import Enqueue, Enqueued, Reserve
from omniq.storage.memory import MemoryStorage
from omniq.testing import FakeClock, FaultyStorage, conformance


def make_storage(clock: FakeClock) -> FaultyStorage:
    return FaultyStorage(MemoryStorage(clock=clock))


test_conformance = conformance.tests(make_storage, capabilities=MemoryStorage.capabilities)

ENQUEUE = [(Enqueue(id="a", name="job", fingerprint="x"),)]


async def test_unavailable_does_nothing() -> None:
    async with FaultyStorage(MemoryStorage(), ["unavailable"]) as store:
        with pytest.raises(StoreUnavailable):
            await store.apply(ENQUEUE)
        assert await store.get("a") is None
        assert await store.apply(ENQUEUE) == [[Enqueued(id="a", existed=False, state=State.READY)]]
        assert store.done == {"unavailable": 1, "ok": 1}


async def test_unknown_acts_and_then_fails_and_a_repeat_is_safe() -> None:
    async with FaultyStorage(MemoryStorage()) as store:
        store.strike("unknown", "ok", "unknown")
        with pytest.raises(OutcomeUnknown):
            await store.apply(ENQUEUE)
        assert await store.apply(ENQUEUE, repeat=True) == [[Enqueued(id="a", existed=True, state=State.READY)]]
        reserve = [(Reserve(queues=("default",), token=new_token()),)]
        with pytest.raises(OutcomeUnknown):
            await store.apply(reserve)
        (answer,) = await store.apply(reserve, repeat=True)
        assert [t.id for t in answer[0].tasks] == ["a"]


async def test_a_delay_only_delays() -> None:
    async with FaultyStorage(MemoryStorage(), ["delay"], delay_s=0.001) as store:
        await store.apply(ENQUEUE)
        assert store.done == {"delay": 1}


def test_apply_blocking_is_struck_too() -> None:
    store = FaultyStorage(MemoryStorage(), ["unavailable", "unknown", "delay", "ok"], delay_s=0.001)
    with pytest.raises(StoreUnavailable):
        store.apply_blocking(ENQUEUE)
    with pytest.raises(OutcomeUnknown):
        store.apply_blocking(ENQUEUE)
    for _ in range(2):
        assert store.apply_blocking(ENQUEUE) == [[Enqueued(id="a", existed=True, state=State.READY)]]
    asyncio.run(store.close())


async def test_a_seed_gives_the_same_faults_again() -> None:
    async def faults(seed: int) -> list[str]:
        seen: list[str] = []
        async with FaultyStorage(MemoryStorage(), unavailable=0.3, unknown=0.3, seed=seed) as store:
            for _ in range(50):
                try:
                    await store.apply([])
                    seen.append("ok")
                except (StoreUnavailable, OutcomeUnknown) as exc:
                    seen.append(type(exc).__name__)
        return seen

    first, again, other = await faults(1), await faults(1), await faults(2)
    assert first == again != other
    assert set(first) == {"ok", "StoreUnavailable", "OutcomeUnknown"}


def test_impossible_probabilities_are_refused() -> None:
    for odds in ({"unknown": 0.6, "delay": 0.6}, {"unavailable": -0.1}):
        with pytest.raises(ValueError, match="probabilities"):
            FaultyStorage(MemoryStorage(), **odds)
