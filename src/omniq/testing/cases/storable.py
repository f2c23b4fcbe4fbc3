"""Values that no store can keep are refused before anything is sent, the same on all stores; all others are kept."""

from __future__ import annotations

from typing import Any

from omniq.errors import Invalid, InvalidLease, LimitExceeded, NameRequired, TaskIdRequired
from omniq.models import MAX_COUNT, MAX_DURATION_US, MAX_TIME_US, Blocker, State, TaskError, new_token
from omniq.operations import (
    Ack,
    Beat,
    Cancel,
    CountFanIn,
    Extend,
    Fail,
    Filter,
    OpenFanIn,
    OpenRun,
    Operation,
    Requeue,
    Reschedule,
    Reserve,
    Retention,
    Retry,
    Stage,
    WorkerInfo,
)
from omniq.testing.bench import Bench, case, on, raises

HALF = "report-\udcff.pdf"  # a file name that is not UTF-8, as Python reads it
YEAR_2286 = 9_999_999_999_999_000  # where clients of the contract stop counting
# Beyond 64 bits with a sign, beyond 64 bits without one, and beyond every integer of a store.
TOO_MUCH = (2**63, 2**64, 10**30)


async def names_the_field(bench: Bench, field: str, *operations: Operation) -> None:
    """The store must refuse the transaction before anything is sent, and the text must name the field."""
    await bench.invalid(Invalid, *operations, naming=field)


@case(rules="1,§1,§8")
async def a_new_task_with_half_a_character_is_refused(bench: Bench) -> None:
    texts: dict[str, Any] = {
        "encoding": HALF,
        "origin": HALF,
        "fingerprint": HALF,
        "group": HALF,
        "idempotency_key": HALF,
        "backoff": HALF,
    }
    for field, text in texts.items():
        await names_the_field(bench, field, bench.new(None, **{field: text}))
    await bench.invalid(TaskIdRequired, bench.new(HALF), naming="task id")
    await bench.invalid(NameRequired, bench.new(name=HALF), naming="task name")
    await names_the_field(bench, "header", bench.new(headers={HALF: "x"}))
    await names_the_field(bench, "'x'", bench.new(headers={"x": HALF}))
    await bench.invalid(TaskIdRequired, bench.new(blocked_by=(Blocker(HALF, "default"),)), naming="blocked_by")
    await names_the_field(bench, "group", bench.new("good"), bench.new(group=HALF))


@case(rules="1,§1,§8")
async def every_other_text_with_half_a_character_is_refused(bench: Bench) -> None:
    task = await bench.hold("a")
    wrong: dict[str, list[Operation]] = {
        "task id": [on(Ack, task, id=HALF), on(Fail, task, id=HALF), Requeue(queue=task.queue, id=HALF)],
        "token": [
            on(Ack, task, token=HALF),
            on(Retry, task, token=HALF),
            on(Extend, task, token=HALF),
            Cancel(queue=task.queue, id="a", token=HALF),
            Reserve(queues=(task.queue,), token=HALF * 3),
        ],
        "encoding": [on(Ack, task, encoding=HALF, result=b"1")],
        "worker": [Reserve(queues=(task.queue,), token=new_token(), worker=HALF), Beat(info=WorkerInfo(worker=HALF))],
        "host": [Beat(info=WorkerInfo(worker="w", host=HALF))],
        "queues": [Beat(info=WorkerInfo(worker="w", queues=(HALF,)))],
        "busy": [Beat(info=WorkerInfo(worker="w", busy={HALF: 1}))],
        "key": [OpenFanIn(key=HALF, expected=1), CountFanIn(key=HALF, member="m")],
        "member": [CountFanIn(key="k", member=HALF)],
        "run_id": [OpenRun(queue=task.queue, run_id=HALF)],
    }
    for field, operations in wrong.items():
        for op in operations:
            await names_the_field(bench, field, op)
    await bench.do(OpenRun(queue="default", run_id="r"))
    await names_the_field(bench, "origin", Stage(queue="default", run_id="r", tasks=(bench.new(origin=HALF),)))
    await raises(Invalid, bench.store.set_group_limit("default", HALF, 1))


@case(rules="1,§11")
async def nothing_is_found_by_half_a_character(bench: Bench) -> None:
    await bench.add("a")
    await raises(Invalid, bench.store.get(HALF))
    await raises(Invalid, bench.store.get(HALF, "default"))
    await raises(Invalid, bench.store.locate(HALF))
    await raises(Invalid, bench.store.results(["a", HALF]))
    await raises(Invalid, bench.store.events_of(HALF))
    wrong: list[dict[str, Any]] = [
        {field: HALF}
        for field in ("queue", "name", "group", "worker", "origin", "run_id", "error_contains", "payload_contains")
    ]
    wrong += [{"ids": ("a", HALF)}, {"min_attempts": 2**63}, {"created_from_us": 2**63}]
    for fields in wrong:
        try:
            Filter(**fields)
        except Invalid as exc:
            assert next(iter(fields)) in str(exc)
        else:
            raise AssertionError(f"{fields} was accepted")
    assert [t.id for t in await bench.all_tasks()] == ["a"]


@case(rules="1,§11")
async def a_look_or_upkeep_with_what_no_store_can_keep_is_refused(bench: Bench) -> None:
    await bench.add("a", group="g")
    store = bench.store
    shard = (await store.event_shards())[0].name
    for queue in (HALF, f"default{HALF}"):
        for look in (store.groups(queue), store.run(queue, "r"), store.promote(queue), store.get("a", queue)):
            await raises(Invalid, look)
        await raises(Invalid, store.expired(queues=[queue]))
    await raises(Invalid, store.expired(lost_workers=[HALF]))
    await raises(Invalid, store.run("default", HALF))
    await raises(Invalid, store.groups("default", HALF))
    await raises(Invalid, store.find(Filter(), HALF))
    await raises(Invalid, store.events(HALF))
    for number in (-2, *TOO_MUCH):
        for upkeep in (store.sweep, store.expired, store.counts, store.workers):
            await raises(Invalid, upkeep(number))
        for limited in (store.sweep, store.expired):
            await raises(Invalid, limited(limit=number))
        await raises(Invalid, store.promote("default", number))
        await raises(Invalid, store.promote("default", now_us=number))
        await raises(Invalid, store.purge(Retention(), limit=number))
        await raises(Invalid, store.purge(Retention(), number))
        await raises(Invalid, store.purge(Retention(events_max=number)))
        await raises(Invalid, store.apply([(bench.new(),)], number))
        await raises(Invalid, store.events(shard, number))
        await raises(Invalid, store.events(shard, limit=number))
        await raises(Invalid, store.task_page(shard, 0, 10, number))
    # A page without rows has no last row at which the next page could begin.
    for number in (0, -2, *TOO_MUCH):
        await raises(Invalid, store.find(Filter(), limit=number))
        await raises(Invalid, store.groups("default", limit=number))
    assert [t.id for t in await bench.all_tasks()] == ["a"]


@case(rules="1,§1")
async def a_time_or_a_duration_that_no_store_can_keep_is_refused(bench: Bench) -> None:
    task = await bench.hold("a")
    await bench.add("waiting")
    durations = ("delay", "timeout", "lease", "interval", "result_ttl", "key_ttl")
    for us in (MAX_DURATION_US + 1, *TOO_MUCH):
        for field in durations:
            await names_the_field(bench, field, bench.new(None, **{f"{field}_us": us}))
        await bench.invalid(InvalidLease, Reserve(queues=("default",), token=new_token(), lease_us=us))
        await bench.invalid(InvalidLease, on(Extend, task, lease_us=us))
        await names_the_field(bench, "delay_us", on(Retry, task, delay_us=us))
        await names_the_field(bench, "delay_us", Reschedule(queue="default", id="waiting", delay_us=us))
        await names_the_field(bench, "ttl", OpenFanIn(key="k", expected=1, ttl_us=us))
        await names_the_field(bench, "ttl", OpenRun(queue="default", run_id="r", ttl_us=us))
    for us in (-1, MAX_TIME_US + 1, *TOO_MUCH):
        await names_the_field(bench, "eta_us", bench.new(eta_us=us))
        await names_the_field(bench, "due_us", on(Retry, task, due_us=us))
        await names_the_field(bench, "again_us", on(Ack, task, again_us=us))
        await names_the_field(bench, "again_us", on(Fail, task, again_us=us))
        await names_the_field(bench, "eta_us", Reschedule(queue="default", id="waiting", eta_us=us))
        await names_the_field(bench, "eta_us", Requeue(queue="default", id="waiting", eta_us=us))


@case(rules="1,§1")
async def a_number_that_no_store_can_keep_is_refused(bench: Bench) -> None:
    task = await bench.hold("a")
    for number in (-1, *TOO_MUCH):
        await names_the_field(bench, "max_attempts", bench.new(max_attempts=number))
        await names_the_field(bench, "group_limit", bench.new(group="g", group_limit=number))
        await names_the_field(bench, "attempts", on(Retry, task, attempts=number))
        for op in (on(Ack, task, ran_us=number), on(Retry, task, ran_us=number), on(Fail, task, ran_us=number)):
            await names_the_field(bench, "ran_us", op)
        await names_the_field(bench, "limit", Reserve(queues=("default",), token=new_token(), limit=number))
        await names_the_field(bench, "expected", OpenFanIn(key="k", expected=number))
        await names_the_field(bench, "running", Beat(info=WorkerInfo(worker="w", running=number)))
        await names_the_field(bench, "busy", Beat(info=WorkerInfo(worker="w", busy={"default": number})))
        await raises(Invalid, bench.store.set_group_limit("default", "g", number))
        await raises(Invalid, bench.store.allocate_ids(number))
    # The policy is read only when a run has failed, so an enqueue has to refuse a policy that nobody could read then.
    for backoff in ("garbage", f"fixed:base={10**20}", f"exp:base=1,max={2**63}", f"exp:jitter={10**6}"):
        await names_the_field(bench, "backoff", bench.new(backoff=backoff))


@case(rules="1,§1")
async def a_result_that_is_larger_than_a_payload_may_be_is_refused(bench: Bench) -> None:
    task = await bench.hold("a")
    result = bytes(bench.store.capabilities.max_payload + 1)
    await bench.invalid(LimitExceeded, on(Ack, task, result=result))
    assert (await bench.get("a")).state is State.RUNNING


@case(rules="1,§1,§8")
async def the_largest_values_come_back(bench: Bench) -> None:
    fields: dict[str, Any] = {
        "timeout_us": MAX_DURATION_US,
        "lease_us": MAX_DURATION_US,
        "interval_us": MAX_DURATION_US,
        "result_ttl_us": MAX_DURATION_US,
        "key_ttl_us": MAX_DURATION_US,
        "max_attempts": MAX_COUNT,
        "group": "g",
        "group_limit": MAX_COUNT,
        "idempotency_key": "k",
    }
    await bench.add("a", **fields)
    found = await bench.get("a")
    kept = ("timeout_us", "lease_us", "interval_us", "result_ttl_us", "max_attempts")
    assert {name: getattr(found, name) for name in kept} == {name: fields[name] for name in kept}
    (task,) = await bench.take()
    lease_until_us = task.lease_until_us
    assert lease_until_us is not None
    # Stores that are shared with clients of the contract cut times there.
    assert min(lease_until_us, YEAR_2286) == min(bench.now + MAX_DURATION_US, YEAR_2286)
    await bench.retry(task, delay_us=MAX_DURATION_US, ran_us=MAX_COUNT)
    await bench.add("b", eta_us=MAX_TIME_US)
    await bench.add("c", delay_us=MAX_DURATION_US)
    for id in ("a", "b", "c"):
        assert (await bench.get(id)).due_us >= YEAR_2286


@case(rules="1,§3")
async def the_error_of_a_run_is_kept_whatever_it_says(bench: Bench) -> None:
    # A failure must be kept, so its text is made storable instead of being refused.
    error = TaskError("Odd", f"cannot open {HALF}", f'File "{HALF}", line 1')
    first, second = await bench.hold("a"), await bench.hold("b")
    await bench.do(on(Retry, first, error=error))
    await bench.do(on(Fail, second, error=error))
    for id in ("a", "b"):
        kept = (await bench.get(id)).last_error
        assert kept is not None
        assert (kept.type, kept.message) == ("Odd", "cannot open report-?.pdf")
        assert kept.traceback == 'File "report-?.pdf", line 1'
    stored = (await bench.store.results(["b"]))["b"]
    assert stored.error is not None
    assert stored.error.message == "cannot open report-?.pdf"


@case(rules="1,§1,§3")
async def what_is_refused_leaves_its_neighbours_alone(bench: Bench) -> None:
    """A call with one such transaction is refused whole, and the same call without it is carried out."""
    good, bad = (bench.new("good"),), (bench.new("bad", group=HALF),)
    await raises(Invalid, bench.call(good, bad))
    assert await bench.store.get("good") is None
    await bench.call(good)
    assert (await bench.get("good")).state is State.READY
