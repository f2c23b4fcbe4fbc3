"""`OmniQ` and `WorkerPool`: from scripts, threads, and inside a running event loop."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from support import jobs
from support.waiting import wait_for

from omniq import BaseStorage, DriverClosed, Invalid, OmniQ, Settings, TaskStatus, WorkerPool


@pytest.fixture
def blocking(storage: BaseStorage) -> Iterator[OmniQ]:
    with OmniQ(storage, settings=Settings(backoff_base=0.01, grace=5)) as made:
        yield made


def test_a_script_enqueues_runs_and_reads(blocking: OmniQ, key: str) -> None:
    task_id = blocking.enqueue(jobs.add, 1, b=2)
    assert blocking.get_result(task_id) is None
    with blocking.worker(concurrency=2) as pool:
        assert blocking.get_result(task_id, wait=True, timeout=5).result == 3
        assert blocking.get_result(jobs.double.enqueue(blocking, 4), wait=True, timeout=5).result == 8
        assert blocking.get_result(blocking.options(queue="x").enqueue(jobs.add_async, 1), wait=True, timeout=5).ok
        assert blocking.get_result(jobs.double.enqueue(blocking.options(queue="x"), 1), wait=True, timeout=5).ok
        retried = blocking.enqueue(jobs.fail_until, key, 2)
        assert blocking.get_result(retried, wait=True, timeout=5).attempts == 2
        pool.drain()
    assert blocking.get_result("unknown") is None


def test_everything_else_has_a_blocking_form(blocking: OmniQ, key: str) -> None:
    ids = blocking.enqueue_many(jobs.add, [(1,), {"a": 2}])
    assert blocking.options(queue="bulk").enqueue_many(jobs.add, [(3,)])
    assert blocking.get_task(ids[0]).args == [1]
    assert len(blocking.find()[0]) == 3
    assert {c.queue: c.ready for c in blocking.counts()} == {"default": 2, "bulk": 1}
    assert [e.event for e in blocking.events()] == ["enqueued"] * 3
    assert [e.event for e in blocking.history(ids[0])] == ["enqueued"]
    assert blocking.cancel(ids[0])
    assert blocking.get_result(ids[0]).status is TaskStatus.CANCELLED
    blocking.pause("default")
    assert blocking.is_paused("default")
    assert blocking.resume("default")
    blocking.set_group_limit("default", "g", 2)
    with blocking.worker():
        failed = blocking.options(max_retries=0).enqueue(jobs.fail, key)
        assert blocking.get_result(failed, wait=True, timeout=5).status is TaskStatus.FAILED
        blocking.requeue(failed)
        wait_for(lambda: jobs.runs[key] == 2)


async def test_it_works_inside_a_running_event_loop(blocking: OmniQ) -> None:
    with blocking.worker():
        task_id = blocking.enqueue(jobs.add_async, 1, 2)
        assert blocking.get_result(task_id, wait=True, timeout=5).result == 3


def test_several_threads_share_one_queue(blocking: OmniQ) -> None:
    ids: list[str] = []

    def work() -> None:
        ids.extend(blocking.enqueue(jobs.add, n) for n in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 80
    assert blocking.counts()[0].ready == 80


def test_a_closed_queue_says_so_and_closing_twice_is_harmless(storage: BaseStorage) -> None:
    oq = OmniQ(storage)
    oq.enqueue(jobs.add, 1)
    oq.close()
    oq.close()
    with pytest.raises(DriverClosed):
        oq.enqueue(jobs.add, 1)
    with pytest.raises(DriverClosed):
        oq.counts()


def test_a_queue_that_was_never_used_closes(storage: BaseStorage) -> None:
    OmniQ(storage).close()


def test_a_blocking_pool_starts_once_stops_twice_and_starts_again(storage: BaseStorage) -> None:
    with OmniQ(storage) as oq:
        pool = oq.worker()
        pool.stop()
        for _ in range(2):
            pool.start()
            with pytest.raises(Invalid, match="already"):
                pool.start()
            assert oq.get_result(oq.enqueue(jobs.add, 1), wait=True, timeout=5).ok
            pool.stop()
            pool.stop()


def test_draining_a_pool_that_does_not_run_says_so(storage: BaseStorage) -> None:
    pool = WorkerPool(storage)
    with pytest.raises(Invalid, match="start"):
        pool.drain()


def test_a_blocking_pool_takes_a_bare_storage(storage: BaseStorage) -> None:
    with OmniQ(storage) as oq, WorkerPool(storage, concurrency=2):
        assert oq.get_result(oq.enqueue(jobs.add, 1), wait=True, timeout=5).ok


def test_a_blocking_stop_hands_back_what_still_runs(storage: BaseStorage, key: str) -> None:
    with OmniQ(storage) as oq:
        pool = oq.worker()
        pool.start()
        task_id = oq.enqueue(jobs.forever, key)
        wait_for(lambda: jobs.runs[key])
        before = time.monotonic()
        pool.stop(grace=0)
        assert time.monotonic() - before < 2
        task = oq.get_task(task_id)
        assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)


def test_waiting_with_a_timeout_gives_none(blocking: OmniQ) -> None:
    task_id = blocking.enqueue(jobs.add, 1, eta=timedelta(hours=1))
    before = time.monotonic()
    assert blocking.get_result(task_id, wait=True, timeout=0.05) is None
    assert time.monotonic() - before < 1
