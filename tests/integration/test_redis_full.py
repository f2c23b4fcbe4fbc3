"""A server that has reached its maxmemory: what ends, extends or reads goes on, what is new is refused."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.redis_server import Server, binary, bundled, free_port, running
from support.waiting import eventually

from omniq import AsyncOmniQ, StoreFull, StoreUnavailable, TaskStatus, current_task
from omniq.contract import AsyncContractClient, JobContext
from omniq.errors import Refused
from omniq.models import Record, State, TaskError, new_token
from omniq.operations import (
    Ack,
    Beat,
    Cancel,
    Enqueue,
    Extend,
    Fail,
    Filter,
    Progress,
    Release,
    Remove,
    Requeue,
    Reschedule,
    Reserve,
    Retention,
    Retry,
    WorkerInfo,
)
from omniq.server import ServeOptions
from omniq.server import Server as TcpServer
from omniq.storage.redis import RedisStorage
from omniq.worker import AsyncWorkerPool

Q = "default"
ROOM = 2_000_000  # bytes above what the empty server takes


@pytest.fixture(scope="module", params=["system", "oldest"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of this machine, and the oldest that omniq knows: it takes scripts without flags only."""
    wanted = binary() if request.param == "system" else str(bundled())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIQ_REDIS_SERVER", wanted)
        with running(tmp_path_factory.mktemp("redis")) as server:
            yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with server.client() as client:
        client.config_set("maxmemory", "0")
        client.flushall()
        client.script_flush()
        client.config_set("maxmemory", str(client.info("memory")["used_memory"] + ROOM))
        client.config_set("maxmemory-policy", "noeviction")
    yield server.url
    with server.client() as client:
        client.config_set("maxmemory", "0")


def task(id: str, **fields: Any) -> Enqueue:
    return Enqueue(**({"id": id, "name": f"{__name__}:double", "queue": Q, "payload": b'{"args":[1],"kwargs":{}}'} | fields))


async def fill(storage: RedisStorage) -> None:
    """Until nothing goes in any more, with what no worker looks at."""

    async def add_for_ever() -> None:
        for n in itertools.count():
            await storage.apply([(task(f"fill-{n}", queue="ballast", payload=b"[%d]" % 10**4000),)])

    with pytest.raises(StoreFull, match="raise maxmemory"):
        await add_for_ever()
    with redis.Redis.from_url(storage.url) as client:  # memory comes and goes with buffers: none of it makes room
        client.config_set("maxmemory", str(client.info("memory")["used_memory"] // 2))


async def reserve(storage: RedisStorage, limit: int = 20) -> list[Record]:
    (answer,) = await storage.apply([(Reserve(queues=(Q,), limit=limit, token=new_token(), worker="w"),)])
    assert isinstance(answer, list), answer
    return answer[0].tasks  # type: ignore[union-attr]


def held(record: Record) -> dict[str, Any]:
    return {"queue": Q, "id": record.id, "token": record.token}


INFO = WorkerInfo(worker="w", host="here", pid=1, queues=(), running=0, concurrency=1, started_at_us=0)
ERROR = TaskError("ValueError", "no", "")


@pytest.mark.parametrize("door", ["apply", "apply_blocking"])
async def test_a_full_server_ends_extends_and_reads(url: str, door: str) -> None:
    async with RedisStorage(url) as first:
        await first.apply([(task(f"t{n}"),) for n in range(12)])
        await first.apply([(task("later", delay_us=10**9),)])
        await fill(first)
    async with RedisStorage(url) as storage:

        async def apply(*operations: Any) -> list[Any]:
            transactions = [(op,) for op in operations]
            if door == "apply":
                return await storage.apply(transactions)
            return await asyncio.to_thread(storage.apply_blocking, transactions)

        with pytest.raises(StoreFull):
            await apply(task("new"))
        with pytest.raises(StoreFull):
            await apply(task("new"), task("new in a group", group="g"))
        tasks = await reserve(storage, 12)
        assert len(tasks) == 12
        operations = [
            *(Ack(**held(t), result=b"1") for t in tasks[:5]),
            Ack(**held(tasks[5]), result=b"1", again_us=storage.clock() + 10**9),
            Retry(**held(tasks[6]), error=ERROR, delay_us=10**9),
            Fail(**held(tasks[7]), error=ERROR),
            Fail(**held(tasks[8]), error=ERROR),
            Release(**held(tasks[9])),
            Extend(**held(tasks[10])),
            Progress(**held(tasks[10]), data=b"{}"),
            Extend(**held(tasks[11])),
            Beat(info=INFO),
            Requeue(queue=Q, id=tasks[7].id),
            Reschedule(queue=Q, id=tasks[6].id, delay_us=10**10),
            Cancel(queue=Q, id="later"),
            Remove(queue=Q, id=tasks[8].id),
        ]
        for operation in operations:
            (answer,) = await apply(operation)
            assert not isinstance(answer, Refused), answer
        counts = {c.queue: c for c in await storage.counts()}[Q]
        assert (counts.done, counts.running, counts.ready, counts.scheduled, counts.cancelled) == (5, 2, 2, 2, 1)
        assert len((await storage.find(Filter(queue=Q, states=(State.DONE,)))).tasks) == 5
        assert await storage.get("t0") is not None
        assert [w.worker for w in await storage.workers()] == ["w"]
        assert await storage.queues() == ["ballast", Q]
        await storage.pause(Q)
        assert await reserve(storage) == []
        await storage.resume(Q)
        assert await storage.reclaim(storage.clock() + 10**10) == 2
        await storage.sweep()
        assert await storage.promote(Q, now_us=storage.clock() + 10**11) == 2
        await storage.purge(Retention(), storage.clock() + 10**13)
        assert await storage.check() == []


async def test_who_brings_something_is_refused_and_who_ends_something_in_the_same_call_is_not(url: str) -> None:
    async with RedisStorage(url) as storage:
        await storage.apply([(task(f"t{n}"),) for n in range(20)])
        tasks = await reserve(storage)
        await fill(storage)
        acks = [storage.apply([(Ack(**held(t), result=b"1"),)]) for t in tasks]
        news = [storage.apply([(task(f"new-{n}"),)]) for n in range(20)]
        mixed = [call for pair in zip(acks, news, strict=True) for call in pair]
        answers = await asyncio.gather(*mixed, return_exceptions=True)
        assert all(isinstance(answer, list) for answer in answers[::2])
        assert all(isinstance(answer, StoreFull) for answer in answers[1::2])
        with pytest.raises(StoreFull):  # one call of one caller is refused whole
            await storage.apply([(Cancel(queue=Q, id="t0"),), (task("new"),)])
        assert await storage.check() == []


# -- workers -----------------------------------------------------------------------------------------


def double(n: int) -> int:
    return 2 * n


def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


async def follow_up() -> None:
    with current_task().transaction() as tx:
        tx.enqueue(double, 1)


async def settled(oq: AsyncOmniQ, ids: list[str]) -> bool:
    return all([(await oq.get_result(id)) is not None for id in ids])


async def test_workers_finish_what_runs_and_what_waits_on_a_full_server(url: str) -> None:
    async with AsyncOmniQ.from_url(url) as oq, AsyncOmniQ.from_url(url) as other:
        storage: Any = oq.storage
        long = await oq.options(lease=0.6).enqueue(slow, 2.0)
        async with await oq.worker(2, allow=[__name__]) as pool:
            await eventually(lambda: _is_running(oq, long), within=20)
            ids = await oq.enqueue_many(double, [(n,) for n in range(40)])
            await fill(storage)
            async with await other.worker(2, allow=[__name__]):  # one that is started on the full server
                await eventually(lambda: settled(oq, [long, *ids]), within=30)
            assert pool.failed == 0
        record = await storage.get(long)
        assert (record.attempts, record.state) == (1, State.DONE)


async def _is_running(oq: AsyncOmniQ, id: str) -> bool:
    found = await oq.get_task(id)
    return found is not None and found.status is TaskStatus.RUNNING


async def test_a_run_whose_end_brings_a_task_fails_with_the_reason_and_the_others_end(url: str) -> None:
    async with AsyncOmniQ.from_url(url) as oq:
        joint = await oq.options(max_retries=0).enqueue(follow_up)
        ids = await oq.enqueue_many(double, [(n,) for n in range(10)])
        storage: Any = oq.storage
        await fill(storage)
        async with await oq.worker(4, allow=[__name__]):
            await eventually(lambda: settled(oq, [joint, *ids]), within=30)
        failed = await oq.get_result(joint)
        assert failed is not None
        assert failed.error is not None
        assert failed.error.type == "StoreFull"


async def test_a_new_store_on_a_full_server_says_that_it_is_full(url: str) -> None:
    async with RedisStorage(url) as storage:
        await fill(storage)
        with pytest.raises(StoreFull, match="raise maxmemory"):
            await AsyncWorkerPool(RedisStorage(url.replace("/0", "/1"))).start()


# -- a replica ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["apply", "apply_blocking"])
async def test_a_replica_is_unavailable_for_what_changes_and_can_be_looked_at(server: Server, url: str, door: str) -> None:
    async with RedisStorage(url) as storage:
        await storage.apply([(task("a"),)])
    async with RedisStorage(url) as storage:
        with server.client() as client:
            client.replicaof("127.0.0.1", free_port())
        try:
            for op in (task("b"), Reserve(queues=(Q,), token=new_token()), Beat(info=INFO), Cancel(queue=Q, id="a")):
                called = storage.apply([(op,)]) if door == "apply" else asyncio.to_thread(storage.apply_blocking, [(op,)])
                with pytest.raises(StoreUnavailable, match="read only replica"):
                    await called
            for call in (storage.pause(Q), storage.allocate_ids(1), storage.sweep(), storage.set_group_limit(Q, "g", 2)):
                with pytest.raises(StoreUnavailable, match="read only replica"):
                    await call
            assert [c.ready for c in await storage.counts()] == [1]
            assert await storage.get("a") is not None
        finally:
            with server.client() as client:
                client.execute_command("REPLICAOF", "NO", "ONE")
        assert len(await reserve(storage)) == 1


# -- an absent server --------------------------------------------------------------------------------


async def test_a_pool_that_cannot_reach_its_server_says_so_at_its_start() -> None:
    pool = AsyncWorkerPool(RedisStorage(f"redis://127.0.0.1:{free_port()}/0"))
    with pytest.raises(StoreUnavailable, match="cannot reach"):
        await pool.start()
    await pool.stop()


async def test_a_consumer_waits_for_a_server_that_is_away_when_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "late")
    stop, seen = asyncio.Event(), list[str]()

    async def handle(job: JobContext) -> None:
        seen.append(job.job_id)
        stop.set()

    try:
        client = AsyncContractClient(RedisStorage(server.url))
        consuming = asyncio.create_task(client.consume("late", handle, stop=stop, signals=False))
        await eventually(lambda: "it will be tried again" in caplog.text, within=20)
        await asyncio.to_thread(server.start)
        id = await client.publish("late", {})
        await asyncio.wait_for(consuming, 30)
        assert seen == [id]
        await client.close()
    finally:
        server.stop()


async def test_a_consumer_that_waits_for_its_server_can_be_stopped(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    client = AsyncContractClient(RedisStorage(f"redis://127.0.0.1:{free_port()}/0"))
    consuming = asyncio.create_task(client.consume("late", print, stop=stop, signals=False))
    await eventually(lambda: "it will be tried again" in caplog.text, within=20)
    stop.set()
    await asyncio.wait_for(consuming, 10)
    await client.close()


# -- the TCP server ----------------------------------------------------------------------------------


class _Lines:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.close = reader, writer, writer.close

    async def ask(self, line: str) -> str:
        self._writer.write(line.encode() + b"\n")
        return (await self._reader.readline()).decode().strip()


async def _lines(server: TcpServer) -> _Lines:
    return _Lines(*await asyncio.open_connection(*server.address))


async def test_a_tcp_client_that_pushes_is_told_and_one_that_acks_is_served(url: str) -> None:
    async with RedisStorage(url) as storage, TcpServer(storage, ServeOptions(port=0)) as server:
        producer, consumer = await _lines(server), await _lines(server)
        assert await producer.ask('PUSH {"name": "x", "queue": "tcp"}') == 'OK {"id":1}'
        await storage.apply([(task("of Python", queue="tcp"),)])
        await consumer.ask('FETCH {"queues": ["tcp"]}')
        await fill(storage)
        told, acked = await asyncio.gather(producer.ask('PUSH {"name": "x"}'), consumer.ask('ACK {"id": 1}'))
        assert told.startswith('ERR {"msg":"store: ')
        assert "raise maxmemory" in told
        assert acked == "OK {}"
        assert '"payload":{"args":[1],"kwargs":{}}' in await consumer.ask('FETCH {"queues": ["tcp"]}')
        producer.close()
        consumer.close()
