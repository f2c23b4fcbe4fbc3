"""The calls of the contract, one by one, on every store."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from omniq import BaseStorage, DriverClosed, DuplicateId, MemoryStorage, NotActive
from omniq.contract import AsyncContractClient, ContractClient, ContractError, Job, LeaseLost, Paused
from omniq.operations import Held

HOUR = 3_600_000
T = ContractClient.now_ms() + HOUR  # all calls that take a time are given one, so no test waits


@pytest.fixture
def storage(every_storage: BaseStorage) -> BaseStorage:
    return every_storage


@pytest.fixture
def client(storage: BaseStorage) -> Iterator[ContractClient]:
    with ContractClient(storage) as made:
        yield made


def take(client: ContractClient, queue: str = "q", at: int = T) -> Job:
    job = client.reserve(queue, at)
    assert isinstance(job, Job)
    return job


def counts(client: ContractClient, queue: str = "q") -> dict[str, int]:
    found = asyncio.run(client.storage.counts())
    row = next(c for c in found if c.queue == queue)
    return {n: v for n in ("scheduled", "ready", "running", "done", "dead") if (v := getattr(row, n))}


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(ContractError) as caught:
        call(*args)
    assert str(caught.value).endswith(caught.value.code)
    return caught.value.code


# -- publish and reserve ---------------------------------------------------------------------------


def test_a_published_job_is_reserved_with_all_that_the_contract_promises(client: ContractClient) -> None:
    job_id = client.publish("q", {"page": 1, "text": "Größe"}, gid="acme")
    job = take(client)
    assert (job.status, job.job_id, job.attempt, job.gid) == ("JOB", job_id, 1, "acme")
    assert json.loads(job.payload) == {"page": 1, "text": "Größe"}
    assert (job.lock_until_ms, job.max_attempts, job.timeout_ms) == (T + 300_000, 5, 300_000)
    assert job.lease_token
    assert client.reserve("q", T) is None


def test_jobs_come_in_the_order_of_publishing(client: ContractClient) -> None:
    ids = [client.publish("q", [n]) for n in range(5)]
    assert [take(client).job_id for _ in ids] == ids


def test_many_jobs_can_be_published_at_once(client: ContractClient) -> None:
    ids = client.publish_many("q", ({"n": n} for n in range(2500)), max_attempts=1)
    assert len(set(ids)) == 2500
    assert counts(client) == {"ready": 2500}
    assert [take(client).job_id for _ in range(3)] == ids[:3]
    with pytest.raises(TypeError):
        client.publish_many("q", [{}, "no object"])
    assert counts(client)["ready"] == 2497
    assert client.publish_many("q", []) == []


def test_the_braces_of_a_queue_are_optional(client: ContractClient) -> None:
    job_id = client.publish("{q}", {})
    job = take(client, "q")
    client.heartbeat("{q}", job_id, job.lease_token, T)
    client.ack_success("q", job_id, job.lease_token, T)


@pytest.mark.parametrize("payload", ["text", None, 3, (1,), {"a": float("nan")}, [float("inf")]])
def test_a_wrong_payload_is_refused_before_anything_is_written(client: ContractClient, payload: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        client.publish("q", payload)
    assert asyncio.run(client.storage.queues()) == []


def test_a_job_is_not_given_before_its_time(client: ContractClient) -> None:
    client.publish("q", {}, due_ms=T + 5000)
    assert client.reserve("q", T + 4999) is None
    client.promote_delayed("q", 1000, T + 5000)
    assert take(client, at=T + 5000).attempt == 1


def test_promoting_counts_what_moved_on_stores_that_have_lanes(client: ContractClient) -> None:
    for n in range(3):
        client.publish("q", [n], due_ms=T + n)
    lanes = not client.storage.capabilities.due_order
    assert client.promote_delayed("q", 0, T + 10) == 0
    assert client.promote_delayed("q", 2, T + 10) == (2 if lanes else 0)
    assert client.promote_delayed("q", 1000, T + 10) == (1 if lanes else 0)
    assert client.promote_delayed("q", 1000, T + 10) == 0
    assert [json.loads(take(client, at=T + 10).payload) for _ in range(3)] == [[0], [1], [2]]


def test_a_time_that_has_passed_is_no_place_at_the_front(client: ContractClient) -> None:
    ids = [client.publish("q", {}), client.publish("q", {}, due_ms=1), client.publish("q", {}, due_ms=client.now_ms())]
    assert [take(client).job_id for _ in ids] == ids


def test_a_paused_queue_says_so_and_all_else_goes_on(client: ContractClient) -> None:
    client.publish("q", {})
    job = take(client)
    assert (client.pause("q"), client.pause("{q}"), client.is_paused("q")) == ("OK", "OK", True)
    client.publish("q", {})
    assert client.reserve("q", T) == Paused()
    assert client.reserve("other", T) is None
    assert client.heartbeat("q", job.job_id, job.lease_token, T + 1) == T + 300_001
    client.ack_success("q", job.job_id, job.lease_token, T + 1)
    assert (client.resume("q"), client.resume("q"), client.is_paused("q")) == (1, 0, False)
    assert take(client).attempt == 1


def test_a_group_runs_as_many_at_once_as_its_first_limit(client: ContractClient) -> None:
    client.publish("q", [0], gid="g", group_limit=2)
    client.publish("q", [1], gid="g", group_limit=9)
    client.publish("q", [2], gid="g")
    first = take(client)
    take(client)
    assert client.reserve("q", T) is None
    client.ack_success("q", first.job_id, first.lease_token, T)
    assert json.loads(take(client).payload) == [2]


def test_a_group_without_a_limit_runs_one_at_a_time(client: ContractClient) -> None:
    for n in range(2):
        client.publish("q", [n], gid="g")
    job = take(client)
    assert client.reserve("q", T) is None
    client.ack_fail("q", job.job_id, job.lease_token, T)
    assert json.loads(take(client).payload) == [1]


def test_grouped_and_ungrouped_jobs_take_turns_groups_first(client: ContractClient) -> None:
    for n in range(2):
        client.publish("q", [f"plain {n}"])
        client.publish("q", [f"grouped {n}"], gid="g", group_limit=9)
    assert [json.loads(take(client).payload)[0] for _ in range(4)] == ["grouped 0", "plain 0", "grouped 1", "plain 1"]


# -- ids -------------------------------------------------------------------------------------------


def test_publishing_an_id_that_is_alive_changes_nothing(client: ContractClient) -> None:
    """Once the same id was queued twice, and the second body overwrote the first."""
    assert client.publish("q", {"n": 1}, job_id="mine") == "mine"
    assert client.publish("q", {"n": 2}, job_id="mine", gid="other") == "mine"
    job = take(client)
    assert json.loads(job.payload) == {"n": 1}
    assert client.publish("q", {"n": 3}, job_id="mine") == "mine"
    assert client.reserve("q", T) is None
    client.ack_fail("q", "mine", job.lease_token, T)
    assert client.publish("q", {"n": 4}, job_id="mine") == "mine"
    assert json.loads(take(client, at=T + 30_000).payload) == {"n": 1}


def test_an_id_that_lives_in_another_queue_is_never_taken_for_this_one(client: ContractClient) -> None:
    client.publish("other", {"n": 1}, job_id="mine")
    with pytest.raises(DuplicateId, match="'other'"):
        client.publish("q", {"n": 2}, job_id="mine")
    assert client.reserve("q", T) is None
    assert json.loads(take(client, "other").payload) == {"n": 1}


@pytest.mark.parametrize("end", ["completed", "failed"])
def test_publishing_an_id_that_has_ended_starts_it_anew(client: ContractClient, end: str) -> None:
    client.publish("q", {"n": 1}, job_id="mine", gid="g", max_attempts=1)
    job = take(client)
    if end == "completed":
        client.ack_success("q", "mine", job.lease_token, T)
    else:
        assert client.ack_fail("q", "mine", job.lease_token, T, "E: x") == ("FAILED", None)
    client.publish("q", {"n": 2}, job_id="mine")
    fresh = take(client)
    assert (fresh.attempt, fresh.gid, json.loads(fresh.payload)) == (1, "", {"n": 2})
    assert refusal(client.ack_success, "q", "mine", job.lease_token, T) == "TOKEN_MISMATCH"
    client.ack_success("q", "mine", fresh.lease_token, T)
    assert counts(client) == {"done": 1}


def test_a_stale_group_does_not_free_a_slot_of_another(client: ContractClient) -> None:
    """Once the old group stayed on a reused id, and its ack let two jobs of a group run at once."""
    client.publish("q", {}, job_id="mine", gid="g")
    job = take(client)
    client.ack_success("q", "mine", job.lease_token, T)
    client.publish("q", {}, job_id="mine")
    again = take(client)
    for _ in range(2):
        client.publish("q", {}, gid="g")
    take(client)
    client.ack_success("q", "mine", again.lease_token, T)
    assert client.reserve("q", T) is None


# -- leases ----------------------------------------------------------------------------------------


def test_beats_do_not_pile_up(client: ContractClient) -> None:
    """Once each beat added a whole timeout, so a dead worker's job stayed leased for hours."""
    client.publish("q", {}, timeout_ms=2000)
    job = take(client)
    ends = [client.heartbeat("q", job.job_id, job.lease_token, T + 500 * n) for n in range(1, 5)]
    assert ends == [T + 2000 + 500 * n for n in range(1, 5)]
    assert client.heartbeat("q", job.job_id, job.lease_token, T) == ends[-1]
    assert client.reap_expired("q", 1000, ends[-1] - 1) == 0
    assert client.reap_expired("q", 1000, ends[-1]) == 1


def test_an_expired_lease_may_be_acked_until_it_is_reaped(client: ContractClient) -> None:
    client.publish("q", {}, timeout_ms=1000)
    job = take(client)
    client.heartbeat("q", job.job_id, job.lease_token, T + 5000)
    client.ack_success("q", job.job_id, job.lease_token, T + 60_000)
    client.publish("q", {}, timeout_ms=1000, backoff_ms=10)
    job = take(client)
    assert client.reap_expired("q", 1000, T + 1000) == 1
    for call in (client.heartbeat, client.ack_success, client.ack_fail, client.release):
        assert refusal(call, "q", job.job_id, job.lease_token, T + 1000) == "TOKEN_MISMATCH"


def test_a_reaped_job_is_retried_after_its_backoff_and_fails_at_last(client: ContractClient) -> None:
    client.publish("q", {}, timeout_ms=1000, backoff_ms=500, max_attempts=2)
    take(client)
    assert client.reap_expired("q", 1000, T + 1000) == 1
    assert client.reserve("q", T + 1499) is None
    assert take(client, at=T + 1500).attempt == 2
    assert client.reap_expired("q", 1000, T + 2500) == 1
    assert counts(client) == {"dead": 1}
    assert client.reap_expired("q", 1000, T + HOUR) == 0


def test_reaping_takes_no_more_than_asked_and_only_of_its_queue(client: ContractClient) -> None:
    for queue in ("q", "q", "q", "other"):
        client.publish(queue, {}, timeout_ms=1000)
        take(client, queue)
    assert client.reap_expired("q", 0, T + 1000) == 0
    assert client.reap_expired("q", 2, T + 1000) == 2
    assert client.reap_expired("q", 2, T + 1000) == 1
    assert counts(client, "other") == {"running": 1}


def test_a_failed_run_is_retried_and_the_last_one_fails(client: ContractClient) -> None:
    job_id = client.publish("q", {}, max_attempts=2, backoff_ms=1500)
    job = take(client)
    assert client.ack_fail("q", job_id, job.lease_token, T, "ValueError: no luck") == ("RETRY", T + 1500)
    assert client.reserve("q", T + 1499) is None
    client.promote_delayed("q", 1000, T + 1500)
    job = take(client, at=T + 1500)
    assert job.attempt == 2
    assert client.ack_fail("q", job_id, job.lease_token, T + 1500, error="ValueError: again") == ("FAILED", None)
    record = asyncio.run(client.storage.get(job_id))
    assert str(record.last_error) == "ValueError: again"
    assert (record.last_error.type, record.last_error.message) == ("ValueError", "again")


@pytest.mark.parametrize("backoff_ms", [0, 5000])
@pytest.mark.parametrize("at", [1_000_000, T - 2 * HOUR, T + HOUR], ids=["long ago", "an hour ago", "in two hours"])
def test_a_retry_is_due_by_the_clock_that_was_given(client: ContractClient, at: int, backoff_ms: int) -> None:
    job_id = client.publish("q", {}, backoff_ms=backoff_ms)
    assert client.ack_fail("q", job_id, take(client).lease_token, at) == ("RETRY", at + backoff_ms)
    task = asyncio.run(client.storage.get(job_id, "q"))
    assert task is not None
    assert task.due_us == (at + backoff_ms) * 1000
    if backoff_ms:
        assert client.reserve("q", at + backoff_ms - 1) is None
    assert take(client, at=at + backoff_ms).job_id == job_id


def test_the_error_of_a_failed_run_is_optional(client: ContractClient) -> None:
    job_id = client.publish("q", {}, max_attempts=1)
    assert client.ack_fail("q", job_id, take(client).lease_token, T) == ("FAILED", None)


def test_the_token_that_ended_a_job_may_say_so_again(client: ContractClient) -> None:
    """Once an ack whose reply got lost ended in TOKEN_MISMATCH, though it had worked."""
    client.publish("q", {}, max_attempts=1)
    done = take(client)
    for _ in range(3):
        client.ack_success("q", done.job_id, done.lease_token, T)
    client.publish("q", {}, max_attempts=1)
    dead = take(client)
    for _ in range(3):
        assert client.ack_fail("q", dead.job_id, dead.lease_token, T) == ("FAILED", None)
    assert refusal(client.ack_fail, "q", done.job_id, done.lease_token, T) == "TOKEN_MISMATCH"
    assert refusal(client.ack_success, "q", dead.job_id, dead.lease_token, T) == "TOKEN_MISMATCH"
    assert refusal(client.ack_success, "q", done.job_id, "another", T) == "TOKEN_MISMATCH"


def test_codes_are_those_that_clients_look_for(client: ContractClient) -> None:
    job_id = client.publish("q", {})
    job = take(client)
    for call in (client.heartbeat, client.ack_success, client.ack_fail, client.release):
        assert refusal(call, "q", job_id, "") == "TOKEN_REQUIRED"
        assert refusal(call, "q", job_id, "wrong", T) == "TOKEN_MISMATCH"
        assert refusal(call, "q", "no such job", job.lease_token, T) == "TOKEN_MISMATCH"
        assert refusal(call, "other", job_id, job.lease_token, T) == "TOKEN_MISMATCH"
    with pytest.raises(LeaseLost):
        client.heartbeat("q", job_id, "wrong", T)
    client.ack_success("q", job_id, job.lease_token, T)


def test_a_token_that_fits_a_job_without_a_lease_is_not_active() -> None:
    """Only a damaged store has such a job."""

    class Damaged(MemoryStorage):
        def _apply_blocking(self, transactions: Any, now_us: int | None, repeat: bool) -> Any:
            if isinstance(transactions[0][0], Held):
                return [NotActive("it has no lease")]
            return super()._apply_blocking(transactions, now_us, repeat)

    with ContractClient(Damaged()) as client:
        job_id = client.publish("q", {})
        job = take(client)
        for call in (client.heartbeat, client.ack_success, client.ack_fail):
            assert refusal(call, "q", job_id, job.lease_token, T) == "NOT_ACTIVE"
            assert refusal(call, "q", job_id, "another", T) == "TOKEN_MISMATCH"


def test_a_job_that_is_handed_back_is_next_and_has_spent_nothing(client: ContractClient) -> None:
    """Once a worker that left early burnt an attempt and the job waited for its lease to run out."""
    ids = [client.publish("q", {}, max_attempts=1) for _ in range(2)]
    job = take(client)
    client.release("q", job.job_id, job.lease_token, T)
    again = take(client)
    assert (again.job_id, again.attempt) == (ids[0], 1)
    assert again.lease_token != job.lease_token


async def test_the_async_client_does_the_same(storage: BaseStorage) -> None:
    async with AsyncContractClient(storage) as client:
        job_id = await client.publish("q", {"n": 1}, job_id="a")
        assert await client.reserve("none") is None
        job = await client.reserve("q")
        assert isinstance(job, Job)
        assert job.job_id == job_id
        assert await client.heartbeat("q", job_id, job.lease_token) >= job.lock_until_ms
        kind, due_ms = await client.ack_fail("q", job_id, job.lease_token, 0, "E: x")
        assert kind == "RETRY"
        assert 25_000 < due_ms - client.now_ms() <= 30_001
        with pytest.raises(LeaseLost) as caught:
            await client.ack_success("q", job_id, job.lease_token)
        assert caught.value.code == "TOKEN_MISMATCH"
        assert await client.pause("q") == "OK"
        assert await client.reserve("q") == Paused()
        assert await client.resume("q") == 1
        assert await client.repair() == []


def test_a_client_is_opened_by_url_and_says_when_it_is_closed() -> None:
    client = ContractClient.from_url("memory://")
    assert client.publish("q", {})
    client.close()
    client.close()
    with pytest.raises(DriverClosed):
        client.publish("q", {})
    with pytest.raises(DriverClosed):
        client.consume("q", print)
