"""Ten tasks end in one turn, and what one of them leaves cannot be stored: the other nine are done, once."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.choking import ChokingStorage
from support.redis_server import running
from support.waiting import eventually, wait_for

import omniq
from omniq import AsyncOmniQ, BaseStorage, Settings, StoreError, TaskStatus
from omniq.contract import AsyncContractClient, JobContext
from omniq.models import Record, State, new_token
from omniq.operations import Ack, Capabilities, Enqueue, Extend, Reserve, Retry, WorkerInfo
from omniq.presence import Heartbeat
from omniq.server import ServeOptions, Server
from omniq.storage import sending
from omniq.storage.redis import RedisStorage
from omniq.testing import FaultyStorage

QUICK = Settings(backoff_base=0.01, grace=5)
HALF = "report-\udcff.pdf"
N = 10

gate: dict[str, asyncio.Event] = {}
runs: Counter[str] = Counter()


# What a task gives its child, the error that this is, and a word of its message.
ODD: dict[str, tuple[dict[str, Any], str, str]] = {
    "own id": ({}, "DuplicateTarget", "Ack and Enqueue"),
    "id": ({"task_id": HALF}, "TaskIdRequired", "task id"),
    "key": ({"idempotency_key": HALF}, "Invalid", "idempotency_key"),
    "group": ({"group": HALF}, "Invalid", "group"),
    "name of a header": ({"headers": {HALF: "x"}}, "Invalid", "header"),
    "header": ({"headers": {"x": HALF}}, "Invalid", "header 'x'"),
    "retries": ({"max_retries": 2**63}, "Invalid", "max_retries"),
    "limit of a group": ({"group": "g", "group_limit": 2**64}, "Invalid", "group_limit"),
}
CHOKES = {"headers": {"store": "chokes"}}


async def leave_something(key: str, odd: str | None) -> str:
    """Waits for the others, then enqueues a child in its own transaction."""
    me = omniq.current_task()
    runs[key] += 1
    await gate[key].wait()
    given: dict[str, Any] = CHOKES if odd == "chokes" else ODD[odd][0] if odd else {}
    if odd == "own id":
        given = {"task_id": me.id}
    async with me.transaction() as tx:
        tx.options(queue="children", **given).enqueue(jobs.add, 1, 2)
    return "done"


async def ten_in_a_turn(oq: AsyncOmniQ, key: str, odd: str) -> tuple[list[str], str]:
    """Nine ordinary tasks and an odd one between them, all ended at the same moment."""
    gate[key] = asyncio.Event()
    async with await oq.worker(concurrency=N, queues=["default"], allow=[__name__]):
        ids = [await oq.options(max_retries=0).enqueue(leave_something, key, odd if n == 4 else None) for n in range(N)]
        await eventually(lambda: runs[key] == N)
        gate[key].set()
        for task_id in ids:
            assert await oq.get_result(task_id, wait=True, timeout=10) is not None, "a run was thrown away"
    return ids[:4] + ids[5:], ids[4]


async def nine_succeeded_once(oq: AsyncOmniQ, good: list[str], key: str) -> None:
    for task_id in good:
        result = await oq.get_result(task_id)
        assert result is not None
        assert (result.status, result.result, result.attempts) == (TaskStatus.SUCCESS, "done", 1)
    assert runs[key] == N
    children, _ = await oq.find(omniq.Filter(queue="children"), limit=100)
    assert len(children) == N - 1
    succeeded = [
        e for e in await oq.events(shard="default" if not oq.storage.capabilities.local else "") if e.event == "succeeded"
    ]
    assert len(succeeded) == N - 1


@pytest.mark.parametrize("odd", ODD)
async def test_what_a_task_enqueues_wrongly_fails_that_task_only(every_storage: BaseStorage, key: str, odd: str) -> None:
    _, error, word = ODD[odd]
    oq = AsyncOmniQ(every_storage, settings=QUICK)
    good, bad = await ten_in_a_turn(oq, key, odd)
    await nine_succeeded_once(oq, good, key)
    failed = await oq.get_result(bad)
    assert failed is not None
    assert (failed.status, failed.error.type) == (TaskStatus.FAILED, error)
    assert word in failed.error.message


@pytest.mark.parametrize("raised", [RuntimeError("cannot be written"), StoreError("the script failed")])
async def test_what_a_store_cannot_take_costs_only_its_own_task(
    every_storage: BaseStorage, key: str, raised: Exception
) -> None:
    storage = ChokingStorage(every_storage, lambda op: isinstance(op, Enqueue) and op.headers == CHOKES["headers"], raised)
    oq = AsyncOmniQ(storage, settings=QUICK)
    good, bad = await ten_in_a_turn(oq, key, "chokes")
    assert storage.acks == N, "they ended in several turns"
    await nine_succeeded_once(oq, good, key)
    failed = await oq.get_result(bad)
    assert failed is not None
    assert (failed.status, failed.error.type) == (TaskStatus.FAILED, type(raised).__name__)
    assert str(raised) in failed.error.message


@pytest.mark.parametrize("raised", [RuntimeError("cannot be written"), StoreError("the script failed")])
async def test_an_ack_that_a_store_cannot_take_becomes_a_failure_that_says_why(
    every_storage: BaseStorage, key: str, raised: Exception
) -> None:
    storage = ChokingStorage(every_storage, lambda op: isinstance(op, Ack) and op.id == key, raised)
    oq = AsyncOmniQ(storage, settings=QUICK)
    async with await oq.worker(concurrency=2, allow=["support.jobs"]) as pool:
        await oq.options(task_id=key).enqueue(jobs.add, 1)
        good = await oq.enqueue(jobs.add, 2)
        failed = await oq.get_result(key, wait=True, timeout=10)
        assert failed is not None
        assert (failed.status, failed.error.type) == (TaskStatus.FAILED, type(raised).__name__)
        assert (await oq.get_result(good, wait=True, timeout=10)).status is TaskStatus.SUCCESS
        assert pool.failed == 1


async def test_a_result_that_is_too_large_fails_its_run(storage: BaseStorage) -> None:
    small = FaultyStorage(storage)
    small.capabilities = Capabilities(durability="none", max_payload=1000)
    oq = AsyncOmniQ(small, settings=QUICK)
    async with await oq.worker():
        task_id = await oq.options(max_retries=0).enqueue(jobs.double, "x" * 600)
        result = await oq.get_result(task_id, wait=True, timeout=10)
        assert result is not None
        assert (result.status, result.error.type) == (TaskStatus.FAILED, "LimitExceeded")


async def give_many(key: str, n: int) -> str:
    runs[key] += 1
    await gate[key].wait()
    return n * "x"


@pytest.mark.parametrize(("sizes", "good"), [([200_000] * N, N), ([1] * 4 + [2_000_000] + [1] * 5, N - 1)])
async def test_what_is_too_much_for_a_server_arrives_in_parts(
    tmp_path: Path, key: str, sizes: list[int], good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of a turn, each of which it takes alone, and one that it does not."""
    monkeypatch.setattr(sending, "UNANSWERED_ALONE", 4)
    with running(tmp_path, proto_max_bulk_len="1mb") as server:
        url = server.url
        gate[key] = asyncio.Event()
        oq = AsyncOmniQ(RedisStorage(url), settings=QUICK)
        async with oq, await oq.worker(concurrency=N, allow=[__name__]):
            ids = [await oq.options(max_retries=0).enqueue(give_many, key, n) for n in sizes]
            await eventually(lambda: runs[key] == N)
            gate[key].set()
            results: list[Any] = [await oq.get_result(task_id, wait=True, timeout=30) for task_id in ids]
        assert sum(result.ok and result.attempts == 1 for result in results) == good
        assert runs[key] == N


async def test_a_consumer_loses_nothing_to_a_job_that_cannot_be_ended(every_storage: BaseStorage, key: str) -> None:
    storage = ChokingStorage(
        every_storage, lambda op: isinstance(op, Ack) and op.id == "bad", RuntimeError("cannot be written")
    )
    started: list[str] = []
    opened, stop = asyncio.Event(), asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        started.append(ctx.job_id)
        await opened.wait()

    async with AsyncContractClient(storage) as client:
        ids = [await client.publish("q", {"n": n}, job_id="bad" if n == 4 else f"job-{n}") for n in range(N)]
        consuming = asyncio.create_task(client.consume("q", handler, concurrency=N, stop=stop, signals=False))
        await eventually(lambda: len(started) == N)
        opened.set()

        async def ended() -> bool:
            (counts,) = await storage.counts()
            return not counts.running and not counts.ready

        await eventually(ended)
        stop.set()
        await consuming
        assert storage.acks == N, "they ended in several turns"
        for job_id in ids:
            job = await storage.get(job_id)
            assert job is not None
            assert (job.state, job.attempts) == (State.DEAD if job_id == "bad" else State.DONE, 1)
        bad = await storage.get("bad")
        assert bad.last_error.type == "RuntimeError"


async def test_a_server_answers_all_others_when_one_command_cannot_be_stored(every_storage: BaseStorage) -> None:
    raised = RuntimeError("cannot be written")
    storage = ChokingStorage(every_storage, lambda op: isinstance(op, Enqueue) and op.name == "bad", raised)
    async with Server(storage, ServeOptions(port=0)) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        lines = [f'PUSH {{"name": "{"bad" if n == 4 else "good"}", "queue": "q"}}\n' for n in range(N)]
        writer.write("".join(lines).encode())
        replies = [(await asyncio.wait_for(reader.readline(), 10)).split(b" ")[0].strip() for _ in range(N)]
        writer.close()
    assert replies == [b"ERR" if n == 4 else b"OK" for n in range(N)]
    (counts,) = await storage.counts()
    assert counts.ready == N - 1


def test_a_heartbeat_that_cannot_be_sent_takes_no_other_lease_with_it(storage: BaseStorage) -> None:
    choking = ChokingStorage(storage, lambda op: isinstance(op, Extend) and op.id == "bad", RuntimeError("cannot be written"))
    lost: list[str] = []

    async def leased() -> list[Record]:
        await storage.apply([(Enqueue(id=i, name="job", lease_us=300_000),) for i in ("bad", "good")])
        (answer,) = await storage.apply([(Reserve(queues=("default",), limit=2, token=new_token()),)])
        return answer[0].tasks

    def renewed() -> bool:
        return asyncio.run(storage.get("good")).lease_until_us > tasks[1].lease_until_us

    tasks = asyncio.run(leased())
    heartbeat = Heartbeat(
        choking, lambda: tasks, lambda: WorkerInfo(worker="w"), lambda task: None, lambda t: lost.append(t.id)
    )
    heartbeat.take(tasks)
    heartbeat.start()
    try:
        wait_for(renewed)
    finally:
        heartbeat.stop()
    assert lost == []


@pytest.mark.parametrize("raised", [RuntimeError("cannot be written"), StoreError("the script failed")])
async def test_a_lost_task_that_cannot_be_taken_back_keeps_no_other_from_coming_back(
    every_storage: BaseStorage, raised: Exception
) -> None:
    storage = ChokingStorage(every_storage, lambda op: isinstance(op, Retry) and op.id == "bad", raised)
    ids = ["a", "bad", "b"]

    async def ready_after_reclaiming(n: int) -> bool:
        await storage.reclaim()
        return (await storage.counts())[0].ready == n

    await storage.apply([(Enqueue(id=id, name="job"),) for id in ids])
    await storage.apply([(Reserve(queues=("default",), limit=3, token=new_token(), lease_us=1000),)])
    await eventually(lambda: ready_after_reclaiming(2))
    assert (await storage.get("bad")).state is State.RUNNING
