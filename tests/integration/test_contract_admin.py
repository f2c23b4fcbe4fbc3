"""Removing, retrying, repairing, group limits, fan-in, and replies that get lost."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from omniq import BaseStorage, OutcomeUnknown, StoreUnavailable
from omniq.contract import BatchResult, ContractClient, ContractError, Job
from omniq.testing import FaultyStorage

T = ContractClient.now_ms() + 3_600_000


@pytest.fixture
def storage(every_storage: BaseStorage) -> BaseStorage:
    return every_storage


@pytest.fixture
def client(storage: BaseStorage) -> Iterator[ContractClient]:
    with ContractClient(storage) as made:
        yield made


def take(client: ContractClient, at: int = T) -> Job:
    job = client.reserve("q", at)
    assert isinstance(job, Job)
    return job


def in_lane(client: ContractClient, lane: str) -> str:
    """A job that is in that lane and nowhere else."""
    if lane == "delayed":
        return client.publish("q", {}, due_ms=T + 60_000)
    job_id = client.publish("q", {}, gid="g" if lane == "gwait" else None, max_attempts=1)
    if lane in ("failed", "completed", "active"):
        job = take(client)
        if lane == "failed":
            client.ack_fail("q", job_id, job.lease_token, T)
        elif lane == "completed":
            client.ack_success("q", job_id, job.lease_token, T)
    return job_id


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(ContractError) as caught:
        call(*args)
    assert str(caught.value).endswith(caught.value.code)
    return caught.value.code


# -- remove ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["wait", "gwait", "delayed", "failed", "completed"])
def test_a_job_is_removed_from_the_lane_it_is_in_and_from_no_other(client: ContractClient, lane: Any) -> None:
    job_id = in_lane(client, lane)
    for other in {"wait", "gwait", "delayed", "failed", "completed"} - {lane}:
        assert refusal(client.remove_job, "q", job_id, other) == "LANE_MISMATCH"
    assert client.remove_job("q", job_id, lane) == "OK"
    assert refusal(client.remove_job, "q", job_id, lane) == "NO_JOB"
    assert client.reserve("q", T + 60_000) is None


def test_a_running_job_is_not_removed(client: ContractClient) -> None:
    job_id = in_lane(client, "active")
    assert refusal(client.remove_job, "q", job_id, "wait") == "ACTIVE"
    assert refusal(client.remove_job, "q", job_id, "nowhere") == "BAD_LANE"
    assert refusal(client.remove_job, "other", job_id, "wait") == "NO_JOB"


def test_removing_a_waiting_job_of_a_group_leaves_its_slots_as_they_are(client: ContractClient) -> None:
    """Once a removal lowered the group's count before it knew that the job was in that lane."""
    ids = [client.publish("q", {}, gid="g") for _ in range(3)]
    take(client)
    assert refusal(client.remove_job, "q", ids[1], "wait") == "LANE_MISMATCH"
    assert client.reserve("q", T) is None
    assert client.remove_job("q", ids[1], "gwait") == "OK"
    assert client.reserve("q", T) is None
    assert client.repair() == []


def test_a_batch_removes_each_job_for_itself(client: ContractClient) -> None:
    good, other, running = in_lane(client, "failed"), in_lane(client, "delayed"), in_lane(client, "active")
    assert client.remove_jobs_batch("q", "failed", [good, other, running, "no such job"]) == [
        BatchResult(good, "OK"),
        BatchResult(other, "ERR", "LANE_MISMATCH"),
        BatchResult(running, "ERR", "ACTIVE"),
        BatchResult("no such job", "ERR", "NO_JOB"),
    ]
    assert client.remove_jobs_batch("q", "failed", []) == []
    assert refusal(client.remove_jobs_batch, "q", "failed", ["x"] * 101) == "BATCH_TOO_LARGE"
    assert refusal(client.remove_jobs_batch, "q", "nowhere", ["x"]) == "BAD_LANE"
    with pytest.raises(TypeError):
        client.remove_jobs_batch("q", "failed", "one id")


# -- retry -----------------------------------------------------------------------------------------


def test_a_failed_job_starts_again_with_all_its_attempts(client: ContractClient) -> None:
    job_id = in_lane(client, "failed")
    client.publish("q", {}, job_id="before")
    assert client.retry_failed("q", job_id) == "OK"
    assert take(client).job_id == "before", "a retried job goes to the end of its lane"
    again = take(client)
    assert (again.job_id, again.attempt) == (job_id, 1)
    assert refusal(client.retry_failed, "q", job_id) == "NOT_FAILED"
    assert refusal(client.retry_failed, "q", "no such job") == "NO_JOB"


def test_a_batch_retries_each_job_for_itself(client: ContractClient) -> None:
    failed = [in_lane(client, "failed") for _ in range(3)]
    waiting = in_lane(client, "wait")
    assert client.retry_failed_batch("q", [*failed, waiting, "none"]) == [
        *[BatchResult(i, "OK") for i in failed],
        BatchResult(waiting, "ERR", "NOT_FAILED"),
        BatchResult("none", "ERR", "NO_JOB"),
    ]
    for job_id, status, reason in client.retry_failed_batch("q", [waiting]):
        assert (job_id, status, reason) == (waiting, "ERR", "NOT_FAILED")
    assert refusal(client.retry_failed_batch, "q", ["x"] * 101) == "BATCH_TOO_LARGE"


# -- groups and repair -----------------------------------------------------------------------------


def test_a_new_group_limit_is_noticed_at_once(client: ContractClient) -> None:
    """Once a raised limit was noticed only at the group's next publish or ack."""
    for _ in range(3):
        client.publish("q", {}, gid="g")
    take(client)
    assert client.reserve("q", T) is None
    client.set_group_limit("q", " g ", 2)
    take(client)
    assert client.reserve("q", T) is None


def test_repairing_a_store_in_order_finds_nothing(client: ContractClient) -> None:
    in_lane(client, "active")
    in_lane(client, "gwait")
    assert client.repair() == []


def test_groups_that_became_ready_together_take_turns(client: ContractClient) -> None:
    """Once groups of one millisecond were ordered by name, and `a` ran all its jobs before `z`."""
    for gid in "zya":
        for _ in range(2):
            client.publish("q", {}, gid=gid, group_limit=9)
    assert [take(client).gid for _ in range(6)] == list("zyazya")


# -- fan-in ----------------------------------------------------------------------------------------


def test_the_last_child_hears_zero_also_when_it_asks_again(client: ContractClient) -> None:
    """Once the last child died after its ack, its retry heard -1, and the finish never came."""
    client.childs_init("order:7", 3)
    assert [client.child_ack("order:7", c) for c in ("a", "b", "a")] == [2, 1, 2]
    assert [client.child_ack("order:7", c) for c in ("c", "c", "a", "stranger")] == [0, 0, 2, -1]


def test_a_parent_that_runs_again_opens_the_same_fan_in(client: ContractClient) -> None:
    """Once a retried parent hit ALREADY_INIT, and one after the end waited for ever."""
    client.childs_init("k", 1)
    client.childs_init("k", 1)
    assert client.child_ack("k", "a") == 0
    client.childs_init("k", 1)
    assert client.child_ack("k", "a") == 0
    assert refusal(client.childs_init, "k", 2) == "ALREADY_INIT"


def test_a_fan_in_ends_with_its_time(client: ContractClient) -> None:
    client.childs_init("k", 2, ttl_ms=1)
    deadline = client.now_ms() + 5000
    while client.child_ack("k", "a") != -1:
        assert client.now_ms() < deadline
    client.childs_init("k", 3)


@pytest.mark.parametrize("expected", [0, -1, 1.5, "2", None, True])
def test_a_fan_in_waits_for_a_whole_number(client: ContractClient, expected: Any) -> None:
    assert refusal(client.childs_init, "k", expected) == "BAD_EXPECTED"


def test_a_child_of_nobody_hears_minus_one(client: ContractClient) -> None:
    assert client.child_ack("nobody", "a") == -1
    with pytest.raises(ValueError, match="braces"):
        client.child_ack("{k}", "a")


# -- lost replies ----------------------------------------------------------------------------------


@pytest.fixture
def faulty(storage: BaseStorage) -> FaultyStorage:
    return FaultyStorage(storage)


@pytest.fixture
def shaky(faulty: FaultyStorage) -> Iterator[ContractClient]:
    with ContractClient(faulty) as made:
        yield made


def test_a_publish_whose_reply_got_lost_is_stored_once(shaky: ContractClient, faulty: FaultyStorage) -> None:
    """Once a client library's own retry pushed the id twice."""
    faulty.strike("unknown", "unavailable", "unknown")
    job_id = shaky.publish("q", {})
    assert take(shaky).job_id == job_id
    assert shaky.reserve("q", T) is None


def test_a_job_that_ended_is_started_anew_once_although_the_reply_got_lost(
    shaky: ContractClient, faulty: FaultyStorage
) -> None:
    job_id = shaky.publish("q", {}, job_id="mine")
    shaky.ack_success("q", job_id, take(shaky).lease_token, T)
    faulty.strike("unknown")
    shaky.publish("q", {}, job_id="mine")
    shaky.ack_success("q", job_id, take(shaky).lease_token, T)
    assert shaky.reserve("q", T) is None


def test_a_publish_that_never_arrived_is_not_taken_for_an_older_one(shaky: ContractClient, faulty: FaultyStorage) -> None:
    """The same body under the same id, ended long ago, is not what this call stored."""
    job_id = shaky.publish("q", {"n": 1}, job_id="mine")
    shaky.ack_success("q", job_id, take(shaky).lease_token, T)

    carry_out = faulty.inner.apply_blocking
    lost = [True]

    def lose_the_first(*args: Any, **kwargs: Any) -> Any:
        if lost.pop() if lost else False:
            raise OutcomeUnknown("it never arrived")
        return carry_out(*args, **kwargs)

    faulty.inner.apply_blocking = lose_the_first  # type: ignore[method-assign]
    shaky.publish("q", {"n": 1}, job_id="mine")
    assert not lost
    assert take(shaky).attempt == 1


def test_a_reserve_whose_reply_got_lost_gives_the_same_lease(shaky: ContractClient, faulty: FaultyStorage) -> None:
    """Once the job was leased to nobody, and the next one was handed out."""
    ids = [shaky.publish("q", {}) for _ in range(2)]
    faulty.strike("unknown", "unknown")
    first = take(shaky)
    assert (first.job_id, first.attempt) == (ids[0], 1)
    shaky.ack_success("q", first.job_id, first.lease_token, T)


def test_an_end_whose_reply_got_lost_is_an_end(shaky: ContractClient, faulty: FaultyStorage) -> None:
    """Once it was reported as TOKEN_MISMATCH."""
    for _ in range(3):
        shaky.publish("q", {}, backoff_ms=7000)
    faulty.strike("ok", "unknown")
    done = take(shaky)
    shaky.ack_success("q", done.job_id, done.lease_token, T)
    retried = take(shaky)
    faulty.strike("unknown")
    assert shaky.ack_fail("q", retried.job_id, retried.lease_token, T) == ("RETRY", T + 7000)
    beaten = take(shaky)
    faulty.strike("unknown", "unknown")
    assert shaky.heartbeat("q", beaten.job_id, beaten.lease_token, T + 1000) == T + 301_000
    faulty.strike("unknown")
    shaky.release("q", beaten.job_id, beaten.lease_token, T)
    assert take(shaky).attempt == 1


def test_a_lost_reply_does_not_hide_a_lost_lease(shaky: ContractClient, faulty: FaultyStorage) -> None:
    shaky.publish("q", {})
    job = take(shaky)
    shaky.ack_success("q", job.job_id, job.lease_token, T)
    faulty.strike("unknown")
    assert refusal(shaky.heartbeat, "q", job.job_id, job.lease_token, T) == "TOKEN_MISMATCH"


def test_admin_calls_whose_reply_got_lost_are_done(shaky: ContractClient, faulty: FaultyStorage) -> None:
    job_id = in_lane(shaky, "failed")
    faulty.strike("unknown")
    assert shaky.retry_failed("q", job_id) == "OK"
    faulty.strike("unknown")
    assert shaky.remove_job("q", job_id, "wait") == "OK"
    faulty.strike("unknown")
    shaky.childs_init("k", 2)
    faulty.strike("unknown")
    assert shaky.child_ack("k", "a") == 1


def test_a_store_that_is_away_is_said_to_be_so(shaky: ContractClient, faulty: FaultyStorage) -> None:
    faulty.strike("unavailable")
    with pytest.raises(StoreUnavailable):
        shaky.publish("q", {})


def test_a_store_that_never_answers_is_said_to_be_so(
    shaky: ContractClient, faulty: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniq.storage.sending.PAUSES_S", (0.001, 0.001))
    faulty.strike("unknown", "unavailable", "unavailable")
    with pytest.raises(OutcomeUnknown):
        shaky.publish("q", {}, job_id="a")
    assert shaky.publish("q", {}, job_id="a") == "a"
    assert asyncio.run(shaky.storage.counts())[0].ready == 1
