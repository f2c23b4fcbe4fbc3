"""Reserve: the choice of tasks, the length of their leases, and how lost leases are taken back."""

from __future__ import annotations

import asyncio

from omniq.errors import Invalid, InvalidLease, LeaseHeld, NotActive, TaskNotFound, TokenMismatch
from omniq.models import DEFAULT_QUEUE, Record, State, new_token
from omniq.operations import Ack, Cancel, Fail, OnTask, Reserve, Reserved, Retry
from omniq.testing.bench import Bench, S, case, on


@case(rules="10")
async def an_empty_queue_gives_nothing(bench: Bench) -> None:
    assert await bench.reserve(9) == Reserved(tasks=[])
    assert await bench.reserve(9, "never", "heard.of") == Reserved(tasks=[])


@case(rules="11,§3")
async def a_reserve_must_make_sense(bench: Bench) -> None:
    await bench.add("a")
    for lease in (0, -1):
        await bench.invalid(InvalidLease, Reserve(queues=(DEFAULT_QUEUE,), token=new_token(), lease_us=lease))
    await bench.invalid(Invalid, Reserve(queues=(DEFAULT_QUEUE,), token=new_token(), limit=0))
    await bench.invalid(Invalid, Reserve(queues=(DEFAULT_QUEUE,), token="short"))  # noqa: S106


@case(rules="12,§3")
async def a_lease_ends_when_the_caller_says_or_the_task_or_after_30_s(bench: Bench) -> None:
    # `c` has a length of its own, and the caller names another one, which counts.
    await bench.add("a", lease_us=7 * S)
    await bench.add("b")
    await bench.add("c", lease_us=7 * S)
    a, b = await bench.take(2)
    (c,) = await bench.take(lease_us=5 * S)
    assert [t.lease_until_us for t in (a, b, c)] == [bench.now + n * S for n in (7, 30, 5)]


@case(rules="§3")
async def a_grant_counts_the_attempt_and_names_the_worker(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    bench.advance(1)
    token = new_token()
    tasks = await bench.take(5, token=token, worker="w1")
    assert tasks == [await bench.get("a"), await bench.get("b")]
    for task in tasks:
        assert (task.state, task.token, task.attempts, task.worker) == (State.RUNNING, token, 1, "w1")
        assert (task.started_at_us, task.updated_at_us, task.created_at_us) == (bench.now, bench.now, bench.now - S)


@case(rules="13")
async def a_leased_task_is_not_handed_out_again(bench: Bench) -> None:
    await bench.hold("a")
    assert await bench.take() == []
    bench.advance(15)
    assert await bench.reclaim() == 0
    assert await bench.take() == []


@case(rules="14,15,31")
async def after_its_lease_a_task_goes_to_the_next(bench: Bench) -> None:
    first = await bench.hold("a")
    bench.advance(30)
    assert await bench.reclaim() == 1
    (second,) = await bench.take()
    assert (second.id, second.attempts) == ("a", 2)
    assert second.token != first.token


@case(rules="14,§9")
async def expired_shows_a_lease_from_the_moment_it_ends(bench: Bench) -> None:
    # At `lease_until_us` itself it is over.
    task = await bench.hold("a")
    bench.advance(29.999)
    assert await bench.store.expired(bench.now) == []
    bench.advance(0.001)
    before = await bench.snapshot()
    (lease,) = await bench.store.expired(bench.now)
    assert (lease.record, lease.lost) == (task, "expired")
    assert await bench.snapshot() == before


@case(rules="§9")
async def expired_can_be_asked_by_queue_and_in_portions(bench: Bench) -> None:
    for queue in ("one", "two"):
        for _ in range(3):
            await bench.hold(queue=queue)
    bench.advance(30)
    assert {x.record.queue for x in await bench.store.expired(bench.now, queues=["two"])} == {"two"}
    assert len(await bench.store.expired(bench.now, 2)) == 2
    assert len(await bench.store.expired(bench.now)) == 6


@case(rules="§9")
async def a_lost_worker_loses_its_leases_at_once(bench: Bench) -> None:
    await bench.hold("a", worker="dead")
    await bench.hold("b", worker="alive")
    (lease,) = await bench.store.expired(bench.now, lost_workers=["dead"])
    assert (lease.record.id, lease.lost) == ("a", "worker_lost")
    assert await bench.store.reclaim(bench.now, lost_workers=["dead"]) == 1
    assert await bench.states("a", "b") == [State.READY, State.RUNNING]


@case(rules="16,§4")
async def reclaim_clears_the_eta_and_keeps_the_place(bench: Bench) -> None:
    # The eta was a wish for the first run. A lost task keeps only `due_us`, its place in the lane.
    due = bench.now + S
    await bench.add("a", eta_us=due)
    bench.advance(1)
    await bench.take()
    bench.advance(30)
    await bench.enqueue("b")
    await bench.reclaim()
    task = await bench.get("a")
    assert (task.eta_us, task.due_us, task.attempts, task.token) == (None, due, 1, None)
    assert await bench.take_ids(9) == ["a", "b"]


@case(rules="17")
async def the_first_reserve_keeps_the_eta(bench: Bench) -> None:
    await bench.add("a", eta_us=bench.now + S)
    bench.advance(2)
    (task,) = await bench.take()
    assert (task.eta_us, task.due_us) == (bench.now - S, bench.now - S)


@case(rules="18")
async def many_reservers_share_the_work_and_never_a_task(bench: Bench) -> None:
    for start in range(0, 2000, 500):
        await bench.do(*[bench.new(f"t{n}") for n in range(start, start + 500)])
    held: set[str] = set()
    runs: list[str] = []

    async def reserver() -> None:
        # The clock stands still, so that no lease runs out, however slow the machine is.
        while tasks := await bench.take(7, lease_us=200_000):
            ids = {t.id for t in tasks}
            assert not held & ids, "a task was handed out twice"
            held.update(ids)
            runs.extend(ids)
            await asyncio.sleep(0)
            answers = await bench.call(*[(on(Ack, t),) for t in tasks])
            assert all(isinstance(a, list) for a in answers)
            held.difference_update(ids)

    await asyncio.gather(*[reserver() for _ in range(32)])
    assert len(runs) == len(set(runs)) == 2000
    assert (await bench.counts()).done == 2000


@case(rules="19")
async def of_many_one_takes_an_expired_lease(bench: Bench) -> None:
    # `reserve` takes back expired leases by itself, so that 32 callers do it at the same time.
    old = await bench.hold("a")
    bench.advance(30)
    at = bench.clock.now
    taken = await asyncio.gather(*[bench.store.reserve(DEFAULT_QUEUE, 30, now=at) for _ in range(32)])
    winners: list[Record] = [t for t in taken if t is not None]
    assert len(winners) == 1
    assert winners[0].token != old.token
    assert (await bench.get("a")).attempts == 2


@case(rules="§5")
async def each_queue_is_emptied_before_the_next(bench: Bench) -> None:
    await bench.enqueue("a1", "a2", queue="a")
    await bench.enqueue("b1", "b2", queue="b")
    assert await bench.take_ids(3, "b", "a") == ["b1", "b2", "a1"]


@case(rules="§5")
async def a_reserve_of_many_equals_many_reserves(bench: Bench) -> None:
    # A driver that takes many tasks in one statement has to keep the turns of the lanes in it.
    for queue in ("many", "single"):
        for n in range(12):
            group = None if n % 3 == 0 else f"g{n % 4}"
            await bench.add(f"{queue}{n}", queue=queue, group=group, group_limit=2 if group else 0)
    at_once = [i.removeprefix("many") for i in await bench.take_ids(10, "many")]
    one_by_one = [(await bench.take_ids(1, "single"))[0].removeprefix("single") for _ in range(10)]
    assert at_once == one_by_one


@case(rules="§3")
async def next_at_is_when_something_falls_due_or_runs_out(bench: Bench) -> None:
    # An idle worker sleeps until then.
    assert (await bench.reserve()).next_at_us is None
    await bench.add("later", delay_us=50 * S)
    assert (await bench.reserve()).next_at_us == bench.now + 50 * S
    assert (await bench.reserve(1, "other")).next_at_us is None
    await bench.hold("a", lease_us=20 * S)
    assert (await bench.reserve()).next_at_us == bench.now + 20 * S
    assert (await bench.reserve(1, "other", DEFAULT_QUEUE)).next_at_us == bench.now + 20 * S


@case(rules="§2")
async def promote_makes_due_tasks_ready_and_counts_them(bench: Bench) -> None:
    for seconds in (3, 1, 2):
        await bench.add(f"t{seconds}", delay_us=seconds * S)
    assert await bench.store.promote(DEFAULT_QUEUE, now_us=bench.now) == 0
    bench.advance(2)
    assert await bench.store.promote("other", now_us=bench.now) == 0
    assert await bench.store.promote(DEFAULT_QUEUE, 1, bench.now) == 1
    assert await bench.states("t1", "t2", "t3") == [State.READY, State.SCHEDULED, State.SCHEDULED]
    assert await bench.store.promote(DEFAULT_QUEUE, now_us=bench.now) == 1
    assert await bench.take_ids(9) == ["t1", "t2"]


@case(rules="§2")
async def more_due_tasks_than_one_call_promotes_all_come(bench: Bench) -> None:
    # One Reserve makes 1,000 due tasks ready at most.
    await bench.do(*[bench.new(f"t{n:04}", delay_us=S) for n in range(1500)])
    bench.advance(1)
    taken = await bench.take_ids(800) + await bench.take_ids(800)
    while more := await bench.take_ids(800):
        taken += more
    assert taken == [f"t{n:04}" for n in range(1500)]


# -- reaping -------------------------------------------------------------------------------------


# A reaper has read the lease before: since then the task may have been renewed, ended, or leased to another worker.
REAPS: list[tuple[type[OnTask], dict[str, str]]] = [(kind, {"lost": "expired"}) for kind in (Retry, Fail, Cancel)]


@case(rules="67,§3")
async def a_reaper_that_comes_too_early_is_refused(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(29.999)
    for kind, lost in REAPS:
        await bench.refused(LeaseHeld, on(kind, task, token=task.token, **lost))


@case(rules="67,§3")
async def a_reaper_that_saw_another_lease_is_refused(bench: Bench) -> None:
    task = await bench.hold("a")
    bench.advance(30)
    for kind, lost in REAPS:
        await bench.refused(TokenMismatch, on(kind, task, token=new_token(), **lost))


@case(rules="67,§3")
async def a_reaper_that_comes_too_late_is_refused(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    a, b = await bench.take(2)
    await bench.do(on(Ack, a), on(Retry, b))
    bench.advance(30)
    for kind, lost in REAPS:
        await bench.refused(NotActive, on(kind, a, token=a.token, **lost))
        await bench.refused(NotActive, on(kind, b, token=b.token, **lost))
        await bench.refused(TaskNotFound, on(kind, b, id="unknown", token=b.token, **lost))


@case(rules="§3,§9")
async def a_reaper_of_a_lost_worker_need_not_wait_for_the_lease(bench: Bench) -> None:
    for kind, state in ((Retry, State.READY), (Fail, State.DEAD), (Cancel, State.CANCELLED)):
        task = await bench.hold(kind.__name__, queue=kind.__name__)
        await bench.do(on(kind, task, token=task.token, lost="worker_lost"))
        assert await bench.state(task.id) is state


@case(rules="§4,§9")
async def a_task_that_keeps_losing_its_worker_dies(bench: Bench) -> None:
    # A task that kills its workers would otherwise go round for ever.
    await bench.add("a", max_attempts=3)
    for _ in range(3):
        assert await bench.take_ids() == ["a"]
        bench.advance(30)
        assert await bench.reclaim() == 1
    task = await bench.get("a")
    assert (task.state, task.attempts) == (State.DEAD, 3)
    assert task.last_error is not None
    assert task.last_error.type == "WorkerLost"


@case(rules="§4,§9")
async def a_lost_task_that_was_to_be_cancelled_is_cancelled(bench: Bench) -> None:
    # The holder that was asked to stop is gone; nobody else would do it.
    await bench.hold("a")
    await bench.cancel("a")
    bench.advance(30)
    assert await bench.reclaim() == 1
    assert await bench.state("a") is State.CANCELLED
    assert await bench.take() == []


@case(rules="§4")
async def a_policy_may_ask_for_a_pause_after_a_loss(bench: Bench) -> None:
    await bench.hold("a", backoff="fixed:base=5000,jitter=0,loss=backoff")
    bench.advance(30)
    assert await bench.reclaim() == 1
    task = await bench.get("a")
    assert (task.state, task.due_us) == (State.SCHEDULED, bench.now + 5 * S)


@case(rules="§9")
async def a_task_without_a_try_left_dies_with_its_worker(bench: Bench) -> None:
    await bench.hold("a", max_attempts=1, worker="w")
    assert await bench.store.reclaim(bench.now, lost_workers=["w"]) == 1
    assert await bench.state("a") is State.DEAD
