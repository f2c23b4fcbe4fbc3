"""Enqueue: the fields of a new task, the moment it becomes ready, and an id that is there already."""

from __future__ import annotations

from typing import Any

from omniq.errors import DuplicateId, Invalid, InvalidLease, LimitExceeded, NameRequired, QueueRequired, TaskIdRequired
from omniq.models import DEFAULT_QUEUE, Blocker, State, new_token
from omniq.operations import Enqueue, Enqueued, OnTask, Remove, Reserve
from omniq.testing.bench import MS, Bench, S, case, raises

# Text that breaks statements, patterns, keys and formats; one letter in two forms, which stay two ids; the longest id.
HOSTILE = ["'; DROP TABLE tasks; --", '"quoted"', "a\nb\tc", "{}:*[x]?", "%s%d\\", "日本語", "é", "e\u0301", "🦑🧵", "x" * 255]


@case(rules="1,§8")
async def a_task_needs_an_id(bench: Bench) -> None:
    # NUL ends a text in C, so some stores cut there and others refuse.
    for bad in ("", "x" * 256, "a\0b"):
        await bench.invalid(TaskIdRequired, Enqueue(id=bad, name="job"))


@case(rules="2")
async def a_task_needs_a_name(bench: Bench) -> None:
    await bench.invalid(NameRequired, bench.new(name=""))


@case(rules="3,51")
async def a_wrong_call_is_refused_before_the_store_is_asked(bench: Bench) -> None:
    # A driver that asks its closed store first raises DriverClosed.
    await bench.store.open()
    await bench.close()
    await raises(TaskIdRequired, bench.call((Enqueue(id="", name="job"),)))


@case(rules="4,7")
async def a_new_task_is_ready_at_once(bench: Bench) -> None:
    assert await bench.add("a") == Enqueued(id="a", existed=False, state=State.READY)
    task = await bench.get("a")
    assert (task.state, task.due_us, task.created_at_us, task.updated_at_us) == (State.READY, *[bench.now] * 3)
    assert await bench.take_ids() == ["a"]


@case(rules="7")
async def what_was_not_given_is_absent(bench: Bench) -> None:
    await bench.add("a")
    task = await bench.get("a")
    absent = (task.payload, task.headers, task.eta_us, task.timeout_us, task.lease_us, task.interval_us, task.result_ttl_us)
    assert absent == (None,) * 7
    absent = (task.token, task.lease_until_us, task.ended_by, task.worker, task.group, task.dead_queue, task.run_id)
    assert absent == (None,) * 7
    absent = (task.idempotency_key, task.started_at_us, task.finished_at_us, task.last_error, task.failed_at_us, task.progress)
    assert absent == (None,) * 6
    assert (task.attempts, task.max_attempts, task.cancel_requested, task.blocked_by) == (0, 0, False, ())


@case(rules="7,8")
async def every_field_comes_back(bench: Bench) -> None:
    fields = {
        "queue": "mail",
        "name": "app.mail:send",
        "payload": b'{"args":[1]}',
        "encoding": "other",
        "headers": {"trace": "1", "x-y": "ü"},
        "origin": "here",
        "eta_us": bench.now + 90 * S,
        "timeout_us": 1_234_000,
        "lease_us": 5 * S,
        "interval_us": 60 * S,
        "result_ttl_us": 7 * S,
        "max_attempts": 9,
        "backoff": "fixed:base=1000",
        "group": "customer 7",
        "idempotency_key": "once",
        "fingerprint": "f00d",
    }
    assert (await bench.add("a", **fields)).state is State.SCHEDULED
    task = await bench.get("a")
    assert {name: getattr(task, name) for name in fields} == fields
    assert task.due_us == bench.now + 90 * S


@case(rules="76")
async def payload_bytes_come_back_exactly(bench: Bench) -> None:
    nested = b'{"args":[%b%b],"kwargs":{}}' % (b"[" * 5000, b"]" * 5000)  # deeper than Python reads
    payloads = [b"", b"\0", bytes(range(256)) * 2, bytes(1 << 20), b"\xff\xfe\0" * 1000, nested]
    for payload in payloads:
        await bench.add(payload=payload)
    assert [t.payload for t in await bench.take(9)] == payloads
    assert [t.payload for t in await bench.all_tasks()] == payloads


@case(rules="§8")
async def hostile_text_comes_back_exactly(bench: Bench) -> None:
    for text in HOSTILE:
        await bench.add(text, name=text, group=text, idempotency_key=text, origin=text, headers={text: text})
    for text in HOSTILE:
        task = await bench.get(text)
        assert (task.id, task.name, task.group, task.idempotency_key, task.origin) == (text,) * 5
        assert task.headers == {text: text}
        assert (await bench.add(idempotency_key=text)).id == text
    tasks = await bench.take(len(HOSTILE), worker="it's me")
    assert [t.id for t in tasks] == HOSTILE
    for task in tasks:
        await bench.ack(task)
    assert set(await bench.store.results(HOSTILE)) == set(HOSTILE)


@case(rules="5")
async def a_scheduled_task_is_ready_exactly_when_it_is_due(bench: Bench) -> None:
    await bench.add("a", eta_us=bench.now + 10 * S)
    # A millisecond is the finest step that every store keeps.
    bench.advance(9.999)
    assert await bench.take() == []
    bench.advance(0.001)
    assert await bench.take_ids() == ["a"]


@case(rules="6")
async def a_future_task_holds_nobody_up(bench: Bench) -> None:
    # `later` came first: a driver that looks only at the head of one list finds nothing that is due.
    await bench.add("later", eta_us=bench.now + S)
    await bench.add("now")
    assert await bench.take_ids(9) == ["now"]
    bench.advance(1)
    assert await bench.take_ids(9) == ["later"]


@case(rules="§3,§8")
async def a_delay_counts_from_the_time_of_the_call(bench: Bench) -> None:
    assert (await bench.add("a", delay_us=1500 * MS)).state is State.SCHEDULED
    assert (await bench.add("b", delay_us=0)).state is State.READY
    assert (await bench.get("a")).due_us == bench.now + 1500 * MS
    bench.advance(1.499)
    assert await bench.take_ids(9) == ["b"]
    bench.advance(0.001)
    assert await bench.take_ids(9) == ["a"]


@case(rules="71,§5", needs="due_order")
async def the_order_is_by_due_time_and_then_by_enqueue(bench: Bench) -> None:
    past = bench.now - 10 * S
    await bench.enqueue("d", "e", "c")
    await bench.add("b", eta_us=past + S)
    await bench.add("a", eta_us=past)
    assert await bench.take_ids(9) == ["a", "b", "d", "e", "c"]


@case(rules="71,§5", needs="due_order")
async def a_task_that_fell_due_keeps_its_place(bench: Bench) -> None:
    # `between` is enqueued after `first` fell due and before `second` did, with nobody looking in between.
    await bench.add("second", delay_us=2 * S)
    await bench.add("first", delay_us=S)
    bench.advance(1.5)
    await bench.add("between")
    bench.advance(5)
    await bench.add("last")
    assert await bench.take_ids(9) == ["first", "between", "second", "last"]


@case(rules="73,§8")
async def a_queue_name_is_short_and_plain(bench: Bench) -> None:
    # On Redis, `omniq.store` is the place of everything that belongs to no queue.
    for bad in ("", " ", "a b", "a/b", "ü", "q" * 129, "omniq.store"):
        await bench.invalid(QueueRequired, bench.new(queue=bad))
        await bench.invalid(QueueRequired, Reserve(queues=(bad,), token=new_token()))
    for good in ("a", "A.b_c-9", "q" * 128):
        await bench.add(queue=good)
        assert len(await bench.take(9, good)) == 1


@case(rules="73")
async def queues_are_isolated(bench: Bench) -> None:
    await bench.add("a", queue="one")
    await bench.add("b", queue="two")
    assert await bench.take_ids(9, "two") == ["b"]
    assert await bench.take_ids(9, "three") == []
    assert await bench.take_ids(9, "one") == ["a"]


@case(rules="§1")
async def nonsense_numbers_are_refused(bench: Bench) -> None:
    nonsense: list[dict[str, Any]] = [
        {"max_attempts": -1},
        {"group": "g", "group_limit": -1},
        {"timeout_us": 0},
        {"interval_us": -S},
        {"key_ttl_us": 0},
        {"result_ttl_us": -1},
        {"delay_us": -1},
        {"eta_us": S, "delay_us": S},
        {"group": ""},
        {"idempotency_key": ""},
    ]
    for bad in nonsense:
        await bench.invalid(Invalid, bench.new(**bad))
    await bench.invalid(InvalidLease, bench.new(lease_us=0))


@case(rules="§6,§8,§12")
async def what_is_too_large_is_refused(bench: Bench) -> None:
    many = tuple(Blocker(f"b{n}", DEFAULT_QUEUE) for n in range(256))
    await bench.invalid(LimitExceeded, bench.new(blocked_by=many))
    await bench.invalid(LimitExceeded, bench.new(group="g" * 256))
    await bench.invalid(LimitExceeded, bench.new(idempotency_key="k" * 256))
    await bench.invalid(LimitExceeded, bench.new(payload=bytes(bench.store.capabilities.max_payload + 1)))
    assert (await bench.add(blocked_by=many[:255])).state is State.READY


@case(rules="72,§6")
async def the_same_id_and_body_changes_nothing(bench: Bench) -> None:
    # The fingerprint alone says whether the body is the same; the other fields of the second call do not count.
    await bench.add("a", payload=b"1", fingerprint="x")
    again = bench.new("a", payload=b"2", fingerprint="x", delay_us=S)
    assert await bench.unchanged(again) == [Enqueued(id="a", existed=True, state=State.READY)]
    await bench.ack((await bench.take())[0])
    assert await bench.unchanged(again) == [Enqueued(id="a", existed=True, state=State.DONE)]


@case(rules="72,§6")
async def the_same_id_with_another_body_is_refused(bench: Bench) -> None:
    await bench.add("a", fingerprint="x")
    await bench.refused(DuplicateId, bench.new("a", fingerprint="y"))
    await bench.ack((await bench.take())[0])
    await bench.refused(DuplicateId, bench.new("a", fingerprint="y"))


@case(rules="72,§4", needs="cross_queue")
async def an_id_is_unique_in_the_whole_store(bench: Bench) -> None:
    await bench.add("a", queue="one", fingerprint="x")
    await bench.refused(DuplicateId, bench.new("a", queue="two", fingerprint="y"))


@case(rules="§4")
async def on_conflict_return_never_refuses(bench: Bench) -> None:
    await bench.add("a", fingerprint="x")
    (outcome,) = await bench.unchanged(bench.new("a", fingerprint="y", on_conflict="return"))
    assert outcome == Enqueued(id="a", existed=True, state=State.READY)


@case(rules="§4")
async def on_conflict_replace_finished_gives_a_live_task_back(bench: Bench) -> None:
    await bench.add("a", fingerprint="x")
    new = bench.new("a", fingerprint="y", on_conflict="replace_finished")
    assert await bench.unchanged(new) == [Enqueued(id="a", existed=True, state=State.READY)]
    await bench.take()
    assert await bench.unchanged(new) == [Enqueued(id="a", existed=True, state=State.RUNNING)]


@case(rules="§4")
async def on_conflict_replace_finished_replaces_an_ended_task(bench: Bench) -> None:
    # The result goes with the old task, or else a client that waits for the new task gets the old result.
    await bench.ack(await bench.hold("a", payload=b"old", fingerprint="x"), result=b"1")
    new = await bench.add("a", payload=b"new", fingerprint="y", on_conflict="replace_finished")
    assert (new.existed, new.state) == (False, State.READY)
    assert not await bench.has_result("a")
    (task,) = await bench.take(9)
    assert (task.payload, task.attempts, task.fingerprint) == (b"new", 1, "y")


@case(rules="72")
async def an_id_is_free_again_after_its_removal(bench: Bench) -> None:
    await bench.add("a", fingerprint="x")
    await bench.remove("a")
    assert not (await bench.add("a", fingerprint="y")).existed


@case(rules="74")
async def an_operation_needs_an_id_and_a_queue(bench: Bench) -> None:
    kinds: list[type[OnTask]] = [Remove]
    for kind in kinds:
        await bench.invalid(TaskIdRequired, kind(queue="default", id=""))
        await bench.invalid(QueueRequired, kind(queue="", id="a"))


@case(rules="§8", needs="own_clock")
async def without_a_time_the_store_s_clock_counts(bench: Bench) -> None:
    # For calls without a time the driver reads its own clock. The clock of a server cannot be set, hence `own_clock`.
    await bench.store.apply([(bench.new("a", delay_us=S),)])
    assert (await bench.get("a")).created_at_us == bench.now
    reserve = Reserve(queues=(DEFAULT_QUEUE,), token=new_token())
    assert await bench.store.apply([(reserve,)]) == await bench.call((reserve,))
    bench.advance(1)
    await bench.store.apply([(reserve,)])
    assert (await bench.get("a")).started_at_us == bench.now
