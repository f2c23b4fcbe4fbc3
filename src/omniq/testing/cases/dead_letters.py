"""Dead letters: brought back, moved to another queue, removed."""

from __future__ import annotations

from omniq.errors import Invalid, NotActive, NotDead, NotWaiting, TaskNotFound
from omniq.models import DEFAULT_QUEUE, State
from omniq.operations import Ack, Failed, Remove, Removed, Requeue, Requeued, Reschedule, Rescheduled
from omniq.testing.bench import BOOM, Bench, S, case, on


@case(rules="50,47")
async def a_requeued_task_runs_again(bench: Bench) -> None:
    dead = await bench.dead("a")
    bench.advance(5)
    assert await bench.do(on(Requeue, dead, reset_attempts=True)) == Requeued(state=State.READY)
    task = await bench.get("a")
    assert (task.state, task.attempts, task.due_us, task.eta_us) == (State.READY, 0, bench.now, None)
    # With `ended_by` left, a repeated Fail of the old holder would be answered as `already`.
    assert (task.last_error, task.failed_at_us, task.finished_at_us, task.ended_by) == (None,) * 4
    (again,) = await bench.take()
    assert (await bench.ack(again)).state is State.DONE


@case(rules="50")
async def a_requeue_without_a_time_forgets_the_one_that_was_asked_for(bench: Bench) -> None:
    # A driver that loads rare fields only when it needs them may write the old eta back.
    await bench.add("a", eta_us=bench.now + 5 * S)
    bench.advance(5)
    (task,) = await bench.take()
    await bench.fail(task)
    await bench.requeue("a")
    task = await bench.get("a")
    assert (task.eta_us, task.due_us) == (None, bench.now)


@case(rules="78")
async def a_requeue_keeps_the_attempts_unless_told_otherwise(bench: Bench) -> None:
    dead = await bench.dead("a")
    await bench.do(on(Requeue, dead))
    assert (await bench.get("a")).attempts == 1
    assert (await bench.take())[0].attempts == 2


@case(rules="78")
async def a_requeue_may_name_a_time(bench: Bench) -> None:
    one, two = await bench.dead("a"), await bench.dead("b")
    assert await bench.do(on(Requeue, one, eta_us=bench.now + 3 * S)) == Requeued(state=State.SCHEDULED)
    assert await bench.do(on(Requeue, two, delay_us=2 * S)) == Requeued(state=State.SCHEDULED)
    # Steps of a millisecond are the finest that every store keeps.
    bench.advance(2.999)
    assert await bench.take_ids(9) == ["b"]
    bench.advance(0.001)
    assert await bench.take_ids(9) == ["a"]


@case(rules="78,67")
async def only_dead_letters_can_be_requeued(bench: Bench) -> None:
    await bench.enqueue("done", "gone", "running", "ready")
    done, gone, _ = await bench.take(3)
    await bench.ack(done)
    await bench.cancel("gone", token=gone.token)
    await bench.add("scheduled", delay_us=S)
    await bench.add("blocked", after=["running"])
    for id in ("done", "gone", "running", "ready", "scheduled", "blocked"):
        await bench.refused(NotDead, on(Requeue, await bench.get(id)))


@case(rules="78,67,74")
async def a_requeue_needs_the_right_queue(bench: Bench) -> None:
    dead = await bench.dead("a")
    await bench.add("b", queue="other")
    await bench.refused(TaskNotFound, on(Requeue, dead, queue="other"))
    await bench.refused(TaskNotFound, on(Requeue, dead, id="unknown"))
    await bench.invalid(Invalid, on(Requeue, dead, eta_us=1, delay_us=1))


@case(rules="50")
async def a_requeued_task_is_pending_and_has_no_result(bench: Bench) -> None:
    dead = await bench.dead("a")
    assert await bench.has_result("a")
    await bench.do(on(Requeue, dead, reset_attempts=True))
    assert not await bench.has_result("a")
    assert (await bench.get("a")).status == "PENDING"


@case(rules="67")
async def the_token_that_failed_a_task_is_worth_nothing_after_a_requeue(bench: Bench) -> None:
    # The requeue has undone the end that this token brought about, so the token speaks for no run any more.
    task = await bench.hold("a")
    await bench.fail(task)
    await bench.requeue("a")
    await bench.refused(NotActive, on(Ack, task))


# -- dead queues ---------------------------------------------------------------------------------


@case(rules="§4,§6", needs="cross_queue")
async def a_dead_queue_gets_the_task_itself(bench: Bench) -> None:
    task = await bench.hold("a", dead_queue="dlq", max_attempts=2, eta_us=bench.now, payload=b"p", fingerprint="f")
    bench.advance(1)
    assert await bench.fail(task) == Failed(queue="dlq", state=State.READY)
    moved = await bench.get("a")
    assert (moved.queue, moved.state, moved.attempts, moved.max_attempts) == ("dlq", State.READY, 0, 2)
    # No dead queue and no blockers come along: the task could move, or wait, for ever.
    assert (moved.eta_us, moved.due_us, moved.dead_queue, moved.blocked_by) == (None, bench.now, None, ())
    assert (moved.payload, moved.fingerprint, moved.last_error, moved.token) == (b"p", "f", BOOM, None)
    assert await bench.take_ids(9) == []
    assert await bench.take_ids(9, "dlq") == ["a"]


@case(rules="§4", needs="cross_queue")
async def the_failed_result_of_a_moved_task_stays_readable(bench: Bench) -> None:
    await bench.dead("a", dead_queue="dlq")
    result = await bench.result("a")
    assert (result.state, result.error, result.attempts) == (State.DEAD, BOOM, 1)


@case(rules="§4", needs="cross_queue")
async def a_task_can_die_in_its_dead_queue(bench: Bench) -> None:
    # A driver that forgets to take the dead queue off the record moves the task from the queue to itself.
    await bench.dead("a", dead_queue="dlq")
    (task,) = await bench.take(1, "dlq")
    assert await bench.fail(task) == Failed(queue="dlq", state=State.DEAD)
    assert (await bench.get("a")).state is State.DEAD


@case(rules="§4", needs="cross_queue")
async def a_moved_task_can_be_done_in_its_dead_queue(bench: Bench) -> None:
    await bench.dead("a", dead_queue="dlq")
    await bench.ack((await bench.take(1, "dlq"))[0], result=b"1")
    result = await bench.result("a")
    assert (result.state, result.result, result.error) == (State.DONE, b"1", None)


@case(rules="§4,§5", needs="cross_queue")
async def a_moved_task_keeps_its_group(bench: Bench) -> None:
    # The group has the limit 1 in both queues, so one of the two tasks is granted.
    for id in ("a", "b"):
        await bench.dead(id, dead_queue="dlq", group="g")
    assert [t.group for t in await bench.take(9, "dlq")] == ["g"]
    assert (await bench.counts("dlq")).ready == 1


@case(rules="§11", needs="cross_queue")
async def a_mere_dead_queue_is_not_fed(bench: Bench) -> None:
    # Workers that serve all queues ask for those that are fed, so that dead letters wait for somebody to look at them.
    await bench.dead("a", dead_queue="dlq")
    assert sorted(await bench.store.queues()) == [DEFAULT_QUEUE, "dlq"]
    assert await bench.store.queues(fed=True) == [DEFAULT_QUEUE]


# -- remove and reschedule -------------------------------------------------------------------------


@case(rules="§3")
async def a_removed_task_is_gone_with_its_result(bench: Bench) -> None:
    await bench.ack(await bench.hold("done"), result=b"1")
    await bench.dead("dead")
    await bench.enqueue("first", "ready")
    await bench.add("scheduled", delay_us=S)
    await bench.add("blocked", after=["first"])
    # A driver keeps each state in another place, from each of which the task has to go.
    for id in ("done", "dead", "ready", "scheduled", "blocked"):
        assert await bench.remove(id) == Removed()
        assert await bench.store.get(id) is None
        assert not await bench.has_result(id)
    bench.advance(10)
    assert await bench.take_ids(9) == ["first"]


@case(rules="67,74,§3")
async def a_remove_can_be_guarded_and_spares_the_running(bench: Bench) -> None:
    running = await bench.hold("a")
    await bench.enqueue("b")
    await bench.refused(NotWaiting, on(Remove, running))
    ready = await bench.get("b")
    await bench.refused(NotWaiting, on(Remove, ready, if_state=State.DEAD))
    await bench.refused(TaskNotFound, on(Remove, ready, id="unknown"))
    assert await bench.do(on(Remove, ready, if_state=State.READY)) == Removed()


@case(rules="§3")
async def a_waiting_task_can_be_rescheduled(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c")
    later = bench.now + 10 * S
    assert await bench.reschedule("a", eta_us=later) == Rescheduled(due_us=later)
    task = await bench.get("a")
    assert (task.state, task.eta_us, task.due_us) == (State.SCHEDULED, later, later)
    assert await bench.reschedule("c", eta_us=bench.now - S) == Rescheduled(due_us=bench.now - S)
    assert sorted(await bench.take_ids(9)) == ["b", "c"]
    assert await bench.do(on(Reschedule, task, delay_us=2 * S)) == Rescheduled(due_us=bench.now + 2 * S)
    bench.advance(2)
    assert await bench.take_ids(9) == ["a"]


@case(rules="§3,§5", needs="due_order")
async def a_rescheduled_task_takes_the_place_of_its_new_time(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    await bench.reschedule("b", eta_us=bench.now - S)
    assert await bench.take_ids(9) == ["b", "a"]


@case(rules="67,74,§3")
async def only_a_waiting_task_can_be_rescheduled(bench: Bench) -> None:
    done, gone, running = await bench.hold("done"), await bench.hold("gone"), await bench.hold("running")
    await bench.ack(done)
    await bench.cancel("gone", token=gone.token)
    for task in (done, gone, running, await bench.dead("dead")):
        await bench.refused(NotWaiting, on(Reschedule, task, delay_us=S))
    await bench.refused(TaskNotFound, on(Reschedule, running, id="unknown", delay_us=S))


@case(rules="§3")
async def a_blocked_task_stays_blocked_when_it_is_rescheduled(bench: Bench) -> None:
    # A new time alone must not bring it into a lane; it counts once the blocker is done.
    await bench.add("first")
    await bench.add("a", after=["first"])
    due = bench.now + 9 * S
    await bench.reschedule("a", eta_us=due)
    assert await bench.state("a") is State.BLOCKED
    await bench.ack((await bench.take())[0])
    task = await bench.get("a")
    assert (task.state, task.due_us) == (State.SCHEDULED, due)


@case(rules="§5")
async def a_task_that_is_rescheduled_to_and_fro_is_due_once(bench: Bench) -> None:
    # In a heap of due times the entry of a former time comes to life when the task returns to that time.
    due = bench.now + 5 * S
    await bench.add("a", eta_us=due)
    for eta in (due + S, due, due, due - S, due):
        await bench.reschedule("a", eta_us=eta)
    bench.advance(9)
    assert await bench.store.promote(DEFAULT_QUEUE, now_us=bench.now) == 1
    await bench.verify()
    assert await bench.take_ids(9) == ["a"]


@case(rules="§5")
async def a_rescheduled_task_loses_its_old_place(bench: Bench) -> None:
    # A returned task stands before all others, until it is given another time.
    await bench.enqueue("a", "b")
    (a,) = await bench.take()
    await bench.release(a)
    bench.advance(1)
    await bench.do(on(Reschedule, a, eta_us=bench.now))
    assert await bench.take_ids(9) == ["b", "a"]
