"""Groups: a limit each, first in first out, and exact turns between lanes."""

from __future__ import annotations

import asyncio

from omniq.errors import Invalid
from omniq.models import DEFAULT_QUEUE, Record, State
from omniq.operations import Ack, Cancel, GroupInfo, Retention
from omniq.testing.bench import Bench, S, case, on, raises


async def info(bench: Bench, group: str) -> GroupInfo:
    return next(g for g in await bench.groups() if g.group == group)


@case(rules="§5")
async def a_group_runs_one_task_at_a_time_and_in_order(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c", group="g")
    for expected in ("a", "b", "c"):
        (task,) = await bench.take(9)
        assert task.id == expected
        assert await bench.take(9) == []
        await bench.ack(task)


@case(rules="§5")
async def a_group_runs_as_many_as_its_limit(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c", "d", group="g", group_limit=3)
    assert await bench.take_ids(9) == ["a", "b", "c"]
    await bench.ack(await bench.get("b"))
    assert await bench.take_ids(9) == ["d"]


@case(rules="§3")
async def the_first_positive_limit_stays(bench: Bench) -> None:
    await bench.add("a", group="g")
    assert (await info(bench, "g")).limit == 1
    await bench.add("b", group="g", group_limit=2)
    await bench.add("c", group="g", group_limit=9)
    await bench.add("d", group="g")
    assert (await info(bench, "g")).limit == 2
    assert await bench.take_ids(9) == ["a", "b"]


@case(rules="§5")
async def a_raised_limit_opens_the_lane_at_once(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c", group="g")
    assert await bench.take_ids(9) == ["a"]
    await bench.store.set_group_limit(DEFAULT_QUEUE, "g", 3)
    assert await bench.take_ids(9) == ["b", "c"]
    assert await info(bench, "g") == GroupInfo(queue=DEFAULT_QUEUE, group="g", limit=3, inflight=3, ready=0)


@case(rules="§5")
async def a_lowered_limit_takes_nothing_away_but_holds_from_then_on(bench: Bench) -> None:
    # After two acks one task still runs, which is all that the new limit allows.
    await bench.enqueue("a", "b", "c", "d", group="g", group_limit=3)
    a, b, c = await bench.take(3)
    await bench.store.set_group_limit(DEFAULT_QUEUE, "g", 1)
    await bench.ack(a)
    await bench.ack(b)
    assert await bench.take(9) == []
    await bench.ack(c)
    assert await bench.take_ids(9) == ["d"]


@case(rules="§5")
async def a_limit_can_be_set_before_there_is_a_task(bench: Bench) -> None:
    # The set limit is then the first one, so that the `group_limit` of a task no longer counts.
    await bench.store.set_group_limit(DEFAULT_QUEUE, "g", 2)
    await bench.enqueue("a", "b", "c", group="g", group_limit=5)
    assert await bench.take_ids(9) == ["a", "b"]
    for bad in (0, -1):
        await raises(Invalid, bench.store.set_group_limit(DEFAULT_QUEUE, "g", bad))


@case(rules="§5")
async def groups_and_ungrouped_tasks_take_turns(bench: Bench) -> None:
    # Groups have the first turn in a new queue.
    await bench.enqueue("u1", "u2", "u3", "u4")
    await bench.enqueue("a1", "a2", "a3", group="a", group_limit=9)
    await bench.enqueue("b1", "b2", group="b", group_limit=9)
    assert await bench.take_ids(20) == ["a1", "u1", "b1", "u2", "a2", "u3", "b2", "u4", "a3"]


@case(rules="§5")
async def the_turn_passes_even_when_the_other_side_served(bench: Bench) -> None:
    # Each grant flips the flag. After two grants it is the turn of the groups again, though both were theirs.
    await bench.enqueue("a1", "a2", "a3", group="a", group_limit=9)
    assert await bench.take_ids(2) == ["a1", "a2"]
    await bench.enqueue("u1", "u2")
    assert await bench.take_ids(9) == ["a3", "u1", "u2"]


@case(rules="§5")
async def an_empty_reserve_leaves_the_turn_alone(bench: Bench) -> None:
    # A driver that flips the flag before it looks gives the next turn to the wrong side.
    await bench.enqueue("a1", "a2", group="a", group_limit=9)
    assert await bench.take_ids(1) == ["a1"]
    await bench.enqueue("u1")
    await bench.take(1, "elsewhere")
    await bench.store.pause(DEFAULT_QUEUE)
    await bench.take(9)
    await bench.store.resume(DEFAULT_QUEUE)
    assert await bench.take_ids(9) == ["u1", "a2"]


@case(rules="§5")
async def the_turn_is_each_queue_s_own(bench: Bench) -> None:
    for queue in ("x", "y"):
        await bench.enqueue(f"{queue}u", queue=queue)
        await bench.enqueue(f"{queue}g", queue=queue, group="g")
    assert await bench.take_ids(1, "x") == ["xg"]
    assert await bench.take_ids(2, "y") == ["yg", "yu"]
    assert await bench.take_ids(1, "x") == ["xu"]


@case(rules="§5")
async def the_lane_that_has_been_open_longest_comes_first(bench: Bench) -> None:
    # `c` has been open from the beginning; `a` and `b` open again when their slots become free, in that order.
    await bench.enqueue("b1", "b2", group="b")
    await bench.enqueue("a1", "a2", group="a")
    await bench.enqueue("c1", "c2", group="c")
    b1, a1 = await bench.take(2)
    assert [b1.id, a1.id] == ["b1", "a1"]
    await bench.ack(a1)
    await bench.ack(b1)
    assert await bench.take_ids(9) == ["c1", "a2", "b2"]


@case(rules="§5")
async def a_lane_that_stays_open_goes_to_the_back(bench: Bench) -> None:
    await bench.enqueue("a1", "a2", "a3", group="a", group_limit=2)
    await bench.enqueue("b1", "b2", group="b", group_limit=2)
    assert await bench.take_ids(9) == ["a1", "b1", "a2", "b2"]


@case(rules="§5", needs="due_order")
async def a_lane_is_ordered_by_due_time(bench: Bench) -> None:
    await bench.add("late", group="g", delay_us=2 * S)
    await bench.add("soon", group="g", delay_us=S)
    bench.advance(3)
    await bench.add("now", group="g")
    await bench.store.set_group_limit(DEFAULT_QUEUE, "g", 9)
    assert await bench.take_ids(9) == ["soon", "late", "now"]


@case(rules="§4,§5")
async def a_retried_task_lets_the_next_of_its_group_run(bench: Bench) -> None:
    await bench.enqueue("a", "b", group="g")
    (a,) = await bench.take(9)
    await bench.retry(a, delay_us=S)
    (b,) = await bench.take(9)
    assert b.id == "b"
    bench.advance(1)
    assert await bench.take(9) == []
    await bench.ack(b)
    assert await bench.take_ids(9) == ["a"]


@case(rules="§5")
async def every_end_of_a_lease_frees_the_slot(bench: Bench) -> None:
    # If one end of a lease does not lower the count of running tasks, the group stays closed for ever.
    await bench.enqueue("ack", "fail", "retry", "cancel", "lost", "last", group="g")

    async def taken() -> Record:
        (task,) = await bench.take(9)
        assert (await info(bench, "g")).inflight == 1
        return task

    await bench.ack(await taken())
    await bench.fail(await taken())
    await bench.retry(await taken(), delay_us=3600 * S)
    await bench.cancel("cancel", token=(await taken()).token)
    assert (await taken()).id == "lost"
    bench.advance(30)
    await bench.reclaim()
    assert (await info(bench, "g")).inflight == 0
    lost = await taken()
    assert lost.id == "lost"
    await bench.release(lost)
    await bench.ack(await taken())
    assert (await taken()).id == "last"


@case(rules="§5")
async def refused_calls_leave_the_slot_taken(bench: Bench) -> None:
    # The other mistake with the count of running tasks is to lower it for calls that end nothing.
    await bench.enqueue("a", "b", group="g")
    (a,) = await bench.take(9)
    await bench.call((on(Ack, a, token="0" * 32),), (on(Ack, a, queue="other"),))
    await bench.cancel("a")
    assert await bench.take(9) == []
    await bench.ack(a)
    await bench.call((on(Ack, a),))
    assert (await info(bench, "g")).inflight == 0
    assert await bench.take_ids(9) == ["b"]


@case(rules="§5")
async def a_waiting_member_that_leaves_closes_an_empty_lane(bench: Bench) -> None:
    # If the empty lane stays listed as open, a driver looks for tasks there in vain.
    await bench.enqueue("a", "b", group="g")
    await bench.enqueue("c", group="h")
    await bench.cancel("a")
    await bench.remove("b")
    assert (await info(bench, "g")).ready == 0
    assert await bench.take_ids(9) == ["c"]


@case(rules="§5")
async def a_group_belongs_to_its_queue(bench: Bench) -> None:
    await bench.enqueue("x1", "x2", queue="x", group="g")
    await bench.enqueue("y1", "y2", queue="y", group="g", group_limit=2)
    assert await bench.take_ids(9, "x", "y") == ["x1", "y1", "y2"]


@case(rules="§5,18")
async def many_reservers_never_exceed_a_limit(bench: Bench) -> None:
    limits = {"one": 1, "two": 2, "five": 5}
    for group, limit in limits.items():
        await bench.do(*[bench.new(f"{group}{n}", group=group, group_limit=limit) for n in range(60)])
    running = dict.fromkeys(limits, 0)
    most = dict.fromkeys(limits, 0)

    async def reserver() -> None:
        while (await bench.counts()).ready:
            tasks = await bench.take(3)
            for task in tasks:
                group = str(task.group)
                running[group] += 1
                most[group] = max(most[group], running[group])
            # The other reservers come in while this one holds its tasks.
            await asyncio.sleep(0)
            for task in tasks:
                running[str(task.group)] -= 1
            await bench.call(*[(on(Ack, t),) for t in tasks])

    await asyncio.gather(*[reserver() for _ in range(8)])
    assert (await bench.counts()).done == 180
    assert all(most[g] <= limit for g, limit in limits.items()), most


@case(rules="§11")
async def groups_are_listed_in_pages(bench: Bench) -> None:
    names = [f"g{n}" for n in range(5)]
    for name in names:
        await bench.enqueue(f"{name}-1", f"{name}-2", group=name)
    await bench.take(2)
    seen: list[GroupInfo] = []
    cursor: str | None = None
    while True:
        page, cursor = await bench.store.groups(DEFAULT_QUEUE, cursor, 2)
        assert len(page) <= 2
        seen += page
        if cursor is None:
            break
    assert sorted(g.group for g in seen) == names
    assert sum(g.inflight for g in seen) == 2
    assert sum(g.ready for g in seen) == 8
    assert await bench.store.groups("unknown") == ([], None)


@case(rules="§5")
async def a_transaction_may_free_and_fill_a_group(bench: Bench) -> None:
    await bench.enqueue("a", group="g")
    (a,) = await bench.take()
    await bench.do(on(Ack, a), bench.new("b", group="g"))
    assert await bench.take_ids(9) == ["b"]
    assert await bench.state("a") is State.DONE


@case(rules="§5")
async def the_turn_passes_in_a_queue_that_has_no_groups_yet(bench: Bench) -> None:
    # Such a queue may take a shorter way, which has to flip the flag all the same.
    await bench.enqueue("u1", "u2")
    assert await bench.take_ids() == ["u1"]
    await bench.enqueue("g1", group="g")
    assert await bench.take_ids(9) == ["u2", "g1"]


async def _purge(bench: Bench, days: float = 0) -> None:
    bench.advance(days * 86_400)
    await bench.purge()


async def _names(bench: Bench) -> list[str]:
    return [g.group for g in await bench.groups()]


@case(rules="§1,§5")
async def a_group_without_tasks_and_limit_is_forgotten(bench: Bench) -> None:
    for n in range(5):
        await bench.hold(f"t{n}", group=f"g{n}")
    for task in await bench.all_tasks():
        await bench.ack(task)
    await bench.add("left", group="left")
    await bench.do(Cancel(queue=DEFAULT_QUEUE, id="left"))
    await bench.add("here", group="here")
    await _purge(bench)
    assert await _names(bench) == ["here"]
    # A group that was forgotten is made anew by its next task.
    await bench.add("again", group="g1")
    assert await bench.take_ids(9) == ["here", "again"]


@case(rules="§1,§5")
async def a_limit_goes_when_its_group_had_no_tasks_for_long(bench: Bench) -> None:
    await bench.ack(await bench.hold("a", group="g", group_limit=3))
    await _purge(bench)
    await _purge(bench, 29)
    assert (await info(bench, "g")).limit == 3
    await bench.ack(await bench.hold("b", group="g"))  # used: it rests anew
    await _purge(bench, 2)
    await _purge(bench, 29)
    assert (await info(bench, "g")).limit == 3
    await _purge(bench, 1)
    assert await _names(bench) == []
    await bench.enqueue("c", "d", group="g")
    assert await bench.take_ids(9) == ["c"]
    await bench.add("e", group="g", group_limit=2)
    assert await bench.take_ids(9) == ["d"]


@case(rules="§1,§5")
async def a_limit_stays_while_its_group_has_tasks(bench: Bench) -> None:
    await bench.add("blocker")
    # The leases outlast all the purges, so that nothing runs out in between.
    (blocker,) = await bench.take(lease_us=300 * 86_400 * S)
    await bench.add("ready", group="ready", group_limit=2)
    await bench.add("scheduled", group="scheduled", group_limit=2, delay_us=100 * 86_400 * S)
    await bench.add("blocked", group="blocked", group_limit=2, after=["blocker"])
    await bench.hold("running", queue="other", group="running", group_limit=2, lease_us=300 * 86_400 * S)
    for _ in range(4):
        await _purge(bench, 31)
        found = [*await bench.groups(), *await bench.groups("other")]
        assert {g.group: g.limit for g in found} == dict.fromkeys(("ready", "scheduled", "blocked", "running"), 2)
    await bench.ack(blocker)
    assert sorted(await bench.take_ids(9)) == ["blocked", "ready", "scheduled"]


@case(rules="§1,§5")
async def a_limit_that_was_set_by_hand_stays_as_long(bench: Bench) -> None:
    await bench.store.set_group_limit(DEFAULT_QUEUE, "g", 4)
    await _purge(bench)
    await _purge(bench, 29)
    await bench.store.set_group_limit(DEFAULT_QUEUE, "g", 5)
    await _purge(bench, 29)
    assert (await info(bench, "g")).limit == 5
    # None keeps limits for ever, but a later purge with a limit counts from when the group was found idle.
    await bench.store.purge(Retention(limits_us=None), bench.advance(365 * 86_400))
    assert (await info(bench, "g")).limit == 5
    await _purge(bench)
    assert await _names(bench) == []
