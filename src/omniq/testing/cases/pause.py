"""A paused queue grants nothing; everything else about it goes on."""

from __future__ import annotations

from omniq.errors import QueueRequired
from omniq.models import DEFAULT_QUEUE, State
from omniq.operations import Reserved
from omniq.testing.bench import Bench, S, case, raises


@case(rules="§5")
async def a_paused_queue_grants_nothing(bench: Bench) -> None:
    await bench.enqueue("a")
    await bench.store.pause(DEFAULT_QUEUE)
    reserved = await bench.reserve(9)
    assert (reserved.tasks, reserved.paused) == ([], (DEFAULT_QUEUE,))
    await bench.store.resume(DEFAULT_QUEUE)
    assert await bench.take_ids(9) == ["a"]


@case(rules="§5")
async def the_other_queues_go_on(bench: Bench) -> None:
    await bench.enqueue("a", queue="a")
    await bench.enqueue("b", queue="b")
    await bench.store.pause("a")
    reserved = await bench.reserve(9, "a", "b", "c")
    assert ([t.id for t in reserved.tasks], reserved.paused) == (["b"], ("a",))


@case(rules="§5")
async def everything_but_grants_goes_on_in_a_paused_queue(bench: Bench) -> None:
    # A pause stops new runs. Runs under way end as usual, and due times, lost leases and cancels do not wait.
    await bench.enqueue("acked", "lost")
    acked, lost = await bench.take(2)
    await bench.store.pause(DEFAULT_QUEUE)
    await bench.extend(acked)
    await bench.ack(acked)
    await bench.add("later", delay_us=S)
    bench.advance(1)
    assert await bench.store.promote(DEFAULT_QUEUE, now_us=bench.now) == 1
    bench.advance(29)
    assert await bench.reclaim() == 1
    await bench.cancel("later")
    assert await bench.states("acked", lost.id, "later") == [State.DONE, State.READY, State.CANCELLED]


@case(rules="§5")
async def a_pause_can_be_seen(bench: Bench) -> None:
    await bench.enqueue("a")
    assert not await bench.store.is_paused(DEFAULT_QUEUE)
    assert not (await bench.counts()).paused
    await bench.store.pause(DEFAULT_QUEUE)
    await bench.store.pause(DEFAULT_QUEUE)
    assert await bench.store.is_paused(DEFAULT_QUEUE)
    assert (await bench.counts()).paused
    assert not await bench.store.is_paused("other")


@case(rules="§11")
async def resume_says_whether_it_was_paused(bench: Bench) -> None:
    await bench.store.pause(DEFAULT_QUEUE)
    assert await bench.store.resume(DEFAULT_QUEUE) is True
    assert await bench.store.resume(DEFAULT_QUEUE) is False
    assert await bench.store.resume("never.seen") is False


@case(rules="§5")
async def a_queue_can_be_paused_before_it_has_tasks(bench: Bench) -> None:
    # The name is given to the store by the pause, not by a first task.
    await bench.store.pause("new")
    await bench.enqueue("a", "g", queue="new", group="g")
    assert await bench.reserve(9, "new") == Reserved(tasks=[], paused=("new",))


@case(rules="73")
async def only_a_proper_queue_can_be_paused(bench: Bench) -> None:
    for call in (bench.store.pause, bench.store.resume, bench.store.is_paused):
        await raises(QueueRequired, call("a b"))
        await raises(QueueRequired, call(""))


@case(rules="80", needs="durable")
async def a_pause_survives_reopening(bench: Bench) -> None:
    await bench.enqueue("a")
    await bench.store.pause(DEFAULT_QUEUE)
    await bench.reopen()
    assert await bench.take(9) == []
    assert await bench.store.resume(DEFAULT_QUEUE)
