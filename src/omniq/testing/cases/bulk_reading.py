"""Reading in bulk: all ranges together hold every row once, even if tasks change while they are read."""

from __future__ import annotations

from typing import Any

from omniq.models import status_of
from omniq.storage.tables import TABLES, Condition
from omniq.testing.bench import Bench, case


async def rows(
    bench: Bench, table: str, *columns: str, parts: int = 1, size: int = 3, where: tuple[Condition, ...] = ()
) -> list[tuple[Any, ...]]:
    # A batch holds three rows, so that most ranges end in the middle of one.
    names = list(columns) or [column.name for column in TABLES[table]]
    found: list[tuple[Any, ...]] = []
    for part in await bench.store.ranges(table, parts):
        async for batch in bench.store.scan(part, names, where, size):
            assert list(batch) == names
            found += zip(*batch.values(), strict=True)
    return found


@case(rules="§10")
async def ranges_hold_every_task_once(bench: Bench) -> None:
    ids = {f"t-{n}" for n in range(23)}
    for id in sorted(ids):
        await bench.add(id)
    # With more parts than tasks some parts are empty, and no task may fall between two of them.
    for parts in (1, 2, 5, 100):
        assert sorted(await rows(bench, "tasks", "id", parts=parts)) == sorted((id,) for id in ids)


@case(rules="§10")
async def an_empty_store_has_no_rows(bench: Bench) -> None:
    for table in TABLES:
        assert await rows(bench, table, parts=4) == []


@case(rules="§10")
async def a_row_says_what_its_task_is(bench: Bench) -> None:
    start = bench.now
    await bench.add("a", name="app:job", group="g", payload=b'{"x":1}')
    task = (await bench.take(worker="w"))[0]
    bench.advance(1)
    await bench.fail(task)
    found = await rows(
        bench, "tasks", "id", "queue", "name", "group_id", "status", "attempts", "created_at", "worker", "payload"
    )
    assert found == [("a", "default", "app:job", "g", "FAILED", 1, start, "w", b'{"x":1}')]


@case(rules="§10")
async def conditions_choose_rows(bench: Bench) -> None:
    for n in range(6):
        await bench.add(f"t-{n}", group="g" if n % 2 else None)
    await bench.fail((await bench.take())[0])
    for where, expected in (
        (Condition("status", "=", "FAILED"), 1),
        (Condition("status", "in", ("FAILED", "PENDING")), 6),
        (Condition("group_id", "null"), 3),
        (Condition("group_id", "not null"), 3),
        (Condition("attempts", ">", 0), 1),
        (Condition("attempts", "<=", 0), 5),
        (Condition("id", "starts", "t-"), 6),
        # Text is compared by its bytes; LIKE of SQL would find these.
        (Condition("id", "starts", "T-"), 0),
        (Condition("created_at", ">=", bench.now), 6),
        (Condition("created_at", "<", bench.now), 0),
        (Condition("error_type", "=", "nothing like it"), 0),
        (Condition("due_at", ">", bench.now), 0),
    ):
        found = await rows(bench, "tasks", "id", where=(where,))
        assert len(found) == expected, where
    # The task that failed may be of the group or not.
    both = (Condition("status", "=", "PENDING"), Condition("group_id", "not null"))
    assert len(await rows(bench, "tasks", "id", where=both)) in (2, 3)


@case(rules="§10")
async def a_scan_meets_each_task_once_while_others_come_and_change(bench: Bench) -> None:
    # A scan that pages by offsets, or by states, skips or repeats rows here.
    for n in range(20):
        await bench.add(f"t-{n:02}")
    seen: list[str] = []
    (part,) = await bench.store.ranges("tasks", 1)
    async for batch in bench.store.scan(part, ["id"], (), 3):
        seen += batch["id"]
        await bench.add(f"late-{len(seen)}")
        for task in await bench.take():
            await bench.ack(task)
    assert [id for id in seen if id.startswith("t-")] == [f"t-{n:02}" for n in range(20)]


@case(rules="§10")
async def events_results_and_attempts_are_tables_too(bench: Bench) -> None:
    for id in ("a", "b", "c"):
        await bench.add(id)
    first = (await bench.take())[0]
    await bench.retry(first)
    for task in [*(await bench.take()), *(await bench.take()), *(await bench.take())][:2]:
        await bench.ack(task, result=b"1", ran_us=5)
    events = await rows(bench, "events", "task_id", "event", "status", parts=3)
    assert sorted(events) == sorted(
        (row.task_id, row.event, status_of(row.state, row.attempt).value) for row in await bench.all_events()
    )
    results = await rows(bench, "results", "status", "result", "attempts", parts=2)
    assert sorted(row[:2] for row in results) == [("SUCCESS", b"1")] * 2
    attempts = await rows(bench, "attempts", "task_id", "attempt", "outcome", "run_us", parts=2)
    assert sorted(row[2] for row in attempts) == ["retried", "running", "succeeded", "succeeded"]
    assert {row[3] for row in attempts if row[2] == "succeeded"} == {5}


@case(rules="§10")
async def queues_and_groups_are_tables_too(bench: Bench) -> None:
    await bench.add("a", group="g")
    await bench.add("b")
    await bench.store.set_group_limit("default", "g", 4)
    assert await rows(bench, "queues", "queue", "ready", "running", "paused") == [("default", 2, 0, False)]
    assert await rows(bench, "groups", "queue", "group_id", "limit", "ready") == [("default", "g", 4, 1)]
