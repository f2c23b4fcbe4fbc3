"""Looking: one task, many tasks in pages, counters, workers."""

from __future__ import annotations

from typing import Any

from omniq.errors import InvalidCursor
from omniq.models import DEFAULT_QUEUE, State, TaskError, TaskStatus
from omniq.operations import Ack, Filter, Requeue
from omniq.testing.bench import Bench, S, case, on, raises


@case(rules="47")
async def a_task_can_be_followed_through_its_life(bench: Bench) -> None:
    await bench.add("a", delay_us=S)
    assert await bench.state("a") is State.SCHEDULED
    bench.advance(1)
    (task,) = await bench.take(worker="w")
    seen = await bench.get("a")
    assert (seen.state, seen.token, seen.worker) == (State.RUNNING, task.token, "w")
    await bench.fail(task)
    assert await bench.state("a") is State.DEAD
    await bench.do(on(Requeue, task))
    assert await bench.state("a") is State.READY
    await bench.ack((await bench.take())[0])
    assert await bench.state("a") is State.DONE


@case(rules="§11")
async def a_task_is_found_by_id_and_guarded_by_queue(bench: Bench) -> None:
    await bench.add("a", queue="x")
    assert await bench.store.get("a") == await bench.store.get("a", "x")
    assert await bench.store.get("a", "y") is None
    assert await bench.store.get("unknown") is None
    assert await bench.store.locate("a") == "x"
    assert await bench.store.locate("unknown") is None


@case(rules="§11")
async def what_was_handed_out_is_a_copy(bench: Bench) -> None:
    # A driver that hands out its own objects lets its callers change the store.
    await bench.add("a")
    task = await bench.get("a")
    task.state, task.attempts = State.DONE, 99
    (taken,) = await bench.take()
    taken.attempts = 99
    assert (await bench.get("a")).attempts == 1


async def variety(bench: Bench) -> None:
    """A task in every state, in two queues."""
    await bench.ack(await bench.hold("done", name="x"), result=b"1")
    await bench.dead("dead", queue="mail", payload=b"needle in hay")
    await bench.add("gone")
    await bench.cancel("gone")
    bench.advance(10)
    await bench.hold("running", worker="w1", name="x", origin="cli")
    await bench.add("scheduled", delay_us=900 * S)
    await bench.add("ready", group="g", queue="mail")
    await bench.add("blocked", after=["running"])


@case(rules="48,§11")
async def tasks_are_found_by_what_they_are(bench: Bench) -> None:
    start = bench.now
    await variety(bench)
    wanted: list[tuple[dict[str, Any], set[str]]] = [
        ({"states": (State.SCHEDULED,)}, {"scheduled"}),
        ({"states": (State.DEAD,)}, {"dead"}),
        ({"states": (State.DONE, State.CANCELLED)}, {"done", "gone"}),
        ({"queue": "mail"}, {"dead", "ready"}),
        ({"queue": "mail", "states": (State.READY,)}, {"ready"}),
        ({"name": "x"}, {"done", "running"}),
        ({"group": "g"}, {"ready"}),
        ({"worker": "w1"}, {"running"}),
        ({"origin": "cli"}, {"running"}),
        ({"ids": ("done", "blocked", "unknown")}, {"done", "blocked"}),
        ({"created_from_us": start + 10 * S}, {"running", "scheduled", "ready", "blocked"}),
        ({"created_to_us": start + 10 * S}, {"done", "dead", "gone"}),
        ({"finished_from_us": start, "finished_to_us": start + S}, {"done", "dead", "gone"}),
        ({"finished_from_us": start + S}, set()),
        ({"error_contains": "it broke"}, {"dead"}),
        ({"payload_contains": "needle"}, {"dead"}),
        ({"queue": "nothing"}, set()),
    ]
    for filter, expected in wanted:
        assert {t.id for t in await bench.all_tasks(**filter)} == expected, filter
    assert len(await bench.all_tasks()) == 7


@case(rules="§11")
async def a_filter_takes_its_text_literally(bench: Bench) -> None:
    # `%` and `_` are wildcards of SQL, and a quote ends its text.
    await bench.add("a", payload=b"100%")
    await bench.add("b", payload=b"100 per cent")
    await bench.fail(await bench.hold("c", queue="c"), error=TaskError("E", "it's a_b"))
    assert {t.id for t in await bench.all_tasks(payload_contains="0%")} == {"a"}
    assert {t.id for t in await bench.all_tasks(error_contains="it's a_b")} == {"c"}
    assert await bench.all_tasks(error_contains="a%b") == []
    assert await bench.all_tasks(name="job' OR '1'='1") == []


@case(rules="49")
async def three_tasks_make_a_page_of_two_and_a_page_of_one(bench: Bench) -> None:
    await bench.enqueue("a", "b", "c")
    first = await bench.store.find(Filter(), None, 2)
    assert ([t.id for t in first.tasks], first.partial) == (["c", "b"], False)
    assert first.cursor is not None
    second = await bench.store.find(Filter(), first.cursor, 2)
    assert ([t.id for t in second.tasks], second.cursor) == (["a"], None)
    oldest = await bench.store.find(Filter(), None, 2, newest_first=False)
    assert [t.id for t in oldest.tasks] == ["a", "b"]
    rest = await bench.store.find(Filter(), oldest.cursor, 2, newest_first=False)
    assert [t.id for t in rest.tasks] == ["c"]


@case(rules="77")
async def pages_stay_exact_while_tasks_change(bench: Bench) -> None:
    ids = [f"t{n:02}" for n in range(20)]
    for newest_first in (True, False):
        await bench.enqueue(*[f"{newest_first}{i}" for i in ids], queue=str(newest_first))
        seen: list[str] = []
        cursor: str | None = None
        while True:
            page = await bench.store.find(Filter(queue=str(newest_first)), cursor, 3, newest_first)
            seen += [t.id for t in page.tasks if t.id.startswith(str(newest_first))]
            cursor = page.cursor
            if cursor is None:
                break
            # Between pages a task changes its state and another arrives: pages by offset or by change slip.
            (task,) = await bench.take(1, str(newest_first))
            await bench.ack(task)
            await bench.add(queue=str(newest_first))
        expected = [f"{newest_first}{i}" for i in ids]
        assert seen == (expected[::-1] if newest_first else expected)


@case(rules="77")
async def a_cursor_that_was_never_given_out_is_refused(bench: Bench) -> None:
    await bench.enqueue("a", "b")
    for bad in ("garbage", "", "-", "9" * 60, "🦑"):
        await raises(InvalidCursor, bench.store.find(Filter(), bad, 1))


@case(rules="§11")
async def counts_tell_every_state(bench: Bench) -> None:
    await variety(bench)
    default, mail = await bench.counts(), await bench.counts("mail")
    assert (default.done, default.cancelled, default.running, default.scheduled, default.blocked) == (1, 1, 1, 1, 1)
    assert (default.ready, default.dead, default.staged, default.waiting) == (0, 0, 0, 2)
    assert (mail.ready, mail.dead, mail.waiting) == (1, 1, 1)
    # It is due, though no Reserve has made it ready yet.
    bench.advance(900)
    default = await bench.counts()
    assert (default.scheduled, default.ready) == (0, 1)


@case(rules="§11")
async def counts_tell_how_long_the_oldest_has_waited(bench: Bench) -> None:
    assert (await bench.counts()).oldest_ready_us is None
    first = bench.now
    await bench.enqueue("a")
    bench.advance(5)
    await bench.enqueue("b")
    assert (await bench.counts()).oldest_ready_us == first
    await bench.take()
    assert (await bench.counts()).oldest_ready_us == first + 5 * S
    await bench.take()
    await bench.add("c", delay_us=S)
    assert (await bench.counts()).oldest_ready_us is None


@case(rules="§11")
async def queues_are_listed(bench: Bench) -> None:
    assert await bench.store.queues() == []
    await bench.enqueue("a", queue="b")
    await bench.enqueue("c", queue="a")
    assert sorted(await bench.store.queues()) == ["a", "b"]
    assert sorted(await bench.store.queues(fed=True)) == ["a", "b"]


@case(rules="§3")
async def a_worker_that_beats_is_registered(bench: Bench) -> None:
    info: dict[str, Any] = {
        "host": "h",
        "pid": 7,
        "queues": ("a", "b"),
        "running": 3,
        "concurrency": 4,
        "started_at_us": bench.now,
    }
    await bench.beat("w1", **info)
    bench.advance(5)
    await bench.beat("w2")
    one, two = sorted(await bench.store.workers(bench.now), key=lambda w: w.worker)
    assert (one.host, one.pid, one.queues, one.running, one.concurrency) == ("h", 7, ("a", "b"), 3, 4)
    assert (one.started_at_us, one.seen_at_us, two.seen_at_us) == (bench.now - 5 * S, bench.now - 5 * S, bench.now)
    await bench.beat("w1", **info)
    assert {w.seen_at_us for w in await bench.store.workers(bench.now)} == {bench.now}


@case(rules="§9")
async def a_worker_says_how_many_functions_run_per_queue(bench: Bench) -> None:
    await bench.beat("w1", queues=("a", "b"), running=3, busy={"a": 2, "b": 1})
    await bench.beat("w2", queues=("a",), running=1)
    await bench.beat("w3", busy={})
    found = {worker.worker: worker.busy for worker in await bench.store.workers(bench.now)}
    # None comes from workers of older versions, which do not report it; an empty mapping means that nothing runs.
    assert found == {"w1": {"a": 2, "b": 1}, "w2": None, "w3": {}}


@case(rules="§3")
async def a_worker_that_leaves_is_taken_out(bench: Bench) -> None:
    # `never` was not registered: a worker that repeats its goodbye must not fail.
    await bench.beat("w1")
    await bench.beat("w1", gone=True)
    await bench.beat("never", gone=True)
    assert await bench.store.workers(bench.now) == []


@case(rules="§11")
async def a_store_introduces_itself(bench: Bench) -> None:
    info = await bench.store.info()
    assert info.store_id
    assert info.format >= 1
    assert info.capabilities == bench.store.capabilities
    assert (await bench.store.info()).store_id == info.store_id


@case(rules="§12")
async def the_check_finds_nothing_wrong_and_repair_breaks_nothing(bench: Bench) -> None:
    await variety(bench)
    # Every state is there, so a repair that misreads a state shows.
    before = await bench.snapshot()
    assert await bench.store.check(repair=True) == []
    assert await bench.snapshot() == before
    await bench.call(*[(on(Ack, t),) for t in await bench.take(9, DEFAULT_QUEUE, "mail")])
    assert await bench.store.check() == []


@case(rules="§11")
async def the_oldest_that_waits_is_known_when_all_have_groups(bench: Bench) -> None:
    first = bench.now
    await bench.add("a", group="g")
    bench.advance(5)
    await bench.add("b", group="h")
    assert (await bench.counts()).oldest_ready_us == first
    (a,) = await bench.take()
    assert (a.id, (await bench.counts()).oldest_ready_us) == ("a", first + 5 * S)
    bench.advance(5)
    await bench.add("c", group="g")
    await bench.take()
    assert (await bench.counts()).oldest_ready_us == first + 10 * S, "it waits, though its group is at its limit"
    await bench.ack(a)
    await bench.take()
    assert (await bench.counts()).oldest_ready_us is None


async def a_crowd(bench: Bench) -> None:
    """A task in every state, behind more newer tasks than a page may look at."""
    await bench.hold("running", queue="all")
    await bench.ack(await bench.hold("done", queue="all"))
    await bench.dead("dead", queue="all")
    await bench.add("cancelled", queue="all")
    await bench.cancel("cancelled", queue="all")
    await bench.add("blocked", queue="all", after=["running"])
    await bench.add("scheduled", queue="all", delay_us=900 * S)
    await bench.add("grouped", queue="all", group="g")
    # Seven tasks of 137 are few: less than one in eight, the share that the contract names.
    await bench.enqueue(*[f"crowd-{n}" for n in range(130)], queue="crowd")
    bench.store.scan_limit = 20


@case(rules="§11")
async def a_few_tasks_of_a_state_are_found_behind_any_number_of_newer_ones(bench: Bench) -> None:
    await a_crowd(bench)
    few: list[tuple[dict[str, Any], list[str]]] = [
        ({"states": (State.RUNNING,)}, ["running"]),
        ({"states": (State.DONE,)}, ["done"]),
        ({"states": (State.DEAD,)}, ["dead"]),
        ({"states": (State.CANCELLED,)}, ["cancelled"]),
        ({"states": (State.BLOCKED,)}, ["blocked"]),
        ({"states": (State.SCHEDULED,)}, ["scheduled"]),
        ({"states": (State.READY,), "queue": "all"}, ["grouped"]),
        ({"states": (State.RUNNING, State.DEAD), "queue": "all"}, ["dead", "running"]),
        ({"states": (State.RUNNING,), "queue": "crowd"}, []),
        ({"states": (State.RUNNING,), "name": "another"}, []),
        ({"statuses": (TaskStatus.RUNNING,)}, ["running"]),
        ({"statuses": (TaskStatus.FAILED, TaskStatus.SUCCESS)}, ["dead", "done"]),
        ({"queue": "all"}, ["grouped", "scheduled", "blocked", "cancelled", "dead", "done", "running"]),
    ]
    for filter, expected in few:
        page = await bench.store.find(Filter(**filter), None, 10)
        assert ([t.id for t in page.tasks], page.cursor, page.partial) == (expected, None, False), filter
        page = await bench.store.find(Filter(**filter), None, 10, newest_first=False)
        assert ([t.id for t in page.tasks], page.cursor, page.partial) == (expected[::-1], None, False), filter


@case(rules="§11")
async def few_tasks_come_in_pages_that_go_on_when_they_become_many(bench: Bench) -> None:
    for newest_first in (True, False):
        queue = str(newest_first)
        ids = [f"{queue}-{n}" for n in range(8)]
        for id in ids:
            await bench.dead(id, queue=queue)
        await bench.enqueue(*[f"{queue}-crowd-{n}" for n in range(130)], queue="crowd")
        wanted = Filter(states=(State.DEAD,), queue=queue)
        bench.store.scan_limit = 200
        first = await bench.store.find(wanted, None, 3, newest_first)
        assert first.cursor is not None
        bench.store.scan_limit = 5  # now they are many
        seen, cursor = [t.id for t in first.tasks], first.cursor
        while cursor is not None:
            page = await bench.store.find(wanted, cursor, 3, newest_first)
            seen, cursor = [*seen, *(t.id for t in page.tasks)], page.cursor
        assert seen == (ids[::-1] if newest_first else ids)
