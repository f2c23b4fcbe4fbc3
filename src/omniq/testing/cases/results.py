"""Results: stored with the end of a run, kept for their time, purged after it."""

from __future__ import annotations

from omniq.errors import TaskNotFound
from omniq.models import State, StoredResult
from omniq.operations import Ack, Retention
from omniq.testing.bench import BOOM, Bench, S, case, on

DAY = 86_400


@case(rules="§3")
async def an_ack_stores_the_result_exactly(bench: Bench) -> None:
    data = bytes(range(256)) * 3
    task = await bench.hold("a")
    bench.advance(2)
    await bench.ack(task, result=data, encoding="cloudpickle")
    assert await bench.result("a") == StoredResult(
        task_id="a",
        state=State.DONE,
        result=data,
        encoding="cloudpickle",
        finished_at_us=bench.now,
        attempts=1,
        started_at_us=bench.now - 2 * S,
    )


@case(rules="§3")
async def an_ack_without_a_value_still_stores_a_result(bench: Bench) -> None:
    await bench.ack(await bench.hold("a"))
    result = await bench.result("a")
    assert (result.state, result.result, result.error) == (State.DONE, None, None)


@case(rules="§3")
async def a_failure_and_a_cancel_store_theirs(bench: Bench) -> None:
    await bench.dead("dead")
    await bench.add("gone")
    await bench.cancel("gone")
    found = await bench.store.results(["dead", "gone"])
    assert (found["dead"].state, found["dead"].error, found["dead"].result) == (State.DEAD, BOOM, None)
    assert (found["gone"].state, found["gone"].finished_at_us) == (State.CANCELLED, bench.now)


@case(rules="§11")
async def there_is_no_result_before_the_end(bench: Bench) -> None:
    await bench.enqueue("ready", "running", "retried")
    await bench.add("later", delay_us=S)
    await bench.retry((await bench.take())[0], delay_us=S)
    await bench.take()
    assert await bench.store.results(["ready", "running", "retried", "later", "unknown"]) == {}
    assert await bench.store.results([]) == {}


@case(rules="§11")
async def many_results_are_read_at_once(bench: Bench) -> None:
    ids = [f"t{n}" for n in range(700)]
    await bench.do(*[bench.new(i) for i in ids])
    tasks = await bench.take(700)
    await bench.call(*[(on(Ack, t, result=t.id.encode()),) for t in tasks])
    found = await bench.store.results(ids)
    assert {i: r.result for i, r in found.items()} == {i: i.encode() for i in ids}


@case(rules="§4")
async def a_ttl_of_nothing_removes_the_task_with_the_ack(bench: Bench) -> None:
    task = await bench.hold("a", result_ttl_us=0)
    assert (await bench.ack(task, result=b"1")).state is State.DONE
    assert await bench.store.get("a") is None
    assert not await bench.has_result("a")
    assert (await bench.counts()).done == 0
    assert await bench.events("a") == ["enqueued", "started", "succeeded"]
    await bench.refused(TaskNotFound, on(Ack, task))


@case(rules="§4")
async def a_dead_letter_stays_even_with_a_ttl_of_nothing(bench: Bench) -> None:
    # Dead letters go by `Retention.dead_us`, so that somebody can look at them.
    await bench.dead("a", result_ttl_us=0)
    assert await bench.state("a") is State.DEAD


@case(rules="§11")
async def a_result_and_its_task_go_after_their_time(bench: Bench) -> None:
    await bench.ack(await bench.hold("a", result_ttl_us=10 * S), result=b"1")
    await bench.ack(await bench.hold("b"), result=b"1")
    await bench.add("c", result_ttl_us=10 * S)
    await bench.cancel("c")
    bench.advance(9.999)
    await bench.purge()
    assert await bench.states("a", "b", "c") == [State.DONE, State.DONE, State.CANCELLED]
    bench.advance(0.001)
    assert await bench.purge() > 0
    assert await bench.states("a", "b", "c") == [None, State.DONE, None]
    assert set(await bench.store.results(["a", "b", "c"])) == {"b"}
    bench.advance(DAY)
    await bench.purge()
    assert await bench.store.get("b") is None


@case(rules="§11")
async def dead_letters_go_by_the_retention_s_age(bench: Bench) -> None:
    await bench.dead("a")
    bench.advance(40 * DAY)
    await bench.purge(Retention(dead_us=None))
    assert await bench.state("a") is State.DEAD
    assert await bench.has_result("a")
    # `a` died 40 days ago, `b` now; the default is 30 days.
    await bench.dead("b")
    await bench.purge()
    assert await bench.states("a", "b") == [None, State.DEAD]
    assert not await bench.has_result("a")


@case(rules="§11")
async def purge_spares_what_has_not_ended(bench: Bench) -> None:
    # The time of a result begins when there is one.
    await bench.enqueue("running", "ready", result_ttl_us=S)
    await bench.take()
    await bench.add("later", result_ttl_us=S, delay_us=900 * DAY * S)
    await bench.add("blocked", after=["ready"], result_ttl_us=S)
    bench.advance(400 * DAY)
    await bench.purge(Retention(dead_us=0))
    assert None not in await bench.states("running", "ready", "later", "blocked")


@case(rules="§11")
async def purge_works_in_portions(bench: Bench) -> None:
    await bench.do(*[bench.new(f"t{n}", result_ttl_us=S) for n in range(30)])
    await bench.call(*[(on(Ack, t),) for t in await bench.take(30)])
    bench.advance(1)
    # Events stay, so that the loop below counts tasks only.
    keep = Retention(events_us=None, events_max=None)
    await bench.purge(keep, 10)
    assert len(await bench.all_tasks()) == 20
    while await bench.purge(keep, 10):
        pass
    assert await bench.all_tasks() == []


@case(rules="§3,§11")
async def silent_workers_are_forgotten(bench: Bench) -> None:
    await bench.beat("old")
    bench.advance(3599)
    await bench.beat("new")
    bench.advance(1)
    await bench.purge()
    assert [w.worker for w in await bench.store.workers(bench.now)] == ["new"]


@case(rules="§11", needs="cross_queue")
async def a_purged_result_of_a_moved_task_leaves_the_task(bench: Bench) -> None:
    # The result tells of the run in the first queue; the task itself has not ended.
    await bench.dead("a", dead_queue="dlq", result_ttl_us=S)
    bench.advance(1)
    await bench.purge()
    assert not await bench.has_result("a")
    assert await bench.take_ids(9, "dlq") == ["a"]
