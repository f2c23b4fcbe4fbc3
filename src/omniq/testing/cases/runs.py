"""Staged runs: unseen until the commit, all there after it, gone after an abort; no run swallows what another needs."""

from __future__ import annotations

import asyncio
from typing import Any

from omniq.errors import DuplicateId, IdempotencyConflict, Invalid, NotWaiting, RunClosed
from omniq.models import Blocker, State, TaskStatus
from omniq.operations import AbortRun, Cancel, CommitRun, Enqueue, OpenRun, Remove, RunInfo, RunState, Stage, Staged
from omniq.testing.bench import Bench, S, case

DAY = 86_400 * S


def row(id: str, **fields: Any) -> Enqueue:
    given: dict[str, Any] = {"name": "job", "payload": b'{"args":[],"kwargs":{}}', "fingerprint": "body", **fields}
    return Enqueue(id=id, **given)


def keyed(id: str, **fields: Any) -> Enqueue:
    return row(id, **{"idempotency_key": id, **fields})


OPEN, COMMIT, ABORT = (kind(queue="default", run_id="r") for kind in (OpenRun, CommitRun, AbortRun))


def stage(*tasks: Enqueue, strict: bool = False) -> Stage:
    return Stage(queue="default", run_id="r", tasks=tasks, strict=strict)


async def opened(bench: Bench, run: str = "r", ttl_us: int = DAY, queue: str = "default") -> RunInfo:
    return await bench.do(OpenRun(queue=queue, run_id=run, ttl_us=ttl_us))


async def staged(bench: Bench, *tasks: Enqueue, run: str = "r", strict: bool = False) -> tuple[int, int]:
    answer: Staged = await bench.do(Stage(queue="default", run_id=run, tasks=tasks, strict=strict))
    return answer.new, answer.there


async def committed(bench: Bench, run: str = "r") -> RunInfo:
    return await bench.do(CommitRun(queue="default", run_id=run))


async def aborted(bench: Bench, run: str = "r") -> RunInfo:
    return await bench.do(AbortRun(queue="default", run_id=run))


async def staged_by(bench: Bench, *runs: str) -> None:
    """Several runs stage the same task."""
    for run in runs:
        await opened(bench, run)
        await staged(bench, keyed("a"), run=run)


@case(rules="§10")
async def nothing_staged_can_be_reserved_before_the_commit(bench: Bench) -> None:
    await opened(bench)
    assert await staged(bench, row("a"), row("b")) == (2, 0)
    assert await bench.take(limit=5) == []
    assert await bench.states("a") == [State.STAGED]
    counts = await bench.counts()
    assert (counts.staged, counts.waiting) == (2, 0)
    assert await bench.all_events() == []
    info = await committed(bench)
    assert (info.state, info.new, info.released, info.settled) == (RunState.COMMITTED, 2, 2, True)
    assert sorted(t.id for t in await bench.take(limit=5)) == ["a", "b"]


@case(rules="§10")
async def a_committed_task_is_as_if_it_was_enqueued_at_the_commit(bench: Bench) -> None:
    await opened(bench)
    await staged(bench, row("plain"), row("later", eta_us=bench.now + 60 * S), row("grouped", group="g", group_limit=2))
    bench.advance(10)
    await committed(bench)
    plain, later, grouped = [await bench.store.get(id) for id in ("plain", "later", "grouped")]
    assert plain is not None and later is not None and grouped is not None
    assert (plain.state, plain.due_us, plain.created_at_us, plain.run_id) == (State.READY, bench.now, bench.now, "r")
    assert (later.state, later.due_us) == (State.SCHEDULED, bench.now + 50 * S)
    assert [(g.group, g.limit, g.ready) for g in await bench.groups()] == [("g", 2, 1)]
    assert sorted((e.task_id, e.event, e.ts_us) for e in await bench.all_events()) == [
        (id, "enqueued", bench.now) for id in ("grouped", "later", "plain")
    ]
    assert await bench.store.queues(fed=True) == ["default"]


@case(rules="§10")
async def an_aborted_run_leaves_nothing(bench: Bench) -> None:
    await opened(bench)
    await staged(bench, keyed("a"), row("b", group="g"))
    info = await aborted(bench)
    await bench.sweep()
    assert (info.state, info.dropped) == (RunState.ABORTED, 2)
    assert await bench.states("a", "b") == [None, None]
    assert await bench.take(limit=5) == []
    assert (await bench.do(keyed("another", idempotency_key="a", fingerprint="other"))).existed is False


@case(rules="§10")
async def a_run_that_is_not_committed_in_time_is_aborted(bench: Bench) -> None:
    # From that moment the run is closed, also before `sweep` has removed its tasks.
    await opened(bench, ttl_us=60 * S)
    await staged(bench, row("a"))
    bench.advance(61)
    await bench.refused(RunClosed, stage(row("b")))
    await bench.refused(RunClosed, COMMIT)
    await bench.sweep()
    assert await bench.states("a", "b") == [None, None]
    found = await bench.store.run("default", "r")
    assert found is not None and (found.state, found.dropped, found.settled) == (RunState.ABORTED, 1, True)


@case(rules="§10")
async def a_run_is_opened_and_committed_once(bench: Bench) -> None:
    # A client that is tried again opens and commits once more, and gets the same answers.
    first = await opened(bench)
    assert await opened(bench) == first
    await staged(bench, row("a"))
    done = await committed(bench)
    assert await committed(bench) == done
    for op in (OPEN, stage(row("b")), ABORT):
        await bench.refused(RunClosed, op)
    assert await bench.states("a", "b") == [State.READY, None]
    assert await bench.store.run("default", "r") == done


@case(rules="§10")
async def an_aborted_run_cannot_come_back(bench: Bench) -> None:
    await opened(bench)
    await aborted(bench)
    for op in (OPEN, stage(row("a")), COMMIT):
        await bench.refused(RunClosed, op)
    assert (await aborted(bench)).state is RunState.ABORTED


@case(rules="§10")
async def a_run_that_was_never_opened_is_closed(bench: Bench) -> None:
    for op in (stage(row("a")), COMMIT, ABORT):
        await bench.refused(RunClosed, op)
    assert await bench.store.run("default", "r") is None


@case(rules="§10")
async def the_same_rows_again_are_there(bench: Bench) -> None:
    await opened(bench)
    assert await staged(bench, keyed("a"), keyed("b")) == (2, 0)
    assert await staged(bench, keyed("b"), keyed("c"), keyed("c")) == (1, 2)
    info = await committed(bench)
    assert (info.new, info.released) == (3, 3)


@case(rules="§10")
async def what_is_there_by_id_or_by_key_stays_as_it_is(bench: Bench) -> None:
    await bench.do(row("by-id"))
    await bench.do(keyed("first", idempotency_key="k"))
    for task in await bench.take(limit=2):
        await bench.ack(task)
    await opened(bench)
    assert await staged(bench, row("by-id", fingerprint="other"), keyed("second", idempotency_key="k"), row("new")) == (1, 2)
    assert (await committed(bench)).released == 1
    assert await bench.states("by-id", "second", "new") == [State.DONE, None, State.READY]


@case(rules="§10")
async def a_strict_stage_refuses_another_body_and_stages_nothing(bench: Bench) -> None:
    await bench.do(keyed("a"))
    await opened(bench)
    await bench.refused(IdempotencyConflict, stage(row("b"), keyed("a", fingerprint="other"), strict=True))
    assert await bench.states("b") == [None]
    assert await staged(bench, row("b"), keyed("a"), strict=True) == (1, 1)


@case(rules="§10")
async def a_task_of_two_runs_is_there_when_either_commits(bench: Bench) -> None:
    await staged_by(bench, "dead", "alive")
    info = await committed(bench, "alive")
    assert (info.new, info.claimed, info.released) == (0, 1, 1)
    assert await bench.states("a") == [State.READY]
    await aborted(bench, "dead")
    await bench.sweep()
    assert await bench.states("a") == [State.READY]


@case(rules="§10")
async def a_task_of_two_runs_survives_the_abort_of_the_first(bench: Bench) -> None:
    # The first run brought the task in, and the second only asked for it: the task has to change hands.
    await staged_by(bench, "first", "second")
    await aborted(bench, "first")
    await bench.sweep()
    assert await bench.states("a") == [State.STAGED]
    assert (await committed(bench, "second")).released == 1
    assert await bench.states("a") == [State.READY]


@case(rules="§10")
async def a_task_of_two_runs_goes_when_both_are_aborted(bench: Bench) -> None:
    await staged_by(bench, "first", "second")
    for run in ("second", "first"):
        assert await bench.states("a") == [State.STAGED]
        await aborted(bench, run)
        await bench.sweep()
    assert await bench.states("a") == [None]


@case(rules="§10")
async def an_ordinary_enqueue_does_not_wait_for_a_run(bench: Bench) -> None:
    await opened(bench)
    await staged(bench, keyed("a"), row("b"), row("c"))
    assert (await bench.do(keyed("a"))).existed is False
    assert (await bench.do(row("b", fingerprint="other"))).existed is False
    # A blocking enqueue may take a shorter way, which has to look for staged tasks as well.
    await asyncio.to_thread(bench.store.apply_blocking, [(row("c"),)], bench.now)
    assert await bench.states("a", "b", "c") == [State.READY] * 3
    assert (await bench.counts()).staged == 0
    assert (await committed(bench)).released == 0
    assert sorted(t.id for t in await bench.take(limit=5)) == ["a", "b", "c"]


@case(rules="§10")
async def a_staged_task_can_be_neither_cancelled_nor_removed(bench: Bench) -> None:
    await opened(bench)
    await staged(bench, row("a"))
    for op in (Cancel(queue="default", id="a"), Remove(queue="default", id="a")):
        await bench.refused(NotWaiting, op)
    assert await bench.states("a") == [State.STAGED]


@case(rules="§10")
async def a_run_has_one_queue_and_rows_without_blockers(bench: Bench) -> None:
    await opened(bench)
    for bad in (row("a", queue="other"), row("a", blocked_by=(Blocker("x", "default"),)), row("a", delay_us=S), row("")):
        await bench.invalid(Invalid, stage(row("fine"), bad))
    assert await bench.states("fine") == [None]


@case(rules="§10")
async def runs_of_two_queues_may_share_an_id(bench: Bench) -> None:
    await opened(bench)
    await opened(bench, queue="other")
    await bench.do(Stage(queue="other", run_id="r", tasks=(row("x", queue="other"),)))
    await staged(bench, row("a"))
    await committed(bench)
    assert await bench.states("a", "x") == [State.READY, State.STAGED]


@case(rules="§10")
async def a_long_run_is_finished_by_sweep(bench: Bench) -> None:
    # A commit releases up to 5,000 tasks in its own transaction (on Redis 500).
    await opened(bench)
    wanted = [f"t-{n:05}" for n in range(5_400)]
    for start in range(0, len(wanted), 900):
        await staged(bench, *(row(id) for id in wanted[start : start + 900]))
    await committed(bench)
    await bench.sweep()
    info = await bench.store.run("default", "r")
    assert info is not None and (info.released, info.settled) == (5_400, True)
    counts = await bench.counts()
    assert (counts.staged, counts.ready) == (0, 5_400)


@case(rules="§10", needs="durable")
async def staged_tasks_and_runs_survive_a_restart(bench: Bench) -> None:
    await staged_by(bench, "r", "second")
    await bench.reopen()
    assert await bench.states("a") == [State.STAGED]
    await aborted(bench, "r")
    await bench.reopen()
    assert (await committed(bench, "second")).released == 1
    await bench.reopen()
    found = await bench.store.run("default", "second")
    assert found is not None and (found.state, found.released) == (RunState.COMMITTED, 1)
    assert [t.id for t in await bench.take()] == ["a"]


@case(rules="§10")
async def purge_forgets_a_run_with_its_keys(bench: Bench) -> None:
    await opened(bench)
    await staged(bench, keyed("a", key_ttl_us=3 * DAY))
    await committed(bench)
    (task,) = await bench.take()
    await bench.ack(task)
    # A day is over; the key of three days would still recognise the task.
    bench.advance(2 * 86_400)
    await bench.purge()
    assert await bench.store.run("default", "r") is not None
    bench.advance(2 * 86_400)
    await bench.purge()
    assert await bench.store.run("default", "r") is None


@case(rules="§10")
async def every_field_of_a_staged_task_comes_back(bench: Bench) -> None:
    await opened(bench)
    fields: dict[str, Any] = {
        "payload": b"\xff\x00\xfe",
        "encoding": "raw",
        "headers": {"a": "b"},
        "origin": "spark",
        "eta_us": bench.now + 60 * S,
        "timeout_us": 5 * S,
        "lease_us": 7 * S,
        "interval_us": 60 * S,
        "result_ttl_us": 9 * S,
        "max_attempts": 7,
        "backoff": "fixed:base=1000",
        "group": "g",
        "idempotency_key": "k",
        "fingerprint": "f",
    }
    # Tasks without these four may be written in a shorter way.
    plain = {name: value for name, value in fields.items() if name not in ("eta_us", "interval_us", "group", "headers")}
    await staged(bench, row("all", **fields), row("plain", **plain | {"idempotency_key": "l"}), row("none", payload=None))
    # Before the commit and after it.
    for _ in range(2):
        found, simple, empty = [await bench.get(id) for id in ("all", "plain", "none")]
        assert {name: getattr(found, name) for name in fields} == fields
        assert {name: getattr(simple, name) for name in plain} == plain | {"idempotency_key": "l"}
        assert (empty.payload, empty.max_attempts, empty.lease_us, empty.result_ttl_us) == (None, 0, None, None)
        assert [task.run_id for task in (found, simple, empty)] == ["r"] * 3
        await committed(bench)
    bench.advance(60)
    leased = {task.id: task for task in await bench.take(limit=5)}
    assert {name: getattr(leased["all"], name) for name in fields} == fields
    assert [leased[id].run_id for id in ("all", "plain", "none")] == ["r"] * 3


@case(rules="§10")
async def find_shows_staged_tasks_to_who_asks_for_them_and_a_scan_leaves_them_out(bench: Bench) -> None:
    await bench.do(row("visible"))
    await opened(bench)
    await staged(bench, row("a"), row("b"))
    assert [t.id for t in await bench.all_tasks()] == ["visible"]
    assert [t.id for t in await bench.all_tasks(statuses=(TaskStatus.PENDING,))] == ["visible"]
    assert [t.id for t in await bench.all_tasks(states=(State.STAGED,))] == ["a", "b"]
    assert [t.id for t in await bench.all_tasks(states=(State.READY, State.STAGED))] == ["visible", "a", "b"]
    assert [t.id for t in await bench.all_tasks(run_id="r")] == ["a", "b"]
    for expected in (["visible"], ["a", "b", "visible"]):
        (part,) = await bench.store.ranges("tasks", 1)
        seen = [id async for batch in bench.store.scan(part, ["id"], (), 10) for id in batch["id"]]
        assert sorted(seen) == expected
        await committed(bench)
    assert [t.id for t in await bench.all_tasks(run_id="r")] == ["a", "b"]


@case(rules="§10, §6")
async def a_key_that_is_staged_does_not_hide_an_id_that_is_there(bench: Bench) -> None:
    # The key leads to a staged task, which would give way; the id leads to a visible one, which stays.
    await bench.do(row("there"))
    await opened(bench)
    await staged(bench, keyed("a"))
    await bench.refused(DuplicateId, keyed("there", idempotency_key="a", fingerprint="other"))
    assert (await bench.do(keyed("there", idempotency_key="a"))).existed is True
    assert await bench.states("a", "there") == [State.STAGED, State.READY]


@case(rules="§10, §6")
async def two_enqueues_of_a_staged_key_in_a_transaction_are_one_task(bench: Bench) -> None:
    # The first replaces the staged task, so that the second has to find the new one.
    await opened(bench)
    await staged(bench, keyed("a"))
    first, second = await bench.do(keyed("a"), keyed("b", idempotency_key="a"))
    assert [(e.id, e.existed) for e in (first, second)] == [("a", False), ("a", True)]
    assert await bench.states("a", "b") == [State.READY, None]
    assert (await committed(bench)).released == 0
    assert [t.id for t in await bench.take(limit=5)] == ["a"]


@case(rules="§10, §6")
async def a_finished_task_is_replaced_over_a_staged_key(bench: Bench) -> None:
    await bench.ack(await bench.hold("old"))
    await opened(bench)
    await staged(bench, keyed("a"))
    new = keyed("old", idempotency_key="a", fingerprint="other", on_conflict="replace_finished")
    assert (await bench.do(new)).existed is False
    assert await bench.states("a", "old") == [None, State.READY]
    assert (await committed(bench)).released == 0


@case(rules="§10, §6")
async def a_task_may_wait_for_a_staged_one(bench: Bench) -> None:
    await opened(bench)
    await opened(bench, "never")
    await staged(bench, row("a"))
    await staged(bench, row("b"), run="never")
    for id in ("a", "b"):
        assert (await bench.add(f"after-{id}", after=[id])).state is State.BLOCKED
    await committed(bench)
    await aborted(bench, "never")
    await bench.sweep()
    assert await bench.states("after-a", "after-b") == [State.BLOCKED, State.DEAD]
    (task,) = await bench.take(limit=5)
    await bench.ack(task)
    assert await bench.states("after-a") == [State.READY]


@case(rules="§10", needs="cross_queue")
async def an_id_that_is_staged_for_another_queue_is_refused(bench: Bench) -> None:
    await opened(bench)
    await opened(bench, queue="other")
    await staged(bench, row("a"))
    tasks = (row("b", queue="other"), row("a", queue="other"))
    await bench.refused(DuplicateId, Stage(queue="other", run_id="r", tasks=tasks))
    assert (await bench.do(row("a", queue="other"))).existed is False
    assert (await committed(bench)).released == 0
    assert (await bench.get("a")).queue == "other"


@case(rules="§10")
async def what_was_staged_first_comes_first(bench: Bench) -> None:
    # Whichever run commits, and whichever run asked for the task first.
    await opened(bench, "first")
    await opened(bench)
    await staged(bench, row("a", group="g"), row("b"), run="first")
    await staged(bench, row("c", group="h"), row("d"), row("a", group="g"), row("b"))
    await committed(bench)
    assert await bench.take_ids(9) == ["a", "b", "c", "d"]


@case(rules="§10")
async def staging_and_enqueueing_follow_each_other_in_one_call(bench: Bench) -> None:
    answers = await bench.call(
        (row("a"),),
        (OPEN,),
        (stage(row("a"), row("b"), row("c")),),
        (row("b"),),
        (COMMIT,),
        (row("c", fingerprint="other"),),
    )
    assert [type(answer) for answer in answers] == [list, list, list, list, list, DuplicateId]
    assert await bench.states("a", "b", "c") == [State.READY] * 3
    assert sorted(await bench.take_ids(9)) == ["a", "b", "c"]


@case(rules="§7,§10")
async def the_events_of_a_commit_come_in_the_order_of_staging(bench: Bench) -> None:
    # A driver may release plain tasks together; their events still stand in the order of staging.
    plain, grouped = {}, {"group": "g"}
    kinds: list[dict[str, Any]] = [
        grouped,
        plain,
        plain,
        {"headers": {"a": "b"}},
        plain,
        {"eta_us": bench.now + S},
        plain,
        grouped,
    ]
    await bench.call(
        (OpenRun(queue="default", run_id="r", ttl_us=DAY),),
        *[(stage(bench.new(f"t{n}", **kind)),) for n, kind in enumerate(kinds)],
        (bench.new("before"),),
        (COMMIT,),
        (bench.new("after"),),
    )
    await bench.sweep()
    told = [(e.event, e.task_id) for e in await bench.all_events()]
    assert told == [("enqueued", id) for id in ["before", *[f"t{n}" for n in range(len(kinds))], "after"]]
