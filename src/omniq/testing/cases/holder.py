"""The calls that a lease allows its holder to make, and their refusal to everybody else."""

from __future__ import annotations

from typing import Any

from omniq.errors import InvalidLease, LeaseExpired, LimitExceeded, NotActive, TaskNotFound, TokenMismatch
from omniq.models import DEFAULT_QUEUE, Record, State, new_token
from omniq.operations import Ack, Acked, Extend, Extended, Fail, Held, Progress, Release, Retry
from omniq.testing.bench import BOOM, Bench, S, case, on

# Retry twice: with a time the task goes to the scheduled ones, without a time back to its lane.
KINDS: list[tuple[type[Held], dict[str, Any]]] = [
    (Ack, {"result": b"1"}),
    (Retry, {"error": BOOM, "delay_us": S}),
    (Retry, {"error": BOOM, "attempts": 5}),
    (Fail, {"error": BOOM}),
    (Release, {}),
    (Extend, {"lease_us": 60 * S}),
    (Progress, {"data": b"50"}),
]


def each(task: Record, **fields: Any) -> list[Held]:
    """Returns every operation of a holder on this task."""
    return [on(kind, task, **(given | fields)) for kind, given in KINDS]


@case(rules="67,74")
async def an_unknown_task_is_not_found(bench: Bench) -> None:
    task = await bench.hold("a")
    for op in each(task, id="unknown"):
        await bench.refused(TaskNotFound, op)


@case(rules="67,78")
async def a_task_of_another_queue_is_not_found(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.add("b", queue="other")
    for op in each(task, queue="other"):
        await bench.refused(TaskNotFound, op)


@case(rules="25,32,38,44,67")
async def a_waiting_task_is_not_active(bench: Bench) -> None:
    await bench.enqueue("ready", "first")
    await bench.add("scheduled", delay_us=S)
    await bench.add("blocked", after=["first"])
    for id in ("ready", "scheduled", "blocked"):
        for op in each(await bench.get(id), token=new_token()):
            await bench.refused(NotActive, op)


@case(rules="25,32,38,44,67")
async def a_returned_task_is_not_active_for_its_old_token(bench: Bench) -> None:
    # `late` forgives a lease that ran out, but not one that was given back.
    task = await bench.hold("a")
    await bench.release(task)
    for op in each(task) + each(task, late=True):
        await bench.refused(NotActive, op)


@case(rules="22,30,36,42,67")
async def a_wrong_token_is_refused_and_the_right_one_still_works(bench: Bench) -> None:
    task = await bench.hold("a")
    for op in each(task, token=new_token()):
        await bench.refused(TokenMismatch, op)
    assert (await bench.extend(task)).lease_until_us == bench.now + 30 * S
    assert await bench.ack(task) == Acked(state=State.DONE)


@case(rules="23,31,37,43,67")
async def an_expired_lease_is_refused(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(30)
    for op in each(task):
        await bench.refused(LeaseExpired, op)
    assert await bench.reclaim() == 1
    assert await bench.take_ids() == ["a"]


@case(rules="24,45,67")
async def expired_and_wrong_token_together_is_expired(bench: Bench) -> None:
    # Both errors hold, and the contract says which of them is told.
    task = await bench.hold("a")
    bench.advance(31)
    for op in each(task, token=new_token()):
        await bench.refused(LeaseExpired, op)


@case(rules="§4")
async def a_lease_is_valid_until_its_last_moment(bench: Bench) -> None:
    for kind, given in KINDS:
        task = await bench.hold(queue=kind.__name__)
        bench.advance(29.999)
        await bench.do(on(kind, task, **given))


@case(rules="§3,§4")
async def a_late_holder_may_still_report_if_nobody_took_the_task(bench: Bench) -> None:
    # Finished work need not be thrown away: as long as nobody else has leased the task, its token still fits.
    for kind, given in KINDS:
        task = await bench.hold(queue=kind.__name__)
        bench.advance(1000)
        await bench.refused(TokenMismatch, on(kind, task, token=new_token(), late=True, **given))
        await bench.do(on(kind, task, late=True, **given))


@case(rules="67,75")
async def an_old_holder_cannot_touch_the_next_one(bench: Bench) -> None:
    # A worker that wakes up late must not end a task that is no longer its own.
    old = await bench.hold("a")
    bench.advance(30)
    await bench.reclaim()
    (new,) = await bench.take()
    for op in each(old) + each(old, late=True):
        await bench.refused(TokenMismatch, op)
    assert (await bench.ack(new)).state is State.DONE


# -- extend --------------------------------------------------------------------------------------


@case(rules="20,21")
async def extend_counts_from_now_and_keeps_the_token(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(10)
    assert await bench.extend(task, lease_us=25 * S) == Extended(lease_until_us=bench.now + 25 * S, cancel_requested=False)
    after = await bench.get("a")
    assert (after.token, after.lease_until_us, after.attempts) == (task.token, bench.now + 25 * S, 1)
    assert (await bench.ack(task)).state is State.DONE


@case(rules="§3")
async def extend_without_a_length_takes_the_task_s_own(bench: Bench) -> None:
    own, default = await bench.hold("a", lease_us=8 * S), await bench.hold("b")
    bench.advance(5)
    assert (await bench.extend(own)).lease_until_us == bench.now + 8 * S
    assert (await bench.extend(default)).lease_until_us == bench.now + 30 * S


@case(rules="§3,§4")
async def extend_never_shortens(bench: Bench) -> None:
    # A short extension after a long one must not make the task look lost.
    task = await bench.hold("a")
    end = bench.now + 30 * S
    assert (await bench.extend(task, lease_us=S)).lease_until_us == end
    assert (await bench.get("a")).lease_until_us == end


@case(rules="26")
async def an_extension_must_last(bench: Bench) -> None:
    task = await bench.hold("a")
    for lease in (0, -5):
        await bench.invalid(InvalidLease, on(Extend, task, lease_us=lease))


@case(rules="27")
async def extensions_keep_the_reaper_away_until_the_last_one_ends(bench: Bench) -> None:
    task = await bench.hold("a")
    for _ in range(3):
        bench.advance(29)
        await bench.extend(task)
        assert await bench.reclaim() == 0
    bench.advance(29.999)
    assert await bench.reclaim() == 0
    bench.advance(0.001)
    assert await bench.reclaim() == 1


@case(rules="§3,§7")
async def extend_makes_no_event(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.extend(task)
    assert await bench.events("a") == ["enqueued", "started"]


# -- ack, progress, release ------------------------------------------------------------------------


@case(rules="28,76")
async def an_acked_task_is_done_for_ever(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(2)
    assert await bench.ack(task, result=b"42") == Acked(state=State.DONE)
    done = await bench.get("a")
    assert (done.state, done.token, done.lease_until_us, done.attempts) == (State.DONE, None, None, 1)
    assert (done.finished_at_us, done.updated_at_us, done.ended_by) == (bench.now, bench.now, task.token)
    bench.advance(3600)
    assert await bench.reclaim() == 0
    assert await bench.take() == []


@case(rules="29,67")
async def a_second_ack_is_silent_for_the_token_that_did_it(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.ack(task, result=b"1")
    # Long after the lease: a holder that lost the answer may ask late.
    bench.advance(100)
    assert await bench.unchanged(on(Ack, task, result=b"2")) == [Acked(state=State.DONE, already=True)]
    await bench.refused(NotActive, on(Ack, task, token=new_token()))


@case(rules="39,67")
async def nothing_but_ack_and_fail_may_follow_an_ack(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.ack(task)
    for op in each(task):
        if not isinstance(op, Ack | Fail):
            await bench.refused(NotActive, op)


@case(rules="§3")
async def progress_is_kept_on_the_record(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(1)
    outcome = await bench.do(on(Progress, task, data=b'{"done":3}'))
    assert isinstance(outcome, Extended)
    assert not outcome.cancel_requested
    after = await bench.get("a")
    assert (after.progress, after.state, after.lease_until_us) == (b'{"done":3}', State.RUNNING, outcome.lease_until_us)


@case(rules="§3")
async def progress_is_short(bench: Bench) -> None:
    task = await bench.hold("a")
    # 4,096 bytes with the quotes, as many as are allowed.
    await bench.do(on(Progress, task, data=b'"' + b"x" * 4094 + b'"'))
    await bench.invalid(LimitExceeded, on(Progress, task, data=b"9" * 4097))


@case(rules="§3,§4")
async def a_released_task_has_not_spent_its_attempt(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(3)
    assert (await bench.release(task)).state is State.READY
    after = await bench.get("a")
    assert (after.state, after.attempts, after.token, after.lease_until_us) == (State.READY, 0, None, None)
    assert after.due_us == task.due_us
    assert (await bench.take())[0].attempts == 1


@case(rules="§5")
async def returned_tasks_come_before_those_never_leased(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c", "d")
    a, b = await bench.take(2)
    await bench.release(b)
    await bench.retry(a)
    # Which of the two comes first is left to the driver.
    taken = await bench.take_ids(9)
    assert sorted(taken[:2]) == ["a", "b"]
    assert taken[2:] == ["c", "d"]


@case(rules="§5", needs="due_order")
async def returned_tasks_come_before_those_that_were_due_earlier(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    (a,) = await bench.take()
    await bench.add("early", eta_us=bench.now - 60 * S)
    await bench.release(a)
    assert await bench.take_ids(9) == ["a", "early", "b"]


@case(rules="§5")
async def a_returned_task_is_an_ordinary_one_after_its_next_lease(bench: Bench) -> None:
    # The mark of a returned task goes with its next lease, or the task would come before the others for ever.
    await bench.enqueue("a", "b")
    (a,) = await bench.take()
    await bench.release(a)
    (a,) = await bench.take()
    bench.advance(1)
    await bench.retry(a, delay_us=0)
    assert await bench.take_ids(9, DEFAULT_QUEUE) == ["b", "a"]
