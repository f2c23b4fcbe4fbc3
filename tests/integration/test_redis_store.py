"""What is particular about a Redis store: shared keys, other clients on them, its users, sentinels."""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.redis_server import Server, free_port, running

from omniq import AsyncOmniQ, OmniQ
from omniq.cli.store.copying import Copy
from omniq.errors import Invalid, Refused, StoreTooNew, StoreUnavailable
from omniq.models import Blocker, Record, State, StoredResult, TaskError, new_token
from omniq.operations import Ack, Cancel, Enqueue, Extend, Fail, Filter, Requeue, Reserve, Reserved, Retention, Saved
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.redis import RedisStorage
from omniq.storage.redis.driver import INFO
from omniq.testing import FakeClock, conformance

Q = "mail"
BASE = "{mail}:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def raw(server: Server) -> Iterator[Any]:
    """The plain client of an empty server, as another program would use it."""
    with server.client() as client:
        client.flushall()
        yield client


@contextlib.asynccontextmanager
async def opened(server: Server) -> AsyncIterator[RedisStorage]:
    async with RedisStorage(server.url) as storage:
        yield storage
        assert await storage.check() == []


def new(id: str, **fields: Any) -> Enqueue:
    return Enqueue(**({"id": id, "name": "job", "queue": Q, "payload": b"[]"} | fields))


async def add(storage: RedisStorage, *operations: Enqueue) -> None:
    for answer in await storage.apply([(op,) for op in operations]):
        assert not isinstance(answer, Refused), answer


async def take(storage: RedisStorage, limit: int = 1, **fields: Any) -> list[Record]:
    (answer,) = await storage.apply([(Reserve(queues=(Q,), limit=limit, token=new_token(), **fields),)])
    assert isinstance(answer, list)
    assert isinstance(answer[0], Reserved)
    return answer[0].tasks


async def ack(storage: RedisStorage, task: Record, **fields: Any) -> Any:
    (answer,) = await storage.apply([(Ack(queue=Q, id=task.id, token=task.token or "", **fields),)])
    return answer


def publish(raw: Any, id: str, payload: str = "[]", gid: str = "", **fields: str) -> None:
    """What another client writes for a job that is due."""
    now = str(int(time.time() * 1000))
    job = {"id": id, "payload": payload, "state": "wait", "attempt": "0", "max_attempts": "3", "timeout_ms": "30000"}
    job |= {"backoff_ms": "5000", "created_ms": now, "queued_ms": now, "updated_ms": now} | fields
    raw.hset(f"{BASE}job:{id}", mapping=job | ({"gid": gid} if gid else {}))
    raw.zadd(f"{BASE}idx:wait", {id: int(now)})
    raw.hset(f"{BASE}stats", "last_enqueue_ms", now)
    if gid:
        raw.set(f"{BASE}has_groups", "1")
        raw.rpush(f"{BASE}g:{gid}:wait", id)
        raw.zadd(f"{BASE}groups:ready", {gid: int(now)}, nx=True)
        raw.hincrby(f"{BASE}stats", "group_waiting", 1)
    else:
        raw.rpush(f"{BASE}wait", id)


# -- keys --------------------------------------------------------------------------------------------


async def test_a_task_is_a_job_with_the_fields_that_every_client_reads(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a", payload=b'{"n":1}', max_attempts=5, lease_us=7_000_000, backoff="fixed:base=900"))
        job = raw.hgetall(f"{BASE}job:a")
        wanted = {"id": "a", "payload": '{"n":1}', "state": "wait", "attempt": "0", "max_attempts": "5", "timeout_ms": "7000"}
        wanted |= {"backoff_ms": "900", "first_started_ms": "", "last_started_ms": "", "completed_ms": "", "failed_ms": ""}
        assert {name: job[name.encode()].decode() for name in wanted} == wanted
        assert raw.lrange(f"{BASE}wait", 0, -1) == [b"a"]
        assert raw.hget(f"{BASE}stats", "waiting") == b"1"
        (task,) = await take(storage)
        assert raw.zscore(f"{BASE}active", "a") == (task.lease_until_us or 0) / 1000
        await ack(storage, task)
        job = raw.hgetall(f"{BASE}job:a")
        assert (job[b"state"], job[b"lease_token"], job[b"lock_until_ms"]) == (b"completed", b"", b"")
        assert raw.lrange(f"{BASE}completed", 0, -1) == [b"a"]


async def test_nothing_is_written_outside_the_queue_and_the_store(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a", group="g", idempotency_key="k"), new("b", blocked_by=(Blocker("a", Q),)))
        (task,) = await take(storage)
        await ack(storage, task, result=b"1")
        await storage.allocate_ids(1)
        assert all(key.startswith((BASE.encode(), b"{omniq.store}:")) for key in raw.scan_iter())
        assert not raw.exists(f"{BASE}meta", "omniq:queues")


async def test_100_completed_jobs_are_listed_and_every_result_is_kept(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        ids = [f"t{n:03}" for n in range(250)]
        await add(storage, *[new(i) for i in ids])
        for _ in range(5):
            await storage.apply([(Ack(queue=Q, id=t.id, token=t.token or "", result=b"1"),) for t in await take(storage, 50)])
        assert raw.llen(f"{BASE}completed") == raw.zcard(f"{BASE}idx:completed") == 100
        assert len(await storage.results(ids)) == 250
        assert [(await storage.get(i)) is not None for i in ids] == [True] * 250
        raw.delete(f"{BASE}job:t249")  # as another client's trimming does
        left = await storage.get("t249")
        assert left is not None
        assert (left.state, left.name, left.attempts) == (State.DONE, "job", 1)
        await storage.purge(Retention(), int(time.time() * 1e6) + 90_000 * 1_000_000)
        assert await storage.get("t000") is None


# -- other clients -------------------------------------------------------------------------------------


async def test_a_job_of_another_client_is_a_task(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        publish(raw, "plain", '{"x":1}')
        publish(raw, "named", '{"func":"app:job","args":[1]}', gid="g")
        seen = await storage.get("plain", Q)
        assert seen is not None
        assert (seen.name, seen.payload, seen.max_attempts, seen.lease_us) == ("*", b'{"x":1}', 3, 30_000_000)
        tasks = {t.id: t for t in await take(storage, 9)}
        assert (tasks["plain"].name, tasks["named"].name, tasks["named"].group) == ("*", "app:job", "g")
        assert tasks["plain"].backoff == "fixed:base=5000,max=5000,jitter=0,loss=backoff"
        (enqueued, _) = await storage.events_of("named")
        assert enqueued.data is not None
        assert json.loads(enqueued.data)["foreign"] is True
        for task in tasks.values():
            assert not isinstance(await ack(storage, task, result=b"1"), Refused)
        assert set(await storage.results(["plain", "named"])) == {"plain", "named"}


async def test_sweep_takes_jobs_of_other_clients_into_the_books(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await storage.pause(Q)
        publish(raw, "theirs", gid="g")
        await storage.sweep()
        assert [t.id for t in (await storage.find(Filter())).tasks] == ["theirs"]
        assert [g.group for g in (await storage.groups(Q))[0]] == ["g"]
        await storage.resume(Q)
        (task,) = await take(storage)
        await ack(storage, task)


def fail_as_others_do(raw: Any, id: str, error: str) -> None:
    now = int(time.time() * 1000)
    raw.zrem(f"{BASE}active", id)
    raw.zrem(f"{BASE}idx:active", id)
    raw.hset(f"{BASE}job:{id}", mapping={"state": "failed", "lease_token": "", "lock_until_ms": "", "last_error": error})
    raw.hset(f"{BASE}job:{id}", mapping={"failed_ms": now, "last_error_ms": now})
    raw.lpush(f"{BASE}failed", id)
    raw.zadd(f"{BASE}idx:failed", {id: now})


async def test_sweep_follows_up_on_what_other_clients_failed(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a", dead_queue="dlq"), new("b", blocked_by=(Blocker("a", Q),)))
        await take(storage)
        fail_as_others_do(raw, "a", "ValueError: no")
        assert await storage.sweep() >= 1
        moved, behind = await storage.get("a"), await storage.get("b")
        assert moved is not None
        assert behind is not None
        assert (moved.queue, moved.state, behind.state) == ("dlq", State.READY, State.DEAD)
        result = (await storage.results(["a"]))["a"]
        assert result.error is not None
        assert (result.error.type, result.error.message) == ("ValueError", "no")


async def test_sweep_follows_up_on_a_task_that_others_retried_and_failed_again(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a"))
        (task,) = await take(storage)
        await storage.apply([(Fail(queue=Q, id="a", token=task.token or "", error=TaskError("E", "first", "")),)])
        assert await storage.sweep() == 0
        raw.lrem(f"{BASE}failed", 1, "a")
        raw.zrem(f"{BASE}idx:failed", "a")
        raw.hset(f"{BASE}job:a", mapping={"attempt": 0, "failed_ms": ""})
        await asyncio.sleep(0.002)  # another millisecond
        fail_as_others_do(raw, "a", "ValueError: second")
        assert await storage.sweep() == 1
        assert await storage.sweep() == 0
        assert str((await storage.results(["a"]))["a"].error) == "ValueError: second"
        assert [e.event for e in await storage.events_of("a")] == ["enqueued", "started", "failed", "failed"]
        await storage.apply([(Requeue(queue=Q, id="a"),)])
        await ack(storage, (await take(storage))[0])


async def test_an_id_that_another_client_publishes_again_starts_anew(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a", result_ttl_us=60_000_000, fingerprint="x"))
        await ack(storage, (await take(storage))[0], result=b"old")
        await asyncio.sleep(0.002)  # another millisecond
        raw.lrem(f"{BASE}completed", 1, "a")
        raw.zrem(f"{BASE}idx:completed", "a")
        publish(raw, "a", '{"new":1}')
        (task,) = await take(storage)
        assert (task.name, task.payload, task.attempts, task.ended_by, task.fingerprint) == ("*", b'{"new":1}', 1, None, "")
        await ack(storage, task, result=b"new")
        assert (await storage.results(["a"]))["a"].result == b"new"


# -- what goes wrong with others, and not here -----------------------------------------------------------


async def test_a_group_gets_its_slot_back_when_a_leased_job_vanishes(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("lost", group="g", lease_us=1000), new("next", group="g"))
        await take(storage)
        raw.delete(f"{BASE}job:lost")
        assert await take(storage) == []
        await asyncio.sleep(0.005)  # the lease is over
        await storage.sweep()
        assert [t.id for t in await take(storage)] == ["next"]


async def test_an_id_without_a_job_is_dropped_and_never_handed_out(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("real"), new("grouped", group="g"))
        raw.lpush(f"{BASE}wait", "ghost", "ghost2")
        raw.lpush(f"{BASE}g:g:wait", "ghost3")
        raw.zadd(f"{BASE}delayed", {"ghost4": 1})
        assert sorted([t.id for t in await take(storage, 9)]) == ["grouped", "real"]
        assert raw.zcard(f"{BASE}delayed") == 0


async def test_a_job_that_was_pushed_twice_runs_once(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        publish(raw, "a")
        raw.rpush(f"{BASE}wait", "a")
        assert [t.id for t in await take(storage, 9)] == ["a"]


async def test_a_beat_does_not_add_up(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a", lease_us=60_000_000))
        (task,) = await take(storage)
        for _ in range(5):
            await storage.apply([(Extend(queue=Q, id="a", token=task.token or ""),)])
        after = await storage.get("a")
        assert after is not None
        assert (after.lease_until_us or 0) < time.time() * 1e6 + 61_000_000


async def test_groups_that_became_ready_together_take_turns_in_that_order(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        names = ["z", "m", "a"]
        call = [(new(f"{name}{n}", group=name, group_limit=9),) for name in names for n in range(2)]
        await storage.apply(call, 1_700_000_000_000_000)
        assert [t.id for t in await take(storage, 9)] == ["z0", "m0", "a0", "z1", "m1", "a1"]


async def test_groups_that_are_over_leave_no_key(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, *[new(f"t{n}", group=f"g{n}") for n in range(50)])
        for task in await take(storage, 50):
            await ack(storage, task)
        assert raw.keys(f"{BASE}g:*") == []
        await storage.purge(Retention())
        assert (await storage.groups(Q))[0] == []


async def test_repair_recounts_slots_readiness_and_counters(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a", group="g"), new("b", group="g"), new("c"))
        raw.set(f"{BASE}g:g:inflight", 7)
        raw.delete(f"{BASE}groups:ready", f"{BASE}idx:wait")
        raw.hset(f"{BASE}stats", mapping={"waiting": 99, "group_waiting": 5})
        assert len(await storage.check()) >= 5
        assert len(await storage.check(repair=True)) >= 5
        assert await storage.check() == []
        assert sorted([t.id for t in await take(storage, 9)]) == ["a", "c"]


async def test_large_numbers_stay_plain_digits(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a", lease_us=10**17, eta_us=2 * 10**15))
        job = raw.hgetall(f"{BASE}job:a")
        assert (job[b"timeout_ms"], job[b"due_ms"]) == (b"100000000000000", b"2000000000000")


# -- the rest ------------------------------------------------------------------------------------------


async def test_events_are_kept_per_queue(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        assert await storage.events() == []
        await add(storage, new("a"))
        assert [e.event for e in await storage.events()] == ["enqueued"]
        await add(storage, new("b", queue="other"))
        assert {s.name for s in await storage.event_shards()} == {Q, "other"}
        with pytest.raises(Invalid, match="other"):
            await storage.events()


def test_a_storage_serves_several_event_loops_and_threads(server: Server, raw: Any) -> None:
    storage = RedisStorage(server.url)
    asyncio.run(storage.apply([(new("a"),)]))
    asyncio.run(storage.apply([(new("b"),)]))
    storage.apply_blocking([(new("c"),)])

    async def main() -> None:
        assert (await storage.counts())[0].ready == 3
        await asyncio.to_thread(storage.apply_blocking, [(new("d"),)])
        await storage.close()

    asyncio.run(main())
    assert raw.llen(f"{BASE}wait") == 4


async def test_callers_that_come_together_share_a_call(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("first"))
        raw.config_resetstat()
        await asyncio.gather(*[storage.apply([(new(f"t{n}"),)]) for n in range(200)])
        assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] < 20
        assert (await storage.counts())[0].ready == 201


async def test_a_call_is_one_call_of_the_script_however_much_it_carries(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await storage.apply([(new(f"first {q}", queue=q),) for q in "abc"])
        raw.config_resetstat()
        call: list[Any] = [(new(f"{q}{n}", queue=q), new(f"{q}{n} too", queue="a")) for n in range(9) for q in "abc"]
        call.append((Reserve(queues=("a", "b", "c"), limit=9, token=new_token()),))
        for answer in await storage.apply(call):
            assert not isinstance(answer, Refused), answer
        assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


async def test_what_was_cancelled_or_is_blocked_is_in_no_lane_and_no_counter_of_the_contract(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        later = new("later", delay_us=60_000_000)
        blocked = new("blocked", blocked_by=(Blocker("waits", Q),))
        await add(storage, new("waits"), new("grouped", group="g"), later, blocked)
        for id in ("grouped", "later"):
            (answer,) = await storage.apply([(Cancel(queue=Q, id=id),)])
            assert not isinstance(answer, Refused)
        assert raw.lrange(f"{BASE}wait", 0, -1) == [b"waits"]
        for key in ("g:g:wait", "groups:ready", "delayed", "idx:delayed"):
            assert not raw.exists(BASE + key), key
        assert raw.zrange(f"{BASE}idx:wait", 0, -1) == [b"waits"]
        stats = {name.decode(): value for name, value in raw.hgetall(f"{BASE}stats").items()}
        assert (stats["waiting"], stats["group_waiting"], stats["delayed"], stats["groups_ready"]) == (b"1", b"0", b"0", b"0")
        assert not raw.exists(f"{BASE}job:grouped", f"{BASE}job:later")


def test_the_least_rights_of_the_documentation_are_enough(server: Server, raw: Any, repository: Path) -> None:
    page = (repository / "docs/how-to/operate-redis.md").read_text()
    line = re.search(r"^user omniq on >secret (.*)$", page, re.MULTILINE)
    assert line is not None
    rules = line[1].split()
    raw.execute_command("ACL", "SETUSER", "omniq", "reset", "on", ">secret", *rules)
    raw.execute_command("ACL", "LOG", "RESET")

    def make(clock: FakeClock) -> RedisStorage:
        raw.flushall()
        return RedisStorage(server.url.replace("redis://", "redis://omniq:secret@"), clock=clock)

    try:
        topics = {"dependencies", "events", "fan_in", "groups", "idempotency", "looking", "results", "runs", "transactions"}
        for case in conformance.cases(durable=False, capabilities=RedisStorage.capabilities):
            if case.topic in topics:
                conformance.run_case(case, make)
        assert raw.execute_command("ACL", "LOG") == []
    finally:
        raw.execute_command("ACL", "DELUSER", "omniq")


async def test_a_user_without_the_right_to_run_scripts_is_told(server: Server, raw: Any) -> None:
    raw.execute_command("ACL", "SETUSER", "reader", "reset", "on", ">secret", "~*", "&*", "+@read", "+hsetnx", "+sadd")
    try:
        async with RedisStorage(server.url.replace("redis://", "redis://reader:secret@")) as storage:
            with pytest.raises(Exception, match=r"(?i)noperm|permission"):
                await storage.apply([(new("a"),)])
    finally:
        raw.execute_command("ACL", "DELUSER", "reader")


async def test_a_check_does_without_the_right_to_look_for_keys(server: Server, raw: Any) -> None:
    raw.execute_command("ACL", "SETUSER", "short", "reset", "on", ">secret", "~{*", "&*", "+@all", "-scan")
    try:
        async with RedisStorage(server.url.replace("redis://", "redis://short:secret@")) as storage:
            await add(storage, new("a"))
            assert await storage.check() == []
    finally:
        raw.execute_command("ACL", "DELUSER", "short")


async def test_sentinels_name_the_master(server: Server, raw: Any, tmp_path: Path) -> None:
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {server.port} 1\nsentinel down-after-milliseconds main 2000\n")
    sentinel = Server(tmp_path / "sentinel", config=config)
    sentinel.start()
    try:
        async with RedisStorage(f"redis://127.0.0.1:{sentinel.port}/0?sentinel=main") as storage:
            await add(storage, new("a"))
            storage.apply_blocking([(new("b"),)])
            assert [t.id for t in await take(storage, 9)] == ["a", "b"]
    finally:
        sentinel.stop()
    assert raw.zcard(f"{BASE}active") == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
async def test_a_server_with_tls_is_reached_and_its_certificate_is_checked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as client:
        if not client.config_get("tls-port"):
            pytest.skip("this server was built without TLS")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *names], check=True, capture_output=True)
    port = free_port()
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key), "tls_ca_cert_file": str(certificate)}
    url = f"rediss://localhost:{port}/0"
    with running(tmp_path / "tls", tls_port=str(port), tls_auth_clients="no", **files):
        refused = RedisStorage(url)
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            await refused.open()
        await refused.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with RedisStorage(url) as storage:
            await add(storage, new("a"))
            storage.apply_blocking([(new("b"),)])
            assert [t.id for t in await take(storage, 9)] == ["a", "b"]


async def test_a_failed_task_that_failed_here_is_not_swept_again(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await add(storage, new("a"), new("b"))
        a, b = await take(storage, 2)
        await storage.apply([(Fail(queue=Q, id="a", token=a.token or ""),), (Ack(queue=Q, id="b", token=b.token or ""),)])
        assert await storage.sweep() == 0
        assert [e.event for e in await storage.events_of("a")] == ["enqueued", "started", "failed"]


async def test_the_events_of_a_queue_are_read_by_its_name(redis_url: str) -> None:
    async with AsyncOmniQ.from_url(redis_url) as oq:
        await oq.options(queue="a").enqueue(jobs.add, 1)
        await oq.options(queue="b").enqueue(jobs.add, 2)
        assert [(e.event, e.queue) for e in await oq.events(shard="b")] == [("enqueued", "b")]
        with pytest.raises(Invalid, match="name a shard: a, b"):
            await oq.events()


# -- moving ----------------------------------------------------------------------------------------


async def _copied(source: BaseStorage, destination: BaseStorage) -> Copy:
    copy = Copy(source, destination, 86_400_000_000)
    await copy.run()
    assert await copy.differences() == []
    assert await destination.check() == []
    return copy


@pytest.mark.usefixtures("raw")
async def test_what_waits_across_queues_goes_on_waiting_when_a_store_moves_in_and_out(server: Server) -> None:
    async with opened(server) as storage:
        first, last = MemoryStorage(), MemoryStorage()
        for n in range(300):
            dependent = new(f"a{n}", queue="a", blocked_by=(Blocker(f"z{n}", "z"),), group=f"g{n % 3}")
            await first.apply([(new(f"z{n}", queue="z"),), (dependent,)])
        await _copied(first, storage)
        await _copied(storage, last)
        for store in (storage, last):
            assert {c.queue: (c.blocked, c.ready) for c in await store.counts()} == {"a": (300, 0), "z": (0, 300)}
        await first.close()
        await last.close()


@pytest.mark.usefixtures("raw")
async def test_a_copy_goes_on_within_the_events_of_each_queue(server: Server) -> None:
    async with opened(server) as storage:
        source = MemoryStorage()
        await source.apply([(new(f"{queue}{n}", queue=queue),) for n in range(40) for queue in ("a", "b")])
        await storage.restore([Saved(record=task) for task in (await source.find(Filter(), None, 100, False)).tasks])
        await storage.restore_events((await source.events("", 0, 1000))[:51])
        copy = await _copied(source, storage)
        assert (copy.tasks, copy.there, copy.events) == (80, 80, 80)
        for queue in ("a", "b"):
            assert [e.task_id for e in await storage.events(queue)] == [f"{queue}{n}" for n in range(40)]
        await source.close()


@pytest.mark.usefixtures("raw")
async def test_what_was_not_told_yet_that_its_blocker_died_is_told_by_the_next_sweep(server: Server) -> None:
    async with opened(server) as storage:
        dead = Record(id="first", queue=Q, name="job", state=State.DEAD, finished_at_us=1)
        ended = StoredResult(task_id="first", state=State.DEAD, finished_at_us=1)
        waits = {"queue": Q, "name": "job", "state": State.BLOCKED, "blocked_by": (Blocker("first", Q),)}
        told, untold = Record(id="told", **waits), Record(id="untold", blockers_left=1, **waits)
        saved = [Saved(record=dead, result=ended), Saved(record=told), Saved(record=untold)]
        assert await storage.restore(saved) == 3
        await storage.sweep()
        assert [t.id for t in await take(storage, 9)] == ["told"]
        assert {t.id for t in (await storage.find(Filter(states=(State.DEAD,)))).tasks} == {"first", "untold"}


async def test_ended_tasks_that_come_in_are_listed_newest_first_and_kept_beyond_the_list(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        now = int(time.time()) * 1_000_000
        record = {"queue": Q, "name": "job", "payload": b"[]", "created_at_us": now}
        ended = [
            Record(id=f"d{n}", state=State.DONE, finished_at_us=now - n * 1000, updated_at_us=now, **record) for n in range(150)
        ]
        assert await storage.restore([Saved(record=task) for task in ended]) == 150
        assert raw.lrange(f"{BASE}completed", 0, -1) == [b"d%d" % n for n in range(100)]
        assert len((await storage.find(Filter(states=(State.DONE,)), None, 500)).tasks) == 150


def test_a_blocking_enqueue_looks_at_the_format_before_it_writes(server: Server, raw: Any) -> None:
    raw.hset(INFO, mapping={"store_id": "a", "format": "99"})
    oq = OmniQ.from_url(server.url)
    with pytest.raises(StoreTooNew):
        oq.enqueue(jobs.add, 1)
    oq.close()
    assert raw.keys("*") == [INFO.encode()]
