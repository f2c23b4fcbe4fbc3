"""`consume`: handlers, leases that are kept and lost, several jobs at once, and leaving."""

import asyncio
import functools
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from support.waiting import eventually, wait_for

from omniq import BaseStorage, DriverClosed, MemoryStorage, State, StoreUnavailable
from omniq.contract import AsyncContractClient, ContractClient, Job, JobContext
from omniq.errors import Invalid
from omniq.models import Record
from omniq.operations import Capabilities, Enqueue
from omniq.testing import FaultyStorage


@pytest.fixture
def storage(every_storage: BaseStorage) -> BaseStorage:
    return every_storage


@pytest.fixture
def client(storage: BaseStorage) -> Iterator[ContractClient]:
    with ContractClient(storage) as made:
        yield made


def get(client: ContractClient, job_id: str) -> Record:
    record = asyncio.run(client.storage.get(job_id))
    assert record is not None
    return record


def consume_n(client: ContractClient, n: int, handler: Callable[[JobContext], Any], queue: str = "q", **options: Any) -> None:
    """Consume until the handler has been called n times."""
    stop, calls = threading.Event(), iter(range(n - 1))

    def counted(ctx: JobContext) -> None:
        if next(calls, None) is None:
            stop.set()
        handler(ctx)

    client.consume(queue, counted, stop=stop, **options)


async def consume_while(
    storage: BaseStorage,
    handler: Callable[[JobContext], Any],
    drive: Callable[[AsyncContractClient, asyncio.Task[None], asyncio.Event], Awaitable[None]],
    **options: Any,
) -> None:
    async with AsyncContractClient(storage) as client:
        stop = asyncio.Event()
        consuming = asyncio.create_task(client.consume("q", handler, stop=stop, **options))
        try:
            await drive(client, consuming, stop)
        finally:
            stop.set()
            await asyncio.wait({consuming})
        if not consuming.cancelled():
            consuming.result()


# -- handlers --------------------------------------------------------------------------------------


def test_a_handler_gets_the_fields_of_the_contract(client: ContractClient) -> None:
    seen: list[JobContext] = []
    job_id = client.publish("q", {"page": 1}, gid="acme", max_attempts=3, timeout_ms=60_000)
    before = client.now_ms()
    consume_n(client, 1, seen.append)
    (ctx,) = seen
    assert (ctx.queue, ctx.job_id, ctx.payload_raw, ctx.payload) == ("q", job_id, '{"page":1}', {"page": 1})
    assert (ctx.attempt, ctx.max_attempts, ctx.gid) == (1, 3, "acme")
    assert ctx.lease_token
    assert before + 60_000 <= ctx.lock_until_ms <= client.now_ms() + 60_000
    assert not ctx.lost.is_set()
    assert get(client, job_id).state is State.DONE


def test_one_job_at_a_time_runs_in_the_thread_of_the_caller(client: ContractClient) -> None:
    threads: list[threading.Thread] = []
    for _ in range(2):
        client.publish("q", {})
    consume_n(client, 2, lambda ctx: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()] * 2


def test_an_exception_fails_the_job_with_its_type_and_message(client: ContractClient, caplog: pytest.LogCaptureFixture) -> None:
    def handler(ctx: JobContext) -> None:
        raise ValueError(f"page {ctx.payload['page']}")

    retried = client.publish("q", {"page": 1}, backoff_ms=60_000)
    failed = client.publish("q", {"page": 2}, max_attempts=1)
    consume_n(client, 2, handler)
    assert (get(client, retried).state, str(get(client, retried).last_error)) == (State.SCHEDULED, "ValueError: page 1")
    assert (get(client, failed).state, str(get(client, failed).last_error)) == (State.DEAD, "ValueError: page 2")
    assert "failed for good: ValueError: page 2" in caplog.text


def test_a_handler_that_exits_has_failed(client: ContractClient) -> None:
    """Handing such a job back would end one consumer after another."""

    def handler(ctx: JobContext) -> None:
        raise SystemExit(3)

    job_id = client.publish("q", {}, max_attempts=1)
    consume_n(client, 1, handler)
    assert (get(client, job_id).state, str(get(client, job_id).last_error)) == (State.DEAD, "SystemExit: 3")


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("error", [GeneratorExit, StopIteration, asyncio.CancelledError], ids=lambda error: error.__name__)
def test_what_a_handler_had_better_not_raise_fails_its_job(
    client: ContractClient, error: type[BaseException], concurrency: int
) -> None:
    def handler(ctx: JobContext) -> None:
        if ctx.payload["page"] == 1:
            raise error

    bad, good = client.publish("q", {"page": 1}, max_attempts=1), client.publish("q", {"page": 2})
    consume_n(client, 2, handler, concurrency=concurrency)
    assert get(client, bad).state is State.DEAD
    assert error.__name__ in str(get(client, bad).last_error)
    assert get(client, good).state is State.DONE


def test_a_failed_job_is_run_again_after_its_backoff(client: ContractClient) -> None:
    attempts: list[int] = []

    def handler(ctx: JobContext) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise RuntimeError("not yet")

    job_id = client.publish("q", {}, backoff_ms=20)
    consume_n(client, 3, handler)
    assert attempts == [1, 2, 3]
    assert get(client, job_id).state is State.DONE


@pytest.mark.parametrize(
    "payload", [b"no json {", b"\xff\xfe", b'{"a": "\xff"}', b"[" * 100_000], ids=["text", "bytes", "in", "deep"]
)
def test_a_payload_that_is_no_json_is_handed_over_as_text(storage: BaseStorage, client: ContractClient, payload: bytes) -> None:
    storage.apply_blocking([(Enqueue(id="odd", name="*", queue="q", payload=payload, origin="contract"),)])
    seen: list[Any] = []
    consume_n(client, 1, lambda ctx: seen.append((ctx.payload_raw, ctx.payload)))
    text = payload.decode("utf-8", "surrogateescape")
    assert seen == [(text, text)]


async def test_failed_jobs_are_kept_unless_a_time_is_given(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they grew without bound; what other clients keep for ever is still not deleted unasked."""
    monkeypatch.setattr("omniq.upkeep.PURGE_S", 0.01)
    monkeypatch.setattr("omniq.upkeep.REAP_S", 0.01)

    async def handler(ctx: JobContext) -> None:
        raise ValueError("no")

    async def keep(client: AsyncContractClient) -> None:
        await client.publish("q", {}, job_id="a", max_attempts=1)
        await eventually(lambda: state_of("a", State.DEAD))
        await asyncio.sleep(0.1)
        assert await state_of("a", State.DEAD)

    async def forget(_: AsyncContractClient) -> None:
        await eventually(lambda: state_of("a", None))

    async def state_of(job_id: str, state: State | None) -> bool:
        task = await storage.get(job_id)
        return (None if task is None else task.state) is state

    client = AsyncContractClient(storage)
    for drive, ttl in ((keep, None), (forget, 50)):
        stop = asyncio.Event()
        consuming = asyncio.create_task(client.consume("q", handler, stop=stop, failed_ttl_ms=ttl))
        await drive(client)
        stop.set()
        await consuming


async def test_a_storage_that_is_closed_under_a_consumer_ends_it(storage: BaseStorage) -> None:
    told: list[JobContext] = []

    async def handler(ctx: JobContext) -> None:
        told.append(ctx)
        await asyncio.sleep(20)

    client = AsyncContractClient(storage)
    await client.publish("q", {})
    consuming = asyncio.create_task(client.consume("q", handler, concurrency=2))
    await eventually(lambda: told)
    await client.close()
    with pytest.raises(DriverClosed):
        async with asyncio.timeout(5):
            await consuming
    assert told[0].lost.is_set()


def test_a_handler_may_use_its_client(client: ContractClient) -> None:
    done: list[Any] = []

    def handler(ctx: JobContext) -> None:
        if ctx.payload["n"] < 3:
            client.publish("q", {"n": ctx.payload["n"] + 1})
        done.append(ctx.payload["n"])

    client.publish("q", {"n": 0})
    consume_n(client, 4, handler)
    assert done == [0, 1, 2, 3]


async def test_a_job_that_arrives_later_is_run_at_once(storage: BaseStorage) -> None:
    ran = asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        ran.set()

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await eventually(lambda: storage.workers())
        await client.publish("q", {})
        async with asyncio.timeout(5):
            await ran.wait()

    await consume_while(storage, handler, drive, poll_interval=30)


def test_a_delayed_job_is_run_when_it_is_due(client: ContractClient) -> None:
    due = client.now_ms() + 150
    client.publish("q", {}, due_ms=due)
    ran: list[int] = []
    consume_n(client, 1, lambda ctx: ran.append(client.now_ms()))
    assert due <= ran[0] < due + 3000


def test_a_consumer_of_another_queue_leaves_it_alone(client: ContractClient) -> None:
    mine, other = client.publish("q", {}), client.publish("other", {})
    consume_n(client, 1, lambda ctx: None)
    assert (get(client, mine).state, get(client, other).state) == (State.DONE, State.READY)


async def test_a_paused_queue_waits_and_goes_on(storage: BaseStorage) -> None:
    ran: list[str] = []

    async def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.pause("q")
        await client.publish("q", {}, job_id="a")
        await asyncio.sleep(0.1)
        assert ran == []
        await client.resume("q")
        await eventually(lambda: ran == ["a"])

    await consume_while(storage, handler, drive)


# -- more than one at once -------------------------------------------------------------------------


def test_several_jobs_run_at_once_in_threads(client: ContractClient) -> None:
    together = threading.Barrier(3, timeout=10)
    for _ in range(3):
        client.publish("q", {})
    consume_n(client, 3, lambda ctx: together.wait(), concurrency=3)
    assert asyncio.run(client.storage.counts())[0].done == 3


async def test_several_jobs_run_at_once_on_the_loop_but_no_more_than_asked(storage: BaseStorage) -> None:
    inside, most, done = 0, 0, 0

    async def handler(ctx: JobContext) -> None:
        nonlocal inside, most, done
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside, done = inside - 1, done + 1

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish_many("q", [[n] for n in range(20)])
        await eventually(lambda: done == 20)

    await consume_while(storage, handler, drive, concurrency=4)
    assert most == 4


async def test_a_group_keeps_its_limit_however_many_run_at_once(storage: BaseStorage) -> None:
    inside, most, done = 0, 0, 0

    async def handler(ctx: JobContext) -> None:
        nonlocal inside, most, done
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.005)
        inside, done = inside - 1, done + 1

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish_many("q", [[n] for n in range(10)], gid="g", group_limit=2)
        await eventually(lambda: done == 10)

    await consume_while(storage, handler, drive, concurrency=8)
    assert most == 2


@pytest.mark.parametrize("make", [lambda f: f, lambda f: functools.partial(f)], ids=["plain", "partial"])
async def test_a_plain_handler_of_the_async_client_runs_in_a_thread(storage: BaseStorage, make: Callable[[Any], Any]) -> None:
    threads: list[threading.Thread] = []

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish("q", {})
        await eventually(lambda: threads)
        assert threads[0] is not threading.current_thread()

    await consume_while(storage, make(lambda ctx: threads.append(threading.current_thread())), drive)


def test_an_async_handler_needs_the_async_client(client: ContractClient) -> None:
    async def handler(ctx: JobContext) -> None: ...

    with pytest.raises(TypeError, match="AsyncContractClient"):
        client.consume("q", handler)
    for wrong in ({"concurrency": 0}, {"concurrency": True}, {"poll_interval": 0}):
        with pytest.raises(Invalid):
            client.consume("q", print, **wrong)


# -- leases ----------------------------------------------------------------------------------------


def test_a_short_lease_is_kept_while_the_handler_works(client: ContractClient) -> None:
    """Once beats were never closer than a second: a job of 300 ms ran five times, each fine, and ended as failed."""
    runs: list[int] = []

    def handler(ctx: JobContext) -> None:
        runs.append(ctx.attempt)
        deadline = time.monotonic() + 1.8
        while time.monotonic() < deadline:
            client.reap_expired("q")
            time.sleep(0.05)

    job_id = client.publish("q", {}, timeout_ms=600)
    consume_n(client, 1, handler)
    assert runs == [1]
    assert get(client, job_id).state is State.DONE


async def test_a_handler_that_blocks_the_loop_keeps_its_lease(storage: BaseStorage) -> None:
    ended: list[int] = []

    async def handler(ctx: JobContext) -> None:
        time.sleep(1.5)  # noqa: ASYNC251 - on purpose
        assert (await storage.get(ctx.job_id)).lease_until_us > storage.clock()
        ended.append(ctx.attempt)

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish("q", {}, timeout_ms=600)
        await eventually(lambda: ended)

    await consume_while(storage, handler, drive)
    assert ended == [1]


def test_a_lost_lease_is_signalled_and_neither_end_is_sent(client: ContractClient, caplog: pytest.LogCaptureFixture) -> None:
    """Once the handler was not told, and worked on for nothing."""
    lost: list[bool] = []

    def handler(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            client.reap_expired("q", 1000, client.now_ms() + 250)
            lost.append(ctx.lost.wait(5))

    job_id = client.publish("q", {}, timeout_ms=200, backoff_ms=1)
    with caplog.at_level(logging.WARNING, "omniq.contract"):
        consume_n(client, 2, handler)
    assert lost == [True]
    assert get(client, job_id).attempts == 2
    assert "was lost" in caplog.text
    assert "refused" not in caplog.text


async def test_an_async_handler_whose_lease_is_lost_is_cancelled(storage: BaseStorage) -> None:
    heard: list[str] = []

    async def handler(ctx: JobContext) -> None:
        if ctx.attempt > 1:
            heard.append("again")
            return
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            heard.append(f"cancelled, lost {ctx.lost.is_set()}")
            raise

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish("q", {}, timeout_ms=150, backoff_ms=1)
        await eventually(lambda: storage.counts())
        await eventually(lambda: client.reap_expired("q", 1000, client.now_ms() + 250))
        await eventually(lambda: heard[-1:] == ["again"])

    await consume_while(storage, handler, drive)
    assert heard == ["cancelled, lost True", "again"]


def test_jobs_of_a_dead_consumer_come_back(client: ContractClient) -> None:
    """Nobody beats for this job; its lease runs out and the next consumer takes it."""
    job_id = client.publish("q", {}, timeout_ms=100, backoff_ms=1)
    assert isinstance(client.reserve("q"), Job)
    seen: list[int] = []
    consume_n(client, 1, lambda ctx: seen.append(ctx.attempt))
    assert seen == [2]
    assert get(client, job_id).state is State.DONE


# -- leaving ---------------------------------------------------------------------------------------


async def test_stopping_finishes_the_job_in_hand_and_takes_no_more(storage: BaseStorage) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        begun.set()
        await gate.wait()

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        for n in range(2):
            await client.publish("q", {}, job_id=f"job {n}")
        await begun.wait()
        stop.set()
        await asyncio.sleep(0.05)
        assert not consuming.done()
        gate.set()
        async with asyncio.timeout(5):
            await consuming
        assert [(await storage.get(f"job {n}")).state for n in range(2)] == [State.DONE, State.READY]

    await consume_while(storage, handler, drive)


async def test_cancelling_hands_the_jobs_back_without_spending_an_attempt(storage: BaseStorage) -> None:
    heard: list[str] = []

    async def handler(ctx: JobContext) -> None:
        heard.append(ctx.job_id)
        try:
            await asyncio.sleep(20)
        finally:
            heard.append("cancelled")

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        for n in range(3):
            await client.publish("q", {}, job_id=f"job {n}", max_attempts=1)
        await eventually(lambda: len(heard) == 2)
        consuming.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait({consuming})
        assert consuming.cancelled()
        assert heard[2:] == ["cancelled"] * 2
        records = [await storage.get(f"job {n}") for n in range(3)]
        assert [(r.state, r.attempts) for r in records] == [(State.READY, 0)] * 3
        again = await client.reserve("q")
        assert isinstance(again, Job)
        assert (again.job_id in ("job 0", "job 1"), again.attempt) == (True, 1)

    await consume_while(storage, handler, drive, concurrency=2)


async def test_a_cancellation_that_a_client_library_swallowed_is_heard_all_the_same(storage: BaseStorage) -> None:
    class Deaf(FaultyStorage):
        inside = 0

        async def _apply(self, *args: Any) -> Any:
            self.inside += 1
            while True:
                try:
                    await asyncio.sleep(0.02)
                    return await super()._apply(*args)
                except asyncio.CancelledError:
                    continue

    deaf = Deaf(storage)

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await eventually(lambda: deaf.inside > 1)
        consuming.cancel()
        await asyncio.wait({consuming}, timeout=5)
        assert consuming.cancelled()

    await consume_while(deaf, print, drive, poll_interval=0.001)


async def test_a_stubborn_handler_does_not_keep_a_consumer_from_leaving(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("omniq.contract.consumer.LEAVE_S", 0.1)
    begun, gate = asyncio.Event(), asyncio.Event()
    told: list[JobContext] = []

    async def handler(ctx: JobContext) -> None:
        told.append(ctx)
        begun.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish("q", {}, job_id="a")
        await begun.wait()
        consuming.cancel()
        await asyncio.wait({consuming}, timeout=5)
        assert consuming.cancelled()
        assert (await storage.get("a")).state is State.READY
        assert told[0].lost.is_set()
        gate.set()
        await asyncio.sleep(0.01)
        assert (await storage.get("a")).state is State.READY

    await consume_while(storage, handler, drive)
    assert "runs on" in caplog.text


def test_a_keyboard_interrupt_that_nobody_caught_hands_the_job_back(client: ContractClient) -> None:
    def handler(ctx: JobContext) -> None:
        raise KeyboardInterrupt

    job_id = client.publish("q", {}, max_attempts=1)
    with pytest.raises(KeyboardInterrupt):
        client.consume("q", handler, signals=False)
    assert (get(client, job_id).state, get(client, job_id).attempts) == (State.READY, 0)


def test_a_consumer_in_a_thread_is_stopped_by_its_event(client: ContractClient) -> None:
    stop, seen = threading.Event(), []
    thread = threading.Thread(target=client.consume, args=("q", seen.append), kwargs={"stop": stop})
    thread.start()
    client.publish("q", {})
    wait_for(lambda: seen)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert asyncio.run(client.storage.workers()) == []


async def test_a_consumer_shows_itself_among_the_workers(storage: BaseStorage) -> None:
    async def handler(ctx: JobContext) -> None:
        await asyncio.sleep(20)

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish("q", {})
        (info,) = await eventually(lambda: storage.workers())
        assert (info.queues, info.concurrency) == (("q",), 3)
        consuming.cancel()

    await consume_while(storage, handler, drive, concurrency=3)


# -- a store that fails ----------------------------------------------------------------------------


async def test_a_consumer_outlives_a_store_that_fails(storage: BaseStorage, caplog: pytest.LogCaptureFixture) -> None:
    """Each job runs once and is acked once, although every third answer is lost or never comes."""
    faulty = FaultyStorage(storage, unavailable=0.15, unknown=0.15, seed=7)
    ran: list[int] = []

    async def handler(ctx: JobContext) -> None:
        ran.append(ctx.payload[0])

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await AsyncContractClient(storage).publish_many("q", [[n] for n in range(12)])
        await eventually(lambda: len(ran) >= 12, within=30)
        stop.set()
        await consuming
        assert (await storage.counts())[0].done == 12

    await consume_while(faulty, handler, drive, concurrency=2)
    assert sorted(ran) == list(range(12))
    assert "it will be tried again" in caplog.text


async def test_a_consumer_that_cannot_reach_its_store_at_the_end_says_so_and_leaves(
    storage: BaseStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniq.turns.LAST_TRIES", 2)
    faulty = FaultyStorage(storage)

    async def handler(ctx: JobContext) -> None:
        faulty.strike(*["unavailable"] * 50)

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await client.publish("q", {})
        await eventually(lambda: faulty.script)
        stop.set()
        async with asyncio.timeout(10):
            await consuming

    await consume_while(faulty, handler, drive)
    assert "comes back by its lease" in caplog.text


def test_payloads_of_any_shape_reach_the_handler(client: ContractClient) -> None:
    payloads: list[Any] = [{}, [], {"args": [1], "kwargs": {}}, {"ü": [None, 1.5]}, [[["deep"]]]]
    for payload in payloads:
        client.publish("q", payload)
    seen: list[Any] = []
    consume_n(client, len(payloads), lambda ctx: seen.append((ctx.payload, json.loads(ctx.payload_raw))))
    assert seen == [(p, p) for p in payloads]


class Laned(MemoryStorage):
    """A store with lanes, whose promotion fails at first."""

    capabilities = Capabilities(durability="none", due_order=False)
    promoted = 0

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        self.promoted += 1
        if self.promoted == 1:
            raise StoreUnavailable("no lanes today")
        return 3


async def test_what_goes_wrong_while_promoting_is_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once failures in promote and reap were swallowed in silence."""
    monkeypatch.setattr("omniq.contract.consumer.PROMOTE_S", 0.01)
    storage = Laned()

    async def drive(client: AsyncContractClient, consuming: asyncio.Task[None], stop: asyncio.Event) -> None:
        await eventually(lambda: storage.promoted > 2)

    with caplog.at_level(logging.DEBUG, "omniq.contract"):
        await consume_while(storage, print, drive)
    assert "could not be promoted, it will be tried again: no lanes today" in caplog.text
    assert "promoted 3 delayed jobs of q" in caplog.text
