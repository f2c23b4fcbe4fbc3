"""The keys that a client of the contract leaves in Redis, and the old failures that they must not show again."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from support.redis_server import Server

from omniq import OmniQ, TaskStatus
from omniq.contract import ContractClient, Job, LeaseLost
from omniq.operations import Ack, Retention

T = ContractClient.now_ms() + 3_600_000


@pytest.fixture
def client(redis_url: str) -> Iterator[ContractClient]:
    with ContractClient.from_url(redis_url) as made:
        yield made


@pytest.fixture
def db(redis_server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, decode_responses=True) as made:
        yield made


def take(client: ContractClient, at: int = T) -> Job:
    job = client.reserve("q", at)
    assert isinstance(job, Job)
    return job


def finish(client: ContractClient, n: int) -> None:
    for _ in range(n):
        job_id = client.publish("q", {})
        client.ack_success("q", job_id, take(client).lease_token, T)


def check_books(db: redis.Redis, queue: str = "q") -> None:
    """What a monitor reads equals what there is, every job is where its state says, and numbers are plain digits."""
    base = f"{{{queue}}}"
    groups = {key.split(":g:")[1].rsplit(":wait", 1)[0] for key in db.keys(f"{base}:g:*:wait")}
    waiting = db.lrange(f"{base}:wait", 0, -1)
    grouped = [i for g in groups for i in db.lrange(f"{base}:g:{g}:wait", 0, -1)]
    lanes = {
        "wait": waiting + grouped,
        "active": db.zrange(f"{base}:active", 0, -1),
        "delayed": db.zrange(f"{base}:delayed", 0, -1),
        "failed": db.lrange(f"{base}:failed", 0, -1),
        "completed": db.lrange(f"{base}:completed", 0, -1),
    }
    for lane, ids in lanes.items():
        assert len(set(ids)) == len(ids), f"twice in {lane}"
        assert sorted(db.zrange(f"{base}:idx:{lane}", 0, -1)) == sorted(ids), lane
        for job_id in ids:
            job = db.hgetall(f"{base}:job:{job_id}")
            assert job["state"] == lane
            assert bool(job.get("lease_token")) == bool(job.get("lock_until_ms")) == (lane == "active")
            for name, value in job.items():
                if name.endswith("_ms") and value:
                    assert value.isdigit(), (name, value)
    for group in groups | {key.split(":g:")[1].rsplit(":inflight", 1)[0] for key in db.keys(f"{base}:g:*:inflight")}:
        held = sum(db.hget(f"{base}:job:{i}", "gid") == group for i in lanes["active"])
        assert int(db.get(f"{base}:g:{group}:inflight") or 0) == held, group
        is_open = db.llen(f"{base}:g:{group}:wait") > 0 and held < int(db.get(f"{base}:g:{group}:limit") or 1)
        assert (db.zscore(f"{base}:groups:ready", group) is not None) == is_open, group
    stats = db.hgetall(f"{base}:stats")
    true = {
        "waiting": len(waiting),
        "group_waiting": len(grouped),
        "waiting_total": len(lanes["wait"]),
        "active": len(lanes["active"]),
        "delayed": len(lanes["delayed"]),
        "failed": len(lanes["failed"]),
        "completed_kept": len(lanes["completed"]),
        "groups_ready": db.zcard(f"{base}:groups:ready"),
    }
    assert {name: int(stats.get(name) or 0) for name in true} == true
    assert not db.exists(f"{base}:meta", "omniq:queues")


# -- the books -------------------------------------------------------------------------------------


def test_a_published_job_looks_as_other_clients_expect(client: ContractClient, db: redis.Redis) -> None:
    client.publish("q", {"ü": 1}, job_id="a", gid="g", group_limit=2, timeout_ms=1500, max_attempts=7, backoff_ms=250)
    job = db.hgetall("{q}:job:a")
    assert (job["id"], job["payload"], job["gid"], job["state"], job["attempt"]) == ("a", '{"ü":1}', "g", "wait", "0")
    assert (job["timeout_ms"], job["max_attempts"], job["backoff_ms"]) == ("1500", "7", "250")
    assert job["created_ms"].isdigit()
    assert db.get("{q}:g:g:limit") == "2"
    assert db.lrange("{q}:g:g:wait", 0, -1) == ["a"]
    assert db.get("{q}:has_groups") == "1"
    assert "gid" not in db.hgetall(f"{{q}}:job:{client.publish('q', [])}")
    check_books(db)


def test_an_ended_lease_leaves_no_trace_of_itself(client: ContractClient, db: redis.Redis) -> None:
    for end in ("success", "fail", "release", "reap"):
        job_id = client.publish("q", {}, gid="g")
        job = take(client)
        assert db.hget(f"{{q}}:job:{job_id}", "lease_token") == job.lease_token
        assert db.hget(f"{{q}}:job:{job_id}", "lock_until_ms") == str(job.lock_until_ms)
        check_books(db)
        if end == "success":
            client.ack_success("q", job_id, job.lease_token, T)
        elif end == "fail":
            client.ack_fail("q", job_id, job.lease_token, T, "ValueError: " + "x" * 9000)
            assert len(db.hget(f"{{q}}:job:{job_id}", "last_error")) == 4096
        elif end == "release":
            client.release("q", job_id, job.lease_token, T)
            assert db.hget(f"{{q}}:job:{job_id}", "attempt") == "0"
            client.remove_job("q", job_id, "gwait")
        else:
            client.reap_expired("q", 1000, T + 300_000)
        check_books(db)


def test_the_books_are_true_after_every_step(client: ContractClient, db: redis.Redis) -> None:
    chance = random.Random(4)
    held: list[Job] = []
    at = T
    for step in range(250):
        at += chance.choice([0, 1, 40])
        move = chance.choice(
            ["publish", "publish", "reserve", "reserve", "ack", "fail", "beat", "release", "promote", "reap", "admin"]
        )
        if move == "publish":
            gid = chance.choice([None, None, "a", "b", "c"])
            due = chance.choice([0, 0, at + 50])
            client.publish(
                "q", {"n": step}, gid=gid, group_limit=chance.choice([0, 2]), due_ms=due, backoff_ms=30, timeout_ms=200
            )
        elif move == "reserve" and isinstance(job := client.reserve("q", at), Job):
            held.append(job)
        elif move == "promote":
            client.promote_delayed("q", chance.choice([1, 1000]), at)
        elif move == "reap":
            client.reap_expired("q", 1000, at)
            held = [job for job in held if db.zscore("{q}:active", job.job_id) is not None]
        elif move == "admin":
            failed = db.lrange("{q}:failed", 0, -1)
            if failed and chance.random() < 0.5:
                client.retry_failed("q", failed[0])
            elif failed:
                client.remove_job("q", failed[0], "failed")
            elif delayed := db.zrange("{q}:delayed", 0, 0):
                client.remove_job("q", delayed[0], "delayed")
        elif held and move in ("ack", "fail", "beat", "release"):
            job = held[0] if move == "beat" else held.pop(chance.randrange(len(held)))
            call: Any = {
                "ack": client.ack_success,
                "fail": client.ack_fail,
                "beat": client.heartbeat,
                "release": client.release,
            }[move]
            call("q", job.job_id, job.lease_token, at)
        if step % 10 == 0:
            check_books(db)
    check_books(db)
    assert client.repair() == []


# -- old failures ----------------------------------------------------------------------------------


def test_a_job_that_waits_again_is_not_trimmed_with_its_older_self(client: ContractClient, db: redis.Redis) -> None:
    """Once the trim of completed jobs deleted the hash of the same id that waited again: it came with an empty payload."""
    client.publish("q", {"n": 1}, job_id="mine")
    client.ack_success("q", "mine", take(client).lease_token, T)
    client.publish("q", {"n": 2}, job_id="mine", gid="later")
    first = take(client)
    finish(client, 105)
    assert json.loads(first.payload) == {"n": 2}
    client.release("q", "mine", first.lease_token, T)
    assert json.loads(take(client).payload) == {"n": 2}
    assert db.llen("{q}:completed") == 100
    check_books(db)


def keys_of(db: redis.Redis, job_id: str) -> list[str]:
    """Whatever names a job, except the log of events."""
    named = [key for key in db.keys("*") if job_id in key]
    sets = [key for key in db.scan_iter(_type="zset") if db.zscore(key, job_id) is not None]
    return [*named, *sets]


@pytest.mark.parametrize("gid", [None, "g"])
def test_a_job_that_the_contract_ended_goes_with_its_entry_and_no_earlier(
    client: ContractClient, db: redis.Redis, gid: str | None
) -> None:
    ids = [client.publish("q", [n], gid=gid) for n in range(102)]
    for _ in ids:
        job = take(client)
        client.ack_success("q", job.job_id, job.lease_token, T)
    listed = db.lrange("{q}:completed", 0, -1)
    assert listed == ids[:1:-1]
    assert [keys_of(db, job_id) for job_id in ids[:2]] == [[], []]
    check_books(db)
    asyncio.run(client.storage.purge(Retention(), (T + 30 * 86_400_000) * 1000))
    assert db.lrange("{q}:completed", 0, -1) == listed
    assert all(db.exists(f"{{q}}:job:{job_id}") for job_id in listed)
    assert client.repair() == []


def test_a_result_of_python_keeps_its_own_time_beside_jobs_of_the_contract(
    client: ContractClient, db: redis.Redis, redis_url: str
) -> None:
    with OmniQ.from_url(redis_url) as oq:
        mine = oq.options(queue="q", result_ttl=3600).enqueue("jobs:mine", 1)
        theirs = oq.options(queue="q", result_ttl=3600).enqueue("jobs:theirs", 1)
        leased = take(client)
        assert leased.job_id == mine
        asyncio.run(_end_in_python(oq, leased))
        client.ack_success("q", theirs, take(client).lease_token)  # a worker in another language runs a task of Python
        finish(client, 105)
        assert db.llen("{q}:completed") == 100
        for id in (mine, theirs):
            result = oq.get_result(id)
            assert result is not None
            assert result.status is TaskStatus.SUCCESS
        assert oq.counts()[0].done == 102
    check_books(db)


async def _end_in_python(oq: OmniQ, job: Job) -> None:
    await oq.queue.storage.apply([(Ack(queue="q", id=job.job_id, token=job.lease_token, result=b"1"),)])


def test_a_job_that_names_its_function_goes_with_its_entry_too(client: ContractClient, db: redis.Redis) -> None:
    now = client.now_ms()
    fields = {"id": "theirs", "payload": '{"func":"app:job"}', "state": "active", "attempt": 1, "created_ms": now}
    db.hset("{q}:job:theirs", mapping={**fields, "lease_token": "t" * 24, "lock_until_ms": now + 9000, "timeout_ms": 9000})
    db.zadd("{q}:active", {"theirs": now + 9000})
    db.zadd("{q}:idx:active", {"theirs": now})
    client.ack_success("q", "theirs", "t" * 24)  # another client has leased it
    assert db.zscore("{q}:o:done", "theirs") == float("inf")
    finish(client, 100)
    assert keys_of(db, "theirs") == []
    check_books(db)


def test_what_other_clients_trimmed_leaves_our_books(client: ContractClient, db: redis.Redis) -> None:
    finish(client, 3)
    gone = db.rpop("{q}:completed")
    db.zrem("{q}:idx:completed", gone)
    db.delete(f"{{q}}:job:{gone}")
    assert asyncio.run(client.storage.purge(Retention())) >= 1
    assert keys_of(db, gone) == []
    client.repair()
    check_books(db)


def test_a_job_that_another_client_ended_goes_with_its_entry_too(client: ContractClient, db: redis.Redis) -> None:
    job_id = client.publish("q", {})
    take(client, client.now_ms())
    now = client.now_ms()
    db.zrem("{q}:active", job_id)
    db.zrem("{q}:idx:active", job_id)
    db.hset(f"{{q}}:job:{job_id}", mapping={"state": "completed", "lease_token": "", "lock_until_ms": "", "completed_ms": now})
    db.lpush("{q}:completed", job_id)
    db.zadd("{q}:idx:completed", {job_id: now})
    asyncio.run(client.storage.sweep())
    assert db.zscore("{q}:o:done", job_id) == float("inf")
    finish(client, 100)
    assert keys_of(db, job_id) == []


def test_a_slot_whose_job_vanished_comes_back(client: ContractClient, db: redis.Redis) -> None:
    """Once a group with limit 1 was stuck for ever when the hash of its leased job was evicted or deleted."""
    for n in range(2):
        client.publish("q", [n], gid="g", timeout_ms=1000)
    gone = take(client)
    db.delete(f"{{q}}:job:{gone.job_id}")
    assert client.reserve("q", T) is None
    client.reap_expired("q", 1000, T + 1000)
    client.repair()
    assert json.loads(take(client, T + 1000).payload) == [1]
    check_books(db)
    assert client.repair() == []


def test_reaping_drops_a_lease_without_a_job_and_frees_its_slot(client: ContractClient, db: redis.Redis) -> None:
    for n in range(2):
        client.publish("q", [n], gid="g", timeout_ms=1000)
    db.delete(f"{{q}}:job:{take(client).job_id}")
    client.reap_expired("q", 1, T + 999)
    assert client.reserve("q", T + 999) is None
    client.reap_expired("q", 1, T + 1000)
    assert json.loads(take(client, T + 1000).payload) == [1]
    check_books(db)


def test_a_token_that_fits_a_job_that_is_not_leased_is_not_active(client: ContractClient, db: redis.Redis) -> None:
    client.publish("q", {})
    job = take(client)
    db.zrem("{q}:active", job.job_id)
    for call in (client.heartbeat, client.ack_success, client.ack_fail):
        with pytest.raises(LeaseLost) as caught:
            call("q", job.job_id, job.lease_token, T)
        assert caught.value.code == "NOT_ACTIVE"


def test_repair_recounts_what_was_miscounted(client: ContractClient, db: redis.Redis) -> None:
    for n in range(3):
        client.publish("q", [n], gid="g")
    client.publish("q", [])
    take(client)
    db.set("{q}:g:g:inflight", 7)
    db.zrem("{q}:groups:ready", "g")
    db.hset("{q}:stats", mapping={"waiting": 40, "active": 0, "groups_ready": 9})
    db.zadd("{q}:idx:wait", {"nobody": 1})
    assert client.repair() != []
    check_books(db)
    assert client.repair() == []


def test_an_id_without_a_job_is_dropped_and_not_given_out(client: ContractClient, db: redis.Redis) -> None:
    """Once such an id was leased with an empty payload, and promoting it made a stub."""
    good = client.publish("q", {})
    ghost = client.publish("q", {}, gid="g")
    later = client.publish("q", {}, due_ms=T + 10)
    db.delete(f"{{q}}:job:{ghost}", f"{{q}}:job:{later}")
    db.lpush("{q}:wait", "never was")
    client.promote_delayed("q", 1000, T + 10)
    assert not db.exists(f"{{q}}:job:{later}")
    assert take(client, T + 10).job_id == good
    assert client.reserve("q", T + 10) is None


def test_the_clock_of_a_client_decides_nothing(client: ContractClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a reaper whose clock was an hour ahead took a living lease, and set the retry an hour away."""
    client.publish("q", {}, timeout_ms=60_000)
    job = client.reserve("q")
    assert isinstance(job, Job)
    server_ms = client.now_ms()
    true_time = time.time_ns
    monkeypatch.setattr("time.time_ns", lambda: true_time() + 3_600_000_000_000)
    assert client.now_ms() > server_ms + 3_000_000
    assert client.reap_expired("q") == 0
    assert client.heartbeat("q", job.job_id, job.lease_token) < server_ms + 120_000
    client.publish("q", {}, due_ms=server_ms + 1_800_000, job_id="later")  # an id made now would be of the wrong time
    assert client.promote_delayed("q") == 0
    assert client.reserve("q") is None
    kind, due_ms = client.ack_fail("q", job.job_id, job.lease_token)
    assert kind == "RETRY"
    assert due_ms < server_ms + 120_000


def test_one_shot_groups_leave_little_behind(client: ContractClient, db: redis.Redis) -> None:
    """Once 1000 groups that were used once left 2000 keys."""
    for n in range(50):
        job_id = client.publish("q", {}, gid=f"g{n}")
        client.ack_success("q", job_id, take(client).lease_token, T)
    assert db.keys("{q}:g:*:inflight") == []
    assert db.keys("{q}:g:*:wait") == []


def test_removing_stamps_the_time_of_the_last_activity(client: ContractClient, db: redis.Redis) -> None:
    """Once a batch removal set it to 0."""
    ids = [client.publish("q", {}) for _ in range(2)]
    before = int(db.hget("{q}:stats", "last_activity_ms"))
    client.remove_jobs_batch("q", "wait", ids)
    assert int(db.hget("{q}:stats", "last_activity_ms")) >= before > 0
    check_books(db)


def test_a_fan_in_leaves_its_keys_as_others_expect_and_ends(client: ContractClient, db: redis.Redis) -> None:
    client.childs_init("order:7", 2)
    assert db.get("{cc:order:7}:count") == "2"
    assert client.child_ack("order:7", "a") == 1
    assert (db.get("{cc:order:7}:count"), db.smembers("{cc:order:7}:done")) == ("1", {"a"})
    client.child_ack("order:7", "b")
    assert not db.exists("{cc:order:7}:count", "{cc:order:7}:done")
    assert all(db.pttl(key) > 0 for key in db.keys("{cc:order:7}*"))


def test_a_queue_is_known_to_tools_since_its_first_publish(client: ContractClient, db: redis.Redis) -> None:
    client.publish("q", {})
    assert db.keys("*:stats") == ["{q}:stats"]
    assert int(db.hget("{q}:stats", "last_enqueue_ms")) > 0
    take(client)
    assert int(db.hget("{q}:stats", "last_reserve_ms")) > 0
