"""A call is a list of transactions; each is all or nothing, and a repeated call does nothing twice."""

from __future__ import annotations

import asyncio

from omniq.errors import DuplicateTarget, Invalid, LimitExceeded, NotActive, Refused, TokenMismatch
from omniq.models import DEFAULT_QUEUE, State, new_token
from omniq.operations import (
    Ack,
    Acked,
    Beat,
    Cancel,
    Enqueued,
    Extend,
    Fail,
    Failed,
    Release,
    Remove,
    Reserve,
    Reserved,
    Retry,
    WorkerInfo,
)
from omniq.testing.bench import BOOM, Bench, S, case, on


@case(rules="§1")
async def an_empty_call_answers_nothing(bench: Bench) -> None:
    assert await bench.call() == []


@case(rules="67,§1")
async def a_transaction_is_all_or_nothing(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.enqueue("b")
    stale = on(Ack, task, token=new_token())
    await bench.refused(TokenMismatch, bench.new("c"), on(Remove, await bench.get("b")), stale)
    await bench.refused(TokenMismatch, stale, bench.new("c"))
    assert await bench.states("a", "b", "c") == [State.RUNNING, State.READY, None]


@case(rules="67,§1")
async def a_refused_transaction_leaves_no_key_behind(bench: Bench) -> None:
    # The enqueue was fine by itself, and only the operation behind it was refused.
    task = await bench.hold("a")
    await bench.refused(TokenMismatch, bench.new("b", idempotency_key="k"), on(Ack, task, token=new_token()))
    assert await bench.add("c", idempotency_key="k") == Enqueued(id="c", existed=False, state=State.READY)


@case(rules="§1")
async def the_other_transactions_of_a_call_go_on(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c")
    a, b, c = await bench.take(3)
    answers = await bench.call((on(Ack, a),), (on(Ack, b, token=new_token()),), (on(Ack, c), bench.new("d")))
    assert answers[0] == [Acked(state=State.DONE)]
    assert type(answers[1]) is TokenMismatch
    assert answers[2] == [Acked(state=State.DONE), Enqueued(id="d", existed=False, state=State.READY)]
    assert await bench.states("a", "b", "c", "d") == [State.DONE, State.RUNNING, State.DONE, State.READY]


@case(rules="§1")
async def later_transactions_see_earlier_ones(bench: Bench) -> None:
    reserve = Reserve(queues=(DEFAULT_QUEUE,), token=new_token(), limit=9)
    # The caller makes the token, so it can end a task in the same call that leases it.
    ack = Ack(queue=DEFAULT_QUEUE, id="a", token=reserve.token)
    answers = await bench.call((bench.new("a"),), (reserve,), (ack,), (bench.new("a"),))
    assert not any(isinstance(a, Refused) for a in answers)
    assert answers[3] == [Enqueued(id="a", existed=True, state=State.DONE)]


@case(rules="§1")
async def a_transaction_targets_each_task_once(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.invalid(DuplicateTarget, on(Extend, task), on(Ack, task))
    await bench.invalid(DuplicateTarget, bench.new("b"), bench.new("b"))
    await bench.invalid(DuplicateTarget, bench.new("b"), Cancel(queue=DEFAULT_QUEUE, id="b"))


@case(rules="§1")
async def reserve_and_beat_stand_alone(bench: Bench) -> None:
    reserve = Reserve(queues=(DEFAULT_QUEUE,), token=new_token())
    await bench.invalid(Invalid, bench.new(), reserve)
    await bench.invalid(Invalid, Beat(info=WorkerInfo(worker="w")), bench.new())


@case(rules="§12")
async def a_transaction_has_a_largest_size(bench: Bench) -> None:
    limit = bench.store.capabilities.max_transaction
    await bench.invalid(LimitExceeded, *[bench.new() for _ in range(limit + 1)])


@case(rules="§1")
async def a_large_transaction_is_taken_whole(bench: Bench) -> None:
    outcomes = await bench.do(*[bench.new() for _ in range(1000)])
    assert len(outcomes) == len(await bench.all_tasks()) == 1000


@case(rules="§1")
async def apply_blocking_is_apply_from_any_thread(bench: Bench) -> None:
    reserve = Reserve(queues=(DEFAULT_QUEUE,), token=new_token())
    call = [(bench.new("a"),), (reserve,), (Ack(queue=DEFAULT_QUEUE, id="a", token=new_token()),)]
    enqueued, reserved, refused = await asyncio.to_thread(bench.store.apply_blocking, call, bench.now)
    assert enqueued == [Enqueued(id="a", existed=False, state=State.READY)]
    assert isinstance(reserved, list)
    assert isinstance(reserved[0], Reserved)
    assert [t.id for t in reserved[0].tasks] == ["a"]
    assert type(refused) is TokenMismatch


@case(rules="§1")
async def apply_blocking_works_while_the_loop_is_blocked(bench: Bench) -> None:
    # On the loop's own thread: a driver that needs the loop for its answer hangs here. Heartbeats rely on it.
    task = await bench.hold("a")
    bench.advance(10)
    (answer,) = bench.store.apply_blocking([(on(Extend, task),)], bench.now)
    assert not isinstance(answer, Refused)
    assert (await bench.get("a")).lease_until_us == bench.now + 30 * S


@case(rules="§1")
async def numbers_are_given_out_once(bench: Bench) -> None:
    blocks = await asyncio.gather(*[bench.store.allocate_ids(n) for n in (1, 5, 100, 3, 1)])
    given = [first + n for first, size in zip(blocks, (1, 5, 100, 3, 1), strict=True) for n in range(size)]
    assert len(set(given)) == len(given) == 110
    assert min(given) > 0


@case(rules="§1")
async def a_waiter_wakes_when_work_arrives(bench: Bench) -> None:
    # Read before the wait begins, so that a task that comes in between is not missed.
    seen = bench.store.changes
    waiting = asyncio.create_task(bench.store.wait(queues=[DEFAULT_QUEUE], after=seen))
    await bench.add("a")
    # A driver that misses the change fails after 30 s instead of hanging.
    await asyncio.wait_for(waiting, 30)
    assert await bench.take_ids() == ["a"]


@case(rules="§1")
async def a_waiter_wakes_when_a_task_ends(bench: Bench) -> None:
    task = await bench.hold("a")
    waiting = asyncio.create_task(bench.store.wait(tasks=["a"], after=bench.store.changes))
    await bench.ack(task)
    await asyncio.wait_for(waiting, 30)
    assert await bench.state("a") is State.DONE


@case(rules="§1")
async def a_wait_ends_when_its_time_is_up(bench: Bench) -> None:
    await asyncio.wait_for(bench.store.wait(queues=["idle"], timeout=0.001), 30)


# -- the same call again, after OutcomeUnknown -----------------------------------------------------


@case(rules="§1")
async def a_repeated_enqueue_existed(bench: Bench) -> None:
    new = bench.new("a", fingerprint="x")
    await bench.do(new, repeat=True)
    assert await bench.unchanged(new, repeat=True) == [Enqueued(id="a", existed=True, state=State.READY)]


@case(rules="§1")
async def a_repeated_enqueue_does_not_replace_what_it_made(bench: Bench) -> None:
    # The first answer was lost and the task has run since. To replace it now would run it twice.
    new = bench.new("a", fingerprint="x", on_conflict="replace_finished")
    await bench.do(new)
    await bench.ack((await bench.take())[0])
    assert await bench.unchanged(new, repeat=True) == [Enqueued(id="a", existed=True, state=State.DONE)]


@case(rules="§1")
async def a_repeated_reserve_gives_the_same_leases(bench: Bench) -> None:
    # Two more tasks under the token would be leased to a worker that does not know of the first two.
    await bench.enqueue("a", "b", "c")
    token = new_token()
    first = await bench.take(2, token=token)
    again = await bench.take(2, token=token, repeat=True)
    assert sorted(t.id for t in again) == [t.id for t in first] == ["a", "b"]
    assert {(t.token, t.attempts, t.lease_until_us) for t in again} == {(token, 1, first[0].lease_until_us)}
    assert await bench.state("c") is State.READY


@case(rules="§1")
async def a_repeated_reserve_that_never_arrived_takes_tasks(bench: Bench) -> None:
    await bench.enqueue("a")
    assert [t.id for t in await bench.take(repeat=True)] == ["a"]


@case(rules="29,§1")
async def a_repeated_ack_or_fail_is_answered(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    a, b = await bench.take(2)
    await bench.do(on(Ack, a), on(Fail, b, error=BOOM))
    outcomes = await bench.unchanged(on(Ack, a), on(Fail, b, error=BOOM), repeat=True)
    assert outcomes == [Acked(state=State.DONE, already=True), Failed(queue=DEFAULT_QUEUE, state=State.DEAD, already=True)]


@case(rules="§1")
async def a_repeated_transaction_of_ack_and_enqueue_changes_nothing(bench: Bench) -> None:
    call = (on(Ack, await bench.hold("a")), bench.new("b", fingerprint="x"))
    await bench.do(*call)
    _, enqueued = await bench.unchanged(*call, repeat=True)
    assert enqueued == Enqueued(id="b", existed=True, state=State.READY)


@case(rules="§1")
async def a_repeated_retry_or_release_changes_nothing(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    a, b = await bench.take(2)
    for again in (on(Retry, a, error=BOOM, delay_us=S), on(Release, b)):
        await bench.do(again)
        before = await bench.snapshot()
        (answer,) = await bench.call((again,), repeat=True)
        # Nobody holds the task any more. The caller reads `NotActive` as done here, and a driver may also answer the outcome.
        assert type(answer) is NotActive or isinstance(answer, list)
        assert await bench.snapshot() == before


@case(rules="§1")
async def a_repeated_ack_of_an_interval_task_changes_nothing(bench: Bench) -> None:
    task = await bench.hold("a", interval_us=60 * S)
    ack = on(Ack, task, again_us=bench.now + 60 * S)
    await bench.do(ack)
    await bench.unchanged(ack, repeat=True)


@case(rules="§1")
async def a_repeat_of_what_never_arrived_is_carried_out(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    a, b = await bench.take(2)
    await bench.do(on(Ack, a), on(Retry, b, error=BOOM, delay_us=S), bench.new("c"), repeat=True)
    assert await bench.states("a", "b", "c") == [State.DONE, State.SCHEDULED, State.READY]
