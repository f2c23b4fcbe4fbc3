"""The Redis driver on a cluster of three nodes: the whole contract within a queue, and refusals by name across slots."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.crc import key_slot
from support import reference
from support.redis_server import Cluster, Server

from omniq.errors import CrossQueue, Refused, StoreUnavailable
from omniq.models import Blocker, Record, State, new_token
from omniq.operations import Ack, Enqueue, Reserve, Reserved, Saved
from omniq.storage.redis import RedisStorage
from omniq.testing import FakeClock, conformance

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
    reference.agrees(make_storage, stories=15)


@pytest.mark.slow
def test_the_reference_model_agrees_on_new_stories() -> None:
    reference.agrees_on_new_stories(make_storage, stories_per_round=25)


async def refused(storage: RedisStorage, *operations: Any) -> Refused:
    (answer,) = await storage.apply([operations])
    assert isinstance(answer, Refused)
    return answer


async def test_what_spans_slots_is_refused_by_name_and_nothing_is_written(cluster: Cluster) -> None:
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
            assert [type(answer) for answer in storage.apply_blocking([operations])] == [CrossQueue]
        with cluster.nodes[cluster.master_of(key_slot(b"omniq.store"))].client() as node:
            assert node.smembers("{omniq.store}:queues") == {b"a"}
        assert await storage.queues() == ["a"]
        assert await storage.get("y") is None


async def test_what_comes_in_from_another_store_must_not_span_slots_either(cluster: Cluster) -> None:
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


def scripts_run(cluster: Cluster) -> int:
    calls = 0
    for node in cluster.nodes:
        with node.client() as client:
            stats = client.info("commandstats")
        calls += sum(stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval"))
    return calls


async def test_a_call_is_one_call_of_the_script_per_slot(cluster: Cluster) -> None:
    async with make_storage(FakeClock()) as storage:
        await storage.apply([(Enqueue(id=f"first {q}", name="job", queue=q),) for q in "abc"])
        before = scripts_run(cluster)
        await storage.apply([(Enqueue(id=f"{q}{n}", name="job", queue=q),) for n in range(9) for q in "abc"])
        assert scripts_run(cluster) == before + 3


async def test_each_queue_has_ids_of_its_own(cluster: Cluster) -> None:
    async with make_storage(FakeClock()) as storage:
        await storage.apply([(Enqueue(id="same", name=q, queue=q),) for q in "ab"])
        storage.apply_blocking([(Enqueue(id="same", name="c", queue="c"),)])
        assert await storage.queues() == ["a", "b", "c"]
        reserve = Reserve(queues=("a",), token=new_token())
        await storage.apply([(reserve,)])
        await storage.apply([(Ack(queue="a", id="same", token=reserve.token),)])
        found = [await storage.get("same", q) for q in "abc"]
        assert [(t.name, t.state) for t in found if t] == [("a", State.DONE), ("b", State.READY), ("c", State.READY)]


async def test_a_call_follows_a_slot_that_moves(cluster: Cluster) -> None:
    """Not while it is on its way: a script that does not declare its keys would find half of them."""
    slot = key_slot(b"moving")
    source = cluster.nodes[cluster.master_of(slot)]
    target = cluster.nodes[(cluster.master_of(slot) + 1) % 3]

    def tell(node: Server, *command: object) -> None:
        with node.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, *command)

    def id_of(node: Server) -> str:
        with node.client() as client:
            return client.execute_command("CLUSTER", "MYID").decode()

    async with make_storage(FakeClock()) as storage:
        await storage.apply([(Enqueue(id="before", name="job", queue="moving"),)])
        tell(target, "IMPORTING", id_of(source))
        tell(source, "MIGRATING", id_of(target))
        try:
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="on its way"):
                    await storage.apply([(Enqueue(id="asked", name="job", queue="moving"),)])
                with pytest.raises(StoreUnavailable, match="on its way"):
                    storage.apply_blocking([(Enqueue(id="asked", name="job", queue="moving"),)])
            with source.client() as client:
                keys = list(client.scan_iter(match="{moving}:*"))
                client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            for node in (target, source, *cluster.nodes):
                tell(node, "NODE", id_of(target))
            await storage.apply([(Enqueue(id="moved", name="job", queue="moving"),)])
            storage.apply_blocking([(Enqueue(id="moved too", name="job", queue="moving"),)])
            with target.client() as client:
                assert client.lrange("{moving}:wait", 0, -1) == [b"before", b"moved", b"moved too"]
        finally:
            cluster.flush()
            for node in (source, target, *cluster.nodes):
                tell(node, "NODE", id_of(source))


def test_the_least_rights_of_the_documentation_are_enough_on_a_cluster(cluster: Cluster, repository: Path) -> None:
    page = (repository / "docs/how-to/operate-redis.md").read_text()
    line = re.search(r"^user omniq on >secret (.*)$", page, re.MULTILINE)
    more = re.search(r"A cluster also needs `([^`]*)`", page)
    assert line is not None
    assert more is not None
    for node in cluster.nodes:
        with node.client() as client:
            client.execute_command("ACL", "SETUSER", "omniq", "reset", "on", ">secret", *line[1].split(), *more[1].split())

    def make(clock: FakeClock) -> RedisStorage:
        cluster.flush()
        return RedisStorage(cluster.url.replace("redis://", "redis://omniq:secret@"), clock=clock)

    try:
        for case in conformance.cases(durable=False, capabilities=CAPABILITIES):
            if case.topic in ("groups", "looking", "transactions"):
                conformance.run_case(case, make)
    finally:
        for node in cluster.nodes:
            with node.client() as client:
                client.execute_command("ACL", "DELUSER", "omniq")


async def test_one_call_may_carry_transactions_for_several_slots(cluster: Cluster) -> None:
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
