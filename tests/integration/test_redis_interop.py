"""The published client and ours on one Redis, in both directions. It is a guest here, in an environment of its own."""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.redis_server import Server
from support.sides import SUPPORT, Ours, Theirs, guest_command
from support.waiting import wait_for

from omniq import OmniQ, RedisStorage, Settings
from omniq.operations import Enqueue
from omniq.storage.bulk import open_bulk

QUEUE = "shared"
MINUTE_MS = 60_000


def value_of(answer: Any, name: str) -> Any:
    return answer[name] if isinstance(answer, dict) else getattr(answer, name)


@pytest.fixture
def sides(redis_server: Server, redis_url: str, guest_python: str) -> Iterator[dict[str, Any]]:
    sides = {"ours": Ours(redis_url), "theirs": Theirs(guest_python, redis_server.port)}
    yield sides
    try:
        assert sides["ours"].repair() == [], "counters or indexes do not tell the truth"
    finally:
        for side in sides.values():
            side.close()


@pytest.fixture(params=["ours", "theirs"])
def giver(request: pytest.FixtureRequest, sides: dict[str, Any]) -> Any:
    """Who publishes, or begins."""
    return sides[request.param]


@pytest.fixture
def taker(giver: Any, sides: dict[str, Any]) -> Any:
    """The other one."""
    return next(side for side in sides.values() if side is not giver)


def reserve(side: Any) -> dict[str, Any] | None:
    job = side.reserve(queue=QUEUE)
    if job is None:
        return None
    names = (
        ["status"] if value_of(job, "status") == "PAUSED" else ["status", "job_id", "payload", "attempt", "gid", "lease_token"]
    )
    return {name: value_of(job, name) for name in names}


def held(job: dict[str, Any] | None) -> dict[str, Any]:
    assert job is not None
    return {"queue": QUEUE, "job_id": job["job_id"], "lease_token": job["lease_token"]}


def test_a_job_of_one_is_run_by_the_other(giver: Any, taker: Any) -> None:
    job_id = giver.publish(queue=QUEUE, payload={"n": 1, "text": "ü🦑"})
    job = reserve(taker)
    assert job is not None
    assert (job["job_id"], job["attempt"], job["gid"]) == (job_id, 1, "")
    assert json.loads(job["payload"]) == {"n": 1, "text": "ü🦑"}
    taker.ack_success(**held(job))
    assert reserve(giver) is None
    assert reserve(taker) is None


def test_a_lease_of_one_is_known_to_the_other(giver: Any, taker: Any) -> None:
    giver.publish(queue=QUEUE, payload=[1], timeout_ms=MINUTE_MS)
    job = reserve(taker)
    assert reserve(giver) is None
    beaten = giver.heartbeat(**held(job))
    assert beaten >= int(time.time() * 1000) + MINUTE_MS - 5000
    with pytest.raises(Exception, match="TOKEN_MISMATCH"):
        giver.ack_success(**(held(job) | {"lease_token": "0" * 40}))
    giver.ack_success(**held(job))
    with pytest.raises(Exception, match="TOKEN_MISMATCH"):
        taker.heartbeat(**held(job))


def test_an_id_may_be_longer_than_ours(sides: dict[str, Any]) -> None:
    ours, theirs = sides["ours"], sides["theirs"]
    job_id = theirs.publish(queue=QUEUE, payload=[1], job_id="w" * 1000, max_attempts=1)
    job = reserve(ours)
    assert ours.heartbeat(**held(job)) > 0
    assert ours.ack_fail(**held(job)) == ("FAILED", None)
    assert ours.retry_failed(QUEUE, job_id) == "OK"
    ours.ack_success(**held(reserve(ours)))


@pytest.mark.parametrize("name", ["timeout_ms", "backoff_ms", "max_attempts", "due_ms"])
@pytest.mark.parametrize("number", [10**15, 10**30])
def test_a_number_that_is_stored_with_an_exponent_is_read(
    sides: dict[str, Any], redis_url: str, name: str, number: int
) -> None:
    """Once a reserve broke over it, after it had leased the job, and so did all who looked for tasks."""
    ours, theirs = sides["ours"], sides["theirs"]
    theirs.publish(queue=QUEUE, payload=[1], **{name: number})
    job = reserve(ours)
    assert (job is None) == (name == "due_ms")
    if job is not None:
        assert ours.heartbeat(**held(job)) > time.time() * 1000
    sweep(redis_url)
    with OmniQ.from_url(redis_url) as oq:
        assert len(oq.find()[0]) == 1
    if job is not None:
        status, due_ms = ours.ack_fail(**held(job))
        assert status == "RETRY"
        assert due_ms > time.time() * 1000


def test_failures_are_retried_and_end_as_dead_letters(giver: Any, taker: Any) -> None:
    job_id = giver.publish(queue=QUEUE, payload=[1], max_attempts=2, backoff_ms=1)
    job = reserve(taker)
    status, due_ms = taker.ack_fail(**held(job), error="ValueError: first")
    assert status == "RETRY"
    assert due_ms is not None
    wait_for(lambda: time.time() * 1000 > due_ms + 1)
    assert giver.promote_delayed(queue=QUEUE) == 1
    job = reserve(giver)
    assert job is not None
    assert (job["job_id"], job["attempt"]) == (job_id, 2)
    assert list(giver.ack_fail(**held(job), error="ValueError: second")) == ["FAILED", None]
    taker.retry_failed(queue=QUEUE, job_id=job_id)
    job = reserve(giver)
    assert job is not None
    assert (job["job_id"], job["attempt"]) == (job_id, 1)
    giver.ack_success(**held(job))


def test_a_delayed_job_comes_at_its_time(giver: Any, taker: Any) -> None:
    due_ms = int(time.time() * 1000) + 2000
    job_id = giver.publish(queue=QUEUE, payload=[1], due_ms=due_ms)
    assert reserve(taker) is None
    wait_for(lambda: time.time() * 1000 > due_ms + 5)
    assert taker.promote_delayed(queue=QUEUE) == 1
    job = reserve(taker)
    assert job is not None
    assert job["job_id"] == job_id
    taker.ack_success(**held(job))


def test_a_group_has_one_limit_for_both(giver: Any, taker: Any) -> None:
    ids = [giver.publish(queue=QUEUE, payload=[n], gid="g", group_limit=2) for n in range(2)]
    ids += [taker.publish(queue=QUEUE, payload=[n], gid="g", group_limit=9) for n in range(2)]
    first, second = reserve(giver), reserve(taker)
    assert first is not None
    assert second is not None
    assert [first["job_id"], second["job_id"]] == ids[:2]
    assert reserve(giver) is None
    assert reserve(taker) is None
    giver.ack_success(**held(second))
    third = reserve(taker)
    assert third is not None
    assert third["job_id"] == ids[2]
    assert reserve(giver) is None
    taker.ack_success(**held(first))
    taker.ack_success(**held(third))
    giver.ack_success(**held(reserve(giver)))


def test_both_take_turns_between_groups_and_the_rest(giver: Any, taker: Any) -> None:
    for n in range(4):
        giver.publish(queue=QUEUE, payload=[n], job_id=f"u{n}")
        taker.publish(queue=QUEUE, payload=[n], job_id=f"g{n}", gid=f"group{n}")
    jobs = [reserve(side) for _ in range(4) for side in (giver, taker)]
    assert [job["job_id"] for job in jobs if job] == ["g0", "u0", "g1", "u1", "g2", "u2", "g3", "u3"]
    for job in jobs:
        giver.ack_success(**held(job))


def test_a_pause_holds_for_both(giver: Any, taker: Any) -> None:
    giver.publish(queue=QUEUE, payload=[1])
    giver.publish(queue=QUEUE, payload=[2])
    running = reserve(taker)
    assert giver.pause(queue=QUEUE) == "OK"
    assert taker.is_paused(queue=QUEUE)
    assert reserve(taker) == {"status": "PAUSED"}
    taker.ack_success(**held(running))
    assert taker.resume(queue=QUEUE) == 1
    assert giver.resume(queue=QUEUE) == 0
    giver.ack_success(**held(reserve(giver)))


def test_a_lost_lease_is_taken_back_by_the_other(giver: Any, taker: Any) -> None:
    job_id = giver.publish(queue=QUEUE, payload=[1], timeout_ms=50, backoff_ms=1, gid="g")
    lost = reserve(taker)
    time.sleep(0.1)
    assert giver.reap_expired(queue=QUEUE) == 1
    with pytest.raises(Exception, match="TOKEN_MISMATCH"):
        taker.ack_success(**held(lost))
    time.sleep(0.01)
    giver.promote_delayed(queue=QUEUE)
    again = reserve(giver)
    assert again is not None
    assert (again["job_id"], again["attempt"]) == (job_id, 2)
    giver.ack_success(**held(again))


def test_removing_and_counting_children_are_shared(giver: Any, taker: Any) -> None:
    job_id = giver.publish(queue=QUEUE, payload=[1])
    taker.remove_job(queue=QUEUE, job_id=job_id, lane="wait")
    assert reserve(giver) is None
    giver.childs_init(key="k", expected=2)
    assert taker.child_ack(key="k", child_id="a") == 1
    assert giver.child_ack(key="k", child_id="b") == 0


def books(db: Any, start: int) -> dict[str, Any]:
    """What monitors read: who is in which state since when, and what is stamped on jobs and counters. Times since `start`."""

    def since(value: Any) -> int:
        return max(int(float(value or 0)) - start, -1)

    found: dict[str, Any] = {}
    for name in ("wait", "active", "delayed", "failed", "completed"):
        found[name] = [(id, since(score)) for id, score in db.zrange(f"{{{QUEUE}}}:idx:{name}", 0, -1, withscores=True)]
    for name in ("wait", "g:g:wait", "failed", "completed"):
        found[f"list of {name}"] = db.lrange(f"{{{QUEUE}}}:{name}", 0, -1)
    stats = db.hgetall(f"{{{QUEUE}}}:stats")
    counted = ("waiting", "group_waiting", "waiting_total", "active", "delayed", "failed", "completed_kept", "groups_ready")
    found["counters"] = [int(stats.get(f"{name}", 0)) for name in counted]
    found["stamps"] = [since(stats.get(f"last_{what}_ms")) for what in ("enqueue", "reserve", "finish")]
    for key in db.keys(f"{{{QUEUE}}}:job:*"):
        job = db.hgetall(key)
        stamped = ("created", "queued", "updated", "first_started", "last_started", "completed", "failed")
        found[key] = [job["state"], job["attempt"], *[since(job[f"{name}_ms"]) for name in stamped]]
    return found


def test_both_keep_the_same_books(sides: dict[str, Any], redis_server: Server) -> None:
    """The same calls, at the same moments, leave the same states, counters and times, step by step."""
    start = int(time.time() * 1000) + 3_600_000
    kept: dict[str, list[Any]] = {name: [] for name in sides}
    with redis.Redis(port=redis_server.port, decode_responses=True) as db:
        for name, side in sides.items():
            db.flushall()

            def do(side: Any, method: str, at: int, steps: list[Any] = kept[name], **arguments: Any) -> Any:
                answer = getattr(side, method)(queue=QUEUE, now_ms_override=start + at, **arguments)
                steps.append((method, at, books(db, start)))
                return answer

            options: dict[str, Any] = {"timeout_ms": 10_000, "backoff_ms": 400, "max_attempts": 2}
            for id, gid in (("plain", None), ("one", "g"), ("two", "g")):
                side.publish(queue=QUEUE, payload=[], job_id=id, gid=gid, **options)
            side.publish(queue=QUEUE, payload=[], job_id="later", due_ms=start + 5000, **options)
            first, second = (do(side, "reserve", at) for at in (1000, 2000))
            assert [value_of(job, "job_id") for job in (first, second)] == ["one", "plain"]
            done, failing = ({n: value_of(job, n) for n in ("job_id", "lease_token")} for job in (first, second))
            do(side, "heartbeat", 3000, **done)
            do(side, "ack_success", 4000, **done)
            do(side, "ack_fail", 4500, **failing, error="E: x")
            do(side, "promote_delayed", 5000)
            for at in (6000, 20_000, 40_000, 60_000, 80_000):
                for n in range(3):
                    do(side, "reserve", at + n)
                do(side, "reap_expired", at + 10_500)
                do(side, "promote_delayed", at + 10_900)
            assert sorted(db.lrange(f"{{{QUEUE}}}:failed", 0, -1)) == ["later", "plain", "two"]
            side.retry_failed(queue=QUEUE, job_id="two")
            side.remove_job(queue=QUEUE, job_id="plain", lane="failed")
            found = books(db, 0)
            kept[name].append([found["counters"], found["list of failed"], found["list of g:g:wait"]])
    for ours, theirs in zip(*kept.values(), strict=True):
        assert ours == theirs


def test_our_task_is_finished_by_theirs_and_frees_who_waits(sides: dict[str, Any], redis_url: str) -> None:
    theirs = sides["theirs"]
    with OmniQ.from_url(redis_url, settings=Settings(default_queue=QUEUE)) as oq:
        first = oq.enqueue("jobs:first")
        second = oq.options(blocked_by=[first]).enqueue("jobs:second")
        theirs.ack_success(**held(reserve(theirs)))
        assert reserve(theirs) is None
        sweep(redis_url)  # as every worker does twice a second
        job = reserve(theirs)
        assert job is not None
        assert job["job_id"] == second
        theirs.ack_success(**held(job))
        sweep(redis_url)
        assert oq.get_task(first).status == oq.get_task(second).status == "SUCCESS"


def test_what_we_stage_is_out_of_their_reach_until_the_commit(sides: dict[str, Any], redis_url: str) -> None:
    theirs = sides["theirs"]
    tasks = [Enqueue(id=f"t{n}", name="job", queue=QUEUE, payload=b"[%d]" % n, idempotency_key=f"k{n}") for n in range(3)]
    with open_bulk(redis_url) as bulk:
        bulk.open_run("r", QUEUE)
        assert bulk.stage("r", tasks) == (3, 0)
        assert reserve(theirs) is None
        with pytest.raises(Exception, match="NO_JOB"):
            theirs.remove_job(queue=QUEUE, job_id="t0", lane="wait")
        with pytest.raises(Exception, match="NO_JOB"):
            theirs.retry_failed(queue=QUEUE, job_id="t0")
        theirs.publish(queue=QUEUE, job_id="t1", payload={"their": "own"})
        theirs.pause(queue=QUEUE)
        done = bulk.commit_run("r")
        assert (done.new, done.released, done.settled) == (3, 2, True)
    theirs.resume(queue=QUEUE)
    taken = [reserve(theirs) for _ in range(4)]
    assert [(job["job_id"], json.loads(job["payload"])) for job in taken if job is not None] == [
        ("t1", {"their": "own"}),
        ("t0", [0]),
        ("t2", [2]),
    ]
    for job in taken[:3]:
        theirs.ack_success(**held(job))


def sweep(url: str) -> None:
    async def main() -> None:
        async with RedisStorage(url) as storage:
            await storage.sweep()

    asyncio.run(main())


def test_both_consume_one_queue_while_their_processes_are_killed(
    sides: dict[str, Any], guest_python: str, redis_server: Server, redis_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "ran"
    log.touch()
    commands = [
        guest_command(guest_python, redis_server.port, QUEUE, str(log)),
        [sys.executable, str(SUPPORT / "own_side.py"), redis_url, QUEUE, str(log)],
    ]

    def start(n: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(commands[n % 2], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    chance = random.Random(4)
    options: dict[str, Any] = {"queue": QUEUE, "timeout_ms": 500, "backoff_ms": 10, "max_attempts": 50}
    ids: list[str] = []
    processes = [start(n) for n in range(4)]
    try:
        for round in range(6):
            for n in range(40):
                side = sides["ours" if n % 2 else "theirs"]
                group = {} if n % 3 else {"gid": f"g{n % 4}", "group_limit": 1}
                ids.append(side.publish(payload=[n], **options, **group))
            victim = chance.randrange(4)
            processes[victim].kill()
            processes[victim].wait()
            assert processes[victim].stdout is not None
            processes[victim].stdout.close()
            processes[victim] = start(victim + round % 2 * 2)
        client = redis_server.client()
        wait_for(lambda: len(set(log.read_text().split()[1::2])) == len(ids), within=60)
        wait_for(lambda: sum(client.zcard(f"{{{QUEUE}}}:{name}") for name in ("active", "delayed", "idx:wait")) == 0, within=30)
        assert client.llen(f"{{{QUEUE}}}:failed") == 0
        client.close()
    finally:
        for process in processes:
            process.terminate()
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()
    ran = [line.split() for line in log.read_text().splitlines()]
    assert set(ids) == {job_id for _, job_id in ran}
    assert set(Counter(side for side, _ in ran)) == {"ours", "theirs"}, "both sides had work"
