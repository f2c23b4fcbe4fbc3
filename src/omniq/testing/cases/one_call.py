"""Tasks that come, change and go within one call of several transactions leave no trace of their former states."""

from __future__ import annotations

from typing import Any

from omniq.errors import DuplicateId, Refused
from omniq.models import DEFAULT_QUEUE, Blocker, State, new_token
from omniq.operations import (
    Ack,
    Cancel,
    CommitRun,
    Enqueue,
    Enqueued,
    Fail,
    OpenRun,
    Operation,
    QueueCounts,
    Remove,
    Requeue,
    Reschedule,
    Reserve,
    Stage,
)
from omniq.testing.bench import Bench, S, case

# A driver may write each of these in another way, and keep it in other indexes.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"group": "g", "group_limit": 2},
    "delayed": {"delay_us": 5 * S},
    "blocked": {"blocked_by": (Blocker("first", DEFAULT_QUEUE),)},
    "with a dead queue": {"dead_queue": "dead"},
    "with a key": {"idempotency_key": "k"},
}


def _ways(bench: Bench) -> dict[str, dict[str, Any]]:
    spans = bench.store.capabilities.cross_queue
    return {way: fields for way, fields in WAYS.items() if spans or "dead_queue" not in fields}


async def _call(bench: Bench, *operations: Operation) -> None:
    """Sends each operation in a transaction of its own. None may be refused."""
    for operation, answer in zip(operations, await bench.call(*[(op,) for op in operations]), strict=True):
        assert not isinstance(answer, Refused), f"{operation!r} answered {answer!r}"


async def _is_empty(bench: Bench, way: str, **but: int) -> None:
    counts = await bench.counts()
    found = {s.name.lower(): getattr(counts, s.name.lower()) for s in State}
    assert {name: n for name, n in found.items() if n} == but, way
    assert not any(g.ready or g.inflight for g in await bench.groups()), way
    assert await bench.store.check() == [], way


@case(rules="§1,§3")
async def enqueued_and_cancelled_leaves_nothing_in_the_lane(bench: Bench) -> None:
    await bench.hold("first")
    for n, (way, fields) in enumerate(_ways(bench).items()):
        await _call(bench, bench.new(f"t{n}", **fields), Cancel(queue=DEFAULT_QUEUE, id=f"t{n}"))
        await _is_empty(bench, way, running=1, cancelled=n + 1)
    bench.advance(10)
    assert await bench.take(9) == []


@case(rules="§1,§3")
async def enqueued_and_removed_leaves_nothing_at_all(bench: Bench) -> None:
    await bench.hold("first")
    for way, fields in _ways(bench).items():
        await _call(bench, bench.new("t", **fields), Remove(queue=DEFAULT_QUEUE, id="t"))
        await _is_empty(bench, way, running=1)
        assert await bench.state("t") is None
    bench.advance(10)
    assert await bench.take(9) == []


@case(rules="§1,§3")
async def enqueued_and_rescheduled_waits_for_its_time(bench: Bench) -> None:
    for n, (way, fields) in enumerate(_ways(bench).items()):
        if "blocked_by" not in fields:
            await _call(bench, bench.new(f"t{n}", **fields), Reschedule(queue=DEFAULT_QUEUE, id=f"t{n}", delay_us=5 * S))
            await _is_empty(bench, way, scheduled=1)
            assert await bench.take(9) == [], way
            bench.advance(5)
            (task,) = await bench.take(9)
            assert (task.id, task.eta_us, task.due_us) == (f"t{n}", bench.now, bench.now), way
            await bench.do(Ack(queue=DEFAULT_QUEUE, id=task.id, token=task.token or ""))
            await bench.do(Remove(queue=DEFAULT_QUEUE, id=task.id))


@case(rules="§1,§3")
async def rescheduled_for_now_the_lease_tells_the_time(bench: Bench) -> None:
    await _call(bench, bench.new("t"), Reschedule(queue=DEFAULT_QUEUE, id="t"))
    (task,) = await bench.take(9)
    assert task.eta_us == bench.now


@case(rules="§1,§3")
async def removed_and_enqueued_again_is_there_once(bench: Bench) -> None:
    """The same holds for each kind of task that the call enqueues and removes before."""
    remove = Remove(queue=DEFAULT_QUEUE, id="t")
    await bench.enqueue("first")
    await bench.add("t")
    for way, fields in _ways(bench).items():
        # Without the key, or `t` would be taken for a repetition of it.
        other = bench.new("x", **{k: v for k, v in fields.items() if k != "idempotency_key"})
        await _call(bench, other, remove, bench.new("t", **fields), remove, bench.new("t"), Remove(queue=DEFAULT_QUEUE, id="x"))
        assert await bench.states("t", "x") == [State.READY, None], way
        await _is_empty(bench, way, ready=2)
    assert await bench.take_ids(9) == ["first", "t"]


@case(rules="§1,§3")
async def several_of_one_shape_with_changes_between(bench: Bench) -> None:
    """A driver may carry out equal neighbours together, but they must see the changes between them."""
    ids = [f"t{n}" for n in range(6)]
    plain: list[Operation] = [bench.new(i) for i in ids]
    leave: list[Operation] = [Cancel(queue=DEFAULT_QUEUE, id=i) for i in ids[:3]]
    again: list[Operation] = [bench.new(i, on_conflict="replace_finished") for i in ids[:2]]
    await _call(bench, *plain, *leave, *again, Remove(queue=DEFAULT_QUEUE, id="t5"), Reschedule(queue=DEFAULT_QUEUE, id="t4"))
    await _is_empty(bench, "several", ready=4, cancelled=1)
    assert sorted(await bench.take_ids(9)) == ["t0", "t1", "t3", "t4"]
    assert await bench.take(9) == []


@case(rules="§1,§3")
async def from_the_enqueue_to_the_dead_letter_and_back(bench: Bench) -> None:
    for n, (way, fields) in enumerate(_ways(bench).items()):
        if not {"delay_us", "blocked_by", "dead_queue"} & fields.keys():
            id, token = f"t{n}", new_token()
            lost: dict[str, Any] = {"queue": DEFAULT_QUEUE, "id": id}
            await _call(
                bench,
                bench.new(id, **fields),
                Reserve(queues=(DEFAULT_QUEUE,), token=token, limit=9),
                Fail(**lost, token=token),
                Requeue(**lost),
                Cancel(**lost),
            )
            assert await bench.state(id) is State.CANCELLED, way
            await bench.do(Remove(**lost))
            await _is_empty(bench, way)


@case(rules="§1,§6", needs="cross_queue")
async def into_the_dead_queue_and_out_of_it_leaves_one_task(bench: Bench) -> None:
    token = new_token()
    await _call(
        bench,
        bench.new("t", dead_queue="dead", group="g"),
        Reserve(queues=(DEFAULT_QUEUE,), token=token),
        Fail(queue=DEFAULT_QUEUE, id="t", token=token),
    )
    token = new_token()
    answers = await bench.call(
        (bench.new("u", dead_queue="other"),),
        (Reserve(queues=(DEFAULT_QUEUE,), token=token),),
        (Fail(queue=DEFAULT_QUEUE, id="u", token=token),),
        # The id went to another queue in this very call, where the enqueue has to find it.
        (bench.new("u"),),
        (Cancel(queue="dead", id="t"),),
    )
    assert answers[3] == [Enqueued(id="u", existed=True, state=State.READY)]
    assert [(t.id, t.queue) for t in await bench.all_tasks(states=(State.READY,))] == [("u", "other")]
    assert await bench.take_ids(9, "other", DEFAULT_QUEUE, "dead") == ["u"]


@case(rules="§1,§8", needs="cross_queue")
async def an_id_is_in_one_queue_only(bench: Bench) -> None:
    """The call enqueues the same id to two queues, first as each kind of task."""
    await bench.hold("first")
    for n, (way, fields) in enumerate(_ways(bench).items()):
        id = f"t{n}"
        answers = await bench.call((bench.new(id, **fields),), (bench.new(id, queue="mail"),))
        assert isinstance(answers[1], list) and answers[1][0].existed, way  # type: ignore[union-attr, attr-defined]
        answers = await bench.call(
            (bench.new(f"{id} too", **{k: v for k, v in fields.items() if k != "idempotency_key"}),),
            (bench.new(f"{id} too", queue="mail", fingerprint="other"),),
        )
        assert isinstance(answers[1], DuplicateId), way
        assert [t.queue for t in await bench.all_tasks() if t.id == id] == [DEFAULT_QUEUE], way
    assert await bench.counts("mail") == QueueCounts(queue="mail")


@case(rules="§1,§8", needs="cross_queue")
async def an_id_that_is_in_one_queue_refuses_a_whole_transaction_for_another(bench: Bench) -> None:
    answers = await bench.call(
        (bench.new("t", group="g"),), (bench.new("u", queue="mail"), bench.new("t", queue="mail", fingerprint="other"))
    )
    assert isinstance(answers[1], DuplicateId)
    assert await bench.states("t", "u") == [State.READY, None]


@case(rules="§1,§10")
async def staged_and_committed_and_cancelled_leaves_the_others(bench: Bench) -> None:
    rows = [bench.new(f"s{n}", **fields) for n, fields in enumerate([{}, {"group": "g"}, {"idempotency_key": "k"}])]
    # One is plain, one has a group, one a key, one a time: a driver may release each in another way.
    tasks: tuple[Enqueue, ...] = (*rows, bench.new("late", eta_us=bench.now + 5 * S))
    on_run: dict[str, Any] = {"queue": DEFAULT_QUEUE, "run_id": "r"}
    leave = [Cancel(queue=DEFAULT_QUEUE, id=t.id) for t in tasks[:2]]
    await _call(
        bench,
        OpenRun(**on_run),
        Stage(**on_run, tasks=tasks),
        CommitRun(**on_run),
        *leave,
        Remove(queue=DEFAULT_QUEUE, id="s2"),
        Reschedule(queue=DEFAULT_QUEUE, id="late"),
    )
    assert await bench.states(*[t.id for t in tasks]) == [State.CANCELLED, State.CANCELLED, None, State.READY]
    assert (await bench.counts()).ready == 1
    assert await bench.take_ids(9) == ["late"]
