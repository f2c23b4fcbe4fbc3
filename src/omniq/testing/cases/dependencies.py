"""Tasks that wait for other tasks: freed when those are done, failed when those die."""

from __future__ import annotations

from omniq.errors import Invalid, NotActive, Refused
from omniq.models import Blocker, State
from omniq.operations import Ack, Cancel, Enqueued, Fail, OnTask, Remove, Reschedule
from omniq.testing.bench import BOOM, Bench, S, case, on


@case(rules="§6")
async def a_blocked_task_waits_for_its_blocker(bench: Bench) -> None:
    await bench.add("a")
    assert await bench.add("b", after=["a"]) == Enqueued(id="b", existed=False, state=State.BLOCKED)
    (a,) = await bench.take(9)
    assert a.id == "a"
    bench.advance(5)
    await bench.ack(a)
    task = await bench.get("b")
    assert (task.state, task.due_us, task.created_at_us) == (State.READY, bench.now, bench.now - 5 * S)
    assert await bench.take_ids(9) == ["b"]


@case(rules="§6")
async def a_blocked_task_waits_for_all_its_blockers(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c")
    # A driver that counts `a` twice waits for it for ever.
    await bench.add("last", after=["a", "b", "c", "a"])
    for task in await bench.take(9):
        assert await bench.state("last") is State.BLOCKED
        await bench.ack(task)
    assert await bench.take_ids(9) == ["last"]


@case(rules="§6")
async def an_unknown_or_done_blocker_is_satisfied(bench: Bench) -> None:
    await bench.ack(await bench.hold("done"))
    assert (await bench.add(after=["done", "unknown"])).state is State.READY
    assert (await bench.add(after=["unknown"], delay_us=S)).state is State.SCHEDULED
    await bench.add("open")
    assert (await bench.add("b", after=["done", "unknown", "open"])).state is State.BLOCKED


@case(rules="§6")
async def a_dead_or_cancelled_blocker_fails_the_new_task_at_once(bench: Bench) -> None:
    await bench.dead("dead")
    await bench.add("gone")
    await bench.cancel("gone")
    await bench.add("open")
    for blocker in ("dead", "gone"):
        # The first blocker is open: the second has to be looked at all the same.
        made = await bench.add(f"after-{blocker}", after=["open", blocker])
        assert made == Enqueued(id=f"after-{blocker}", existed=False, state=State.DEAD)
        result = await bench.result(made.id)
        assert result.error is not None
        assert result.error.type == "BlockerFailed"
        assert await bench.events(made.id) == ["enqueued", "failed"]
    assert await bench.take_ids(9) == ["open"]


@case(rules="§6")
async def dead_blockers_can_be_ignored(bench: Bench) -> None:
    await bench.dead("dead")
    assert (await bench.add("a", after=["dead"], dead_blockers="ignore")).state is State.READY


@case(rules="§6")
async def a_task_cannot_wait_for_itself(bench: Bench) -> None:
    await bench.invalid(Invalid, bench.new("a", after=["a"]))


@case(rules="§6")
async def a_chain_runs_link_by_link(bench: Bench) -> None:
    await bench.chain("t0", "t1", "t2", "t3", "t4")
    for n in range(5):
        (task,) = await bench.take(9)
        assert task.id == f"t{n}"
        await bench.ack(task)


@case(rules="§6")
async def a_failure_fails_everything_behind_it(bench: Bench) -> None:
    await bench.enqueue("a", "other")
    await bench.add("b", after=["a", "other"])
    await bench.add("c", after=["b"])
    await bench.add("d", after=["c", "other"])
    await bench.fail((await bench.take())[0])
    assert await bench.states("b", "c", "d", "other") == [State.DEAD, State.DEAD, State.DEAD, State.READY]
    for id in ("b", "c", "d"):
        task = await bench.get(id)
        assert task.last_error is not None
        assert (task.last_error.type, task.attempts, task.finished_at_us) == ("BlockerFailed", 0, bench.now)
        assert await bench.events(id) == ["enqueued", "failed"]
    # `b` and `d` also wait for `other`, whose good end must not revive them.
    await bench.ack((await bench.take())[0])
    assert await bench.take(9) == []


@case(rules="§3,§6")
async def a_cancelled_blocker_fails_its_dependents(bench: Bench) -> None:
    await bench.chain("a", "b", "c")
    await bench.cancel("a")
    assert await bench.states("a", "b", "c") == [State.CANCELLED, State.DEAD, State.DEAD]


@case(rules="§6")
async def a_cancelled_link_fails_only_what_is_behind_it(bench: Bench) -> None:
    await bench.chain("a", "b", "c")
    await bench.cancel("b")
    assert await bench.states("a", "b", "c") == [State.READY, State.CANCELLED, State.DEAD]
    await bench.ack((await bench.take())[0])
    assert await bench.take(9) == []


@case(rules="§3")
async def a_removed_waiting_blocker_fails_its_dependents(bench: Bench) -> None:
    await bench.chain("a", "b")
    await bench.remove("a")
    assert await bench.states("a", "b") == [None, State.DEAD]


@case(rules="§4,§6")
async def only_a_final_failure_cascades(bench: Bench) -> None:
    # A retry, a release and a lost lease end a run, but not the task.
    task = await bench.hold("a")
    await bench.add("b", after=["a"])
    await bench.retry(task)
    (task,) = await bench.take()
    await bench.release(task)
    bench.advance(1)
    (task,) = await bench.take()
    bench.advance(30)
    await bench.reclaim()
    assert await bench.state("b") is State.BLOCKED
    await bench.ack((await bench.take())[0])
    assert await bench.state("b") is State.READY


@case(rules="§6")
async def a_requeued_blocker_does_not_revive_its_dependents(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.add("b", after=["a"])
    await bench.fail(task)
    await bench.requeue("a")
    await bench.ack((await bench.take())[0])
    assert await bench.state("b") is State.DEAD


@case(rules="§6")
async def a_requeued_dependent_waits_for_nobody(bench: Bench) -> None:
    # The dead blocker is still there; a driver that looks at it again fails the dependent once more.
    await bench.dead("a")
    await bench.add("b", after=["a"])
    await bench.requeue("b")
    assert await bench.take_ids(9) == ["b"]


@case(rules="§2")
async def a_freed_task_still_waits_for_its_eta(bench: Bench) -> None:
    task = await bench.hold("a")
    eta = bench.now + 10 * S
    await bench.add("b", after=["a"], eta_us=eta)
    bench.advance(1)
    await bench.ack(task)
    freed = await bench.get("b")
    assert (freed.state, freed.eta_us, freed.due_us) == (State.SCHEDULED, eta, eta)
    bench.advance(9)
    assert await bench.take_ids(9) == ["b"]


@case(rules="§2,§5")
async def a_freed_task_is_placed_by_the_moment_it_was_freed(bench: Bench) -> None:
    # By its eta, a minute ago, `b` would overtake a task that was ready before it.
    task = await bench.hold("a")
    await bench.add("b", after=["a"], eta_us=bench.now - 60 * S)
    bench.advance(1)
    await bench.enqueue("c")
    bench.advance(1)
    await bench.ack(task)
    assert (await bench.get("b")).due_us == bench.now
    assert await bench.take_ids(9) == ["c", "b"]


@case(rules="§6")
async def a_transaction_may_enqueue_a_whole_chain(bench: Bench) -> None:
    task = await bench.hold("first")
    # `first` ends in the transaction that names it as a blocker, and so `c` does not wait for it.
    made = await bench.do(bench.new("a"), bench.new("b", after=["a"]), bench.new("c", after=["a", "b", "first"]), on(Ack, task))
    assert [m.state for m in made[:3]] == [State.READY, State.BLOCKED, State.BLOCKED]
    for expected in ("a", "b", "c"):
        (task,) = await bench.take(9)
        assert task.id == expected
        await bench.ack(task)


@case(rules="§6")
async def a_blocked_task_of_a_group_takes_no_slot(bench: Bench) -> None:
    await bench.add("a")
    await bench.add("b", after=["a"], group="g")
    await bench.add("c", group="g")
    c, a = await bench.take(9)
    assert (a.id, c.id) == ("a", "c")
    await bench.ack(a)
    assert await bench.take(9) == []
    await bench.ack(c)
    assert await bench.take_ids(9) == ["b"]


@case(rules="§6")
async def a_blocker_that_leaves_no_record_frees_too(bench: Bench) -> None:
    # With a ttl of nothing the ack removes the record, and its dependents still have to hear of it.
    task = await bench.hold("a", result_ttl_us=0)
    await bench.add("b", after=["a"])
    await bench.ack(task)
    assert await bench.states("a", "b") == [None, State.READY]


@case(rules="§6")
async def a_task_whose_key_was_known_blocks_in_place_of_the_new_one(bench: Bench) -> None:
    # `again` and `d` are never stored. A dependent that waited for their ids would run at once, as if they were unknown.
    await bench.add("a", idempotency_key="k")
    twice = bench.new("c", idempotency_key="l"), bench.new("d", idempotency_key="l"), bench.new("e", after=["d"])
    await bench.do(bench.new("again", idempotency_key="k"), bench.new("b", after=["again"]), *twice)
    assert [[b.id for b in (await bench.get(id)).blocked_by] for id in "be"] == [["a"], ["c"]]
    # In another transaction the id is simply unknown.
    await bench.add("f", after=["again"])
    a, c, f = await bench.take(9)
    assert (a.id, c.id, f.id) == ("a", "c", "f")
    await bench.ack(a)
    assert await bench.take_ids(9) == ["b"]
    await bench.fail(c)
    assert await bench.state("e") is State.DEAD


@case(rules="§6", needs="cross_queue")
async def a_blocker_may_be_in_another_queue(bench: Bench) -> None:
    task = await bench.hold("a", queue="x")
    await bench.add("b", queue="y", blocked_by=(Blocker("a", "x"),))
    assert await bench.take(9, "y") == []
    await bench.ack(task)
    assert await bench.take_ids(9, "y") == ["b"]


@case(rules="§6", needs="cross_queue")
async def dependents_fail_each_to_its_own_dead_queue(bench: Bench) -> None:
    task = await bench.hold("a", dead_queue="dlq.a")
    await bench.add("b", after=["a"], dead_queue="dlq.b")
    await bench.add("c", after=["b"])
    await bench.fail(task)
    a, b, c = [await bench.get(i) for i in ("a", "b", "c")]
    assert [(t.queue, t.state) for t in (a, b, c)] == [("dlq.a", State.READY), ("dlq.b", State.READY), ("default", State.DEAD)]
    assert (b.blocked_by, b.dead_queue, b.attempts) == ((), None, 0)
    assert await bench.take_ids(9, "dlq.b") == ["b"]


@case(rules="§4,§6", needs="cross_queue")
async def a_new_task_with_a_dead_blocker_goes_to_its_dead_queue(bench: Bench) -> None:
    await bench.dead("a")
    await bench.add("b", after=["a"], dead_queue="dlq")
    assert ((await bench.get("b")).queue, await bench.state("b")) == ("dlq", State.READY)


@case(rules="§6")
async def very_many_dependents_are_freed_in_the_end(bench: Bench) -> None:
    # One transaction moves up to 1,000 dependents, so that this takes two portions of `sweep` as well.
    await bench.ack(await bench.hold_with_dependents(2300))
    assert (await bench.counts()).ready >= 1000
    await bench.sweep()
    counts = await bench.counts()
    assert (counts.blocked, counts.ready) == (0, 2300)


@case(rules="§6")
async def very_many_dependents_fail_in_the_end(bench: Bench) -> None:
    await bench.fail(await bench.hold_with_dependents(2300))
    assert (await bench.counts()).dead >= 1000
    await bench.sweep()
    counts = await bench.counts()
    assert (counts.blocked, counts.ready, counts.dead) == (0, 0, 2301)
    assert len([e for e in await bench.all_events() if e.event == "failed"]) == 2301


@case(rules="§6")
async def a_long_cascade_goes_on_behind_what_sweep_finished(bench: Bench) -> None:
    # `tail` waits for a task that only `sweep` fails, and `end` for `tail`.
    task = await bench.hold_with_dependents(1200)
    await bench.add("tail", after=["d1199"])
    await bench.add("end", after=["tail"])
    await bench.fail(task)
    await bench.sweep()
    assert await bench.states("tail", "end") == [State.DEAD, State.DEAD]
    assert (await bench.counts()).blocked == 0


@case(rules="§6")
async def a_dependent_of_a_half_finished_cascade_can_still_be_cancelled(bench: Bench) -> None:
    # Its blocker has died, and the cascade has not come to it yet.
    await bench.fail(await bench.hold_with_dependents(1100))
    (left, *_) = await bench.all_tasks(states=(State.BLOCKED,))
    assert (await bench.cancel(left.id)).state is State.CANCELLED
    await bench.sweep()
    assert await bench.state(left.id) is State.CANCELLED
    assert (await bench.counts()).blocked == 0


@case(rules="§6")
async def sweep_has_nothing_to_do_on_a_quiet_store(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.add("b", after=["a"])
    assert await bench.store.sweep(bench.now) == 0
    await bench.ack(task)
    assert await bench.store.sweep(bench.now) == 0
    await bench.refused(NotActive, on(Fail, await bench.get("b"), token="0" * 32, error=BOOM))


@case(rules="§1,§2,§6")
async def a_cascade_never_revives_another_target_of_its_transaction(bench: Bench) -> None:
    # The first operation ends the target of the second. A driver may refuse that, or let the second find an ended task.
    kinds: list[type[OnTask]] = [Cancel, Remove, Reschedule]
    for kind in kinds:
        first, second = f"{kind.__name__}-1", f"{kind.__name__}-2"
        await bench.add(first)
        await bench.add(second, after=[first], group="g")
        before = await bench.snapshot()
        (answer,) = await bench.call((on(Cancel, await bench.get(first)), on(kind, await bench.get(second))))
        if isinstance(answer, Refused):
            assert await bench.snapshot() == before
        else:
            assert await bench.state(second) in (State.DEAD, State.CANCELLED, None)
            ends = [e for e in await bench.events(second) if e in ("failed", "cancelled")]
            assert len(ends) <= 1, ends
        await bench.verify()


@case(rules="§1,§6")
async def a_freed_task_may_be_another_target_of_its_transaction(bench: Bench) -> None:
    # All operations are checked while these tasks are BLOCKED, and find them READY when they are carried out.
    task = await bench.hold("a")
    for id in ("cancelled", "removed", "later"):
        await bench.add(id, after=["a"], group="g")
    cancelled, removed, later = [await bench.get(i) for i in ("cancelled", "removed", "later")]
    await bench.do(on(Ack, task), on(Cancel, cancelled), on(Remove, removed), on(Reschedule, later, delay_us=S))
    assert await bench.states("cancelled", "removed", "later") == [State.CANCELLED, None, State.SCHEDULED]
    assert await bench.take(9) == []
    bench.advance(1)
    assert await bench.take_ids(9) == ["later"]
