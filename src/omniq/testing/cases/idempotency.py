"""Idempotency keys: one key, one task, for as long as the key lives."""

from __future__ import annotations

import asyncio

from omniq.errors import IdempotencyConflict
from omniq.models import State
from omniq.operations import Enqueued
from omniq.testing.bench import Bench, S, case

DAY = 86_400


@case(rules="9")
async def the_same_key_gives_the_first_task(bench: Bench) -> None:
    await bench.add("a", idempotency_key="k", payload=b"1")
    again = bench.new("b", idempotency_key="k", payload=b"2")
    assert await bench.unchanged(again) == [Enqueued(id="a", existed=True, state=State.READY)]
    assert [t.payload for t in await bench.all_tasks()] == [b"1"]


@case(rules="§6,67")
async def the_same_key_with_another_body_is_a_conflict(bench: Bench) -> None:
    await bench.add("a", idempotency_key="k", fingerprint="x")
    await bench.refused(IdempotencyConflict, bench.new("b", idempotency_key="k", fingerprint="y"))
    await bench.refused(IdempotencyConflict, bench.new("b", idempotency_key="k", fingerprint="y", on_conflict="return"))


@case(rules="68")
async def a_key_belongs_to_its_queue(bench: Bench) -> None:
    assert not (await bench.add("a", queue="x", idempotency_key="k")).existed
    assert not (await bench.add("b", queue="y", idempotency_key="k", fingerprint="other")).existed


@case(rules="68")
async def without_a_key_nothing_is_deduplicated(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c", payload=b"same", fingerprint="same")
    assert len(await bench.take(9)) == 3


@case(rules="68")
async def of_many_enqueues_with_one_key_one_makes_the_task(bench: Bench) -> None:
    # A driver that looks for the key in one step and writes in another makes several tasks.
    made = await asyncio.gather(*[bench.add(f"t{n}", idempotency_key="k") for n in range(32)])
    assert len({m.id for m in made}) == 1
    assert [m.existed for m in made].count(False) == 1
    assert len(await bench.all_tasks()) == 1


@case(rules="69")
async def a_key_answers_after_its_task_has_ended(bench: Bench) -> None:
    await bench.ack(await bench.hold("done", idempotency_key="k1"))
    await bench.dead("dead", idempotency_key="k2")
    await bench.add("gone", idempotency_key="k3")
    await bench.cancel("gone")
    for key, id, state in (("k1", "done", State.DONE), ("k2", "dead", State.DEAD), ("k3", "gone", State.CANCELLED)):
        assert await bench.add(idempotency_key=key) == Enqueued(id=id, existed=True, state=state)


@case(rules="69,§6")
async def a_key_outlives_the_record(bench: Bench) -> None:
    # One record goes with its ack, the other one by `purge`.
    await bench.ack(await bench.hold("a", idempotency_key="k", result_ttl_us=0))
    await bench.ack(await bench.hold("b", idempotency_key="l", result_ttl_us=S))
    bench.advance(2)
    await bench.purge()
    assert await bench.states("a", "b") == [None, None]
    assert (await bench.add("c", idempotency_key="k")).id == "a"
    assert (await bench.add("d", idempotency_key="l")).id == "b"


@case(rules="§6")
async def a_key_is_free_again_after_its_time(bench: Bench) -> None:
    await bench.ack(await bench.hold("a", idempotency_key="k", key_ttl_us=10 * S))
    bench.advance(9.999)
    assert (await bench.add("b", idempotency_key="k")).id == "a"
    bench.advance(0.001)
    assert await bench.add("b", idempotency_key="k", fingerprint="new") == Enqueued(id="b", existed=False, state=State.READY)
    assert (await bench.add("c", idempotency_key="k", fingerprint="new")).id == "b"


@case(rules="§6")
async def a_key_lives_a_day_by_default(bench: Bench) -> None:
    await bench.ack(await bench.hold("a", idempotency_key="k"))
    bench.advance(DAY - 0.001)
    assert (await bench.add("b", idempotency_key="k")).existed
    bench.advance(0.001)
    assert not (await bench.add("b", idempotency_key="k")).existed


@case(rules="§6")
async def a_key_lives_as_long_as_its_task_is_not_final(bench: Bench) -> None:
    # The key's own second is over long before its task ends.
    await bench.add("a", idempotency_key="k", key_ttl_us=S, delay_us=30 * DAY * S)
    bench.advance(10 * DAY)
    await bench.purge()
    assert (await bench.add("b", idempotency_key="k")) == Enqueued(id="a", existed=True, state=State.SCHEDULED)
    bench.advance(20 * DAY)
    (task,) = await bench.take()
    assert (await bench.add("b", idempotency_key="k")).id == "a"
    await bench.ack(task)
    assert (await bench.add("b", idempotency_key="k")).id == "b"


@case(rules="§1")
async def one_key_twice_in_a_transaction_gives_one_task(bench: Bench) -> None:
    made = await bench.do(bench.new("a", idempotency_key="k"), bench.new("b", idempotency_key="k"))
    assert [(m.id, m.existed) for m in made] == [("a", False), ("a", True)]
    assert [t.id for t in await bench.all_tasks()] == ["a"]


@case(rules="67,§6")
async def one_key_with_two_bodies_in_a_transaction_is_a_conflict(bench: Bench) -> None:
    # When the second task is checked, the first one is not written yet.
    first = bench.new("a", idempotency_key="k", fingerprint="x")
    await bench.refused(IdempotencyConflict, first, bench.new("b", idempotency_key="k", fingerprint="y"))


@case(rules="§6")
async def the_key_is_asked_before_the_id(bench: Bench) -> None:
    # By its id alone the last call would be DuplicateId.
    await bench.add("a", idempotency_key="k", fingerprint="x")
    await bench.add("b", fingerprint="y")
    assert (await bench.add("b", idempotency_key="k", fingerprint="x")).id == "a"


@case(rules="§3")
async def a_removed_task_takes_its_key_along(bench: Bench) -> None:
    await bench.add("a", idempotency_key="k")
    await bench.remove("a")
    assert not (await bench.add("b", idempotency_key="k", fingerprint="other")).existed


@case(rules="§3,§6")
async def a_removed_task_leaves_the_key_of_its_successor_alone(bench: Bench) -> None:
    # The record of `a` still names the key, which belongs to `b` by now.
    await bench.ack(await bench.hold("a", idempotency_key="k", key_ttl_us=S))
    bench.advance(1)
    await bench.add("b", idempotency_key="k")
    await bench.remove("a")
    assert (await bench.add("c", idempotency_key="k")).id == "b"


@case(rules="§3,§6", needs="cross_queue")
async def a_moved_task_keeps_its_key_in_the_queue_it_came_from(bench: Bench) -> None:
    await bench.dead("a", idempotency_key="k", dead_queue="dlq")
    assert (await bench.add("b", idempotency_key="k")).id == "a"
    assert not (await bench.add("c", idempotency_key="k", queue="dlq")).existed
    # `a` is in `dlq` by now, where the same key belongs to `c`.
    await bench.remove("a")
    assert (await bench.add("d", idempotency_key="k", queue="dlq")).id == "c"


@case(rules="§6")
async def an_existing_task_makes_no_event(bench: Bench) -> None:
    await bench.add("a", idempotency_key="k")
    await bench.add("b", idempotency_key="k")
    assert [e.event for e in await bench.all_events()] == ["enqueued"]
