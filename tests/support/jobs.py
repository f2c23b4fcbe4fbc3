"""Functions that tests enqueue. Gates and counters are keyed by a text that each test makes for itself."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import omniq
from omniq.tasks import NotRunnable

runs: Counter[str] = Counter()
starts: defaultdict[str, list[float]] = defaultdict(list)
seen: defaultdict[str, list[Any]] = defaultdict(list)
gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
inside: Counter[str] = Counter()
most_inside: Counter[str] = Counter()
_lock = threading.Lock()


def _count(key: str) -> int:
    with _lock:
        runs[key] += 1
        starts[key].append(time.monotonic())
        return runs[key]


def add(a: int, b: int = 0) -> int:
    return a + b


def x_of(point: Any) -> Any:
    return point.x


async def add_async(a: int, b: int = 0) -> int:
    return a + b


def echo(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"args": list(args), "kwargs": kwargs}


def nothing() -> None:
    return None


def count(key: str) -> int:
    return _count(key)


async def count_async(key: str) -> int:
    return _count(key)


def remember(key: str, value: Any) -> None:
    _count(key)
    seen[key].append(value)


def fail(key: str, message: str = "no luck") -> None:
    _count(key)
    raise RuntimeError(message)


def fail_until(key: str, good: int) -> int:
    """Fails until its `good`-th run."""
    n = _count(key)
    if n < good:
        raise RuntimeError(f"run {n} of {good}")
    return n


def retry_after(key: str, seconds: float) -> int:
    n = _count(key)
    if n == 1:
        raise omniq.Retry("later", after=seconds)
    return n


def give_up(key: str) -> None:
    _count(key)
    raise omniq.Unrecoverable("hopeless")


def not_runnable_inside() -> None:
    raise NotRunnable("raised by the task", unknown=True)


def leave(key: str) -> None:
    _count(key)
    raise SystemExit(3)


def raise_odd(key: str, name: str) -> None:
    """What a task had better not raise, by its name."""
    _count(key)
    raise ODD[name]


async def raise_odd_async(key: str, name: str) -> None:
    _count(key)
    raise ODD[name]


async def cancel_itself(key: str, *, and_wait: bool) -> str:
    """Cancels the asyncio task that it runs in."""
    _count(key)
    current = asyncio.current_task()
    assert current is not None
    current.cancel("by itself")
    if and_wait:
        await asyncio.sleep(0)
    return "returned"


async def in_a_task_group(key: str) -> int:
    """Hears of a cancellation of its asyncio task that somebody left behind."""
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        child = group.create_task(add_async(1, 2))
    return child.result()


def retry_when(key: str, after: str, late: bool) -> None:
    """Wishes for a strange pause, at once or after the error was made."""
    _count(key)
    if late:
        error = omniq.Retry("later")
        error.after = float(after)
        raise error
    raise omniq.Retry("later", after=float(after))


class Mine(BaseException):
    """An exception of a program of its own that is no Exception."""


ODD: dict[str, BaseException | type[BaseException]] = {
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "CancelledError": asyncio.CancelledError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "Mine": Mine,
}


class Mute(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail_without_text(key: str) -> None:
    _count(key)
    raise Mute


def fail_with_broken_text(key: str) -> None:
    _count(key)
    raise RuntimeError("half a character: \udc80")


def fail_behind_broken_text(key: str) -> None:
    try:
        fail_with_broken_text(key)
    except RuntimeError as exc:
        raise ValueError("after that") from exc


def stop_iteration(key: str) -> None:
    _count(key)
    raise StopIteration(7)


def unstorable(key: str) -> object:
    _count(key)
    return object()


def not_a_number() -> float:
    return float("nan")


def wait_for_gate(key: str) -> str:
    """A synchronous function that ends when the test opens its gate."""
    _count(key)
    gates[key].wait(20)
    return "through"


async def wait_async(key: str) -> str:
    """An asynchronous one."""
    _count(key)
    while not gates[key].is_set():  # noqa: ASYNC110 - the gate is opened from other threads too
        await asyncio.sleep(0.002)
    return "through"


async def forever(key: str) -> None:
    _count(key)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen[key].append("cancelled")
        raise


async def stubborn(key: str) -> str:
    """Catches its cancellation and returns all the same."""
    _count(key)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "too late"
    return "never"


def poll_cancel(key: str) -> str:
    """A synchronous function that asks whether it was cancelled."""
    _count(key)
    task = omniq.current_task()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        task.check_cancelled()
        time.sleep(0.002)
    return "never cancelled"


async def block_the_loop(key: str, seconds: float) -> int:
    """Holds the event loop with a call that does not await."""
    n = _count(key)
    time.sleep(seconds)  # noqa: ASYNC251 - on purpose
    return n


async def crowd(key: str) -> None:
    """Notes how many of its kind run at once."""
    _count(key)
    inside[key] += 1
    most_inside[key] = max(most_inside[key], inside[key])
    await asyncio.sleep(0.01)
    inside[key] -= 1


def order(key: str, n: int) -> None:
    _count(key)
    seen[key].append(n)


async def order_async(key: str, n: int) -> None:
    _count(key)
    seen[key].append(n)


def about_me() -> dict[str, Any]:
    task = omniq.current_task()
    return {
        "id": task.id,
        "name": task.name,
        "queue": task.queue,
        "attempt": task.attempt,
        "max_attempts": task.max_attempts,
        "headers": task.headers,
        "thread": threading.current_thread() is not threading.main_thread(),
    }


async def about_me_async() -> dict[str, Any]:
    return about_me()


async def report_progress(key: str) -> str:
    task = omniq.current_task()
    task.progress(1, 3, note="one")
    return await wait_async(key)


def report_progress_from_a_thread(key: str) -> str:
    omniq.current_task().progress(2, 4)
    return wait_for_gate(key)


def report_too_much() -> None:
    omniq.current_task().progress(note="x" * 5000)


def log_something(key: str) -> None:
    _count(key)
    omniq.current_task().logger.warning("hello from inside")


async def spawn(key: str) -> str:
    """Enqueues a child in the transaction that acks this task."""
    async with omniq.current_task().transaction() as tx:
        seen[key].append(tx.enqueue(add, 1, 2))
    return "parent"


def spawn_from_a_thread(key: str) -> str:
    with omniq.current_task().transaction() as tx:
        seen[key].append(tx.enqueue(add, 1, 2))
    return "parent"


async def spawn_and_fail(key: str) -> None:
    async with omniq.current_task().transaction() as tx:
        seen[key].append(tx.enqueue(add, 1, 2))
    raise RuntimeError("after the transaction")


async def spawn_and_roll_back(key: str) -> str:
    try:
        async with omniq.current_task().transaction() as tx:
            seen[key].append(tx.enqueue(add, 1, 2))
            raise KeyError("inside the block")
    except KeyError:
        return "went on"


async def spawn_the_same_id_twice(key: str) -> str:
    async with omniq.current_task().transaction() as tx:
        tx.options(task_id=key).enqueue(add, 1)
        tx.options(task_id=key).enqueue(add, 2)
    return "parent"


async def spawn_another_body(key: str, task_id: str) -> str:
    """Enqueues under an id that another task has already."""
    _count(key)
    async with omniq.current_task().transaction() as tx:
        tx.options(task_id=task_id).enqueue(add, 40, 2)
    return "parent"


def typed(day: dt.date, when: dt.datetime, pair: tuple[int, int], tags: set[str], data: bytes) -> list[str]:
    return [type(value).__name__ for value in (day, when, pair, tags, data)]


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


def take_point(point: Point) -> str:
    return f"{type(point).__name__} {point.x}"


def options_as_arguments(queue: str, timeout: int, group: str, max_retries: int) -> list[Any]:
    """Parameters that have the names of options."""
    return [queue, timeout, group, max_retries]


def keyword_only(a: int, *, b: int) -> int:
    return a + b


def with_eta(eta: str) -> str:
    return eta


class Holder:
    @staticmethod
    def static(a: int) -> int:
        return a * 2

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    def method(self) -> None: ...

    def __call__(self) -> None: ...


not_callable = 42


def hold_then_write(path: str) -> int:
    """Writes the process id and waits until a file beside it says go."""
    Path(path).write_text(str(os.getpid()))
    deadline = time.monotonic() + 20
    while not Path(path + "-go").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return os.getpid()


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@omniq.task(name="tests.double", max_retries=1)
def double(x: int) -> int:
    return x * 2


@omniq.task
async def triple(x: int, *, plus: int = 0) -> int:
    return x * 3 + plus


@omniq.task(name="tests.to_mail", queue="mail", timeout=7.5, group="g", group_limit=2)
def to_mail(address: str) -> str:
    return address
