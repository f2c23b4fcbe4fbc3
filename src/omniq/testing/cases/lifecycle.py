"""Opening and closing a storage, and the state that a durable store keeps in between."""

from __future__ import annotations

from collections.abc import Awaitable

from omniq.errors import DriverClosed, TokenMismatch
from omniq.models import DEFAULT_QUEUE, State, new_token
from omniq.operations import Ack, Filter, Retention
from omniq.testing.bench import Bench, S, case, on, raises


@case(rules="79")
async def opening_twice_is_harmless(bench: Bench) -> None:
    await bench.store.open()
    await bench.enqueue("a")
    await bench.store.open()
    assert await bench.take_ids() == ["a"]


@case(rules="79")
async def closing_twice_is_harmless(bench: Bench) -> None:
    await bench.enqueue("a")
    await bench.close()
    await bench.close()


@case(rules="79")
async def closing_before_opening_is_harmless(bench: Bench) -> None:
    await bench.close()
    await raises(DriverClosed, bench.call((bench.new(),)))


@case(rules="51,79")
async def a_closed_storage_refuses_every_call(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.close()
    store, at = bench.store, bench.now

    async def blocking() -> None:
        store.apply_blocking([(bench.new(),)], at)

    calls: list[Awaitable[object]] = [
        bench.call((bench.new(),)),
        bench.call((on(Ack, task),)),
        bench.reserve(),
        blocking(),
        store.allocate_ids(1),
        store.expired(at),
        store.sweep(at),
        store.purge(Retention(), at),
        store.promote(DEFAULT_QUEUE, now_us=at),
        store.check(),
        store.get("a"),
        store.results(["a"]),
        store.find(Filter()),
        store.counts(at),
        store.queues(),
        store.groups(DEFAULT_QUEUE),
        store.workers(at),
        store.info(),
        store.event_shards(),
        store.events(),
        store.events_of("a"),
        store.pause(DEFAULT_QUEUE),
        store.resume(DEFAULT_QUEUE),
        store.is_paused(DEFAULT_QUEUE),
        store.set_group_limit(DEFAULT_QUEUE, "g", 1),
        store.get_result("a"),
        store.purge_results(bench.clock.now),
        store.reserve(DEFAULT_QUEUE, 1),
        # A closed storage stays closed; to use the store again, make another storage.
        store.open(),
    ]
    for call in calls:
        await raises(DriverClosed, call)


@case(rules="79")
async def a_storage_is_a_context_manager(bench: Bench) -> None:
    async with bench.store as store:
        assert store is bench.store
        await bench.enqueue("a")
    bench.closed = True
    await raises(DriverClosed, bench.take())


@case(rules="80", needs="durable")
async def everything_survives_reopening(bench: Bench) -> None:
    await bench.ack(await bench.hold("done", idempotency_key="k"), result=b"1")
    await bench.dead("dead")
    await bench.hold("running", worker="w", group="g", group_limit=2)
    await bench.enqueue("ready", "grouped", group="g")
    await bench.add("scheduled", delay_us=S, payload=b"\0\xff")
    await bench.add("blocked", after=["running"])
    await bench.beat("w", host="h")
    before, events, info = await bench.snapshot(), await bench.all_events(), await bench.store.info()
    await bench.reopen()
    assert await bench.snapshot() == before
    assert await bench.all_events() == events
    assert (await bench.store.info()).store_id == info.store_id
    assert (await bench.add(idempotency_key="k")).id == "done"


@case(rules="80", needs="durable")
async def everything_survives_a_process_that_never_closed(bench: Bench) -> None:
    # As after a kill: data that only `close` would write is missing.
    task = await bench.hold("a")
    await bench.add("b", after=["a"])
    before = await bench.snapshot()
    await bench.reopen(close=False)
    assert await bench.snapshot() == before
    await bench.ack(task)
    assert await bench.take_ids(9) == ["b"]


@case(rules="80,75", needs="durable")
async def two_storages_on_one_store_respect_each_other(bench: Bench) -> None:
    # A storage that keeps records in memory overlooks the leases and acks of the other storage.
    first = bench.store
    await bench.enqueue("a", "b")
    (a,) = await bench.take()
    await bench.reopen(close=False)
    assert await bench.take_ids(9) == ["b"]
    await bench.refused(TokenMismatch, on(Ack, a, token=new_token()))
    await bench.ack(a)
    seen = await first.get("a")
    assert seen is not None
    assert seen.state is State.DONE


@case(rules="80,14", needs="durable")
async def a_lease_survives_reopening_and_runs_out_after_it(bench: Bench) -> None:
    await bench.hold("a")
    await bench.reopen()
    assert await bench.take() == []
    bench.advance(30)
    assert await bench.reclaim() == 1
    assert await bench.take_ids() == ["a"]


@case(rules="80,§1", needs="durable")
async def numbers_are_never_given_twice_even_after_reopening(bench: Bench) -> None:
    first = await bench.store.allocate_ids(5)
    await bench.enqueue("a")
    shard = await bench.shard()
    await bench.reopen()
    # More than the next number is fine: numbers that were allocated ahead may be lost.
    assert await bench.store.allocate_ids(1) >= first + 5
    await bench.enqueue("b")
    (event,) = await bench.store.events(shard.name, shard.last)
    assert event.seq > shard.last


@case(rules="80,§5", needs="durable")
async def turns_and_order_survive_reopening(bench: Bench) -> None:
    await bench.enqueue("u1", "u2", "u3")
    await bench.enqueue("a1", "a2", group="a", group_limit=9)
    await bench.enqueue("b1", "b2", group="b", group_limit=9)
    assert await bench.take_ids(1) == ["a1"]
    await bench.reopen()
    assert await bench.take_ids(9) == ["u1", "b1", "u2", "a2", "u3", "b2"]


@case(rules="80,§1", needs="durable")
async def a_repeated_reserve_finds_its_leases_after_reopening(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    token = new_token()
    await bench.take(1, token=token)
    await bench.reopen()
    assert [t.id for t in await bench.take(1, token=token, repeat=True)] == ["a"]


@case(rules="80,§6", needs="durable")
async def a_half_finished_cascade_survives_reopening(bench: Bench) -> None:
    await bench.fail(await bench.hold_with_dependents(1200))
    await bench.reopen()
    await bench.sweep()
    assert (await bench.counts()).blocked == 0
    assert (await bench.counts()).dead == 1201
