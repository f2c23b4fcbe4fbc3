"""A process that is stopped while it holds the write lock: whoever waits hears of it, and can leave."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import fault_jobs
import pytest
from fault_processes import Fleet, Process, on_each_store, until

from omniq import BaseStorage, OmniQ, StoreUnavailable
from omniq.models import new_id, now_us
from omniq.operations import Enqueue
from omniq.storage.locks import LOOK_S, STOPPED_S, holder, is_stopped

TOLD_S = STOPPED_S + 4 * LOOK_S + 2.0  # and some room for a busy machine


def frozen_writer(fleet: Fleet) -> Process:
    process = fleet.start("frozen", str(Path(__file__)), fleet.url)
    until(lambda: process.lines or not process.running, "the writer to stop")
    assert process.lines == ["stopping"], process.errors
    until(lambda: is_stopped(process.pid), "the writer to be stopped")
    return process


def stop_in_a_transaction(url: str) -> None:
    def stop() -> int:
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait(0.5)  # the signal may reach this thread last
        return now_us()

    async def main() -> None:
        async with BaseStorage.from_url(url, clock=stop) as storage:
            await storage.promote("default")  # asks for the time in its transaction, and finds nothing to do

    asyncio.run(main())


@on_each_store
def test_who_waits_for_a_stopped_writer_is_told_and_nothing_is_stored(fleet: Fleet) -> None:
    with OmniQ.from_url(fleet.url) as oq:
        first = oq.enqueue(fault_jobs.nothing)
        frozen = frozen_writer(fleet)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"process {frozen.pid} is stopped and holds the write lock"):
            oq.enqueue(fault_jobs.nothing)
        with pytest.raises(StoreUnavailable, match="kill -CONT"):
            oq.storage.apply_blocking([(Enqueue(id=new_id(), name="job"),)])
        assert time.monotonic() - began < 2 * TOLD_S
        frozen.thaw()
        assert frozen.popen.wait(20) == 0, frozen.errors
        second = oq.enqueue(fault_jobs.nothing)
        assert sorted(t.id for t in oq.find()[0]) == sorted([first, second])


@pytest.mark.slow
@on_each_store
def test_a_stopped_writer_keeps_nobody_from_leaving(fleet: Fleet) -> None:
    oq = OmniQ.from_url(fleet.url)
    oq.enqueue(fault_jobs.nothing)
    frozen = frozen_writer(fleet)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        oq.enqueue(fault_jobs.nothing)
    oq.close()
    assert time.monotonic() - began < 2 * TOLD_S
    late = OmniQ.from_url(fleet.url)
    with pytest.raises(StoreUnavailable, match=f"process {frozen.pid} is stopped"):
        late.enqueue(fault_jobs.nothing)  # one that opens only now
    late.close()
    assert time.monotonic() - began < 4 * TOLD_S
    frozen.kill()
    until(lambda: not any(t.name == "omniq-writer" for t in threading.enumerate()), "what was left to itself to end")


@pytest.mark.slow
@on_each_store
def test_a_worker_beside_a_stopped_writer_says_so_and_ends_when_told_to(fleet: Fleet) -> None:
    """SIGTERM, as a service manager sends it; the store does not answer, and the grace time is short."""
    worker = fleet.start("worker", "-m", "omniq", "worker", "fault_jobs", "--store", fleet.url, "--grace", "1s")
    until(lambda: fleet.worker_locks(), "the worker to begin")
    until(lambda: "ready" in worker.errors or "worker" in worker.errors or worker.lines, "a word of the worker")
    frozen = frozen_writer(fleet)
    until(lambda: f"process {frozen.pid} is stopped" in worker.errors, "the worker to say what it waits for")
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    worker.popen.wait(30)
    took = time.monotonic() - began
    print("seconds:", took)
    assert took < 1 + 2 * TOLD_S


def test_threads_that_wait_for_a_stopped_writer_are_all_told(fleet: Fleet) -> None:
    with OmniQ.from_url(fleet.url) as oq:
        oq.enqueue(fault_jobs.nothing)
        frozen = frozen_writer(fleet)
        told: list[str] = []

        def call() -> None:
            try:
                oq.storage.apply_blocking([(Enqueue(id=new_id(), name="job"),)])
            except StoreUnavailable as exc:
                told.append(str(exc))

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(told) == 8
        frozen.kill()


def test_the_holder_of_a_lock_is_known(fleet: Fleet) -> None:
    asyncio.run(_opened(fleet))
    frozen = frozen_writer(fleet)
    descriptor = os.open(fleet.folder / "queue.db-lock", os.O_RDWR)
    try:
        assert holder(descriptor) == frozen.pid
        assert holder(0) is None
    finally:
        os.close(descriptor)
    assert not is_stopped(os.getpid())


async def _opened(fleet: Fleet) -> None:
    async with fleet.storage():
        pass


if __name__ == "__main__":
    stop_in_a_transaction(sys.argv[1])
