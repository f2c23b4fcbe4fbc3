"""Events: one per transition, in its transaction, in an order that a reader can resume."""

from __future__ import annotations

from typing import Any

from omniq.errors import EventsLost
from omniq.models import DEFAULT_QUEUE, State, new_token
from omniq.operations import Ack, Cancel, EventRow, Progress, Release, Remove, Requeue, Reschedule, Retention
from omniq.testing.bench import Bench, S, case, on, raises

DAY = 86_400


@case(rules="§3,§7")
async def every_transition_makes_one_event(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.retry(task)
    (task,) = await bench.take()
    await bench.release(task)
    (task,) = await bench.take()
    await bench.do(on(Progress, task, data=b"1"))
    await bench.fail(task)
    await bench.do(on(Requeue, task))
    await bench.do(on(Reschedule, task, delay_us=0))
    await bench.take()
    bench.advance(30)
    await bench.reclaim()
    (task,) = await bench.take()
    await bench.ack(task)
    await bench.do(on(Remove, task))
    assert [e.event for e in await bench.all_events()] == [
        *["enqueued", "started", "retried", "started", "released", "started", "progress", "failed"],
        *["requeued", "rescheduled", "started", "expired", "started", "succeeded", "removed"],
    ]


@case(rules="§7")
async def an_event_says_what_happened_to_whom(bench: Bench) -> None:
    start = bench.now
    await bench.add("a", name="app:job", group="g", payload=b"12345")
    bench.advance(1)
    (task,) = await bench.take(worker="w1")
    bench.advance(1)
    await bench.ack(task, result=b"123", ran_us=777)
    enqueued, started, succeeded = await bench.store.events_of("a")
    for event, moment, attempt, worker in ((enqueued, 0, 0, None), (started, 1, 1, "w1"), (succeeded, 2, 1, "w1")):
        assert (event.task_id, event.queue, event.name, event.group) == ("a", DEFAULT_QUEUE, "app:job", "g")
        assert (event.ts_us, event.attempt, event.worker) == (start + moment * S, attempt, worker)
        assert (event.enqueued_at_us, event.due_us) == (start, start)
    assert [e.state for e in (enqueued, started, succeeded)] == [State.READY, State.RUNNING, State.DONE]


@case(rules="§7")
async def an_event_carries_what_applies(bench: Bench) -> None:
    async def data(id: str) -> dict[str, Any]:
        return (await bench.last_event(id))[1]

    await bench.add("a", payload=b"12345")
    assert (await data("a"))["payload_bytes"] == 5
    (task,) = await bench.take()
    await bench.retry(task, ran_us=55)
    told = await data("a")
    assert (told["error"]["type"], told["error"]["message"], told["ran_us"]) == ("Boom", "it broke", 55)
    (task,) = await bench.take()
    await bench.ack(task, result=b"123", ran_us=66)
    told = await data("a")
    assert (told["result_bytes"], told["ran_us"]) == (3, 66)


@case(rules="§7", needs="cross_queue")
async def a_move_to_a_dead_queue_names_it(bench: Bench) -> None:
    await bench.dead("a", dead_queue="dlq")
    event, data = await bench.last_event("a")
    assert (event.event, event.queue, data["to_queue"]) == ("failed", DEFAULT_QUEUE, "dlq")


@case(rules="§3,§7")
async def a_lost_lease_ends_in_expired_or_failed(bench: Bench) -> None:
    await bench.hold("a", max_attempts=2)
    bench.advance(30)
    await bench.reclaim()
    event, data = await bench.last_event("a")
    assert (event.event, event.attempt, data["error"]["type"]) == ("expired", 1, "WorkerLost")
    await bench.take()
    bench.advance(30)
    await bench.reclaim()
    event, data = await bench.last_event("a")
    assert (event.event, event.attempt, data["error"]["type"]) == ("failed", 2, "WorkerLost")


@case(rules="67,§7")
async def what_changes_nothing_makes_no_event(bench: Bench) -> None:
    task = await bench.hold("a", fingerprint="x")
    before = len(await bench.all_events())
    # These calls are refused, repeated or without effect, and must not show where events are counted.
    await bench.call(
        (on(Ack, task, token=new_token()),), (bench.new("a", fingerprint="x"),), (bench.new("a", fingerprint="y"),)
    )
    await bench.call((bench.new("b"), on(Ack, task, token=new_token())))
    await bench.cancel("a")
    await bench.take(9)
    await bench.beat("w")
    assert len(await bench.all_events()) == before
    await bench.ack(task)
    await bench.call((on(Ack, task),))
    assert len(await bench.all_events()) == before + 1


@case(rules="§7")
async def numbers_grow_and_a_reader_can_resume(bench: Bench) -> None:
    await bench.enqueue(*[f"t{n}" for n in range(10)])
    shard = await bench.shard()
    seen: list[EventRow] = []
    position = shard.first - 1
    while batch := await bench.store.events(shard.name, position, 3):
        assert len(batch) <= 3
        seen += batch
        position = batch[-1].seq
    assert [e.task_id for e in seen] == [f"t{n}" for n in range(10)]
    # They grow; whether they have gaps is said by `Capabilities.events_gapless`.
    numbers = [e.seq for e in seen]
    assert numbers == sorted(set(numbers))
    await bench.enqueue("new")
    assert [e.task_id for e in await bench.store.events(shard.name, position)] == ["new"]


@case(rules="§7")
async def a_reader_can_stop_at_a_number(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c", "d")
    shard = await bench.shard()
    events = await bench.store.events(shard.name, shard.first - 1)
    assert (shard.first, shard.last) == (events[0].seq, events[-1].seq)
    assert await bench.store.events(shard.name, events[0].seq, upto=events[2].seq) == events[1:3]
    assert await bench.store.events(shard.name, shard.last) == []


@case(rules="§7")
async def a_reader_that_was_away_too_long_is_told(bench: Bench) -> None:
    # An empty page would tell the reader that nothing had happened.
    await bench.enqueue("a", "b", "c")
    shard = await bench.shard()
    second = (await bench.store.events(shard.name, shard.first - 1))[1].seq
    await bench.purge(Retention(events_max=1))
    await raises(EventsLost, bench.store.events(shard.name, shard.first - 1))
    assert [e.task_id for e in await bench.store.events(shard.name, second)] == ["c"]
    after = await bench.shard()
    assert (after.first, after.last) == (shard.last, shard.last)


@case(rules="§7")
async def numbers_go_on_when_every_event_is_gone(bench: Bench) -> None:
    # Numbers that begin anew would lie before the position of every reader.
    await bench.enqueue("a", "b")
    shard = await bench.shard()
    bench.advance(8 * DAY)
    await bench.purge()
    empty = await bench.shard()
    assert (empty.first, empty.last) == (shard.last + 1, shard.last)
    assert await bench.store.events(shard.name, shard.last) == []
    await bench.enqueue("c")
    (event,) = await bench.store.events(shard.name, shard.last)
    assert event.seq > shard.last


@case(rules="§7,§11")
async def events_go_by_age(bench: Bench) -> None:
    await bench.enqueue("old")
    bench.advance(7 * DAY - 1)
    await bench.enqueue("new")
    bench.advance(1)
    await bench.purge()
    assert [e.task_id for e in await bench.all_events()] == ["new"]
    assert await bench.events("old") == []


@case(rules="§7")
async def an_unknown_task_has_no_events(bench: Bench) -> None:
    await bench.enqueue("a")
    assert await bench.store.events_of("unknown") == []


@case(rules="§7")
async def the_events_of_a_call_come_in_its_order(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    a, b = await bench.take(2)
    await bench.call((on(Ack, b), bench.new("c")), (on(Ack, a),))
    assert [(e.event, e.task_id) for e in (await bench.all_events())[-3:]] == [
        ("succeeded", "b"),
        ("enqueued", "c"),
        ("succeeded", "a"),
    ]


@case(rules="§7")
async def equal_transactions_between_others_leave_their_events_where_they_were(bench: Bench) -> None:
    """A driver may carry out equal neighbours together, but their events must not show it."""
    await bench.enqueue(*[f"held-{n}" for n in range(8)])
    held = {t.id: t for t in await bench.take(8)}
    acks = [(on(Ack, held[f"held-{n}"], result=b"1" if n % 3 == 2 else None),) for n in range(6)]
    await bench.call(
        (bench.new("a"),),
        (bench.new("b"),),
        acks[0],
        acks[1],
        (bench.new("c", group="g"),),
        acks[2],
        (bench.new("d"),),
        (bench.new("e", origin="tcp"),),
        (bench.new("f", delay_us=S),),
        acks[3],
        (on(Cancel, held["held-6"], token=held["held-6"].token),),
        acks[4],
        (bench.new("g"),),
        acks[5],
        (on(Release, held["held-7"]),),
        (bench.new("h"),),
    )
    # The first sixteen are those of the tasks that are held.
    told = [f"{e.event} {e.task_id}" for e in (await bench.all_events())[16:]]
    ends = [f"succeeded held-{n}" for n in range(6)]
    new = [f"enqueued {id}" for id in "abcdefgh"]
    assert told == [
        *[*new[:2], *ends[:2], new[2], ends[2], *new[3:6], ends[3], "cancelled held-6", ends[4], new[6], ends[5]],
        *["released held-7", new[7]],
    ]
