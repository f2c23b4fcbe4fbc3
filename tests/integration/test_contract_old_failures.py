"""What goes wrong with the published client of the contract, 4.0.0, and does not with ours, by the same calls on one server.

| old failure | test | ours |
|---|---|---|
| each beat adds a timeout: the job of a dead worker stays leased for hours | `beats_pile_up` | now + timeout |
| an id that is published twice is queued twice | `the_same_id_is_queued_twice` | it is returned |
| the trim of completed jobs deletes one that waits again | `a_waiting_job_is_trimmed` | looks at the state |
| a reused id keeps its old group, and frees a slot of it | `a_stale_group_frees_a_slot` | the old hash goes first |
| a lost reply publishes twice, leases to nobody, denies an ack | `a_lost_reply_…`, three | a repeat is recognised |
| a slot leaks for good when a leased job's hash vanishes | `a_slot_leaks` | given back; `repair` |
| an id without a job is leased empty, or becomes a stub | `ghosts_are_given_out` | dropped |
| clocks of clients decide leases and retries | `a_clock_that_is_ahead_takes_leases` | the server's does |
| beats are a second apart: a short lease cannot be kept | `a_short_lease_is_lost` | a third of the timeout |
| three calls and a question per job | `a_job_costs_many_round_trips` | in batches |
| a fan-in that is repeated hears -1 or ALREADY_INIT | `a_fan_in_loses_its_end` | may be repeated |
| keys of groups, and failed jobs, stay for ever | `groups_and_failures_pile_up` | gone, but for limits; `failed_ttl_ms` |
| leaving early burns an attempt, the lease must run out | `leaving_burns_an_attempt` | handed back |
| of groups of one moment the first name runs all its jobs | `ties_favour_low_names` | turns |
| a limit that is raised by hand is not noticed | `a_raised_limit_is_not_noticed` | `set_group_limit` |
| huge numbers break a reserve that has already leased | `huge_numbers` | refused at once |
| NaN is stored, which other languages cannot read | `nan_is_stored` | refused |
| a removal that fails frees a slot | `removing_from_the_wrong_lane_frees_a_slot` | it does not |
| a batch of removals sets the last activity to 0 | `removing_a_batch_forgets_the_time` | true times |
| bare RuntimeErrors; a lost lease is not told to the handler | `errors_have_no_code` | `code`; `lost` |

The same for both, by the keys they share, and documented: a retried job goes to the end of its group
(`a_retry_goes_behind`), all groups together get every second turn (`groups_share_every_second_turn`), a queue is one slot.
"""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.proxy import Proxy
from support.redis_server import Server
from support.sides import Ours, Theirs, guest_command
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


def afresh(db: redis.Redis) -> None:
    db.flushall()


# -- leases ------------------------------------------------------------------------------------------


def test_beats_pile_up(theirs: Any, ours: Any) -> None:
    left: dict[str, int] = {}
    for name, side in (("theirs", theirs), ("ours", ours)):
        side.publish(queue=Q, payload=[], timeout_ms=60_000)
        job = take(side)
        for _ in range(5):
            end = side.heartbeat(**held(job))
        left[name] = end - now()
        side.ack_success(**held(job))
    assert left["theirs"] > 5 * 60_000
    assert left["ours"] <= 60_000


def test_a_clock_that_is_ahead_takes_leases(
    guest_python: str, redis_server: Server, ours: Any, db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Theirs(guest_python, redis_server.port, ahead_s=3600)
    try:
        ours.publish(queue=Q, payload=[], timeout_ms=60_000)
        job = take(ours)
        assert fast.reap_expired(queue=Q) == 1, "a living lease"
        with pytest.raises(LeaseLost):
            ours.ack_success(**held(job))
        assert db.zscore(f"{{{Q}}}:delayed", job["job_id"]) > now() + HOUR / 2, "and its retry is an hour away"
    finally:
        fast.close()
    afresh(db)
    ours.publish(queue=Q, payload=[], timeout_ms=60_000, backoff_ms=1000)
    job, started, true_time = take(ours), now(), time.time_ns
    with monkeypatch.context() as wrong:
        wrong.setattr("omniq.models._last_ms", 0)  # set back at the end: ids of later tests shall be of their own time
        wrong.setattr("time.time_ns", lambda: true_time() + HOUR * 1_000_000)
        assert ours.now_ms() > started + HOUR / 2
        assert ours.reap_expired(queue=Q) == 0
        _, due_ms = ours.ack_fail(**held(job))
    assert due_ms < started + 60_000


def test_a_short_lease_is_lost(
    theirs: Any, ours: Any, guest_python: str, redis_server: Server, db: redis.Redis, tmp_path: Path
) -> None:
    """A handler that takes longer than the timeout, while somebody else reaps: every run is fine."""
    options: dict[str, Any] = {"queue": Q, "payload": [], "timeout_ms": 250, "backoff_ms": 1, "max_attempts": 2}
    theirs.publish(**options, job_id="old")
    log = tmp_path / "ran"
    command = guest_command(guest_python, redis_server.port, Q, str(log), json.dumps({"hold_s": 1.0}))
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        wait_for(lambda: theirs.reap_expired(queue=Q) >= 0 and db.hget(f"{{{Q}}}:job:old", "state") == "failed", within=20)
    finally:
        process.terminate()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()
    assert log.read_text().splitlines() == ["theirs old"] * 2
    runs: list[str] = []

    def handler(ctx: JobContext) -> None:
        runs.append(ctx.job_id)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            theirs.reap_expired(queue=Q)
        stopping.set()

    stopping = threading.Event()
    ours.publish(**options, job_id="new")
    ours.consume(Q, handler, stop=stopping)
    assert runs == ["new"]
    assert db.hget(f"{{{Q}}}:job:new", "state") == "completed"


def test_leaving_burns_an_attempt(
    theirs: Any, ours: Any, guest_python: str, redis_server: Server, db: redis.Redis, tmp_path: Path
) -> None:
    theirs.publish(queue=Q, payload=[], job_id="old")
    log = tmp_path / "ran"
    given = json.dumps({"hold_s": 60, "drain": False})
    process = subprocess.Popen(guest_command(guest_python, redis_server.port, Q, str(log), given), stdout=subprocess.PIPE)
    try:
        wait_for(log.exists, within=20)
        process.send_signal(signal.SIGINT)
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert (db.hget(f"{{{Q}}}:job:old", "state"), db.hget(f"{{{Q}}}:job:old", "attempt")) == ("active", "1")
    assert ours.reserve(Q) is None
    afresh(db)

    def handler(ctx: JobContext) -> None:
        raise KeyboardInterrupt

    ours.publish(queue=Q, payload=[], job_id="new")
    with pytest.raises(KeyboardInterrupt):
        ours.consume(Q, handler, drain=False, signals=False)
    assert (db.hget(f"{{{Q}}}:job:new", "state"), db.hget(f"{{{Q}}}:job:new", "attempt")) == ("wait", "0")
    assert take(ours)["attempt"] == 1


# -- ids ---------------------------------------------------------------------------------------------


def test_the_same_id_is_queued_twice(theirs: Any, ours: Any, db: redis.Redis) -> None:
    for _ in range(2):
        theirs.publish(queue=Q, payload=[], job_id="old")
    assert db.lrange(f"{{{Q}}}:wait", 0, -1) == ["old", "old"]
    assert [take(theirs)["job_id"] for _ in range(2)] == ["old", "old"]
    afresh(db)
    for _ in range(2):
        assert ours.publish(queue=Q, payload=[], job_id="new") == "new"
    assert take(ours)["job_id"] == "new"
    assert ours.reserve(Q) is None


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_a_waiting_job_is_trimmed(theirs: Any, ours: Any, name: str) -> None:
    side = {"theirs": theirs, "ours": ours}[name]
    side.publish(queue=Q, payload={"n": 1}, job_id="again")
    side.ack_success(**held(take(side)))
    due_ms = now() + HOUR
    side.publish(queue=Q, payload={"n": 2}, job_id="again", due_ms=due_ms)
    finish(side, 101)
    side.promote_delayed(queue=Q, now_ms_override=due_ms)
    assert take(side, due_ms)["payload"] == ("" if name == "theirs" else '{"n":2}')


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_a_stale_group_frees_a_slot(theirs: Any, ours: Any, name: str) -> None:
    side = {"theirs": theirs, "ours": ours}[name]
    side.publish(queue=Q, payload=[], job_id="again", gid="g")
    side.ack_success(**held(take(side)))
    side.publish(queue=Q, payload=[], job_id="again")
    again = take(side)
    for _ in range(2):
        side.publish(queue=Q, payload=[], gid="g")
    assert take(side)["gid"] == "g"
    assert side.reserve(queue=Q) is None, "the group's limit is 1"
    side.ack_success(**held(again))
    assert (side.reserve(queue=Q) is None) == (name == "ours")


# -- lost replies ------------------------------------------------------------------------------------


@pytest.fixture(params=["theirs", "ours"])
def behind(
    request: pytest.FixtureRequest, guest_python: str, redis_server: Server, redis_url: str
) -> Iterator[tuple[str, Any, Callable[[], None]]]:
    """A client behind a proxy, and how to lose the next reply."""
    proxy = Proxy(redis_server.port)
    side: Any = Theirs(guest_python, proxy.port) if request.param == "theirs" else Ours(proxy.url)
    finish(side, 1)
    yield request.param, side, proxy.swallow_reply
    side.close()
    proxy.close()


def test_a_lost_reply_publishes_twice(behind: tuple[str, Any, Callable[[], None]], db: redis.Redis) -> None:
    name, side, lose_reply = behind
    lose_reply()
    side.publish(queue=Q, payload=[], job_id="a")
    assert db.lrange(f"{{{Q}}}:wait", 0, -1) == ["a"] * (2 if name == "theirs" else 1)


def test_a_lost_reply_leases_to_nobody(behind: tuple[str, Any, Callable[[], None]], db: redis.Redis) -> None:
    name, side, lose_reply = behind
    for id in ("first", "second"):
        side.publish(queue=Q, payload=[], job_id=id)
    lose_reply()
    assert take(side)["job_id"] == ("second" if name == "theirs" else "first")
    assert db.zcard(f"{{{Q}}}:active") == (2 if name == "theirs" else 1)


def test_a_lost_reply_is_taken_for_a_lost_lease(behind: tuple[str, Any, Callable[[], None]], db: redis.Redis) -> None:
    name, side, lose_reply = behind
    side.publish(queue=Q, payload=[], job_id="a")
    job = take(side)
    lose_reply()
    if name == "theirs":
        with pytest.raises(RuntimeError, match="TOKEN_MISMATCH"):
            side.ack_success(**held(job))
    else:
        side.ack_success(**held(job))
    assert db.hget(f"{{{Q}}}:job:a", "state") == "completed", "though it worked"


# -- jobs that vanish --------------------------------------------------------------------------------


def test_a_slot_leaks(theirs: Any, ours: Any, db: redis.Redis) -> None:
    def lose_a_job(side: Any) -> None:
        for n in range(2):
            side.publish(queue=Q, payload=[n], gid="g", timeout_ms=1000)
        db.delete(f"{{{Q}}}:job:{take(side)['job_id']}")
        side.reap_expired(queue=Q, now_ms_override=now() + 2000)

    lose_a_job(theirs)
    assert db.zcard(f"{{{Q}}}:active") == 0
    assert theirs.reserve(queue=Q) is None, "nothing runs, and nothing ever will"
    assert any("group g" in line for line in ours.repair())
    assert ours.repair() == []
    assert take(theirs)["payload"] == "[1]"
    afresh(db)
    lose_a_job(ours)
    ours.repair()
    assert take(ours)["payload"] == "[1]"


def test_ghosts_are_given_out(theirs: Any, ours: Any, db: redis.Redis) -> None:
    def make_ghosts(side: Any) -> None:
        for due_ms in (0, now() + HOUR):
            db.delete(f"{{{Q}}}:job:{side.publish(queue=Q, payload=[1], due_ms=due_ms)}")

    make_ghosts(theirs)
    assert take(theirs)["payload"] == ""
    theirs.promote_delayed(queue=Q, now_ms_override=now() + 2 * HOUR)
    stub = db.lindex(f"{{{Q}}}:wait", 0)
    assert db.hget(f"{{{Q}}}:job:{stub}", "payload") is None
    assert db.hget(f"{{{Q}}}:job:{stub}", "state") == "wait"
    afresh(db)
    make_ghosts(ours)
    ours.promote_delayed(Q, 1000, now() + 2 * HOUR)
    assert ours.reserve(Q) is None
    assert db.keys(f"{{{Q}}}:job:*") == []


# -- cost --------------------------------------------------------------------------------------------


def test_a_job_costs_many_round_trips(
    theirs: Any, ours: Any, guest_python: str, redis_server: Server, db: redis.Redis, tmp_path: Path
) -> None:
    jobs = 40

    def commands() -> int:
        return sum(row["calls"] for name, row in db.info("commandstats").items() if name in ASKED)

    ours.publish_many(Q, [[n] for n in range(jobs)])
    log = tmp_path / "ran"
    log.touch()
    before = commands()
    process = subprocess.Popen(guest_command(guest_python, redis_server.port, Q, str(log)), stdout=subprocess.PIPE)
    try:
        wait_for(lambda: db.llen(f"{{{Q}}}:completed") == jobs, within=20)
    finally:
        process.terminate()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()
    assert commands() - before >= 3 * jobs, "reserve, a beat, ack; and the timeout is asked for on the way"
    afresh(db)
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


def test_groups_and_failures_pile_up(theirs: Any, ours: Any, db: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniq.upkeep.PURGE_S", 0.05)

    def use_groups(side: Any) -> None:
        for n in range(20):
            side.publish(queue=Q, payload=[], gid=f"g{n}")
            side.ack_success(**held(take(side)))

    use_groups(theirs)
    assert len(db.keys(f"{{{Q}}}:g:*")) >= 20
    for _ in range(5):
        theirs.publish(queue=Q, payload=[], max_attempts=1)
        theirs.ack_fail(**held(take(theirs)))
    assert db.llen(f"{{{Q}}}:failed") == 5
    afresh(db)
    use_groups(ours)
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


def test_a_fan_in_loses_its_end(theirs: Any, ours: Any, db: redis.Redis) -> None:
    theirs.childs_init(key="old", expected=1)
    with pytest.raises(RuntimeError, match="ALREADY_INIT"):
        theirs.childs_init(key="old", expected=1)
    assert [theirs.child_ack(key="old", child_id="a") for _ in range(2)] == [0, -1]
    theirs.childs_init(key="old", expected=1)
    assert db.get("{cc:old}:count") == "1", "a parent that runs again waits for a child that has ended"
    for _ in range(2):
        ours.childs_init("new", 1)
    assert [ours.child_ack("new", "a") for _ in range(2)] == [0, 0]
    ours.childs_init("new", 1)
    assert not db.exists("{cc:new}:count")
    assert ours.child_ack("new", "a") == 0


# -- groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "order"), [("theirs", "aayyzz"), ("ours", "zyazya")])
def test_ties_favour_low_names(theirs: Any, ours: Any, name: str, order: str) -> None:
    side, at = {"theirs": theirs, "ours": ours}[name], now() + HOUR
    for gid in "zya":
        for n in range(2):
            if name == "theirs":
                side.publish(queue=Q, payload=[n], gid=gid, group_limit=9, now_ms_override=at)
            else:
                side.publish(queue=Q, payload=[n], gid=gid, group_limit=9)
    assert "".join(take(side, at)["gid"] for _ in range(6)) == order


def test_a_raised_limit_is_not_noticed(theirs: Any, ours: Any, db: redis.Redis) -> None:
    for _ in range(3):
        theirs.publish(queue=Q, payload=[], gid="g", group_limit=1)
    take(theirs)
    db.set(f"{{{Q}}}:g:g:limit", "2")
    assert theirs.reserve(queue=Q) is None
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


def test_huge_numbers(theirs: Any, ours: Any, db: redis.Redis) -> None:
    theirs.publish(queue=Q, payload=[], timeout_ms=10**15)
    with pytest.raises(RuntimeError, match="ValueError"):
        theirs.reserve(queue=Q)
    assert db.zcard(f"{{{Q}}}:active") == 1, "it is leased all the same"
    afresh(db)
    with pytest.raises(Invalid):
        ours.publish(Q, [], timeout_ms=10**15)
    assert db.keys(f"{{{Q}}}:*") == []


def test_nan_is_stored(theirs: Any, ours: Any, db: redis.Redis) -> None:
    job_id = theirs.publish(queue=Q, payload={"n": float("nan")})
    assert "NaN" in db.hget(f"{{{Q}}}:job:{job_id}", "payload")
    afresh(db)
    with pytest.raises(ValueError, match="nan"):
        ours.publish(Q, {"n": float("nan")})
    assert db.keys(f"{{{Q}}}:*") == []


# -- administration ----------------------------------------------------------------------------------


def test_removing_a_batch_forgets_the_time(theirs: Any, ours: Any, db: redis.Redis) -> None:
    for side, stamped in ((theirs, False), (ours, True)):
        ids = [side.publish(queue=Q, payload=[]) for _ in range(2)]
        side.remove_jobs_batch(queue=Q, lane="wait", job_ids=ids)
        assert (int(db.hget(f"{{{Q}}}:stats", "last_activity_ms")) > 0) == stamped


def test_removing_from_the_wrong_lane_frees_a_slot(theirs: Any, ours: Any, db: redis.Redis) -> None:
    """With a leftover of a lease on a job that does not run, as older clients leave it."""

    def leave_behind(side: Any) -> None:
        for n in range(2):
            side.publish(queue=Q, payload=[n], gid="g", job_id=f"job{n}")
        take(side)
        db.hset(f"{{{Q}}}:job:job1", mapping={"lease_token": "leftover", "lock_until_ms": "1"})
        db.lrem(f"{{{Q}}}:g:g:wait", 1, "job1")  # and its entry is gone

    leave_behind(theirs)
    with pytest.raises(RuntimeError, match="NOT_IN_LANE"):
        theirs.remove_job(queue=Q, job_id="job1", lane="gwait")
    assert db.get(f"{{{Q}}}:g:g:inflight") == "0", "though job0 runs"
    afresh(db)
    leave_behind(ours)
    assert ours.remove_job(queue=Q, job_id="job1", lane="gwait") == "OK"
    assert db.get(f"{{{Q}}}:g:g:inflight") == "1"


def test_errors_have_no_code(theirs: Any, ours: Any, guest_python: str) -> None:
    look = "from dataclasses import fields; from omniq.types import JobCtx; print([f.name for f in fields(JobCtx)])"
    told = subprocess.run([guest_python, "-E", "-c", look], check=True, capture_output=True, text=True).stdout
    assert "lease_token" in told
    assert "lost" not in told
    assert "lost" in JobContext.__struct_fields__
    for side in (theirs, ours):
        side.publish(queue=Q, payload=[])
        job = take(side)
        with pytest.raises(Exception, match=r"TOKEN_MISMATCH$") as caught:
            side.ack_success(**(held(job) | {"lease_token": "0" * 40}))
        if side is ours:
            assert isinstance(caught.value, LeaseLost)
            assert caught.value.code == "TOKEN_MISMATCH"
        else:
            assert str(caught.value).startswith("RuntimeError: ")
        side.ack_success(**held(job))
