"""Interval tasks: one id, run after run."""

from __future__ import annotations

from omniq.models import State
from omniq.operations import Acked, Failed
from omniq.policy import next_run
from omniq.testing.bench import BOOM, Bench, S, case


@case(rules="§3,§4")
async def an_ack_with_again_schedules_the_same_task(bench: Bench) -> None:
    task = await bench.hold("a", interval_us=60 * S)
    bench.advance(1)
    again = bench.now + 59 * S
    assert await bench.ack(task, result=b"1", again_us=again) == Acked(state=State.SCHEDULED)
    after = await bench.get("a")
    assert (after.state, after.due_us, after.attempts, after.interval_us) == (State.SCHEDULED, again, 0, 60 * S)
    assert (after.token, after.lease_until_us) == (None, None)
    bench.advance(58.999)
    assert await bench.take() == []
    bench.advance(0.001)
    (second,) = await bench.take()
    assert (second.id, second.attempts) == ("a", 1)
    assert await bench.events("a") == ["enqueued", "started", "succeeded", "started"]


@case(rules="§4")
async def the_last_result_wins(bench: Bench) -> None:
    await bench.add("a", interval_us=S)
    for value in (b"1", b"2"):
        (task,) = await bench.take()
        await bench.ack(task, result=value, again_us=bench.now + S)
        result = await bench.result("a")
        assert (result.state, result.result) == (State.DONE, value)
        bench.advance(1)


@case(rules="§3,§4")
async def a_series_has_finished_when_its_last_run_has(bench: Bench) -> None:
    task = await bench.hold("a", interval_us=S)
    await bench.ack(task, again_us=bench.now + S)
    assert (await bench.get("a")).finished_at_us == bench.now
    bench.advance(1)
    (last,) = await bench.take()
    bench.advance(1)
    assert (await bench.ack(last)).state is State.DONE
    assert (await bench.get("a")).finished_at_us == bench.now


@case(rules="§3,§4")
async def a_run_that_fails_for_good_is_recorded_and_the_next_comes(bench: Bench) -> None:
    task = await bench.hold("a", interval_us=60 * S)
    again = bench.now + 60 * S
    assert await bench.fail(task, again_us=again) == Failed(queue="default", state=State.SCHEDULED)
    result = await bench.result("a")
    assert (result.state, result.error, result.attempts) == (State.DEAD, BOOM, 1)
    after = await bench.get("a")
    assert (after.state, after.due_us, after.attempts) == (State.SCHEDULED, again, 0)
    assert await bench.events("a") == ["enqueued", "started", "failed"]


@case(rules="§4", needs="cross_queue")
async def an_interval_task_that_goes_on_stays_in_its_queue(bench: Bench) -> None:
    # The dead queue is for tasks that have ended, and a series goes on.
    task = await bench.hold("a", interval_us=S, dead_queue="dlq")
    await bench.fail(task, again_us=bench.now + S)
    assert (await bench.get("a")).queue == "default"


@case(rules="§3,§4")
async def a_requested_cancel_ends_the_series(bench: Bench) -> None:
    task = await bench.hold("a", interval_us=S)
    await bench.cancel("a")
    assert await bench.ack(task, again_us=bench.now + S) == Acked(state=State.DONE)
    bench.advance(100)
    assert await bench.take() == []


@case(rules="§4")
async def a_cancel_between_two_runs_ends_the_series(bench: Bench) -> None:
    task = await bench.hold("a", interval_us=S)
    await bench.ack(task, again_us=bench.now + S)
    assert (await bench.cancel("a")).state is State.CANCELLED
    bench.advance(100)
    assert await bench.take() == []


@case(rules="§4")
async def the_series_keeps_its_grid_and_does_not_pile_up(bench: Bench) -> None:
    start = bench.now
    await bench.add("a", interval_us=60 * S, eta_us=start)
    # How late a run starts, and the next point of the grid after it. Points that passed meanwhile are left out.
    for late, expected in ((0.5, 60), (130, 240), (3600, 3900)):
        bench.advance(late)
        (task,) = await bench.take()
        bench.advance(1)
        again = next_run(task, bench.now)
        assert again is not None
        await bench.ack(task, again_us=again)
        assert again == start + expected * S
        bench.advance((again - bench.now) / S)


@case(rules="§11")
async def purge_forgets_the_result_but_never_the_series(bench: Bench) -> None:
    # The result's time is over while the task waits for its next run.
    task = await bench.hold("a", interval_us=3600 * S, result_ttl_us=S)
    await bench.ack(task, result=b"1", again_us=bench.now + 3600 * S)
    bench.advance(2)
    await bench.purge()
    assert not await bench.has_result("a")
    assert await bench.state("a") is State.SCHEDULED


@case(rules="§4")
async def a_series_that_keeps_no_results_goes_on(bench: Bench) -> None:
    # A ttl of nothing removes a task with its ack, unless it runs again.
    task = await bench.hold("a", interval_us=S, result_ttl_us=0)
    await bench.ack(task, result=b"1", again_us=bench.now + S)
    assert not await bench.has_result("a")
    assert await bench.state("a") is State.SCHEDULED


@case(rules="§4,§9")
async def a_lost_run_of_a_series_keeps_the_series(bench: Bench) -> None:
    start = bench.now
    await bench.hold("a", interval_us=60 * S, max_attempts=1, eta_us=start)
    bench.advance(30)
    await bench.reclaim()
    task = await bench.get("a")
    assert (task.state, task.due_us, task.attempts) == (State.SCHEDULED, start + 60 * S, 0)


@case(rules="§5")
async def a_series_frees_its_group_between_runs(bench: Bench) -> None:
    await bench.enqueue("a", "b", group="g", interval_us=S)
    (a,) = await bench.take(9)
    await bench.ack(a, again_us=bench.now + S)
    assert await bench.take_ids(9) == ["b"]
