"""A Redis store of 10,000 queues: everything works, and no call keeps the server from serving others."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from support.redis_server import Server, running

from omniq.errors import DuplicateId, Refused
from omniq.models import State, new_id, new_token
from omniq.operations import Ack, Cancel, Enqueue, Filter, Operation, Reserve, Retention
from omniq.storage.redis import RedisStorage

MANY = 10_000
NAMES = tuple(f"q{n:05d}" for n in range(MANY))
BUSY_MS = 1500  # what a script took here before was several times as long; what it takes now a fiftieth, on a quiet machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def store(server: Server) -> Iterator[RedisStorage]:
    """10,000 queues with a task each, which came in one call."""
    with server.client() as raw:
        raw.flushall()
    storage = RedisStorage(server.url)
    answers = storage.apply_blocking([(_new(queue),) for queue in NAMES])
    assert not any(isinstance(answer, Refused) for answer in answers)
    yield storage
    asyncio.run(storage.close())


@contextlib.contextmanager
def never_busy(server: Server) -> Iterator[None]:
    """Another client is served all the time; one script that takes longer than `BUSY_MS` would refuse it."""
    refused: list[str] = []
    done = threading.Event()

    def ping() -> None:
        with server.client() as raw:
            while not done.is_set():
                try:
                    raw.ping()
                except redis.ResponseError as exc:
                    refused.append(str(exc))
                done.wait(0.02)

    with server.client() as raw:
        raw.config_set("lua-time-limit", BUSY_MS)
    other = threading.Thread(target=ping)
    other.start()
    try:
        yield
    finally:
        done.set()
        other.join()
    assert refused == []


def _new(queue: str, id: str | None = None, **fields: Any) -> Enqueue:
    return Enqueue(id=id or new_id(), name="job", queue=queue, **fields)


async def _all_stored(storage: RedisStorage, *transactions: list[Operation]) -> None:
    for answer in await storage.apply(transactions):
        assert isinstance(answer, list), answer
        assert not any(outcome.existed for outcome in answer)  # type: ignore[union-attr, attr-defined]


async def test_tasks_come_in_by_every_door(server: Server, store: RedisStorage) -> None:
    with never_busy(server):
        (answer,) = store.apply_blocking([(_new(NAMES[3]),)])
        assert isinstance(answer, list)
        store.apply_blocking([(Cancel(queue=NAMES[3], id=answer[0].id),)])  # type: ignore[union-attr, attr-defined]
        await _all_stored(store, [_new(NAMES[7])])
        await _all_stored(store, [_new("the-first-of-this-queue")])
        await asyncio.gather(*[_all_stored(store, [_new(NAMES[n])]) for n in range(10)])
        await _all_stored(store, [_new(NAMES[7]) for _ in range(1000)])
        await _all_stored(store, *[[_new(NAMES[7])] for _ in range(1000)])
        await _all_stored(store, [_new(NAMES[n % 9], group="g") for n in range(300)])
        await _all_stored(store, *[[_new(NAMES[n % 9], idempotency_key=str(n))] for n in range(300)])
        assert sum(counts.ready for counts in await store.counts()) == MANY + 1 + 1 + 10 + 2600


async def test_an_id_of_another_queue_is_found_among_many(server: Server, store: RedisStorage) -> None:
    with never_busy(server):
        await _all_stored(store, [_new(NAMES[-1], "mine")], [_new(NAMES[4], "late", delay_us=10**10)])
        for mine in ("mine", "late"):
            several: list[Operation] = [_new(NAMES[0], fingerprint="other") for _ in range(50)]
            several[20] = _new(NAMES[0], mine, fingerprint="other")
            alone = await store.apply([several[20:21]])
            (together,) = await store.apply([several])
            one_by_one = await store.apply([[op] for op in several])
            assert isinstance(alone[0], DuplicateId)
            assert isinstance(together, DuplicateId)
            assert [n for n, answer in enumerate(one_by_one) if isinstance(answer, Refused)] == [20]


async def test_ids_that_other_queues_have_are_found_at_once(server: Server, store: RedisStorage) -> None:
    ids = [f"mine-{n}" for n in range(400)]
    with never_busy(server):
        await _all_stored(store, *[[_new(NAMES[-1 - n % 90], id)] for n, id in enumerate(ids)])
        answers = await store.apply([[_new(NAMES[0], id, on_conflict="return")] for id in ids])
        assert all(answer[0].existed for answer in answers)  # type: ignore[index, union-attr, attr-defined]


async def test_ids_that_only_the_books_of_a_queue_have_are_looked_for_in_several_calls(
    server: Server, store: RedisStorage
) -> None:
    """Other clients deleted the jobs, so each of them is looked for in all queues."""
    ids = [f"mine-{n}" for n in range(20)]

    def calls(raw: Any) -> int:
        return raw.info("commandstats")["cmdstat_evalsha"]["calls"]

    with server.client() as raw:
        await _all_stored(store, *[[_new(NAMES[-1], id)] for id in ids])
        raw.delete(*[f"{{{NAMES[-1]}}}:job:{id}" for id in ids])
        before = calls(raw)
        await _all_stored(store, *[[_new(NAMES[0], id)] for id in ids])
        assert calls(raw) - before >= len(ids) / 3


async def test_a_worker_of_all_queues_takes_ends_and_sweeps(server: Server, store: RedisStorage) -> None:
    def reserve(limit: int) -> Reserve:
        return Reserve(queues=NAMES, token=new_token(), limit=limit, worker="w")

    with never_busy(server):
        await store.pause(NAMES[600])
        first = reserve(700)
        ((got,),) = await store.apply([[first]])  # type: ignore[misc]
        assert [task.queue for task in got.tasks] == [*NAMES[:600], *NAMES[601:701]]  # type: ignore[union-attr, attr-defined]
        assert got.paused == (NAMES[600],)  # type: ignore[union-attr, attr-defined]
        assert got.next_at_us == min(task.lease_until_us for task in got.tasks)  # type: ignore[union-attr, attr-defined]
        ((again,),) = await store.apply([[first]], repeat=True)  # type: ignore[misc]
        assert {t.id for t in again.tasks} == {t.id for t in got.tasks}  # type: ignore[union-attr, attr-defined]
        ends = [[Ack(queue=t.queue, id=t.id, token=t.token or "")] for t in got.tasks[:600]]  # type: ignore[union-attr, attr-defined]
        ((rest,), *_) = store.apply_blocking([[reserve(2)], *ends])  # type: ignore[misc]
        assert [task.queue for task in rest.tasks] == list(NAMES[701:703])  # type: ignore[union-attr, attr-defined]
        assert await store.sweep() == 0
        await store.purge(Retention())
        assert await store.expired() == []
        running = await store.find(Filter(states=(State.RUNNING,)), limit=200)
        assert {task.queue for task in running.tasks} == {*NAMES[601:703]}
        page = await store.find(Filter(), limit=40)
        assert len({task.queue for task in page.tasks}) == 40
        assert page.cursor is not None


async def test_a_reserve_costs_as_much_per_queue_whatever_their_number(server: Server, store: RedisStorage) -> None:
    async def cost(queues: tuple[str, ...], times: int) -> float:
        """The server's CPU time for asking these queues once, of which the first few have tasks."""
        with server.client() as raw:
            before = raw.info("cpu")["used_cpu_user"]
            for _ in range(times):
                answers = await store.apply([[Reserve(queues=queues, token=new_token(), limit=5)]])
                assert len(answers[0][0].tasks) == 5  # type: ignore[index, union-attr, attr-defined]
            return (raw.info("cpu")["used_cpu_user"] - before) / times

    await cost(NAMES[:1000], 1)  # the server knows the script
    assert await cost(NAMES, 2) < 30 * await cost(NAMES[:1000], 10)  # ten times as much, not a hundred
