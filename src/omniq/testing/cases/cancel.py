"""Cancel, in every state that a task can be in."""

from __future__ import annotations

from omniq.errors import NotActive, TaskNotFound, TokenMismatch
from omniq.models import State, new_token
from omniq.operations import Acked, Cancel, Cancelled, Progress
from omniq.testing.bench import Bench, S, case, on


@case(rules="§3")
async def a_waiting_task_is_cancelled_at_once(bench: Bench) -> None:
    await bench.enqueue("first", "ready")
    await bench.add("scheduled", delay_us=S)
    await bench.add("blocked", after=["first"])
    for id in ("ready", "scheduled", "blocked"):
        assert await bench.cancel(id) == Cancelled(state=State.CANCELLED)
        task = await bench.get(id)
        assert (task.state, task.status, task.finished_at_us) == (State.CANCELLED, "CANCELLED", bench.now)
        assert await bench.events(id) == ["enqueued", "cancelled"]
        result = await bench.result(id)
        assert result.state is State.CANCELLED
    # A cancelled dependent must not come back when its blocker is done, nor a scheduled one when it is due.
    bench.advance(10)
    (first,) = await bench.take(9)
    await bench.ack(first)
    assert await bench.take(9) == []


@case(rules="§3,§4")
async def a_running_task_is_asked(bench: Bench) -> None:
    task = await bench.hold("a")
    assert await bench.cancel("a") == Cancelled(state=State.RUNNING)
    after = await bench.get("a")
    assert (after.state, after.cancel_requested, after.token) == (State.RUNNING, True, task.token)
    # The holder hears of the request in the answer to its next heartbeat.
    assert (await bench.extend(task)).cancel_requested
    assert (await bench.do(on(Progress, task, data=b"1"))).cancel_requested
    assert await bench.cancel("a") == Cancelled(state=State.RUNNING)


@case(rules="§3")
async def the_holder_says_that_it_has_stopped(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.cancel("a")
    assert await bench.cancel("a", token=task.token) == Cancelled(state=State.CANCELLED)
    after = await bench.get("a")
    assert (after.state, after.token, after.lease_until_us) == (State.CANCELLED, None, None)
    result = await bench.result("a")
    assert result.state is State.CANCELLED
    assert await bench.events("a") == ["enqueued", "started", "cancelled"]
    # A lease that the driver left in its index of leases would run out here.
    bench.advance(100)
    assert await bench.reclaim() == 0
    assert await bench.take() == []


@case(rules="§3,67")
async def only_the_holder_can_say_so(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.refused(TokenMismatch, on(Cancel, task, token=new_token()))


@case(rules="§3,67,75")
async def a_former_holder_cannot_cancel_what_waits_again(bench: Bench) -> None:
    # Anybody may cancel a waiting task, but a token claims to speak for a run, and that run is over.
    task = await bench.hold("a")
    await bench.retry(task, delay_us=S)
    await bench.refused(NotActive, on(Cancel, task, token=task.token))
    bench.advance(1)
    await bench.take()
    await bench.refused(TokenMismatch, on(Cancel, task, token=task.token))


@case(rules="§3")
async def an_ended_task_is_left_as_it_is(bench: Bench) -> None:
    await bench.ack(await bench.hold("done"))
    await bench.dead("dead")
    await bench.add("gone")
    await bench.cancel("gone")
    for id, state in (("done", State.DONE), ("dead", State.DEAD), ("gone", State.CANCELLED)):
        assert await bench.unchanged(Cancel(queue="default", id=id)) == [Cancelled(state=state)]


@case(rules="67,74")
async def an_unknown_task_cannot_be_cancelled(bench: Bench) -> None:
    await bench.add("a")
    await bench.refused(TaskNotFound, Cancel(queue="default", id="unknown"))
    await bench.refused(TaskNotFound, Cancel(queue="other", id="a"))


@case(rules="§4")
async def a_task_that_finishes_first_is_done(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.cancel("a")
    assert await bench.ack(task, result=b"1") == Acked(state=State.DONE)
    result = await bench.result("a")
    assert result.state is State.DONE


@case(rules="§3,§4")
async def a_cancelled_run_is_never_retried(bench: Bench) -> None:
    # Three ways lead back to the lane, and each of them has to look at the request.
    await bench.enqueue("delay", "now", "release")
    delay, now, release = await bench.take(3)
    for id in ("delay", "now", "release"):
        await bench.cancel(id)
    assert (await bench.retry(delay, delay_us=S)).state is State.CANCELLED
    assert (await bench.retry(now)).state is State.CANCELLED
    assert (await bench.release(release)).state is State.CANCELLED
    for id in ("delay", "now", "release"):
        assert await bench.events(id) == ["enqueued", "started", "cancelled"]
    bench.advance(100)
    assert await bench.take(9) == []


@case(rules="§4")
async def a_cancelled_run_that_fails_for_good_is_dead(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.cancel("a")
    await bench.fail(task)
    assert await bench.state("a") is State.DEAD


@case(rules="§3,§6")
async def a_cancelled_run_fails_its_dependents(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.add("b", after=["a"])
    await bench.cancel("a")
    assert await bench.state("b") is State.BLOCKED
    await bench.cancel("a", token=task.token)
    assert await bench.state("b") is State.DEAD


@case(rules="§3")
async def a_request_does_not_outlive_its_run(bench: Bench) -> None:
    # The request is kept on the record, from where a requeue has to take it.
    task = await bench.hold("a")
    await bench.cancel("a")
    await bench.fail(task)
    await bench.requeue("a")
    (again,) = await bench.take()
    assert not again.cancel_requested
    assert not (await bench.extend(again)).cancel_requested
