"""The calls of `BaseStorage` that take tasks and datetimes: enqueue, dequeue, mark_*, reserve, ack, retry, fail."""

from __future__ import annotations

from datetime import timedelta

from omniq.errors import (
    DuplicateId,
    Invalid,
    InvalidLease,
    LeaseExpired,
    NotActive,
    NotWaiting,
    QueueRequired,
    TaskNotFound,
    TokenMismatch,
)
from omniq.models import DEFAULT_QUEUE, Record, State, Task, TaskError, TaskResult, TaskStatus, new_token, to_us
from omniq.testing.bench import BOOM, Bench, S, case, raises


def a_task(id: str = "a", **fields: object) -> Task:
    return Task(**({"id": id, "func_path": "app:job", "args": [1, "x"], "kwargs": {"k": None}} | fields))  # pyright: ignore[reportArgumentType]


async def dequeued(bench: Bench, id: str = "a") -> None:
    await bench.store.enqueue(a_task(id))
    await bench.store.dequeue(bench.clock.now)


def success(id: str, value: object = None) -> TaskResult:
    return TaskResult(task_id=id, status=TaskStatus.SUCCESS, result=value)


@case(rules="§14")
async def enqueue_and_dequeue_give_the_task_back(bench: Bench) -> None:
    eta = bench.clock.now - timedelta(seconds=5)
    sent = a_task(eta=eta, interval=timedelta(minutes=2), max_retries=7, timeout=1.5, queue="mail", group="g")
    assert await bench.store.enqueue(sent) == "a"
    got = await bench.store.dequeue(bench.clock.now)
    assert got is not None
    same = ("id", "func_path", "args", "kwargs", "eta", "interval", "max_retries", "timeout", "queue", "group")
    assert [getattr(got, f) for f in same] == [getattr(sent, f) for f in same]
    assert (got.status, got.attempts) == (TaskStatus.RUNNING, 1)


@case(rules="72,§14")
async def enqueueing_the_same_task_twice_is_safe(bench: Bench) -> None:
    await bench.store.enqueue(a_task())
    assert await bench.store.enqueue(a_task()) == "a"
    await raises(DuplicateId, bench.store.enqueue(a_task(args=[2])))
    assert len(await bench.all_tasks()) == 1


# Some of these calls take no time and read the store's clock, which has to be the fake one: hence `own_clock`.
@case(rules="10,5,§14", needs="own_clock")
async def dequeue_gives_nothing_before_its_time(bench: Bench) -> None:
    assert await bench.store.dequeue(bench.clock.now) is None
    await bench.store.enqueue(a_task(eta=bench.clock.now + timedelta(seconds=1)))
    assert await bench.store.dequeue(bench.clock.now) is None
    got = await bench.store.dequeue(bench.clock.now + timedelta(seconds=1))
    assert got is not None


@case(rules="§14")
async def dequeue_serves_every_queue(bench: Bench) -> None:
    for id in ("a", "b", "c"):
        await bench.store.enqueue(a_task(id, queue=f"q.{id}"))
    got = [await bench.store.dequeue(bench.clock.now) for _ in range(4)]
    assert sorted(t.id for t in got if t is not None) == ["a", "b", "c"]


@case(rules="14,§14", needs="own_clock")
async def dequeue_takes_expired_tasks_back(bench: Bench) -> None:
    await dequeued(bench)
    bench.advance(30)
    again = await bench.store.dequeue(bench.clock.now)
    assert again is not None
    assert again.attempts == 2


@case(rules="28,§14", needs="own_clock")
async def mark_done_stores_the_result(bench: Bench) -> None:
    await bench.store.enqueue(a_task())
    assert await bench.store.get_result("a") is None
    await bench.store.dequeue(bench.clock.now)
    await bench.store.mark_running("a")
    bench.advance(1)
    await bench.store.mark_done("a", success("a", {"sum": [1, 2]}))
    result = await bench.store.get_result("a")
    assert result is not None
    assert (result.status, result.result, result.error, result.attempts) == (TaskStatus.SUCCESS, {"sum": [1, 2]}, None, 1)
    assert (result.finished_at, result.ok) == (bench.clock.now, True)
    assert await bench.store.get_result("unknown") is None


@case(rules="33,35,§14", needs="own_clock")
async def mark_failed_retries_at_once_or_ends(bench: Bench) -> None:
    await dequeued(bench)
    await bench.store.mark_failed("a", BOOM, will_retry=True)
    assert await bench.store.get_result("a") is None
    again = await bench.store.dequeue(bench.clock.now)
    assert again is not None
    assert (again.attempts, again.last_error) == (2, BOOM)
    await bench.store.mark_failed("a", BOOM, will_retry=False)
    result = await bench.store.get_result("a")
    assert result is not None
    assert (result.status, result.error, result.attempts) == (TaskStatus.FAILED, BOOM, 2)
    assert await bench.store.dequeue(bench.clock.now) is None


@case(rules="25,32,§14", needs="own_clock")
async def only_what_was_dequeued_here_can_be_marked(bench: Bench) -> None:
    # These calls have no token: the storage object remembers those of the tasks that it dequeued.
    await bench.store.enqueue(a_task())
    await bench.take()
    for id in ("a", "unknown"):
        await raises(NotActive, bench.store.mark_running(id))
        await raises(NotActive, bench.store.mark_done(id, success(id)))
        await raises(NotActive, bench.store.mark_failed(id, BOOM, will_retry=True))


@case(rules="30,§14", needs="own_clock")
async def a_task_is_marked_once(bench: Bench) -> None:
    await dequeued(bench)
    await bench.store.mark_done("a", success("a"))
    await raises(NotActive, bench.store.mark_done("a", success("a")))


@case(rules="§14", needs="own_clock")
async def purge_results_removes_what_ended_before(bench: Bench) -> None:
    for id in ("a", "b"):
        await dequeued(bench, id)
        await bench.store.mark_done(id, success(id))
        bench.advance(10)
    assert await bench.store.purge_results(bench.clock.now - timedelta(seconds=20)) == 0
    assert await bench.store.purge_results(bench.clock.now - timedelta(seconds=15)) == 1
    assert await bench.store.get_result("a") is None
    assert await bench.store.get_result("b") is not None


@case(rules="§14", needs="own_clock")
async def reschedule_moves_a_waiting_task(bench: Bench) -> None:
    await bench.store.enqueue(a_task())
    later = bench.clock.now + timedelta(seconds=9)
    await bench.store.reschedule("a", later)
    assert (await bench.get("a")).eta_us == to_us(later)
    assert await bench.store.dequeue(bench.clock.now) is None
    assert await bench.store.dequeue(later) is not None
    await raises(NotWaiting, bench.store.reschedule("a", later))
    await raises(TaskNotFound, bench.store.reschedule("unknown", later))
    # Without a zone it would be another moment on each machine.
    await raises(Invalid, bench.store.reschedule("a", later.replace(tzinfo=None)))


async def reserved(bench: Bench, id: str = "a", lease: float = 10) -> Record:
    await bench.add(id)
    task = await bench.store.reserve(DEFAULT_QUEUE, lease, now=bench.clock.now, worker="w")
    assert task is not None
    assert task.token
    return task


@case(rules="10,11,12,73,§14")
async def reserve_leases_one_task(bench: Bench) -> None:
    assert await bench.store.reserve(DEFAULT_QUEUE, 10, now=bench.clock.now) is None
    task = await reserved(bench)
    assert (task.id, task.lease_until_us, task.worker) == ("a", bench.now + 10 * S, "w")
    assert await bench.store.reserve(DEFAULT_QUEUE, 10, now=bench.clock.now) is None
    for lease in (0, -1, timedelta(0)):
        await raises(InvalidLease, bench.store.reserve(DEFAULT_QUEUE, lease, now=bench.clock.now))
    await raises(QueueRequired, bench.store.reserve("", 10, now=bench.clock.now))


@case(rules="14,15,§9,§14")
async def reserve_takes_expired_tasks_back(bench: Bench) -> None:
    old = await reserved(bench)
    bench.advance(10)
    new = await bench.store.reserve(DEFAULT_QUEUE, timedelta(seconds=5), now=bench.clock.now)
    assert new is not None
    assert (new.id, new.attempts, new.lease_until_us) == ("a", 2, bench.now + 5 * S)
    assert new.token != old.token
    await raises(TokenMismatch, bench.store.ack("a", str(old.token), now=bench.clock.now))


@case(rules="28,29,§14")
async def ack_ends_a_reserved_task(bench: Bench) -> None:
    task = await reserved(bench)
    await raises(TokenMismatch, bench.store.ack("a", new_token(), now=bench.clock.now))
    await bench.store.ack("a", str(task.token), result=[1], now=bench.clock.now)
    await bench.store.ack("a", str(task.token), queue=DEFAULT_QUEUE, now=bench.clock.now)
    await raises(NotActive, bench.store.ack("a", new_token(), now=bench.clock.now))
    result = await bench.store.get_result("a")
    assert result is not None
    assert result.result == [1]


@case(rules="33,34,§14")
async def retry_gives_a_reserved_task_a_new_time(bench: Bench) -> None:
    task = await reserved(bench)
    at = bench.clock.now + timedelta(seconds=3)
    error = TaskError("E", "m", "t")
    await bench.store.retry("a", str(task.token), run_at=at, attempts=4, error=error, now=bench.clock.now)
    after = await bench.get("a")
    assert (after.state, after.due_us, after.attempts, after.last_error) == (State.SCHEDULED, to_us(at), 4, error)
    assert await bench.store.reserve(DEFAULT_QUEUE, 1, now=bench.clock.now) is None
    assert await bench.store.reserve(DEFAULT_QUEUE, 1, now=at) is not None


@case(rules="40,41,§14")
async def fail_makes_a_reserved_task_a_dead_letter(bench: Bench) -> None:
    task = await reserved(bench)
    await bench.store.fail("a", str(task.token), error=BOOM, now=bench.clock.now)
    await bench.store.fail("a", str(task.token), error=BOOM, now=bench.clock.now)
    dead = await bench.get("a")
    assert (dead.state, dead.last_error) == (State.DEAD, BOOM)


@case(rules="20,21,26,§14")
async def extend_lease_moves_its_end(bench: Bench) -> None:
    task = await reserved(bench)
    bench.advance(5)
    until = await bench.store.extend_lease("a", str(task.token), 10, now=bench.clock.now)
    assert until == bench.now + 10 * S == (await bench.get("a")).lease_until_us
    await raises(InvalidLease, bench.store.extend_lease("a", str(task.token), 0, now=bench.clock.now))


@case(rules="23,31,37,43,74,§14")
async def these_names_are_strict(bench: Bench) -> None:
    task = await reserved(bench)
    store, token = bench.store, str(task.token)
    bench.advance(10)
    at = bench.clock.now
    for call in (store.ack("a", token, now=at), store.retry("a", token, now=at), store.fail("a", token, now=at)):
        await raises(LeaseExpired, call)
    await raises(LeaseExpired, store.extend_lease("a", token, 1, now=at))
    for call in (store.ack("?", token, now=at), store.retry("?", token, now=at), store.fail("?", token, now=at)):
        await raises(TaskNotFound, call)
    await raises(TaskNotFound, store.extend_lease("?", token, 1, now=at))
