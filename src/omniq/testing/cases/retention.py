"""`purge` deletes each kind of thing when its time is over and not before, and in one call no more than its limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from omniq.models import DEFAULT_QUEUE
from omniq.operations import Ack, CommitRun, CountFanIn, EventRow, FannedIn, OpenFanIn, OpenRun, Retention
from omniq.testing.bench import Bench, S, case, on

DAY = 86_400
IDS = ("a", "b", "c", "d", "e")
# Nothing goes by its age, so that a case sees only the kind of thing that it is about.
FOREVER = Retention(dead_us=None, events_us=None, events_max=None, workers_us=1 << 60, limits_us=None)

Left = Callable[[], Awaitable[int]]


async def goes_in_portions(bench: Bench, keep: Retention, after_s: float, left: Left) -> None:
    """Five things all stay until their time; then three calls delete two, two and one, and a fourth deletes nothing."""
    # A millisecond, the finest step that every store keeps.
    bench.advance(after_s - 0.001)
    assert await bench.purge(keep) == 0
    assert await left() == 5
    bench.advance(0.001)
    for there in (3, 1, 0):
        assert await bench.purge(keep, 2) > 0
        assert await left() == there
    assert await bench.purge(keep, 2) == 0


async def ended(bench: Bench, **fields: object) -> None:
    await bench.enqueue(*IDS, **fields)
    await bench.call(*[(on(Ack, task),) for task in await bench.take(5)])


def tasks_left(bench: Bench) -> Left:
    async def left() -> int:
        found = await bench.all_tasks()
        assert set(await bench.store.results(IDS)) == {task.id for task in found}
        return len(found)

    return left


@case(rules="§11")
async def results_go_with_their_tasks_when_their_time_is_over(bench: Bench) -> None:
    await ended(bench, result_ttl_us=10 * S)
    await goes_in_portions(bench, FOREVER, 10, tasks_left(bench))


@case(rules="§11")
async def cancelled_tasks_go_with_their_results(bench: Bench) -> None:
    await bench.enqueue(*IDS, result_ttl_us=10 * S)
    for id in IDS:
        await bench.cancel(id)
    await goes_in_portions(bench, FOREVER, 10, tasks_left(bench))


@case(rules="§11")
async def dead_letters_go_so_long_after_their_end(bench: Bench) -> None:
    for id in IDS:
        await bench.dead(id, result_ttl_us=S)
    bench.advance(DAY)
    assert await bench.purge(FOREVER) == 0
    await goes_in_portions(bench, Retention(dead_us=3 * DAY * S, events_us=None), 2 * DAY, tasks_left(bench))


@case(rules="§7")
async def events_go_so_long_after_they_happened(bench: Bench) -> None:
    await bench.enqueue(*IDS)

    async def left() -> int:
        return len(await bench.all_events())

    await goes_in_portions(bench, Retention(events_us=10 * S), 10, left)


@case(rules="§7")
async def so_many_events_are_kept_and_the_oldest_go_first(bench: Bench) -> None:
    await bench.enqueue(*IDS)
    keep = Retention(events_us=None, events_max=2)
    for ids in ("cde", "de", "de"):
        await bench.purge(keep, 2)
        assert [event.task_id for event in await bench.all_events()] == list(ids)


@case(rules="§7", needs="restores")
async def an_old_event_behind_a_young_one_waits_for_it(bench: Bench) -> None:
    # Events go in order, without a gap; those that came from another store may be older than their neighbours.
    await bench.enqueue("young")
    old = EventRow(seq=1, ts_us=bench.now - 8 * DAY * S, event="removed", task_id="old", queue=DEFAULT_QUEUE, name="job")
    await bench.store.restore_events([old])
    assert await bench.purge() == 0
    assert [event.task_id for event in await bench.all_events()] == ["young", "old"]
    bench.advance(7 * DAY)
    await bench.purge()
    assert await bench.all_events() == []


@case(rules="§6")
async def keys_go_when_their_time_is_over_and_their_task_has_ended(bench: Bench) -> None:
    for id in IDS:
        await bench.ack(await bench.hold(id, idempotency_key=f"key of {id}", key_ttl_us=10 * S, result_ttl_us=0))
    # Its time is over at once, but its task has not ended.
    await bench.add("alive", idempotency_key="key of alive", key_ttl_us=S)
    bench.advance(9.999)
    assert await bench.purge(FOREVER) == 0
    bench.advance(0.001)
    assert await portions(bench, FOREVER) == [2, 2, 1]
    assert (await bench.add("new", idempotency_key="key of alive")).id == "alive"


async def portions(bench: Bench, keep: Retention) -> list[int]:
    """Purges until a call deletes nothing. Returns how many things each call deleted."""
    gone: list[int] = []
    while n := await bench.purge(keep, 2):
        gone.append(n)
    return gone


@case(rules="§5")
async def idle_groups_go_at_once_in_portions(bench: Bench) -> None:
    for id in IDS:
        await bench.ack(await bench.hold(id, group=id))
    await bench.add("busy", group="busy")
    assert sorted(await groups(bench)) == ["a", "b", "busy", "c", "d", "e"]
    for _ in range(5):  # a store may look at groups that stay, too, before it has deleted as many as it may
        there = len(await groups(bench))
        await bench.purge(FOREVER, 2)
        assert there - len(await groups(bench)) <= 2
    assert await groups(bench) == ["busy"]


async def groups(bench: Bench) -> Sequence[str]:
    return [info.group for info in await bench.groups()]


@case(rules="§5")
async def idle_groups_with_a_limit_go_so_long_after_they_were_found(bench: Bench) -> None:
    for id in IDS:
        await bench.store.set_group_limit(DEFAULT_QUEUE, id, 3)
    keep = Retention(limits_us=10 * S)
    for _ in range(5):
        assert await bench.purge(keep, 2) == 0
    bench.advance(9.999)
    assert await bench.purge(keep) == 0
    bench.advance(0.001)
    for _ in range(5):
        there = len(await groups(bench))
        await bench.purge(keep, 2)
        assert there - len(await groups(bench)) <= 2
    assert await groups(bench) == []


@case(rules="§3")
async def workers_go_so_long_after_their_last_beat(bench: Bench) -> None:
    for id in IDS:
        await bench.beat(id)

    async def left() -> int:
        return len(await bench.store.workers(bench.now))

    await goes_in_portions(bench, Retention(workers_us=10 * S), 10, left)


@case(rules="§10")
async def settled_runs_go_after_a_day(bench: Bench) -> None:
    # For a day a client that lost its answer can still ask what became of its run.
    for id in IDS:
        await bench.do(OpenRun(queue=DEFAULT_QUEUE, run_id=id, ttl_us=S))
        await bench.do(CommitRun(queue=DEFAULT_QUEUE, run_id=id))
    await bench.do(OpenRun(queue=DEFAULT_QUEUE, run_id="open", ttl_us=9 * DAY * S))

    async def left() -> int:
        return sum([await bench.store.run(DEFAULT_QUEUE, id) is not None for id in IDS])

    await goes_in_portions(bench, FOREVER, DAY, left)
    assert await bench.store.run(DEFAULT_QUEUE, "open") is not None


@case(rules="§3")
async def fan_ins_go_when_their_time_is_over(bench: Bench) -> None:
    for key in IDS:
        await bench.do(OpenFanIn(key=key, expected=2, ttl_us=10 * S))
        await bench.do(CountFanIn(key=key, member="m"))
    bench.advance(9.999)
    assert await bench.purge(FOREVER) == 0
    assert await bench.do(OpenFanIn(key="a", expected=2, ttl_us=10 * S)) == FannedIn(left=1)
    bench.advance(0.001)
    assert max(await portions(bench, FOREVER), default=0) <= 2  # some stores let them run out by themselves
    for key in IDS:
        assert await bench.do(OpenFanIn(key=key, expected=3, ttl_us=10 * S)) == FannedIn(left=3)
        assert await bench.do(CountFanIn(key=key, member="m")) == FannedIn(left=2)
