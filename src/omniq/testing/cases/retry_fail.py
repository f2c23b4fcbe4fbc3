"""Retry and fail: the ends of a failed run."""

from __future__ import annotations

from omniq.errors import Invalid, NotActive
from omniq.models import DEFAULT_QUEUE, State, TaskError, new_token
from omniq.operations import Ack, Fail, Failed, Retried, Retry
from omniq.policy import after_unknown, waits_for_function
from omniq.testing.bench import BOOM, Bench, S, case, on


@case(rules="33,§3")
async def a_retry_stores_what_it_was_given(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(1)
    due = bench.now + 9 * S
    assert await bench.retry(task, due_us=due, attempts=7) == Retried(due_us=due, state=State.SCHEDULED)
    after = await bench.get("a")
    assert (after.state, after.due_us, after.attempts) == (State.SCHEDULED, due, 7)
    assert (after.last_error, after.failed_at_us, after.updated_at_us) == (BOOM, bench.now, bench.now)
    assert (after.token, after.lease_until_us, after.finished_at_us) == (None, None, None)


@case(rules="34")
async def a_retried_task_waits_for_its_time(bench: Bench) -> None:
    task = await bench.hold("a")
    assert (await bench.retry(task, delay_us=5 * S)).due_us == bench.now + 5 * S
    bench.advance(4.999)
    assert await bench.take() == []
    bench.advance(0.001)
    (again,) = await bench.take()
    assert (again.id, again.attempts) == ("a", 2)


@case(rules="35")
async def a_retry_without_a_time_is_ready_at_once(bench: Bench) -> None:
    task = await bench.hold("a")
    assert await bench.retry(task) == Retried(due_us=task.due_us, state=State.READY)
    assert (await bench.get("a")).attempts == 1
    (again,) = await bench.take()
    assert (again.attempts, again.last_error) == (2, BOOM)


@case(rules="35,§5")
async def a_retry_with_a_delay_of_nothing_goes_to_its_new_place(bench: Bench) -> None:
    # A delay of 0 is a new time; no delay means no new time, and the task returns to its old place.
    task = await bench.hold("a")
    await bench.enqueue("b")
    bench.advance(1)
    assert await bench.retry(task, delay_us=0) == Retried(due_us=bench.now, state=State.READY)
    assert await bench.take_ids(9) == ["b", "a"]


@case(rules="33,46")
async def what_a_worker_did_not_have_comes_again_ever_later_and_spends_no_attempt(bench: Bench) -> None:
    """`policy.after_unknown` keeps its state in the record that comes with the next lease, so a store needs nothing for it."""
    task = await bench.hold("a", max_attempts=2)
    await bench.retry(task)
    error = TaskError("NotRunnable", "no task named 'a' is registered in this worker")
    for seconds in (1, 2, 4, 3):  # and then the ten are over
        (task,) = await bench.take()
        assert task.attempts == 2
        await bench.do(after_unknown(task, error, bench.now, 10 * S))
        waiting = await bench.get("a")
        assert (waiting.state, waiting.attempts, waits_for_function(waiting)) == (State.SCHEDULED, 1, True)
        assert waiting.due_us == bench.now + seconds * S
        bench.advance(seconds)
    (task,) = await bench.take()
    await bench.do(after_unknown(task, error, bench.now, 10 * S))
    ended = await bench.get("a")
    assert (ended.state, ended.attempts) == (State.DEAD, 2)
    assert ended.last_error is not None
    assert str(ended.last_error) == f"NotRunnable: no worker had its function for 10s: {error.message}"


@case(rules="33,46")
async def what_a_worker_did_not_have_begins_anew_after_a_run_that_ended(bench: Bench) -> None:
    error = TaskError("NotRunnable", "no task named 'a' is registered in this worker")
    for tick in range(3):
        if tick == 0:
            await bench.add("a", interval_us=60 * S)
        (task,) = await bench.take()
        await bench.do(after_unknown(task, error, bench.now, 3600 * S))
        assert (await bench.get("a")).due_us == bench.now + S
        bench.advance(1)
        (task,) = await bench.take()
        assert task.attempts == 1
        await bench.ack(task, again_us=bench.now + 59 * S)
        assert not waits_for_function(await bench.get("a"))
        bench.advance(59)


@case(rules="33,46")
async def attempts_stay_unless_they_are_given(bench: Bench) -> None:
    await bench.add("a")
    for expected in (1, 2, 3):
        (task,) = await bench.take()
        await bench.retry(task)
        assert (await bench.get("a")).attempts == expected
    (task,) = await bench.take()
    await bench.retry(task, attempts=0)
    assert (await bench.get("a")).attempts == 0


@case(rules="§1")
async def a_retry_must_make_sense(bench: Bench) -> None:
    task = await bench.hold("a")
    for bad in ({"delay_us": 1, "due_us": 1}, {"delay_us": -1}, {"attempts": -1}):
        await bench.invalid(Invalid, on(Retry, task, **bad))


@case(rules="39,70,67")
async def an_ended_task_cannot_be_retried(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c")
    a, b, c = await bench.take(3)
    await bench.ack(a)
    await bench.fail(b)
    await bench.cancel("c", token=c.token)
    for task in (a, b, c):
        await bench.refused(NotActive, on(Retry, task))


@case(rules="40,§3")
async def a_failed_task_is_a_dead_letter_with_its_reason(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(1)
    assert await bench.fail(task) == Failed(queue=DEFAULT_QUEUE, state=State.DEAD)
    dead = await bench.get("a")
    assert (dead.state, dead.last_error, dead.failed_at_us, dead.finished_at_us) == (State.DEAD, BOOM, bench.now, bench.now)
    assert (dead.token, dead.lease_until_us, dead.ended_by) == (None, None, task.token)
    bench.advance(3600)
    assert await bench.reclaim() == 0
    assert await bench.take() == []


@case(rules="40")
async def the_reason_is_the_last_one(bench: Bench) -> None:
    await bench.retry(await bench.hold("a"))
    (task,) = await bench.take()
    last = TaskError("Other", "with 'quotes' and 🦑", "")
    await bench.fail(task, error=last)
    assert (await bench.get("a")).last_error == last


@case(rules="41,67")
async def a_second_fail_is_silent_for_the_token_that_did_it(bench: Bench) -> None:
    # The caller may have lost its first answer.
    task = await bench.hold("a")
    await bench.fail(task)
    again = on(Fail, task, error=TaskError("Other"))
    assert await bench.unchanged(again) == [Failed(queue=DEFAULT_QUEUE, state=State.DEAD, already=True)]
    await bench.refused(NotActive, on(Fail, task, token=new_token()))


@case(rules="70,67")
async def a_fail_after_an_ack_is_silent_for_the_same_token(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.ack(task)
    assert await bench.unchanged(on(Fail, task)) == [Failed(queue=DEFAULT_QUEUE, state=State.DONE, already=True)]
    await bench.refused(NotActive, on(Fail, task, token=new_token()))


@case(rules="41,67")
async def an_ack_after_a_fail_is_refused(bench: Bench) -> None:
    # The result was not stored, and a silent answer would say that it was.
    task = await bench.hold("a")
    await bench.fail(task)
    await bench.refused(NotActive, on(Ack, task))


@case(rules="46")
async def fail_adds_no_attempt(bench: Bench) -> None:
    # Reserve has counted the run already.
    await bench.add("a")
    for _ in range(2):
        await bench.retry((await bench.take())[0])
    (task,) = await bench.take()
    await bench.fail(task)
    assert (await bench.get("a")).attempts == 3
    result = await bench.result("a")
    assert result.attempts == 3


@case(rules="§2")
async def a_task_that_failed_before_is_retrying(bench: Bench) -> None:
    await bench.add("a")
    assert (await bench.get("a")).status == "PENDING"
    (task,) = await bench.take()
    assert task.status == "RUNNING"
    await bench.retry(task, delay_us=S)
    assert (await bench.get("a")).status == "RETRYING"
    bench.advance(1)
    await bench.fail((await bench.take())[0])
    assert (await bench.get("a")).status == "FAILED"
