"""What goes wrong with the published client of the contract, 4.0.0, does not with ours: docs/reference/contract.md lists it."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from support.proxy import Proxy
from support.redis_server import Server
from support.sides import Ours, Theirs
from support.waiting import wait_for

from omniq import Invalid
from omniq.contract import ContractClient, JobContext, LeaseLost

Q = "q"
HOUR = 3_600_000


@pytest.fixture
def db(redis_server: Server, redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, decode_responses=True) as made:
        yield made


@pytest.fixture
def theirs(guest_python: str, redis_server: Server, redis_url: str) -> Iterator[Any]:
    made = Theirs(guest_python, redis_server.port)
    yield made
    made.close()


@pytest.fixture
def ours(redis_url: str) -> Iterator[Any]:
    made = Ours(redis_url)
    yield made
    made.close()


def now() -> int:
    return ContractClient.now_ms()


def job_of(answer: Any) -> dict[str, Any]:
    assert answer is not None, "there was no job"
    names = ("job_id", "payload", "attempt", "gid", "lease_token", "lock_until_ms")
    return {n: answer[n] if isinstance(answer, dict) else getattr(answer, n) for n in names}


def take(side: Any, at: int = 0) -> dict[str, Any]:
    return job_of(side.reserve(queue=Q, now_ms_override=at))


def held(job: dict[str, Any]) -> dict[str, Any]:
    return {"queue": Q, "job_id": job["job_id"], "lease_token": job["lease_token"]}


def finish(side: Any, n: int) -> None:
    for _ in range(n):
        side.publish(queue=Q, payload=[])
        side.ack_success(**held(take(side)))


# -- leases ------------------------------------------------------------------------------------------


def test_beats_do_not_pile_up(ours: Any) -> None:
    ours.publish(queue=Q, payload=[], timeout_ms=60_000)
    job = take(ours)
    for _ in range(5):
        end = ours.heartbeat(**held(job))
    assert end - now() <= 60_000
    ours.ack_success(**held(job))


def test_a_clock_that_is_ahead_takes_no_lease(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.publish(queue=Q, payload=[], timeout_ms=60_000, backoff_ms=1000)
    job, started, true_time = take(ours), now(), time.time_ns
    with monkeypatch.context() as wrong:
        wrong.setattr("time.time_ns", lambda: true_time() + HOUR * 1_000_000)
        assert ours.now_ms() > started + HOUR / 2
        assert ours.reap_expired(queue=Q) == 0
        _, due_ms = ours.ack_fail(**held(job))
    assert due_ms < started + 60_000


def test_a_short_lease_is_kept(theirs: Any, ours: Any, db: redis.Redis) -> None:
    """A handler that takes longer than the timeout, while somebody else reaps."""
    runs: list[str] = []

    def handler(ctx: JobContext) -> None:
        runs.append(ctx.job_id)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            theirs.reap_expired(queue=Q)
        stopping.set()

    stopping = threading.Event()
    ours.publish(queue=Q, payload=[], timeout_ms=250, backoff_ms=1, max_attempts=2, job_id="new")
    ours.consume(Q, handler, stop=stopping)
    assert runs == ["new"]
    assert db.hget(f"{{{Q}}}:job:new", "state") == "completed"


def test_leaving_burns_no_attempt(ours: Any, db: redis.Redis) -> None:
    def handler(ctx: JobContext) -> None:
        raise KeyboardInterrupt

    ours.publish(queue=Q, payload=[], job_id="new")
    with pytest.raises(KeyboardInterrupt):
        ours.consume(Q, handler, drain=False, signals=False)
    assert (db.hget(f"{{{Q}}}:job:new", "state"), db.hget(f"{{{Q}}}:job:new", "attempt")) == ("wait", "0")
    assert take(ours)["attempt"] == 1


# -- ids ---------------------------------------------------------------------------------------------


def test_the_same_id_is_queued_once(ours: Any) -> None:
    for _ in range(2):
        assert ours.publish(queue=Q, payload=[], job_id="new") == "new"
    assert take(ours)["job_id"] == "new"
    assert ours.reserve(Q) is None


def test_a_job_that_waits_again_is_not_trimmed(ours: Any) -> None:
    ours.publish(queue=Q, payload={"n": 1}, job_id="again")
    ours.ack_success(**held(take(ours)))
    due_ms = now() + HOUR
    ours.publish(queue=Q, payload={"n": 2}, job_id="again", due_ms=due_ms)
    finish(ours, 101)
    ours.promote_delayed(queue=Q, now_ms_override=due_ms)
    assert take(ours, due_ms)["payload"] == '{"n":2}'


def test_a_group_of_an_earlier_job_of_that_id_frees_no_slot(ours: Any) -> None:
    ours.publish(queue=Q, payload=[], job_id="again", gid="g")
    ours.ack_success(**held(take(ours)))
    ours.publish(queue=Q, payload=[], job_id="again")
    again = take(ours)
    for _ in range(2):
        ours.publish(queue=Q, payload=[], gid="g")
    assert take(ours)["gid"] == "g"
    assert ours.reserve(queue=Q) is None, "the group's limit is 1"
    ours.ack_success(**held(again))
    assert ours.reserve(queue=Q) is None


# -- lost replies ------------------------------------------------------------------------------------


@pytest.fixture
def behind(redis_server: Server, redis_url: str) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A client behind a proxy, and how to lose the next reply."""
    proxy = Proxy(redis_server.port)
    side = Ours(proxy.url)
    finish(side, 1)
    yield side, proxy.swallow_reply
    side.close()
    proxy.close()


def test_a_lost_reply_publishes_once(behind: tuple[Any, Callable[[], None]], db: redis.Redis) -> None:
    side, lose_reply = behind
    lose_reply()
    side.publish(queue=Q, payload=[], job_id="a")
    assert db.lrange(f"{{{Q}}}:wait", 0, -1) == ["a"]


def test_a_lost_reply_leases_to_who_asked(behind: tuple[Any, Callable[[], None]], db: redis.Redis) -> None:
    side, lose_reply = behind
    for id in ("first", "second"):
        side.publish(queue=Q, payload=[], job_id=id)
    lose_reply()
    assert take(side)["job_id"] == "first"
    assert db.zcard(f"{{{Q}}}:active") == 1


def test_a_lost_reply_is_not_taken_for_a_lost_lease(behind: tuple[Any, Callable[[], None]], db: redis.Redis) -> None:
    side, lose_reply = behind
    side.publish(queue=Q, payload=[], job_id="a")
    job = take(side)
    lose_reply()
    side.ack_success(**held(job))
    assert db.hget(f"{{{Q}}}:job:a", "state") == "completed"


# -- jobs that vanish --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_a_slot_that_leaked_is_given_back(theirs: Any, ours: Any, db: redis.Redis, name: str) -> None:
    side = {"theirs": theirs, "ours": ours}[name]
    for n in range(2):
        side.publish(queue=Q, payload=[n], gid="g", timeout_ms=1000)
    db.delete(f"{{{Q}}}:job:{take(side)['job_id']}")
    side.reap_expired(queue=Q, now_ms_override=now() + 2000)
    said = ours.repair()
    assert name == "ours" or any("group g" in line for line in said)
    assert ours.repair() == []
    assert take(side)["payload"] == "[1]"


def test_ids_without_a_job_are_dropped(ours: Any, db: redis.Redis) -> None:
    for due_ms in (0, now() + HOUR):
        db.delete(f"{{{Q}}}:job:{ours.publish(queue=Q, payload=[1], due_ms=due_ms)}")
    ours.promote_delayed(Q, 1000, now() + 2 * HOUR)
    assert ours.reserve(Q) is None
    assert db.keys(f"{{{Q}}}:job:*") == []


# -- cost --------------------------------------------------------------------------------------------


def test_jobs_share_their_round_trips(ours: Any, db: redis.Redis) -> None:
    jobs = 40

    def commands() -> int:
        return sum(row["calls"] for name, row in db.info("commandstats").items() if name in ASKED)

    ours.publish_many(Q, [[n] for n in range(jobs)])
    stop, left, lock = threading.Event(), [jobs], threading.Lock()

    def handler(ctx: JobContext) -> None:
        with lock:
            left[0] -= 1
            if not left[0]:
                stop.set()

    before = commands()
    ours.consume(Q, handler, stop=stop, concurrency=10)
    assert db.llen(f"{{{Q}}}:completed") == jobs
    assert commands() - before < 2 * jobs


ASKED = ("cmdstat_evalsha", "cmdstat_eval")


def test_groups_and_failures_do_not_pile_up(ours: Any, db: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.upkeep.PURGE_S", 0.05)
    for n in range(20):
        ours.publish(queue=Q, payload=[], gid=f"g{n}")
        ours.ack_success(**held(take(ours)))
    assert db.keys(f"{{{Q}}}:g:*") == []
    for _ in range(5):
        ours.publish(queue=Q, payload=[], max_attempts=1)
        ours.ack_fail(**held(take(ours)))
    stop = threading.Event()
    consuming = threading.Thread(target=ours.consume, args=(Q, print), kwargs={"stop": stop, "failed_ttl_ms": 1})
    consuming.start()
    try:
        wait_for(lambda: db.llen(f"{{{Q}}}:failed") == 0, within=90)
    finally:
        stop.set()
        consuming.join()
    assert db.zcard(f"{{{Q}}}:idx:failed") == 0
    assert [key for key in db.keys(f"{{{Q}}}:job:*") if db.hget(key, "state") == "failed"] == []


# -- fan-in ------------------------------------------------------------------------------------------


def test_a_fan_in_may_be_repeated(ours: Any, db: redis.Redis) -> None:
    for _ in range(2):
        ours.childs_init("new", 1)
    assert [ours.child_ack("new", "a") for _ in range(2)] == [0, 0]
    ours.childs_init("new", 1)
    assert not db.exists("{cc:new}:count")
    assert ours.child_ack("new", "a") == 0


# -- groups ------------------------------------------------------------------------------------------


def test_groups_of_one_moment_take_turns(ours: Any) -> None:
    for gid in "zya":
        for n in range(2):
            ours.publish(queue=Q, payload=[n], gid=gid, group_limit=9)
    assert "".join(take(ours)["gid"] for _ in range(6)) == "zyazya"


def test_a_limit_that_was_raised_by_hand_is_noticed(theirs: Any, ours: Any, db: redis.Redis) -> None:
    for _ in range(3):
        theirs.publish(queue=Q, payload=[], gid="g", group_limit=1)
    take(theirs)
    db.set(f"{{{Q}}}:g:g:limit", "2")
    ours.set_group_limit(Q, "g", 2)
    assert take(theirs)["gid"] == "g"


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_a_retry_goes_behind(theirs: Any, ours: Any, name: str) -> None:
    side = {"theirs": theirs, "ours": ours}[name]
    for n in range(3):
        side.publish(queue=Q, payload=[n], gid="g", backoff_ms=0)
    side.ack_fail(**held(take(side)))
    side.promote_delayed(queue=Q, now_ms_override=now() + 1000)
    order: list[str] = []
    for _ in range(3):
        job = take(side)
        order.append(job["payload"])
        side.ack_success(**held(job))
    assert order == ["[1]", "[2]", "[0]"]


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_groups_share_every_second_turn(theirs: Any, ours: Any, name: str) -> None:
    side = {"theirs": theirs, "ours": ours}[name]
    for n in range(4):
        side.publish(queue=Q, payload=[n], gid=f"g{n}")
        side.publish(queue=Q, payload=[n])
    assert [bool(take(side)["gid"]) for _ in range(8)] == [True, False] * 4


# -- what goes in ------------------------------------------------------------------------------------


def test_huge_numbers_are_refused(ours: Any, db: redis.Redis) -> None:
    with pytest.raises(Invalid):
        ours.publish(Q, [], timeout_ms=10**15)
    assert db.keys(f"{{{Q}}}:*") == []


def test_nan_is_refused(ours: Any, db: redis.Redis) -> None:
    with pytest.raises(ValueError, match="nan"):
        ours.publish(Q, {"n": float("nan")})
    assert db.keys(f"{{{Q}}}:*") == []


# -- administration ----------------------------------------------------------------------------------


def test_removing_a_batch_keeps_the_time(ours: Any, db: redis.Redis) -> None:
    ids = [ours.publish(queue=Q, payload=[]) for _ in range(2)]
    ours.remove_jobs_batch(queue=Q, lane="wait", job_ids=ids)
    assert int(db.hget(f"{{{Q}}}:stats", "last_activity_ms")) > 0


def test_removing_from_the_wrong_lane_frees_no_slot(ours: Any, db: redis.Redis) -> None:
    """With a leftover of a lease on a job that does not run, as older clients leave it."""
    for n in range(2):
        ours.publish(queue=Q, payload=[n], gid="g", job_id=f"job{n}")
    take(ours)
    db.hset(f"{{{Q}}}:job:job1", mapping={"lease_token": "leftover", "lock_until_ms": "1"})
    db.lrem(f"{{{Q}}}:g:g:wait", 1, "job1")  # and its entry is gone
    assert ours.remove_job(queue=Q, job_id="job1", lane="gwait") == "OK"
    assert db.get(f"{{{Q}}}:g:g:inflight") == "1"


def test_errors_have_a_code(ours: Any) -> None:
    ours.publish(queue=Q, payload=[])
    job = take(ours)
    with pytest.raises(LeaseLost, match=r"TOKEN_MISMATCH$") as caught:
        ours.ack_success(**(held(job) | {"lease_token": "0" * 40}))
    assert caught.value.code == "TOKEN_MISMATCH"
    assert "lost" in JobContext.__struct_fields__
    ours.ack_success(**held(job))
