"""More than one process on one store: forks, wake-ups, and workers that die."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import jobs
from support.forks import Python
from support.waiting import eventually, wait_for

from omniq import AsyncOmniQ, MemoryStorage, OmniQ, Settings, TaskStatus
from omniq.storage.writer import Writer

Spawn = Callable[..., "subprocess.Popen[str]"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

ENQUEUER = """
import sys, time
from omniq import OmniQ
from support import jobs

with OmniQ.from_url(sys.argv[1]) as oq:
    oq.counts()
    print("ready", flush=True)
    for line in sys.stdin:
        task_id = oq.enqueue(jobs.count, line.strip())
        print(task_id, time.monotonic(), flush=True)
"""

WORKER = """
import sys, time
from omniq import OmniQ, Settings
from support import jobs

with OmniQ.from_url(sys.argv[1], settings=Settings(lease=float(sys.argv[2]))) as oq, oq.worker():
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a Python program; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str, ready: bool = True) -> subprocess.Popen[str]:
        child = Python(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        started.append(child)
        assert child.stdout is not None
        if ready:
            assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


LEAVER = """
import asyncio, sys
from omniq import AsyncOmniQ
from support import jobs

async def main():
    oq = AsyncOmniQ.from_url(sys.argv[1])
    await (await oq.worker(2)).start()
    await oq.enqueue(jobs.forever, "running")
    while not jobs.runs["running"]:
        await asyncio.sleep(0.01)
    print("ready", flush=True)

asyncio.run(main())
"""


def test_a_program_that_leaves_its_loop_without_a_stop_ends(url: str, spawn: Spawn) -> None:
    assert spawn(LEAVER, url).wait(30) == 0


async def test_a_task_from_another_process_starts_long_before_the_poll(url: str, key: str, spawn: Spawn) -> None:
    async with AsyncOmniQ.from_url(url) as oq, await oq.worker(poll_interval=30):
        child = await asyncio.to_thread(spawn, ENQUEUER, url)
        delays: list[float] = []
        for n in range(10):
            child.stdin.write(f"{key}{n}\n")
            child.stdin.flush()
            answer = await asyncio.to_thread(child.stdout.readline)
            await eventually(lambda n=n: jobs.runs[f"{key}{n}"])
            delays.append(jobs.starts[f"{key}{n}"][0] - float(answer.split()[1]))
    delays = sorted(delays)
    assert delays[5] < 0.1, delays
    assert delays[-1] < 2, delays


async def test_without_inotify_a_task_from_another_process_is_found_by_polling(
    url: str, key: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "asyncinotify", None)
    async with AsyncOmniQ.from_url(url) as oq, await oq.worker(poll_interval=30):
        child = await asyncio.to_thread(spawn, ENQUEUER, url)
        for n in range(3):
            child.stdin.write(f"{key}{n}\n")
            child.stdin.flush()
            await eventually(lambda n=n: jobs.runs[f"{key}{n}"], within=5)


async def test_a_result_from_another_process_ends_the_waiting_early(url: str, spawn: Spawn) -> None:
    async with AsyncOmniQ.from_url(url) as oq:
        await asyncio.to_thread(spawn, WORKER, url, "30")
        await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)
        times = []
        for _ in range(5):
            before = time.monotonic()
            assert (await oq.get_result(await oq.enqueue(jobs.add, 1), wait=True, timeout=5)).ok
            times.append(time.monotonic() - before)
        assert sorted(times)[2] < 0.3, times


async def test_the_very_first_wait_of_a_storage_hears_other_processes_too(url: str, spawn: Spawn) -> None:
    await asyncio.to_thread(spawn, WORKER, url, "30")
    times = []
    for _ in range(5):
        async with AsyncOmniQ.from_url(url) as oq:
            task_id = await oq.enqueue(jobs.add, 1)
            before = time.monotonic()
            assert (await oq.get_result(task_id, wait=True, timeout=5)).ok
            times.append(time.monotonic() - before)
    assert max(times) < 0.7, times


async def test_the_tasks_of_a_killed_worker_run_again_within_a_second(url: str, tmp_path: Path, spawn: Spawn) -> None:
    mark = str(tmp_path / "pid")
    async with AsyncOmniQ.from_url(url) as oq:
        child = await asyncio.to_thread(spawn, WORKER, url, "30")
        task_id = await oq.enqueue(jobs.hold_then_write, mark)
        await eventually(lambda: Path(mark).exists())
        Path(mark).unlink()
        async with await oq.worker(poll_interval=30):
            child.kill()
            await asyncio.to_thread(child.wait)
            killed = time.monotonic()
            await eventually(lambda: Path(mark).exists())
            assert time.monotonic() - killed < 2
            Path(mark + "-go").touch()
            result = await oq.get_result(task_id, wait=True, timeout=5)
        history = [e.event for e in await oq.history(task_id)]
    assert (result.ok, result.attempts) == (True, 2)
    assert history == ["enqueued", "started", "expired", "started", "succeeded"]


async def test_a_task_that_kills_its_worker_again_and_again_is_a_failure_that_says_so(url: str, spawn: Spawn) -> None:
    async with AsyncOmniQ.from_url(url) as oq:
        task_id = await oq.options(max_retries=1).enqueue("support.jobs:kill_me")
        for _ in range(2):
            child = spawn(WORKER, url, "30", ready=False)
            assert await asyncio.to_thread(child.wait, 10) == -signal.SIGKILL
        async with await oq.worker():
            result = await oq.get_result(task_id, wait=True, timeout=5)
    assert (result.status, result.error.type, result.attempts) == (TaskStatus.FAILED, "WorkerLost", 2)
    assert "died during attempt 2 of 2" in result.error.message


async def test_a_frozen_worker_loses_its_task_after_the_lease_and_cannot_end_it(url: str, tmp_path: Path, spawn: Spawn) -> None:
    mark = str(tmp_path / "pid")
    async with AsyncOmniQ.from_url(url, settings=Settings(lease=0.6)) as oq:
        child = await asyncio.to_thread(spawn, WORKER, url, "0.6")
        task_id = await oq.enqueue(jobs.hold_then_write, mark)
        await eventually(lambda: Path(mark).exists())
        os.kill(child.pid, signal.SIGSTOP)
        Path(mark).unlink()
        Path(mark + "-go").touch()
        async with await oq.worker():
            result = await oq.get_result(task_id, wait=True, timeout=8)
            assert (result.ok, result.attempts, result.result) == (True, 2, os.getpid())
            os.kill(child.pid, signal.SIGCONT)
            child.stdin.close()
            await asyncio.to_thread(child.wait, 10)
        again = await oq.get_result(task_id)
        assert again == result


# -- fork ------------------------------------------------------------------------------------------


def in_a_fork(call: Callable[[], object], seconds: int = 15) -> int:
    """The exit status of a forked child that makes the call; 0 if it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(seconds)
            call()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_enqueues_through_its_parents_object(url: str) -> None:
    with OmniQ.from_url(url) as oq, oq.worker(poll_interval=30):
        first = oq.enqueue(jobs.add, 1)
        assert oq.get_result(first, wait=True, timeout=5).ok

        def child() -> None:
            task_id = oq.options(task_id="from-the-child").enqueue(jobs.add, 2)
            assert oq.get_result(task_id, wait=True, timeout=5).result == 2
            assert oq.get_task(first).status is TaskStatus.SUCCESS
            oq.close()

        assert in_a_fork(child) == 0
        assert oq.get_result("from-the-child").result == 2
        assert oq.get_result(oq.enqueue(jobs.add, 3), wait=True, timeout=5).result == 3


def test_a_fork_after_a_store_was_closed_costs_the_child_no_file_that_was_opened_since(url: str) -> None:
    """The numbers of closed descriptors are given again, to the pipes of `subprocess` for one."""
    with OmniQ.from_url(url) as oq:
        oq.enqueue(jobs.add, 1)
        # Held on to: a fork looks at each writer that the garbage collector has not come to yet.
        writers = [each for each in gc.get_objects() if issubclass(type(each), Writer)]
    assert writers
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        assert in_a_fork(lambda: [os.fstat(number) for number in files]) == 0
    finally:
        for number in files:
            os.close(number)


def test_a_fork_in_the_middle_of_a_write_does_not_lock_the_child_out(url: str) -> None:
    with OmniQ.from_url(url) as oq:
        oq.enqueue(jobs.add, 0)
        stop = threading.Event()

        def write_on() -> None:
            while not stop.is_set():
                oq.enqueue_many(jobs.add, [(n,) for n in range(50)])

        writer = threading.Thread(target=write_on)
        writer.start()
        try:
            codes = [in_a_fork(lambda: oq.enqueue(jobs.add, 1), seconds=5) for _ in range(10)]
        finally:
            stop.set()
            writer.join()
        assert codes == [0] * 10


def test_a_forked_child_does_not_keep_its_parents_worker_alive(url: str, tmp_path: Path) -> None:
    """The parent's lock must not be inherited, or a dead parent would look alive as long as its child lives."""
    script = """
import os, signal, sys
from omniq import OmniQ
oq = OmniQ.from_url(sys.argv[1])
pool = oq.worker()
pool.start()
oq.enqueue("support.jobs:hold_then_write", sys.argv[2])
while not os.path.exists(sys.argv[2]):
    pass
if os.fork() == 0:
    print(os.getpid(), flush=True)
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    mark = tmp_path / "pid"
    command = [sys.executable, "-c", script, url, str(mark)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    parent.wait()
    parent.stdout.close()
    try:
        mark.unlink()
        (tmp_path / "pid-go").touch()
        with OmniQ.from_url(url) as oq, oq.worker():
            (task,), _ = oq.find()
            result = oq.get_result(task.id, wait=True, timeout=5)
            assert result is not None, "the dead worker looked alive"
            assert result.attempts == 2
    finally:
        os.kill(grandchild, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{grandchild}").exists() or "Z" in Path(f"/proc/{grandchild}/stat").read_text())


def test_a_memory_store_after_a_fork_belongs_to_the_child_alone() -> None:
    with OmniQ(MemoryStorage()) as oq:
        oq.enqueue(jobs.add, 1)

        def child() -> None:
            oq.enqueue(jobs.add, 2)
            assert oq.counts()[0].ready == 2

        assert in_a_fork(child) == 0
        assert oq.counts()[0].ready == 1


def test_a_script_that_forgets_to_close_still_ends(url: str) -> None:
    script = """
import sys
from omniq import OmniQ
from support import jobs
oq = OmniQ.from_url(sys.argv[1])
pool = oq.worker()
pool.start()
assert oq.get_result(oq.enqueue(jobs.add, 1), wait=True, timeout=5).ok
print("done", flush=True)
"""
    command = [sys.executable, "-c", script, url]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_function_of_main_runs_in_its_own_process_and_fails_elsewhere(url: str) -> None:
    script = """
import sys
from omniq import OmniQ

def local():
    return "ran"

with OmniQ.from_url(sys.argv[1]) as oq:
    with oq.worker():
        print(oq.get_result(oq.enqueue(local), wait=True, timeout=5).result)
    oq.options(task_id="left").enqueue(local)
"""
    command = [sys.executable, "-c", script, url]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=20, check=False)
    assert done.stdout == "ran\n", done.stderr
    with OmniQ.from_url(url) as oq, oq.worker():
        result = oq.get_result("left", wait=True, timeout=5)
    assert result.status is TaskStatus.FAILED
    assert "move it into a module" in result.error.message
