"""The Redis driver on a cluster of three nodes: the whole contract within a queue, and refusals by name across slots."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.redis_server import Cluster

from omniq.errors import CrossQueue, Refused
from omniq.models import Blocker, Record, State, new_token
from omniq.operations import Ack, Enqueue, Reserve, Reserved, Saved
from omniq.storage.redis import RedisStorage
from omniq.testing import FakeClock, conformance
from omniq.testing.stateful import driver_machine

_clusters: list[Cluster] = []


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(Path(tmp_path_factory.mktemp("cluster")))
    try:
        _clusters.append(cluster.start())
        yield cluster
    finally:
        cluster.stop()
        _clusters.clear()


def make_storage(clock: FakeClock) -> RedisStorage:
    _clusters[-1].flush()
    return RedisStorage(_clusters[-1].url, clock=clock)


def reopen(storage: RedisStorage, clock: FakeClock) -> RedisStorage:
    return RedisStorage(storage.url, clock=clock)


CAPABILITIES = msgspec.structs.replace(RedisStorage.capabilities, cross_queue=False)

test_conformance = conformance.tests(make_storage, reopen=reopen, capabilities=CAPABILITIES)


def test_the_reference_model_agrees() -> None:
    run_state_machine_as_test(
        driver_machine(make_storage),
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )


async def refused(storage: RedisStorage, *operations: Any) -> Refused:
    (answer,) = await storage.apply([operations])
    assert isinstance(answer, Refused)
    return answer


def test_what_spans_slots_is_refused_by_name_and_nothing_is_written(cluster: Cluster) -> None:
    async def main() -> None:
        async with make_storage(FakeClock()) as storage:
            await storage.apply([(Enqueue(id="first", name="job", queue="a"),)])
            other = Enqueue(id="x", name="job", queue="b")
            for operations in (
                (Enqueue(id="y", name="job", queue="a"), other),
                (Enqueue(id="y", name="job", queue="a", dead_queue="b"),),
                (Enqueue(id="y", name="job", queue="b", blocked_by=(Blocker("first", "a"),)),),
            ):
                error = await refused(storage, *operations)
                assert type(error) is CrossQueue
                assert "'a'" in str(error)
                assert "'b'" in str(error)
            assert await storage.queues() == ["a"]
            assert await storage.get("y") is None

    asyncio.run(main())


def test_what_comes_in_from_another_store_must_not_span_slots_either(cluster: Cluster) -> None:
    async def main() -> None:
        async with make_storage(FakeClock()) as storage:
            good = [Record(id=f"t{n}", queue=f"q{n}", name="job") for n in range(20)]
            blocked = {"state": State.BLOCKED, "blocked_by": (Blocker("t0", "q0"),), "blockers_left": 1}
            for wrong in ({"dead_queue": "b"}, blocked):
                record = Record(id="y", queue="a", name="job", **wrong)  # type: ignore[arg-type]
                with pytest.raises(CrossQueue, match="'y' of queue 'a'"):
                    await storage.restore([Saved(record=task) for task in (*good, record)])
                assert await storage.queues() == []
            assert await storage.restore([Saved(record=task) for task in good]) == 20
            assert [c.ready for c in await storage.counts()] == [1] * 20
            assert await storage.check() == []

    asyncio.run(main())


def test_one_call_may_carry_transactions_for_several_slots(cluster: Cluster) -> None:
    async def main() -> None:
        async with make_storage(FakeClock()) as storage:
            new = [(Enqueue(id=f"{queue}{n}", name="job", queue=queue),) for n in range(3) for queue in "abc"]
            assert not any(isinstance(answer, Refused) for answer in await storage.apply(new))
            reserve = Reserve(queues=("a", "b", "c"), limit=7, token=new_token())
            call = [(Enqueue(id="a9", name="job", queue="a"),), (reserve,)]
            _, answer = await storage.apply(call)
            assert isinstance(answer, list)
            assert isinstance(answer[0], Reserved)
            assert [t.id for t in answer[0].tasks] == ["a0", "a1", "a2", "a9", "b0", "b1", "b2"]
            acks = [(Ack(queue=t.queue, id=t.id, token=reserve.token),) for t in answer[0].tasks]
            assert not any(isinstance(a, Refused) for a in storage.apply_blocking(acks))
            assert {t.id: t.state for q in "abc" for t in [await storage.get(f"{q}0", q)] if t} == {
                "a0": State.DONE,
                "b0": State.DONE,
                "c0": State.READY,
            }

    asyncio.run(main())
