"""Moving to another store: whether a store exists, and restoring the tasks and events of another one."""

from __future__ import annotations

from omniq.models import DEFAULT_QUEUE, State, TaskStatus
from omniq.operations import CommitRun, EventRow, Filter, OpenRun, Progress, Saved, Stage
from omniq.storage.memory import MemoryStorage
from omniq.testing.bench import Bench, S, case, on


@case(rules="§1")
async def an_open_store_exists(bench: Bench) -> None:
    await bench.store.open()
    assert await bench.store.exists()
    await bench.enqueue("a")
    assert await bench.store.exists()


@case(rules="§1", needs="durable")
async def a_store_exists_after_it_was_closed(bench: Bench) -> None:
    await bench.enqueue("a")
    await bench.reopen()
    assert await bench.store.exists()


async def _saved(bench: Bench) -> list[Saved]:
    """Returns everything in the store of this bench, in the form that `restore` takes."""
    tasks = await bench.all_tasks()
    results = await bench.store.results([t.id for t in tasks])
    return [Saved(record=t, result=results.get(t.id)) for t in tasks]


def _other(bench: Bench) -> Bench:
    """Returns a second store on the same clock."""
    # Of another kind, so that nothing but the records can come along.
    return Bench(MemoryStorage(clock=bench.clock), bench.clock)


async def _life(bench: Bench, cross_queue: bool) -> None:
    """Makes tasks in all states and with all kinds of fields. With `cross_queue` one of them names another queue."""
    await bench.ack(await bench.hold("done", idempotency_key="k", fingerprint="f"), result=b"[1]")
    await bench.dead("dead", group="g", payload=b"\0\xff")
    await bench.add("gone", headers={"a": "b"})
    await bench.cancel("gone")
    bench.advance(5)
    task = await bench.hold("tried", origin="cli", timeout_us=S, backoff="fixed:base=5000")
    await bench.do(on(Progress, task, data=b'{"done":1}'))
    await bench.retry(task, delay_us=60 * S)
    await bench.add("series", interval_us=90 * S, delay_us=10 * S)
    await bench.add("ready", group="g", group_limit=2, max_attempts=9, result_ttl_us=7 * S)
    await bench.add("waits", after=["tried", "ready"], queue=DEFAULT_QUEUE, dead_queue="grave" if cross_queue else None)


@case(rules="§1", needs="restores")
async def tasks_and_results_of_another_store_come_in_as_they_stand(bench: Bench) -> None:
    source = _other(bench)
    await _life(source, bench.store.capabilities.cross_queue)
    kept = await _saved(source)
    assert await bench.store.restore(kept) == len(kept)
    for saved in kept:
        there, theirs = await bench.get(saved.record.id), saved.record
        # Each store numbers its tasks by itself.
        there.seq = theirs.seq
        assert there == theirs
        assert (await bench.store.results([theirs.id])).get(theirs.id) == saved.result
    assert [t.id for t in await bench.all_tasks()] == [s.record.id for s in kept]
    theirs, ours = await source.counts(), await bench.counts()
    assert (ours.ready, ours.scheduled, ours.blocked, ours.dead) == (
        theirs.ready,
        theirs.scheduled,
        theirs.blocked,
        theirs.dead,
    )
    await source.close()


@case(rules="§1", needs="restores,cross_queue")
async def a_task_that_is_there_stays_as_it_is(bench: Bench) -> None:
    # A move that was interrupted can be repeated, also while the new store is in use.
    source = _other(bench)
    await source.enqueue("a", "b")
    kept = await _saved(source)
    await bench.enqueue("a", queue="mine")
    assert await bench.store.restore(kept) == 1
    assert await bench.store.restore(kept) == 0
    assert (await bench.get("a")).queue == "mine"
    assert await bench.take_ids(9) == ["b"]
    await source.close()


@case(rules="§1,§5", needs="restores")
async def a_running_task_comes_in_as_if_it_had_been_handed_back(bench: Bench) -> None:
    source = _other(bench)
    await source.enqueue("first", "second")
    held = (await source.take())[0]
    await bench.store.restore(await _saved(source))
    there = await bench.get("first")
    assert (there.state, there.attempts, there.token, there.lease_until_us) == (State.READY, 0, None, None)
    assert held.attempts == 1
    assert await bench.take_ids(9) == ["first", "second"]
    await source.close()


@case(rules="§1,§5", needs="restores")
async def groups_count_what_came_in(bench: Bench) -> None:
    source = _other(bench)
    await source.enqueue("a", "b", "c", group="g")
    await bench.store.restore(await _saved(source))
    (info,) = await bench.groups()
    assert (info.group, info.ready, info.inflight) == ("g", 3, 0)
    assert await bench.take_ids(9) == ["a"]
    await source.close()


@case(rules="§1,§6", needs="restores")
async def what_waits_for_another_goes_on_waiting(bench: Bench) -> None:
    source = _other(bench)
    await source.chain("first", "second", "third")
    await bench.store.restore(await _saved(source))
    await bench.ack((await bench.take())[0])
    assert await bench.states("second", "third") == [State.READY, State.BLOCKED]
    await bench.cancel("second")
    assert await bench.state("third") is State.DEAD
    await source.close()


@case(rules="§1,§6", needs="restores")
async def what_waits_for_something_that_is_gone_may_run(bench: Bench) -> None:
    # The blocker did not come along; nobody would ever free the dependent.
    source = _other(bench)
    await source.chain("first", "second")
    kept = await _saved(source)
    await bench.store.restore(kept[1:])
    assert await bench.take_ids(9) == ["second"]
    await source.close()


@case(rules="§1,§6", needs="restores")
async def a_key_that_came_in_still_answers(bench: Bench) -> None:
    source = _other(bench)
    await source.ack(await source.hold("a", idempotency_key="k", fingerprint="f"))
    await bench.store.restore(await _saved(source), 60 * S)
    assert (await bench.add("b", idempotency_key="k", fingerprint="f")).id == "a"
    bench.advance(61)
    assert (await bench.add("c", idempotency_key="k", fingerprint="f")).id == "c"
    await source.close()


@case(rules="§1", needs="restores")
async def a_result_that_came_in_expires_in_its_time(bench: Bench) -> None:
    source = _other(bench)
    await source.ack(await source.hold("a", result_ttl_us=60 * S), result=b"1")
    await bench.store.restore(await _saved(source))
    assert await bench.has_result("a")
    bench.advance(61)
    await bench.purge()
    assert not await bench.has_result("a")
    assert await bench.state("a") is None
    await source.close()


@case(rules="§1,§7", needs="restores")
async def events_of_another_store_come_in_with_their_times_and_writing_none(bench: Bench) -> None:
    source = _other(bench)
    await _life(source, bench.store.capabilities.cross_queue)
    rows = await source.all_events()
    await bench.store.restore(await _saved(source))
    # To take a task in is no transition: its past comes with `restore_events`.
    assert await bench.all_events() == []
    await bench.store.restore_events(rows)
    ours = await bench.all_events()
    assert [_without_place(e) for e in ours] == [_without_place(e) for e in rows]
    assert await bench.events("done") == await source.events("done")
    await bench.enqueue("new")
    assert (await bench.all_events())[-1].seq > ours[-1].seq
    await source.close()


@case(rules="§1,§7", needs="restores")
async def events_of_a_task_that_is_gone_come_in_too(bench: Bench) -> None:
    row = EventRow(seq=7, ts_us=bench.now, event="removed", task_id="old", queue="q", name="job", data=b'{"a":1}')
    await bench.store.restore_events([row])
    assert [(e.event, e.ts_us, e.data) for e in await bench.store.events_of("old")] == [("removed", row.ts_us, row.data)]


def _without_place(event: EventRow) -> tuple[object, ...]:
    skipped = {"seq", "shard"}
    return tuple(getattr(event, f) for f in event.__struct_fields__ if f not in skipped)


@case(rules="§11")
async def tasks_are_found_by_their_status(bench: Bench) -> None:
    await bench.ack(await bench.hold("done"))
    await bench.dead("dead")
    await bench.retry(await bench.hold("tried"), delay_us=60 * S)
    await bench.add("later", delay_us=S)
    await bench.hold("runs")

    async def found(*statuses: TaskStatus) -> set[str]:
        return {t.id for t in (await bench.store.find(Filter(statuses=statuses))).tasks}

    assert await found(TaskStatus.PENDING) == {"later"}
    assert await found(TaskStatus.RETRYING) == {"tried"}
    assert await found(TaskStatus.RUNNING, TaskStatus.FAILED) == {"runs", "dead"}
    assert await found() == {"done", "dead", "tried", "later", "runs"}


@case(rules="§1, §10", needs="restores")
async def a_staged_task_is_left_out_and_gives_way(bench: Bench) -> None:
    # Runs do not move with a store, and a task that comes in does not wait for a run that may never be committed.
    source = _other(bench)
    await source.enqueue("visible", "free")
    run = OpenRun(queue=DEFAULT_QUEUE, run_id="r")
    for side, id in ((source, "theirs"), (bench, "visible")):
        await side.do(run)
        await side.do(Stage(queue=DEFAULT_QUEUE, run_id="r", tasks=(side.new(id),)))
    assert await bench.store.restore(await _saved(source)) == 2
    assert await bench.states("visible", "free", "theirs") == [State.READY, State.READY, None]
    assert (await bench.do(CommitRun(queue=DEFAULT_QUEUE, run_id="r"))).released == 0
    await source.close()
