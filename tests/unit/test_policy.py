"""The decisions about tasks, as pure functions."""

from typing import Literal

import pytest

from omniq.errors import ConfigError
from omniq.models import MAX_DURATION_US, MAX_TIME_US, Record, TaskError
from omniq.operations import Cancel, Fail, Lease, Retry
from omniq.policy import (
    DEFAULT_MAX_ATTEMPTS,
    SERVER_PREFIX,
    Backoff,
    after_failure,
    after_loss,
    after_unknown,
    max_attempts,
    next_run,
    parse_backoff,
    waits_for_function,
)

S = 1_000_000
HOUR = 3600 * S
MONDAY = 1_700_000_000 * S
ERROR = TaskError("RuntimeError", "no luck")


def held(**fields: object) -> Record:
    given = {"id": "a", "queue": "default", "name": "job", "token": "t" * 32, "attempts": 1, "max_attempts": 4, **fields}
    return Record(**given)  # type: ignore[arg-type]


def test_the_default_backoff_doubles_from_one_second() -> None:
    assert [Backoff().delay_us(n, 0) // S for n in range(1, 7)] == [1, 2, 4, 8, 16, 32]


def test_the_backoff_stops_at_an_hour() -> None:
    assert Backoff().delay_us(12, 0) == 2048 * S
    assert [Backoff().delay_us(n, 0) for n in (13, 14, 100, 10_000)] == [3600 * S] * 4


def test_jitter_adds_up_to_ten_per_cent_and_takes_nothing_off() -> None:
    for n in (1, 3, 20):
        bare = Backoff().delay_us(n, 0)
        assert bare <= Backoff().delay_us(n, 0.5) <= Backoff().delay_us(n, 0.999_999) <= bare * 1.1


def test_delays_grow_whatever_the_jitter() -> None:
    for n in range(1, 12):
        assert Backoff().delay_us(n, 0.999_999) < Backoff().delay_us(n + 1, 0)


def test_the_base_scales_every_delay() -> None:
    assert [Backoff(base_ms=50).delay_us(n, 0) for n in (1, 2, 3)] == [50_000, 100_000, 200_000]


def test_fixed_always_waits_the_base() -> None:
    assert {Backoff("fixed", base_ms=200, jitter=0).delay_us(n, 1.0) for n in range(1, 9)} == {200_000}


def test_quartic_waits_the_fourth_power() -> None:
    assert [Backoff("quartic", jitter=0).delay_us(n, 0) // S for n in (1, 2, 3)] == [1, 16, 81]


def test_a_failure_count_of_zero_waits_like_the_first() -> None:
    assert Backoff().delay_us(0, 0) == Backoff().delay_us(1, 0)


@pytest.mark.parametrize(
    "policy", [Backoff(), Backoff("fixed", 5, 10, 0, "backoff"), Backoff("quartic", base_ms=7, max_ms=9, jitter=100)]
)
def test_a_policy_is_read_back_from_its_text(policy: Backoff) -> None:
    assert parse_backoff(str(policy)) == policy


def test_an_empty_text_is_the_default_policy() -> None:
    assert parse_backoff("") == Backoff()


def test_what_a_policy_text_leaves_out_is_the_default() -> None:
    assert parse_backoff("fixed") == Backoff("fixed")
    assert parse_backoff("exp:base=250") == Backoff(base_ms=250)


@pytest.mark.parametrize("text", ["linear", "exp:base", "exp:base=soon", "exp:colour=red", "exp:loss=never", ":base=1"])
def test_a_bad_policy_text_is_an_error_that_shows_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match="exp:base=1000"):
        parse_backoff(text)


@pytest.mark.parametrize("text", ["exp:base=-5", "exp:max=-1", "exp:jitter=-10", "fixed:base=-1"])
def test_a_policy_that_would_wait_less_than_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_backoff(text)


def test_a_task_that_says_nothing_has_three_retries() -> None:
    assert max_attempts(held(max_attempts=0)) == DEFAULT_MAX_ATTEMPTS == 4


def test_a_task_without_interval_has_no_next_run() -> None:
    assert next_run(held(due_us=5 * S), 6 * S) is None


def test_the_next_run_is_on_the_grid_of_the_first() -> None:
    task = held(eta_us=100 * S, due_us=100 * S, interval_us=10 * S)
    assert next_run(task, 100 * S) == 110 * S
    assert next_run(task, 104 * S) == 110 * S
    assert next_run(task, 110 * S) == 120 * S


def test_late_runs_do_not_drift() -> None:
    task = held(due_us=100 * S, interval_us=10 * S)
    for late_us in (1, 3 * S, 9 * S):
        task.due_us = next_run(task, task.due_us + late_us) or 0
    assert task.due_us == 130 * S


def test_missed_ticks_do_not_pile_up() -> None:
    task = held(due_us=100 * S, interval_us=10 * S)
    assert next_run(task, 100_005 * S) == 100_010 * S


def test_a_tick_that_is_still_to_come_stands() -> None:
    assert next_run(held(eta_us=500 * S, interval_us=10 * S), 100 * S) == 500 * S


def test_a_failed_run_with_retries_left_is_retried_after_the_backoff() -> None:
    op = after_failure(held(attempts=3), ERROR, 0, 0)
    assert isinstance(op, Retry)
    assert op.delay_us == 4 * S
    assert op.error == ERROR


def test_the_last_failed_run_is_the_end() -> None:
    op = after_failure(held(attempts=4), ERROR, 0, 0)
    assert isinstance(op, Fail)
    assert op.error == ERROR
    assert op.again_us is None


def test_a_task_without_retries_fails_at_its_first_failure() -> None:
    assert isinstance(after_failure(held(attempts=1, max_attempts=1), ERROR, 0, 0), Fail)


def test_a_final_failure_ends_a_task_whatever_is_left() -> None:
    assert isinstance(after_failure(held(attempts=1, max_attempts=9), ERROR, 0, 0, final=True), Fail)


def test_the_tasks_own_wish_replaces_the_backoff_without_jitter() -> None:
    op = after_failure(held(), ERROR, 0, 0.9, after_us=7 * S)
    assert isinstance(op, Retry)
    assert op.delay_us == 7 * S
    at_once = after_failure(held(), ERROR, 0, 0.9, after_us=0)
    assert isinstance(at_once, Retry)
    assert at_once.delay_us == 0


def test_the_tasks_own_wish_does_not_give_more_attempts() -> None:
    assert isinstance(after_failure(held(attempts=4), ERROR, 0, 0, after_us=7 * S), Fail)


def test_an_interval_task_that_fails_for_good_still_has_a_next_tick() -> None:
    op = after_failure(held(attempts=4, due_us=100 * S, interval_us=10 * S), ERROR, 125 * S, 0)
    assert isinstance(op, Fail)
    assert op.again_us == 130 * S


def test_a_lost_run_with_retries_left_runs_again_at_once() -> None:
    op = after_loss(Lease(record=held(worker="w1"), lost="worker_lost"), 0, 0)
    assert isinstance(op, Retry)
    assert (op.delay_us, op.lost) == (None, "worker_lost")
    assert op.error is not None
    assert op.error.type == "WorkerLost"


def test_a_lost_run_waits_if_its_policy_says_so() -> None:
    op = after_loss(Lease(record=held(attempts=2, backoff=str(Backoff(loss="backoff"))), lost="expired"), 0, 0)
    assert isinstance(op, Retry)
    assert op.delay_us == 2 * S


def test_a_task_that_keeps_losing_its_workers_ends_and_says_so() -> None:
    op = after_loss(Lease(record=held(attempts=4, worker="w1"), lost="worker_lost"), 0, 0)
    assert isinstance(op, Fail)
    assert op.error is not None
    assert op.error.type == "WorkerLost"
    assert "w1 died during attempt 4 of 4" in op.error.message


def test_a_silent_worker_is_not_called_dead() -> None:
    op = after_loss(Lease(record=held(worker="w1"), lost="expired"), 0, 0)
    assert isinstance(op, Retry)
    assert op.error is not None
    assert "silent until the lease ran out" in op.error.message


def test_a_lost_run_that_was_asked_to_end_is_cancelled_and_never_retried() -> None:
    op = after_loss(Lease(record=held(cancel_requested=True), lost="expired"), 0, 0)
    assert isinstance(op, Cancel)


def test_a_cancelled_task_whose_worker_died_on_its_last_attempt_counts_as_failed() -> None:
    op = after_loss(Lease(record=held(attempts=4, cancel_requested=True), lost="worker_lost"), 0, 0)
    assert isinstance(op, Fail)


def test_the_reaper_never_forgives_a_late_holder() -> None:
    for attempts in (1, 4):
        op = after_loss(Lease(record=held(attempts=attempts), lost="expired"), 0, 0)
        assert isinstance(op, Retry | Fail)
        assert not op.late


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("lost", ["expired", "worker_lost"])
def test_a_lost_tcp_server_costs_its_clients_no_attempt(attempts: int, lost: Literal["expired", "worker_lost"]) -> None:
    record = held(attempts=attempts, max_attempts=2, worker=f"{SERVER_PREFIX}host:1:x")
    op = after_loss(Lease(record=record, lost=lost), 0, 0.5)
    assert isinstance(op, Retry)
    assert (op.attempts, op.delay_us, op.lost) == (attempts - 1, None, lost)
    record.cancel_requested = True
    assert isinstance(after_loss(Lease(record=record, lost=lost), 0, 0.5), Cancel)


@pytest.mark.parametrize("text", ["garbage", "exp:base=\udcff", f"fixed:base={10**30}"])
def test_a_task_whose_policy_cannot_be_read_ends_by_the_default_one(text: str) -> None:
    task = held(attempts=1, backoff=text)
    op = after_failure(task, None, 0, 0)
    assert isinstance(op, Retry)
    assert op.delay_us == Backoff().delay_us(1, 0)
    lost = after_loss(Lease(record=held(attempts=2, backoff=text), lost="worker_lost"), 0, 0.5)
    assert isinstance(lost, Retry)


def test_no_delay_is_longer_than_a_store_can_keep() -> None:
    longest = Backoff(kind="fixed", base_ms=MAX_DURATION_US // 1000, max_ms=MAX_DURATION_US // 1000, jitter=100)
    assert longest.delay_us(1, 1.0) == MAX_DURATION_US
    assert Backoff(kind="quartic", max_ms=MAX_DURATION_US // 1000).delay_us(10**18, 0) == MAX_DURATION_US


def test_the_next_run_of_a_very_long_interval_still_has_a_date() -> None:
    task = held(interval_us=MAX_TIME_US, due_us=MAX_TIME_US - 1)
    assert next_run(task, MAX_TIME_US) == MAX_TIME_US


# -- what a worker does not have -------------------------------------------------------------------

UNKNOWN = TaskError("NotRunnable", "no task named 'job' is registered in this worker")


def again(task: Record, op: Retry, at_us: int) -> Record:
    """The record as the next worker gets it, had the store carried out what was decided at that moment."""
    assert op.attempts is not None
    return held(attempts=op.attempts + 1, last_error=op.error, failed_at_us=at_us, interval_us=task.interval_us)


def waits_of(limit_us: int, late_us: int = 0) -> list[int]:
    """The pauses of a task that no worker has, each of which comes a little late."""
    task, now, pauses = held(), MONDAY, []
    while isinstance(op := after_unknown(task, UNKNOWN, now, limit_us), Retry):
        assert op.delay_us is not None
        assert op.attempts == 0
        pauses.append(op.delay_us)
        task = again(task, op, now)
        now += op.delay_us + late_us
    assert isinstance(op, Fail)
    assert op.error is not None
    assert op.error.type == "NotRunnable"
    return pauses


def test_what_no_worker_has_waits_a_second_and_then_twice_as_long_up_to_five_minutes() -> None:
    pauses = [us // S for us in waits_of(HOUR)]
    assert pauses[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert set(pauses[9:-1]) == {300}
    assert sum(pauses) == 3600


def test_waits_that_come_late_still_end_after_the_hour() -> None:
    pauses = waits_of(HOUR, late_us=3 * S)
    assert 3500 * S < sum(pauses) + 3 * S * len(pauses) < 3610 * S


@pytest.mark.parametrize("attempts", [1, 2, 4])
def test_what_a_worker_does_not_have_spends_no_attempt_whatever_was_before(attempts: int) -> None:
    task = held(attempts=attempts, last_error=ERROR, failed_at_us=MONDAY - HOUR * 5)
    op = after_unknown(task, UNKNOWN, MONDAY, HOUR)
    assert isinstance(op, Retry)
    assert (op.attempts, op.delay_us, op.late) == (attempts - 1, S, True)
    assert str(op.error) == (
        "NotRunnable: waits since 2023-11-14T22:13:20.000Z for a worker that has its function: "
        "no task named 'job' is registered in this worker"
    )


def test_a_worker_that_is_the_last_to_be_asked_fails_it_at_once() -> None:
    op = after_unknown(held(), UNKNOWN, MONDAY, HOUR, last=True)
    assert isinstance(op, Fail)
    assert op.error == UNKNOWN


def test_without_a_limit_it_fails_at_once() -> None:
    assert isinstance(after_unknown(held(), UNKNOWN, MONDAY, 0), Fail)


def test_the_hour_begins_anew_after_a_failure_of_another_kind_and_after_a_run_that_ended() -> None:
    first = after_unknown(held(), UNKNOWN, MONDAY, HOUR)
    assert isinstance(first, Retry)
    for change in ({"last_error": ERROR}, {"finished_at_us": MONDAY + 9 * S}, {"last_error": None}):
        fields = {"last_error": first.error, "failed_at_us": MONDAY, **change}
        op = after_unknown(held(**fields), UNKNOWN, MONDAY + HOUR, HOUR)
        assert isinstance(op, Retry)
        assert op.delay_us == S


def test_the_hour_begins_anew_when_nobody_looked_for_longer() -> None:
    first = after_unknown(held(), UNKNOWN, MONDAY, HOUR)
    assert isinstance(first, Retry)
    waited = again(held(), first, MONDAY)
    assert isinstance(after_unknown(waited, UNKNOWN, MONDAY + HOUR, HOUR), Fail)
    later = after_unknown(waited, UNKNOWN, MONDAY + 9 * HOUR, HOUR)
    assert isinstance(later, Retry)
    assert later.delay_us == S


def test_a_clock_that_is_behind_makes_no_pause_negative_and_nobody_older() -> None:
    first = after_unknown(held(), UNKNOWN, MONDAY, HOUR)
    assert isinstance(first, Retry)
    op = after_unknown(again(held(), first, MONDAY), UNKNOWN, MONDAY - 9 * S, HOUR)
    assert isinstance(op, Retry)
    assert op.delay_us == S


@pytest.mark.parametrize("text", ["2023-99-14T22:13:20.000Z", "yesterdayZ", "0000-00-00Z"])
def test_a_time_that_cannot_be_read_is_now(text: str) -> None:
    error = TaskError("NotRunnable", f"waits since {text} for a worker that has its function: x")
    op = after_unknown(held(last_error=error, failed_at_us=MONDAY), UNKNOWN, MONDAY, HOUR)
    assert isinstance(op, Retry)
    assert op.delay_us == S


def test_an_interval_task_that_no_worker_has_still_has_a_next_tick() -> None:
    task = held(due_us=MONDAY, interval_us=10 * S)
    op = after_unknown(task, UNKNOWN, MONDAY + 25 * S, HOUR, last=True)
    assert isinstance(op, Fail)
    assert op.again_us == MONDAY + 30 * S


def test_a_reason_of_any_length_leaves_its_time_readable() -> None:
    op = after_unknown(held(), TaskError("NotRunnable", "x" * 99_999), MONDAY, HOUR)
    assert isinstance(op, Retry)
    assert waits_for_function(again(held(), op, MONDAY))
