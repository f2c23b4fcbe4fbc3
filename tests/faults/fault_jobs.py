"""The tasks that the fault tests run in worker processes. Every execution appends one line to a side file.

A line is `word task_id attempt pid`. One short write to a file opened with O_APPEND is never torn or mixed with others.
"""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import omniq

DEADLINE_S = 60.0


def note(side: str, word: str) -> str:
    """Append a line about the running task; `attempt-pid`, which tells this execution from all others."""
    task = omniq.current_task()
    line = f"{word} {task.id} {task.attempt} {os.getpid()}\n"
    descriptor = os.open(side, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
    return f"{task.attempt}-{os.getpid()}"


async def work(side: str, seconds: float) -> str:
    mark = note(side, "run")
    await asyncio.sleep(seconds)
    return mark


def work_in_thread(side: str, seconds: float) -> str:
    mark = note(side, "run")
    time.sleep(seconds)
    return mark


async def fail_once(side: str) -> str:
    mark = note(side, "run")
    if omniq.current_task().attempt == 1:
        raise RuntimeError("the first attempt always fails")
    return mark


async def nothing() -> None:
    pass


async def hang_at_first(side: str) -> str:
    """The first attempt never ends by itself, the next ones at once."""
    mark = note(side, "run")
    if omniq.current_task().attempt == 1:
        await asyncio.sleep(DEADLINE_S)
    return mark


async def fork_and_hang_at_first(side: str) -> str:
    """As `hang_at_first`, with a forked child that outlives a killed worker."""
    mark = note(side, "run")
    if omniq.current_task().attempt == 1:
        child = os.fork()
        if child == 0:
            signal.alarm(int(DEADLINE_S))
            while True:
                signal.pause()
        note(side, f"child-{child}")
        await asyncio.sleep(DEADLINE_S)
    return mark


def wait_for_file_at_first(side: str, path: str) -> str:
    """The first attempt ends when a file appears, the next ones at once."""
    mark = note(side, "run")
    if omniq.current_task().attempt == 1:
        end = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not Path(path).exists() and time.monotonic() < end:
            pause.wait(0.01)
    note(side, "end")
    return mark


def die(side: str) -> None:
    note(side, "run")
    os._exit(7)
