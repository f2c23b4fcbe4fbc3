"""`omniq.client`: the blocking and the async client against a real server, also when it goes away and comes back."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.tcp import TOKEN, Peer, ServerProcess
from support.waiting import eventually, wait_for

import omniq
from omniq.client import AsyncClient, Client, FetchedTask, QueueInfo
from omniq.errors import (
    AuthenticationFailed,
    ClientError,
    ConnectionLost,
    ErrorReply,
    Invalid,
    LimitReached,
    ServerStopping,
    TaskNotAcquired,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("clients")
    options = ["--heartbeat", "1s", "--backoff", "fixed:base=20,jitter=0", "--metrics-port", "0"]
    started = ServerProcess("memory://", folder, options).ready()
    yield started
    started.end()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(*server.address, heartbeat=0.5) as made:
        yield made


def test_push_fetch_and_ack(client: Client) -> None:
    number = client.push("resize", {"width": 100}, queue="images", retry=3)
    assert client.info() == [QueueInfo(name="images", ready=1)]
    task = client.fetch(["images"])
    assert task == FetchedTask(id=number, queue="images", name="resize", payload={"width": 100})
    client.ack(task, {"bytes": 5})
    assert client.result(number).result == {"bytes": 5}
    assert client.result(number).status == "SUCCESS"
    assert client.fetch(["images"], timeout=0.02) is None
    client.ping()


def test_falsy_payloads_arrive_and_an_absent_one_is_absent(server: ServerProcess, client: Client) -> None:
    for payload in (0, False, "", [], {}, None):
        client.push("x", payload, queue="falsy")
    client.push("x", queue="falsy")
    with Peer(server.address) as bare:
        replies = [bare.ask('FETCH {"queues":["falsy"]}') for _ in range(7)]
    assert [r.partition('"name":"x"')[2] for r in replies] == [
        ',"payload":0}',
        ',"payload":false}',
        ',"payload":""}',
        ',"payload":[]}',
        ',"payload":{}}',
        ',"payload":null}',
        "}",
    ]


def test_fetch_many_nack_extend_and_cancel(client: Client) -> None:
    numbers = [client.push("x", n, queue="many") for n in range(3)]
    tasks = client.fetch_many(10, ["many"], timeout=timedelta(seconds=1))
    assert [t.id for t in tasks] == numbers
    assert client.extend(tasks[0]) is False
    assert client.cancel(numbers[0]) is False
    assert client.extend(numbers[0]) is True
    client.nack(tasks[0], "cancelled")
    client.nack(tasks[1])
    client.ack(tasks[2])
    assert client.fetch_many(10, ["many"], timeout=1)[0].failures == 1
    assert client.result(numbers[0]).status == "CANCELLED"


def test_a_pushed_task_may_repeat(client: Client) -> None:
    number = client.push("x", queue="series", interval=timedelta(milliseconds=50), idempotency_key="series")
    assert client.push("x", queue="series", interval=0.05, idempotency_key="series") == number
    for _ in range(3):
        task = None
        while task is None:
            task = client.fetch(["series"], timeout=1)
        assert task.id == number
        client.ack(task)
    assert client.cancel(number)
    with pytest.raises(ErrorReply, match="invalid interval"):
        client.push("x", queue="series", interval=0.0001)


def push_two(client: Client, name: str) -> None:
    with client.transaction() as tx:
        tx.push("never", queue="tx")
        tx.push(name, queue="tx")


def push_and_fail(client: Client) -> None:
    with client.transaction() as tx:
        tx.push("never", queue="tx")
        raise ZeroDivisionError


def test_a_transaction_is_sent_whole_or_not_at_all(client: Client) -> None:
    client.push("zero", queue="tx")
    held = client.fetch(["tx"])
    assert held is not None
    with client.transaction() as tx:
        tx.push("one", queue="tx")
        tx.push("two", queue="tx", blocked_by=[-1])
        tx.ack(held, "done")
    assert len(tx.ids) == 2
    assert [q for q in client.info() if q.name == "tx"] == [QueueInfo(name="tx", ready=1, blocked=1)]
    with pytest.raises(ZeroDivisionError):
        push_and_fail(client)
    with pytest.raises(ErrorReply, match="invalid task name"):
        push_two(client, "not good")
    assert [q.ready for q in client.info() if q.name == "tx"] == [1]


def test_errors_have_types(client: Client) -> None:
    with pytest.raises(TaskNotAcquired, match="task not acquired"):
        client.ack(123456)
    with pytest.raises(LimitReached, match="too big"):
        client.push("x", "x" * 70_000)
    with pytest.raises(ErrorReply, match="no such task"):
        client.result(123456)
    with pytest.raises(Invalid, match="time zone"):
        client.push("x", execute_at=datetime(2030, 1, 1))
    with pytest.raises(Invalid, match="no option 'priority'"):
        client.push("x", priority=1)  # type: ignore[call-arg]
    with pytest.raises(Invalid, match="list of queue names"):
        client.fetch("images")
    assert issubclass(TaskNotAcquired, ClientError)
    assert issubclass(ClientError, omniq.OmniQError)
    client.ping()


def test_the_heartbeat_keeps_a_silent_client(client: Client) -> None:
    number = client.push("x", queue="quiet", execute_at=datetime.now(UTC))
    assert client.fetch(["quiet"], timeout=1) is not None
    time.sleep(1.6)
    client.ack(number)


def test_threads_share_a_client(client: Client) -> None:
    threads = [threading.Thread(target=lambda: [client.push("x", queue="shared") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [q.ready for q in client.info() if q.name == "shared"] == [200]


def missed_heartbeats(server: ServerProcess) -> float:
    return server.metric("omniq_server_missed_heartbeats_total")


def has_no_clients(server: ServerProcess) -> bool:
    return server.metric("masenko_clients_total") == 0


def test_a_client_that_was_silent_too_long_connects_again(server: ServerProcess) -> None:
    before = missed_heartbeats(server)
    with Client(*server.address, heartbeat=60) as client:
        for _ in range(2):
            client.ping()
            wait_for(lambda: has_no_clients(server))
            assert isinstance(client.info(), list)
        wait_for(lambda: has_no_clients(server))
        assert missed_heartbeats(server) - before == 3
        with pytest.raises(ConnectionLost, match="the server heard nothing for longer than its heartbeat"):
            client.push("x", queue="silent")
        assert client.push("x", queue="silent")


async def test_an_async_client_that_was_silent_too_long_connects_again(server: ServerProcess) -> None:
    before = missed_heartbeats(server)
    async with AsyncClient(*server.address, heartbeat=60) as client:
        await client.ping()
        await eventually(lambda: has_no_clients(server))
        assert missed_heartbeats(server) - before == 1
        assert isinstance(await client.info(), list)


@pytest.fixture
def slammed_doors() -> Iterator[tuple[int, list[float]]]:
    """A port that closes each connection at once, and when it did."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        times: list[float] = []

        def slam() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    times.append(time.monotonic())

        slamming = threading.Thread(target=slam)
        slamming.start()
        yield listener.getsockname()[1], times
        listener.shutdown(socket.SHUT_RDWR)
        slamming.join()


async def test_pauses_grow_also_when_every_connection_breaks_at_once(slammed_doors: tuple[int, list[float]]) -> None:
    port, times = slammed_doors
    with Client(port=port, reconnect=1.0) as client, pytest.raises(ConnectionLost):
        client.info()
    assert 1 < len(times) <= 8
    times.clear()
    async with AsyncClient(port=port, reconnect=1.0) as client:
        with pytest.raises(ConnectionLost):
            await client.info()
    assert 1 < len(times) <= 8


def test_a_client_that_was_turned_away_connects_again(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path, ["--max-connections", "1", "--metrics-port", "0"]).ready()
    try:
        with Client(*server.address) as client:
            with Peer(server.address) as first:
                assert first.ask("PING") == "PONG {}"
                with pytest.raises(LimitReached, match="max-connections is 1"):
                    client.push("x")
            wait_for(lambda: server.metric("masenko_clients_total") == 0)
            assert client.push("x") == 1
    finally:
        server.end()


def test_a_closed_client_says_so(server: ServerProcess) -> None:
    client = Client(*server.address)
    client.ping()
    client.close()
    client.close()
    with pytest.raises(ConnectionLost, match="make a new one"):
        client.ping()


def test_no_server_is_an_error_after_some_tries() -> None:
    with Client(port=1, reconnect=0.2) as client, pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        client.ping()


def test_a_client_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    server = ServerProcess(f"sqlite:///{tmp_path}/q.db", tmp_path).ready()
    try:
        with Client(*server.address, reconnect=20) as client:
            number = client.push("x")
            task = client.fetch()
            assert task is not None
            server.kill()
            restarting = threading.Timer(0.3, server.restart)
            restarting.start()
            assert wait_for(lambda: client.fetch(timeout=1), 20).id == number
            restarting.join()
            server.kill()
            with pytest.raises(ConnectionLost):
                client.ack(task)
            server.restart()
            with pytest.raises(TaskNotAcquired):
                client.ack(task)
            assert client.push("y", idempotency_key="k") == client.push("y", idempotency_key="k")
    finally:
        server.end()


def test_a_client_hears_that_the_server_stops(tmp_path: Path) -> None:
    server = ServerProcess(f"sqlite:///{tmp_path}/q.db", tmp_path, ["--grace", "5s"]).ready()
    try:
        with Client(*server.address, reconnect=0.1) as client:
            client.push("x")
            assert client.fetch() is not None
            server.signal(15)
            wait_for(lambda: "stopping" in server.errors)
            with pytest.raises(ServerStopping):
                client.fetch()
        assert server.popen.wait(10) == 0
    finally:
        server.end()


def test_a_token_is_sent_before_anything_else(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path, ["--token-file", "token"]).ready()
    try:
        with Client(*server.address, token=TOKEN) as client:
            assert client.push("x") == 1
        with Client(*server.address, token="wrong") as client, pytest.raises(AuthenticationFailed, match="wrong token"):
            client.ping()
        with Client(*server.address) as client, pytest.raises(AuthenticationFailed, match="required"):
            client.info()
    finally:
        server.end()


async def test_the_async_client_does_the_same(server: ServerProcess) -> None:
    async with AsyncClient(*server.address, heartbeat=0.5) as client:
        await client.ping()
        numbers = [await client.push("x", n, queue="async") for n in range(3)]
        task = await client.fetch(["async"])
        assert task is not None
        assert task.id == numbers[0]
        assert await client.extend(task) is False
        async with client.transaction() as tx:
            tx.ack(task, {"n": 1})
            tx.push("y", queue="async")
        assert (await client.result(task.id, timeout=1)).result == {"n": 1}
        many = await client.fetch_many(5, ["async"])
        assert [t.id for t in many] == [*numbers[1:], *tx.ids]
        await client.nack(many[0])
        await asyncio.sleep(1.3)
        await client.ack(many[1])
        assert await client.cancel(numbers[1]) is True
        assert [q.to_ack for q in await client.info() if q.name == "async"] == [1]
        with pytest.raises(TaskNotAcquired):
            await client.ack(987654)


async def test_tasks_share_an_async_client(server: ServerProcess) -> None:
    async with AsyncClient(*server.address) as client:
        ids = await asyncio.gather(*(client.push("x", queue="gather") for _ in range(50)))
        assert len(set(ids)) == 50


async def test_a_cancelled_fetch_takes_no_task(server: ServerProcess) -> None:
    async with AsyncClient(*server.address) as client, AsyncClient(*server.address) as other:
        fetching = asyncio.ensure_future(client.fetch(["cancelled"], timeout=0.9))
        await eventually(lambda: server.metric("omniq_server_waiting_fetches") == 1)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        number = await other.push("x", queue="cancelled", retry=0)
        task = await client.fetch(["cancelled"], timeout=0.9)
        assert task is not None
        assert (task.id, task.failures) == (number, 0)


async def test_an_async_client_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    server = ServerProcess(f"sqlite:///{tmp_path}/q.db", tmp_path).ready()
    try:
        async with AsyncClient(*server.address, reconnect=20) as client:
            number = await client.push("x")
            assert await client.fetch() is not None
            await asyncio.to_thread(server.kill)
            restarting = asyncio.ensure_future(asyncio.to_thread(server.restart))
            task = await eventually(lambda: client.fetch(timeout=1), 20)
            assert (task.id, task.failures) == (number, 0)
            await restarting
            await asyncio.to_thread(server.kill)
            with pytest.raises(ConnectionLost):
                await client.ack(task)
    finally:
        server.end()
