"""What is logged, at which level, and that each record about a task names it."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support import jobs
from support.waiting import eventually

from omniq import AsyncOmniQ, BaseStorage, MemoryStorage, OmniQ, RedisStorage, Settings, SQLiteStorage
from omniq.cli.logs import PlainFormatter
from omniq.client import AsyncClient
from omniq.contract import AsyncContractClient
from omniq.models import new_token
from omniq.operations import Reserve
from omniq.server import ServeOptions, Server


def said(caplog: pytest.LogCaptureFixture, task_id: str | None = None) -> list[str]:
    """Level and text of what omniq said, of one task."""
    found = [r for r in caplog.records if r.name.startswith("omniq") and r.name != "omniq.task"]
    return [f"{r.levelname} {r.getMessage()}" for r in found if task_id is None or getattr(r, "task_id", None) == task_id]


async def test_the_life_of_a_task_is_told_at_debug(oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    async with await oq.worker():
        task_id = await oq.enqueue(jobs.fail_until, key, 2)
        assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
    lines = said(caplog, task_id)
    name = "support.jobs:fail_until"
    assert lines[0] == f"DEBUG enqueued {name}"
    assert lines[1] == f"DEBUG task {name} starts, attempt 1 of 4"
    assert lines[2] == f"WARNING task {name} failed, it will be retried: RuntimeError: run 1 of 2"
    assert lines[3].startswith(f"DEBUG task {name} was promoted: it was due at 20")
    assert lines[4] == f"DEBUG task {name} starts, attempt 2 of 4"
    assert lines[5].startswith(f"DEBUG task {name} succeeded after 0.0")
    assert len(lines) == 6
    for record in caplog.records:
        if "support.jobs" in record.getMessage():
            assert record.task_id


async def test_each_task_of_a_batch_is_told(oq: AsyncOmniQ, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    ids = await oq.enqueue_many(jobs.add, [(n,) for n in range(3)])
    async with oq.transaction() as tx:
        ids.append(tx.enqueue(jobs.add, 4))
    kept = oq.options(idempotency_key="once")
    ids.append(await kept.enqueue(jobs.add, 5))
    assert await kept.enqueue(jobs.add, 5) == ids[-1]
    for task_id in ids[:4]:
        assert said(caplog, task_id) == ["DEBUG enqueued support.jobs:add"]
    assert said(caplog, ids[4]) == ["DEBUG enqueued support.jobs:add", "DEBUG support.jobs:add was there already"]


async def test_the_blocking_door_tells_too_and_so_does_the_contract(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    with OmniQ(MemoryStorage()) as oq:
        assert said(caplog, oq.enqueue(jobs.add, 1)) == ["DEBUG enqueued support.jobs:add"]

    async with AsyncContractClient(MemoryStorage()) as client:
        published = [await client.publish("q", {}), *await client.publish_many("q", [{}, {}])]
    assert [said(caplog, job_id) for job_id in published] == [["DEBUG enqueued *"]] * 3


async def test_steering_is_told_at_debug(oq: AsyncOmniQ, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    cancelled, removed, dead = [await oq.enqueue(jobs.give_up, "steered") for _ in range(3)]
    await oq.cancel(cancelled)
    await oq.remove(removed)
    async with await oq.worker() as pool:
        await pool.drain()
    await oq.requeue(dead)
    await oq.pause("default")
    await oq.resume("default")
    await oq.set_group_limit("default", "g", 3)
    ids = [cancelled, removed, dead]
    ends = [said(caplog, task_id)[-1] for task_id in ids]
    assert ends == [f"DEBUG {what} support.jobs:give_up" for what in ("asked to cancel", "removed", "requeued")]
    assert {"DEBUG paused queue default", "DEBUG resumed queue default"} <= set(said(caplog))


async def test_a_pool_tells_its_start_and_its_end_at_info(oq: AsyncOmniQ, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omniq")
    await oq.enqueue(jobs.add, 1)
    async with await oq.worker(3, queues=["default", "b"]) as pool:
        await pool.drain()
    async with await oq.worker():
        pass
    worker = pool.worker_id
    place = oq.storage.url or "MemoryStorage"
    first, last, other, _ = said(caplog)
    assert first == f"INFO worker {worker} runs up to 3 tasks at once of queues default, b, on {place}"
    assert last == f"INFO worker {worker} stopped: 1 done, 0 failed, 0 retried, on {place}"
    assert "1 tasks at once of all queues" in other
    assert [r.worker for r in caplog.records[:2]] == [worker, worker]


async def test_the_password_of_a_store_is_in_no_line(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    async with AsyncOmniQ(RedisStorage(redis_url.replace("//", "//default:s3cret@"))) as oq, await oq.worker():
        pass
    assert "default:***@127.0.0.1" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_pool_that_could_not_start_does_not_say_that_it_stopped(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omniq")
    oq = AsyncOmniQ(SQLiteStorage(tmp_path / "q.db"))
    pool = await oq.worker()
    await oq.close()
    with pytest.raises(Exception, match="closed"):
        await pool.start()
    assert "stopped" not in caplog.text


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("func", [jobs.fail, jobs.raise_odd_async])
async def test_a_failure_tells_where_it_happened(
    oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture, func: Callable[..., Any], retries: int
) -> None:
    caplog.set_level(logging.WARNING, "omniq")
    async with await oq.worker():
        argument = "no luck" if func is jobs.fail else "Mine"
        task_id = await oq.options(max_retries=retries).enqueue(func, key, argument)
        await oq.get_result(task_id, wait=True, timeout=5)
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR"][1 - retries :]
    for record in caplog.records:
        shown = PlainFormatter().format(record)
        assert "Traceback (most recent call last):" in shown
        assert f"in {func.__name__}" in shown
        assert "omniq/runner.py" not in shown
        assert "omniq/functions.py" not in shown


async def test_half_a_character_in_an_error_is_no_reason_to_lose_the_record(
    oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that writes UTF-8 could not write it."""
    caplog.set_level(logging.WARNING, "omniq")
    async with await oq.worker():
        for func in (jobs.fail_with_broken_text, jobs.fail_without_text, jobs.fail_behind_broken_text):
            task_id = await oq.options(max_retries=0).enqueue(func, key)
            await oq.get_result(task_id, wait=True, timeout=5)
    shown = [logging.Formatter().format(record) for record in caplog.records]
    assert [text.splitlines()[-1].partition(":")[0] for text in shown] == ["RuntimeError", "support.jobs.Mute", "ValueError"]
    for text in shown:
        text.encode()


async def test_a_module_that_fails_tells_where(
    oq: AsyncOmniQ, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    caplog.set_level(logging.WARNING, "omniq")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"broken_{key}.py").write_text("def setting():\n    return 1 / 0\n\n\nVALUE = setting()\n")
    async with await oq.worker():
        task_id = await oq.enqueue(f"broken_{key}:f")

        async def refused() -> bool:
            return (await oq.get_task(task_id)).last_error is not None

        await eventually(refused)
        task = await oq.get_task(task_id)
    assert task.last_error.traceback.endswith("ZeroDivisionError: division by zero\n")
    (record,) = caplog.records
    shown = PlainFormatter().format(record)
    for text in (task.last_error.traceback, shown):
        assert "in setting" in text
        assert "importlib" not in text


async def test_a_consumer_tells_what_it_does(every_storage: BaseStorage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    async with AsyncContractClient(every_storage) as client:
        good = await client.publish("q", {"page": 1})
        bad = await client.publish("q", {"page": 2}, max_attempts=1)
        stop = asyncio.Event()

        async def handler(job: Any) -> None:
            if job.payload["page"] == 2:
                stop.set()
                raise ValueError("no page")

        await client.consume("q", handler, stop=stop)
    lines = said(caplog, good)
    assert lines[:2] == ["DEBUG enqueued *", f"DEBUG job {good} starts, attempt 1"]
    assert lines[2].startswith(f"DEBUG job {good} succeeded after ")
    (failed,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert (failed.task_id, failed.getMessage()) == (bad, f"job {bad} failed for good: ValueError: no page")
    assert "ValueError: no page" in PlainFormatter().format(failed).split("\n")[-1]
    told = [r.getMessage() for r in caplog.records if r.levelname == "INFO" and r.name == "omniq.contract"]
    assert "runs up to 1 jobs of q at once" in told[0]
    assert told[-1].endswith("stopped")


async def test_a_server_tells_what_its_clients_do(storage: BaseStorage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    async with Server(storage, ServeOptions(port=0)) as server, AsyncClient(*server.address) as client:
        await client.push("support.jobs:add", payload=[1, 2])
        await client.push("support.jobs:fail", payload=[], retry=0)
        for _ in range(2):
            task = await client.fetch()
            await (client.ack(task) if task.name.endswith("add") else client.nack(task, "ValueError: no luck"))
    assert said(caplog, "1") == [
        "DEBUG enqueued support.jobs:add",
        "DEBUG task support.jobs:add is fetched, attempt 1",
        "DEBUG task 1 succeeded",
    ]
    failed = said(caplog, "2")[-1]
    assert failed.startswith("DEBUG task 2 failed for good: ")


async def test_what_waited_for_its_time_is_promoted_and_what_did_not_is_not(
    oq: AsyncOmniQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    at_once = await oq.enqueue(jobs.add, 1)
    later = await oq.enqueue(jobs.add, 2, eta=timedelta(seconds=0.05))
    async with await oq.worker():
        assert (await oq.get_result(later, wait=True, timeout=5)).ok
        assert (await oq.get_result(at_once, wait=True, timeout=5)).ok
    assert not any("promoted" in line for line in said(caplog, at_once))
    assert any("promoted" in line for line in said(caplog, later))


async def test_what_a_task_enqueues_with_its_own_end_is_told(
    oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    async with await oq.worker() as pool:
        parent = await oq.enqueue(jobs.spawn, key)
        await oq.get_result(parent, wait=True, timeout=5)
        await pool.drain()
    (child,) = jobs.seen[key]
    assert said(caplog, child)[0] == f"DEBUG support.jobs:add is enqueued with the end of task {parent}"


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_lost_run_names_its_task(oq: AsyncOmniQ, key: str, caplog: pytest.LogCaptureFixture, retries: int) -> None:
    caplog.set_level(logging.DEBUG, "omniq")
    task_id = await oq.options(max_retries=retries).enqueue(jobs.add, 1)
    now = oq.storage.clock()
    await oq.storage.apply([(Reserve(queues=("default",), token=new_token(), lease_us=1, worker="w"),)], now)
    assert await oq.storage.reclaim(now + 2) == 1
    line = said(caplog, task_id)[-1]
    why = f"WorkerLost: worker w was silent until the lease ran out during attempt 1 of {retries + 1}"
    assert line == ("DEBUG task {} is taken back: {}" if retries else "ERROR task {} failed for good: {}").format(
        "support.jobs:add", why
    )


async def test_at_info_nothing_is_said_of_tasks_that_go_well(storage: BaseStorage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omniq")
    oq = AsyncOmniQ(storage, settings=Settings(grace=5))
    await oq.enqueue_many(jobs.add, [(n,) for n in range(20)])
    async with await oq.worker() as pool:
        await pool.drain()
    assert len(said(caplog)) == 2
