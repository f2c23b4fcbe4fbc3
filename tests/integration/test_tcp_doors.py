"""Tasks of the line protocol and tasks of Python are the same tasks."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
from support.jobs import add
from support.waiting import eventually

import omniq
from omniq import AsyncOmniQ, BaseStorage, MemoryStorage, TaskStatus
from omniq.server import ServeOptions, Server
from omniq.testing import FaultyStorage


@omniq.task(name="tcp.echo")
def echo(*args: Any, **kwargs: Any) -> list[Any]:
    return [list(args), kwargs]


class Talk:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, line: str) -> Any:
        """The object of the reply; the word before it if that is empty."""
        self._writer.write(line.encode() + b"\n")
        return await self.more()

    async def more(self) -> Any:
        """The next reply."""
        word, _, body = (await self._reader.readline()).decode().strip().partition(" ")
        return json.loads(body) or word

    async def ends(self) -> bool:
        """Whether the server says nothing more and closes."""
        return await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()


async def talk(server: Server) -> Talk:
    return Talk(*await asyncio.open_connection(*server.address))


@pytest.mark.parametrize(
    ("payload", "args", "kwargs"),
    [
        ("", [], {}),
        (', "payload": null', [None], {}),
        (', "payload": 5', [5], {}),
        (', "payload": [1, "a"]', [1, "a"], {}),
        (', "payload": {"a": 1}', [], {"a": 1}),
        (', "payload": {}', [], {}),
        (', "payload": {"args": [1], "kwargs": {"b": 2}}', [1], {"b": 2}),
        (', "payload": {"args": [1]}', [1], {}),
        (', "payload": {"kwargs": {"b": 2}}', [], {"b": 2}),
        (', "payload": {"args": [1], "c": 3}', [], {"args": [1], "c": 3}),
        (', "payload": {"args": 1}', [], {"args": 1}),
    ],
)
async def test_a_worker_runs_a_pushed_task(oq: AsyncOmniQ, payload: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    async with oq, Server(oq.storage, ServeOptions(port=0)) as server, await oq.worker():
        client = await talk(server)
        pushed = await client.ask(f'PUSH {{"name": "tcp.echo"{payload}}}')
        result = await oq.get_result(str(pushed["id"]), wait=True, timeout=10)
        assert result is not None
        assert (result.status, result.result) == (TaskStatus.SUCCESS, [args, kwargs])
        told = await client.ask(f'RESULT {{"id": {pushed["id"]}}}')
        assert told["result"] == [args, kwargs]
        client.close()


async def test_a_client_fetches_what_python_enqueued(oq: AsyncOmniQ) -> None:
    async with oq, Server(oq.storage, ServeOptions(port=0)) as server:
        ids = [await oq.enqueue(add, 1, 2), await oq.enqueue(echo, 1, b=2)]
        one, other = await talk(server), await talk(server)
        first = await one.ask("FETCH")
        assert isinstance(first["id"], int)
        assert (first["name"], first["payload"]) == ("support.jobs:add", {"args": [1, 2], "kwargs": {}})
        second = await one.ask("FETCH")
        assert second["id"] != first["id"]
        assert (second["name"], second["payload"]) == ("tcp.echo", {"args": [1], "kwargs": {"b": 2}})
        assert (await other.ask(f'ACK {{"id": {first["id"]}}}')) == {"msg": "task not acquired"}
        assert await one.ask(f'ACK {{"id": {first["id"]}, "result": 3}}') == "OK"
        assert await one.ask(f'NACK {{"id": {second["id"]}, "error": "no"}}') == "OK"
        result = await oq.get_result(ids[0])
        assert result is not None
        assert (result.status, result.result) == (TaskStatus.SUCCESS, 3)
        task = await oq.get_task(ids[1])
        assert task is not None
        assert (task.status, str(task.last_error)) == (TaskStatus.RETRYING, "Nack: no")
        assert (await one.ask(f'RESULT {{"id": "{ids[0]}"}}'))["result"] == 3
        one.close()
        other.close()


async def test_a_number_that_python_took_as_an_id_is_passed_over(oq: AsyncOmniQ) -> None:
    async with oq, Server(oq.storage, ServeOptions(port=0)) as server:
        await oq.options(task_id="1").enqueue(add, 1, 2)
        await oq.options(task_id="3").enqueue(add, 1, 2)
        client = await talk(server)
        assert await client.ask('PUSH {"name": "x"}') == {"id": 2}
        client.close()
        client = await talk(server)
        assert await client.ask('ATOMIC\nPUSH {"name": "x"}\nPUSH {"name": "y", "blocked_by": [-1]}\nDONE') == {"ids": [5, 6]}
        client.close()
        (counts,) = await oq.counts()
        assert (counts.ready, counts.blocked) == (4, 1)


async def test_a_paused_queue_gives_nothing_until_it_is_resumed(oq: AsyncOmniQ) -> None:
    async with oq, Server(oq.storage, ServeOptions(port=0)) as server:
        client = await talk(server)
        await client.ask('PUSH {"name": "x"}')
        await oq.pause("default")
        fetching = asyncio.ensure_future(client.ask('FETCH {"timeout": "5s"}'))
        await eventually(lambda: len(server.engine.lines) == 1)
        await asyncio.sleep(0.05)
        assert not fetching.done()
        await oq.resume("default")
        assert (await fetching)["name"] == "x"
        client.close()


async def test_a_server_whose_clients_wait_asks_the_store_for_nothing(oq: AsyncOmniQ) -> None:
    async with oq, Server(oq.storage, ServeOptions(port=0)) as server:
        one, other = await talk(server), await talk(server)
        fetching = [asyncio.ensure_future(one.ask('FETCH {"timeout": "20s"}'))]
        fetching.append(asyncio.ensure_future(other.ask('FETCH {"queues": ["more", "default"], "timeout": "20s"}')))
        await eventually(lambda: len(server.engine.lines) == 2)
        await server.engine.settle()
        before = server.engine.turns
        await asyncio.sleep(1)
        assert server.engine.turns - before <= 4, "it polls"
        pushing = await talk(server)
        await pushing.ask('ATOMIC\nPUSH {"name": "x"}\nPUSH {"name": "x"}\nDONE')
        assert {(await answer)["id"] for answer in fetching} == {1, 2}
        for client in (one, other, pushing):
            client.close()


async def test_a_server_tells_the_registry_what_its_clients_work_on_and_wait_for(
    oq: AsyncOmniQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniq.presence.TELL_S", 0.02)
    async with oq, Server(oq.storage, ServeOptions(port=0)) as server:

        async def says(busy: dict[str, int]) -> bool:
            return [worker.busy for worker in await oq.workers()] == [busy]

        one, other = await talk(server), await talk(server)
        waiting = asyncio.ensure_future(other.ask('FETCH {"queues": ["rare"], "timeout": "20s"}'))
        await eventually(lambda: len(server.engine.lines) == 1)
        number = (await one.ask('PUSH {"name": "x", "queue": "mail"}'))["id"]
        await one.ask('FETCH {"queues": ["mail"]}')
        await eventually(lambda: says({"mail": 1}))
        (worker,) = await oq.workers()
        assert (worker.queues, worker.running) == (("mail", "rare"), 1)
        await one.ask(f'ACK {{"id": {number}}}')
        await eventually(lambda: says({}))
        waiting.cancel()
        for client in (one, other):
            client.close()


async def test_a_wrong_token_is_answered_late_and_the_right_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.server.session.WRONG_TOKEN_S", 1.0)
    async with MemoryStorage() as storage, Server(storage, ServeOptions(port=0, token="secret")) as server:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        guessers = [await talk(server) for _ in range(20)]
        guesses = [asyncio.ensure_future(guesser.ask('AUTH {"token": "guess"}\nPING')) for guesser in guessers]
        client = await talk(server)
        assert await client.ask('AUTH {"token": "secret"}') == "OK"
        assert (await client.ask('PUSH {"name": "x"}'))["id"] == 1
        assert not any(guess.done() for guess in guesses)
        assert {(await guess)["msg"] for guess in guesses} == {"authentication failed: wrong token"}
        assert 0.9 < loop.time() - begun < 10, "they wait at the same time"
        assert [await guesser.ends() for guesser in guessers] == [True] * 20, "one guess per connection"
        for talking in (client, *guessers):
            talking.close()


async def test_a_server_that_stops_does_not_wait_for_those_who_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.server.session.WRONG_TOKEN_S", 60.0)
    async with MemoryStorage() as storage, Server(storage, ServeOptions(port=0, token="secret")) as server:
        client = await talk(server)
        guess = asyncio.ensure_future(client.ask('AUTH {"token": "guess"}'))
        await eventually(lambda: server.tally.requests["AUTH"] == 1)
        async with asyncio.timeout(10):
            await server.stop()
        assert (await guess)["msg"] == "authentication failed: wrong token"
        client.close()


async def test_two_servers_share_a_store(oq: AsyncOmniQ) -> None:
    async with oq, Server(oq.storage, ServeOptions(port=0)) as a, Server(oq.storage, ServeOptions(port=0)) as b:
        one, other = await talk(a), await talk(b)
        fetching = asyncio.ensure_future(one.ask('FETCH {"timeout": "5s"}'))
        pushed = [(await other.ask('PUSH {"name": "x"}'))["id"] for _ in range(5)]
        assert (await fetching)["id"] == pushed[0]
        assert len(set(pushed)) == 5
        assert (await other.ask(f'ACK {{"id": {pushed[0]}}}')) == {"msg": "task not acquired"}
        one.close()
        other.close()


async def test_a_stopping_server_gives_back_what_its_clients_hold(oq: AsyncOmniQ) -> None:
    async with oq:
        async with Server(oq.storage, ServeOptions(port=0, grace=0.2)) as server:
            client = await talk(server)
            task_id = str((await client.ask('PUSH {"name": "x", "retry": 0}'))["id"])
            assert (await client.ask("FETCH"))["id"] == int(task_id)
        task = await oq.get_task(task_id)
        assert task is not None
        assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
        assert await oq.storage.workers() == []
        client.close()


async def test_the_leases_of_live_connections_are_renewed(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    from omniq.server import engine, server, session

    for module in (engine, server, session):
        monkeypatch.setattr(module, "LEASE_US", 150_000)
    async with storage, Server(storage, ServeOptions(port=0)) as running:
        client = await talk(running)
        task_id = (await client.ask('PUSH {"name": "x", "retry": 0}'))["id"]
        await client.ask("FETCH")
        first = await storage.get(str(task_id))
        assert first is not None
        assert first.lease_until_us is not None

        async def renewed_often() -> bool:
            now = await storage.get(str(task_id))
            return now is not None and now.lease_until_us > first.lease_until_us + 400_000  # type: ignore[operator]

        await eventually(renewed_often)
        assert await client.ask(f'ACK {{"id": {task_id}}}') == "OK"
        client.close()


def test_backoff_grows_with_the_fourth_power_of_the_failures() -> None:
    from omniq.backoff import parse_backoff

    policy = parse_backoff(ServeOptions().backoff)
    seconds = [policy.delay_us(n, 0.9) / 1e6 for n in (1, 2, 3, 4, 20)]
    assert seconds == [1, 16, 81, 256, 160_000]
    assert policy.delay_us(1000, 0.9) / 1e6 == timedelta(days=3650).total_seconds()


async def test_a_repeating_task_of_python_goes_on_after_an_ack(oq: AsyncOmniQ) -> None:
    async with oq, Server(oq.storage, ServeOptions(port=0)) as server:
        task_id = await oq.options(interval=timedelta(hours=1)).enqueue(add, 1, 2)
        client = await talk(server)
        for end in ("ACK {}", "ATOMIC\nACK {}\nDONE"):
            number = (await client.ask("FETCH"))["id"]
            assert await client.ask(end.replace("{}", f'{{"id": {number}}}')) == "OK"
            task = await oq.get_task(task_id)
            assert task is not None
            assert task.status is TaskStatus.PENDING
            await oq.storage.reschedule(task_id, task.created_at)
        client.close()


async def test_a_store_that_fails_is_told_and_survived() -> None:
    faulty = FaultyStorage(MemoryStorage())
    async with faulty, Server(faulty, ServeOptions(port=0)) as server:
        client = await talk(server)
        assert await client.ask('PUSH {"name": "x"}') == {"id": 1}
        faulty.script.append("unavailable")
        assert "store: " in (await client.ask('PUSH {"name": "x"}'))["msg"]
        faulty.script.append("unknown")  # carried out, but the answer got lost: it is asked again
        assert await client.ask('PUSH {"name": "x"}') == {"id": 3}
        faulty.script.append("unavailable")
        assert "store: " in (await client.ask("FETCH"))["msg"]
        faulty.script.append("unknown")
        assert (await client.ask("FETCH"))["id"] == 1
        faulty.script.append("unavailable")
        assert "store: " in (await client.ask('ACK {"id": 1}'))["msg"]
        faulty.script.append("unavailable")
        assert "store: " in (await client.ask('ATOMIC\nACK {"id": 1}\nDONE'))["msg"]
        faulty.script.append("unavailable")
        failed = [await client.ask('PUSH {"name": "x"}\nNOPE\nINFO'), await client.more(), await client.more()]
        assert [sorted(reply) for reply in failed] == [["msg"], ["msg"], ["queues"]]
        faulty.script.append("unknown")
        assert await client.ask('ACK {"id": 1}') == "OK"
        (counts,) = await faulty.counts()
        assert (counts.ready, counts.running, counts.done) == (1, 0, 1)
        client.close()
