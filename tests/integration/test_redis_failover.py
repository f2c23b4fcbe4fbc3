"""Redis when a master goes away: by sentinels, in a cluster, and what a cluster still does without one of its nodes.

Replication is asynchronous: what a master answered in its last moments may not have reached its replica. So these tests
demand what was *confirmed*: after a `WAIT` that a replica answered, everything before it is there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from support.proxy import Proxy
from support.redis_server import Cluster, Server, Watched
from support.waiting import eventually

from omniq import AsyncOmniQ, Settings, current_task
from omniq.errors import OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from omniq.models import State, new_token
from omniq.operations import Ack, Enqueue, Enqueued, Reserve, Reserved
from omniq.storage.redis import RedisStorage

QUICK = Settings(backoff_base=0.01, grace=5)
DURABLE = {"appendonly": "yes", "appendfsync": "everysec"}
IN_DOUBT = (OutcomeUnknown, StoreUnavailable)
AFTER = 40  # tasks that must get through when the new master serves


def square(n: int) -> int:
    return n * n


def enqueue(id: str, queue: str = "default") -> tuple[Enqueue]:
    return (Enqueue(id=id, name="job", queue=queue, payload=b"[]"),)


class Load:
    """A producer on one queue that goes on whatever happens; what was answered, and what a replica has for certain."""

    def __init__(self, oq: AsyncOmniQ, queue: str, master: Server) -> None:
        self._oq, self._queue, self._master = oq, queue, master
        self.answered: list[str] = []
        self.confirmed = 0
        self._tries = 0
        self.ending = False

    async def produce(self) -> None:
        while not self.ending:
            self._tries += 1
            try:
                options = self._oq.options(queue=self._queue, task_id=f"{self._queue}-{self._tries}")
                self.answered.append(await options.enqueue(square, self._tries))
            except StoreError:
                await asyncio.sleep(0.02)

    async def confirm(self) -> None:
        """Note how much has reached the replica, until the master is gone."""
        with contextlib.suppress(redis.RedisError):
            while not self.ending:
                count = len(self.answered)
                if await asyncio.to_thread(self._replicated):
                    self.confirmed = count

    def _replicated(self) -> bool:
        with self._master.client() as client:
            client.set(f"{{{self._queue}}}:barrier", "1")  # a WAIT counts from the last write of its own connection
            return client.wait(1, 500) >= 1


@contextlib.asynccontextmanager
async def under_load(url: str, queue: str, master: Server) -> AsyncIterator[Load]:
    async with AsyncOmniQ.from_url(url, settings=QUICK) as oq:
        load = Load(oq, queue, master)
        producers = [asyncio.create_task(load.produce()), asyncio.create_task(load.confirm())]
        try:
            yield load
        finally:
            load.ending = True
            await asyncio.gather(*producers)


async def fails_over(url: str, queue: str, master: Server) -> None:
    """Kill the master under load: all that was confirmed is done in the end, and so is what came after."""
    async with (
        AsyncOmniQ.from_url(url, settings=QUICK) as oq,
        await oq.worker(4, queues=[queue], allow=[__name__]),
        RedisStorage(url) as storage,
    ):
        async with under_load(url, queue, master) as load:
            await eventually(lambda: load.confirmed > 50, within=30)
            await asyncio.to_thread(master.kill)
            before, confirmed = len(load.answered), load.answered[: load.confirmed]
            await eventually(lambda: len(load.answered) > before + AFTER, within=40)
        await eventually(lambda: _quiet(storage, queue), within=40)
        wanted = [*confirmed, *load.answered[before + 1 :]]
        results = await storage.results(wanted)
        assert [i for i in wanted if i not in results or results[i].state is not State.DONE] == []
        assert await storage.check() == []


async def _quiet(storage: RedisStorage, queue: str) -> bool:
    try:
        (counts,) = [c for c in await storage.counts() if c.queue == queue]
    except StoreUnavailable:  # this object has not heard of the new master yet
        return False
    return counts.ready + counts.running + counts.scheduled + counts.dead == 0


@pytest.mark.slow
async def test_sentinels_name_another_master_and_work_goes_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path, **DURABLE)
    try:
        watched.start()
        await fails_over(watched.url, "default", watched.master)
        with watched.replica.client() as client:
            assert client.info("replication")["role"] == "master"
    finally:
        watched.stop()


@pytest.mark.slow
async def test_a_replica_takes_over_in_a_cluster_and_work_goes_on(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, replicas=True, cluster_node_timeout="1000", **DURABLE)
    try:
        cluster.start()
        victim = cluster.master_of(key_slot(b"default"))
        await fails_over(cluster.url, "default", cluster.nodes[victim])
        with cluster.replicas[victim].client() as client:
            assert client.info("replication")["role"] == "master"
    finally:
        cluster.stop()


# -- a cluster without one of its nodes --------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, cluster_node_timeout="60000", cluster_require_full_coverage="no")
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def queues_by_node(cluster: Cluster) -> list[str]:
    """A queue on each node, in the order of the nodes."""
    names = [f"q{n}" for n in range(50)]
    return [next(q for q in names if cluster.master_of(key_slot(q.encode())) == node) for node in range(3)]


async def test_the_other_nodes_of_a_cluster_serve_while_one_is_away(cluster: Cluster) -> None:
    """The list of queues is on a node, too; the one that is killed here is another."""
    number = (cluster.master_of(key_slot(b"omniq.store")) + 1) % 3
    gone, *others = queues = sorted(queues_by_node(cluster), key=lambda q: cluster.master_of(key_slot(q.encode())) != number)
    async with RedisStorage(cluster.url) as storage:
        await storage.apply([enqueue(q, q) for q in queues])
        storage.apply_blocking([enqueue(f"{q} too", q) for q in queues])
        cluster.nodes[number].kill()
        for call in (storage.apply, _in_thread(storage)):
            with pytest.raises(IN_DOUBT):  # on the connection that the node has just left
                await call([enqueue("x", gone)])
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await call([enqueue("x", gone)])
            with pytest.raises(OutcomeUnknown, match="a part"):
                await call([enqueue(f"{call} of {others[0]}", others[0]), enqueue("x", gone)])
            op = Reserve(queues=tuple(queues), limit=2, token=new_token())
            (answer,) = await call([(op,)])
            assert isinstance(answer, list)
            assert isinstance(answer[0], Reserved)
            assert {t.queue for t in answer[0].tasks} <= set(others)
            assert len(answer[0].tasks) == 2
            with pytest.raises(StoreUnavailable):
                await call([(op,)], repeat=True)
            acks = [(Ack(queue=t.queue, id=t.id, token=op.token),) for t in answer[0].tasks]
            assert [type(a) for a in await call(acks)] == [list, list]
            with pytest.raises(StoreUnavailable):
                await call([(Reserve(queues=(gone,), token=new_token()),)])


async def follow_up(queue: str) -> None:
    with current_task().transaction() as tx:
        tx.options(queue=queue).enqueue(square, 1)


async def test_a_full_node_of_a_cluster_ends_what_it_has_and_the_others_take_more(cluster: Cluster) -> None:
    number = (cluster.master_of(key_slot(b"omniq.store")) + 1) % 3
    full, *others = sorted(queues_by_node(cluster), key=lambda q: cluster.master_of(key_slot(q.encode())) != number)
    async with RedisStorage(cluster.url) as storage, AsyncOmniQ(storage) as oq:
        brings = await oq.options(queue=full, max_retries=0).enqueue(follow_up, full)
        old = [await oq.options(queue=full).enqueue(square, n) for n in range(5)]
        with cluster.nodes[number].client() as client:
            client.config_set("maxmemory", "1")
        for door in (storage.apply, _in_thread(storage)):
            with pytest.raises(StoreFull):
                await door([enqueue("new", full)])
            with pytest.raises(OutcomeUnknown, match="out of memory"):
                await door([enqueue("new", others[0]), enqueue("new", full)])
        new = [await oq.options(queue=queue).enqueue(square, 1) for queue in others]
        async with await oq.worker(2, allow=[__name__]):
            for id in (brings, *old, *new):
                result = await oq.get_result(id, wait=True, timeout=30)
                assert result is not None
                assert (result.error is None) == (id != brings), result.error
        failed = await oq.get_result(brings)
        assert failed is not None
        assert failed.error is not None
        assert failed.error.type == "StoreFull"


def _in_thread(storage: RedisStorage) -> Callable[..., Awaitable[list[Any]]]:
    async def call(*args: Any, **options: Any) -> list[Any]:
        return await asyncio.to_thread(storage.apply_blocking, *args, **options)

    return call


async def test_a_cluster_that_is_away_is_unavailable_in_the_words_of_the_library(cluster: Cluster) -> None:
    async with RedisStorage(cluster.url) as storage:
        await storage.apply([enqueue("a")])
        storage.apply_blocking([enqueue("b")])
        for node in cluster.nodes:
            node.kill()
        for expected in (IN_DOUBT, StoreUnavailable, StoreUnavailable):
            with pytest.raises(expected):
                await storage.apply([enqueue("c")])
            with pytest.raises(expected):
                storage.apply_blocking([enqueue("c")])
            for call in (lambda: storage.get("a"), lambda: storage.allocate_ids(1), storage.counts):
                with pytest.raises(StoreUnavailable):
                    await call()
    fresh = RedisStorage(cluster.url)
    with pytest.raises(StoreUnavailable):
        fresh.apply_blocking([enqueue("c")])
    with pytest.raises(StoreUnavailable):
        await fresh.open()
    await fresh.close()


@pytest.fixture
def behind_proxy(tmp_path: Path) -> Iterator[tuple[Cluster, Proxy, str]]:
    """A cluster whose clients are sent to one of the nodes through a proxy, and a queue of that node."""
    cluster = Cluster(tmp_path)
    name = "default"
    victim = cluster.nodes[cluster.master_of(key_slot(name.encode()))]
    proxy = Proxy(victim.port)
    victim.options |= {"cluster_announce_port": str(proxy.port), "cluster_announce_bus_port": str(victim.port + 10_000)}
    try:
        yield cluster.start(), proxy, name
    finally:
        proxy.close()
        cluster.stop()


def scripts_run(server: Server) -> int:
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval"))


async def test_a_call_on_a_cluster_whose_answer_got_lost_is_not_sent_again_unasked(
    behind_proxy: tuple[Cluster, Proxy, str],
) -> None:
    cluster, proxy, queue = behind_proxy
    node = cluster.nodes[cluster.master_of(key_slot(queue.encode()))]
    async with RedisStorage(cluster.url) as storage:
        await storage.apply([enqueue("warm")])
        storage.apply_blocking([enqueue("warm too")])
        before = scripts_run(node)
        proxy.swallow_reply()
        with pytest.raises(OutcomeUnknown):
            await storage.apply([enqueue("a")])
        assert scripts_run(node) == before + 1
        proxy.swallow_reply()
        with pytest.raises(OutcomeUnknown):
            storage.apply_blocking([enqueue("b")])
        assert scripts_run(node) == before + 2
        for id in "ab":
            expected = [[Enqueued(id=id, existed=True, state=State.READY)]]
            assert await storage.apply([enqueue(id)], repeat=True) == expected
        assert (await storage.counts())[0].ready == 4
