"""One worker process: a pool with signals, log lines, and a reason to end."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import IO

import msgspec

from omniq.cli.logs import set_up_logging
from omniq.cli.modules import import_modules
from omniq.cli.stores import must_exist, settings_and_url
from omniq.cli.worker.status_line import LiveLine, show_cursor
from omniq.context import TaskContext
from omniq.core import AsyncOmniQ
from omniq.errors import OutcomeUnknown, StoreFull, StoreUnavailable
from omniq.middleware import Middleware
from omniq.racing import first
from omniq.signals import listen
from omniq.storage.url import mask
from omniq.tasks import REGISTRY
from omniq.worker import AsyncWorkerPool

log = logging.getLogger("omniq.cli")

REPORT_S = 0.25
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # between two tries to start


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker was told to do."""

    modules: tuple[str, ...]
    store: str | None = None
    queues: list[str] | None = None
    concurrency: int = 10
    grace: float | None = None
    drain: bool = False
    max_tasks: int | None = None
    max_memory: int | None = None


class Report(msgspec.Struct, kw_only=True):
    """What a worker process tells its supervisor, a line at a time."""

    ready: bool = False
    running: int = 0
    done: int = 0
    failed: int = 0
    retried: int = 0
    recycled: str = ""


class Link:
    """The two pipes to a supervisor: one to report on, and one that ends when the supervisor does."""

    def __init__(self, text: str) -> None:
        number, report, life = map(int, text.split(","))
        self.first = number == 0
        self._report: IO[bytes] = os.fdopen(report, "wb", buffering=0)
        self.life = life

    def send(self, report: Report) -> None:
        with suppress(OSError):  # the supervisor is gone, and the other pipe says so too
            self._report.write(msgspec.json.encode(report) + b"\n")


def run_alone(plan: Plan) -> int:
    return _run(plan, None)


def run_linked(plan: Plan, link: str) -> int:
    return _run(plan, Link(link))


def _run(plan: Plan, link: Link | None) -> int:
    settings, url = settings_and_url(plan.store)
    set_up_logging(settings.log_level)
    if plan.grace is not None:
        settings = msgspec.structs.replace(settings, grace=plan.grace)
    import_modules(plan.modules)
    oq = AsyncOmniQ.from_url(url, settings=settings)
    return asyncio.run(_work(oq, url, plan, link, settings.log_level))


async def _work(oq: AsyncOmniQ, url: str, plan: Plan, link: Link | None, log_level: str | None) -> int:
    await must_exist(oq, url, create=True)
    log.log(
        logging.INFO if link is None or link.first else logging.DEBUG,
        "store %s; modules %s; tasks %s",
        mask(url),
        ", ".join(plan.modules),
        ", ".join(sorted(REGISTRY)) or "(none registered)",
    )
    async with AsyncExitStack() as closing:
        closing.push_async_callback(oq.close)
        limits = Limits(plan)
        middleware = [limits] if plan.max_tasks is not None else []
        pool = await oq.worker(plan.concurrency, queues=plan.queues, allow=plan.modules, middleware=middleware)
        stopping = asyncio.Event()
        _catch_signals(pool, stopping)
        if link is not None:
            _follow(link, stopping)
        if not await _started(pool, stopping):
            return 0
        background = [asyncio.ensure_future(limits.watch_memory())]
        if link is not None:
            background.append(asyncio.ensure_future(_report(pool, link)))
        with _live(pool, link, log_level):
            await first(stopping.wait(), limits.reached.wait(), pool.drain() if plan.drain else asyncio.Event().wait())
            if limits.reached.is_set() and not stopping.is_set():
                log.info("this process is replaced: %s", limits.why, extra={"worker": pool.worker_id})
                await first(pool.finish(), stopping.wait())
            await pool.stop()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        if link is not None:
            link.send(_numbers(pool, recycled=limits.why if not stopping.is_set() else ""))
        log.info("worker ended: %d done, %d failed, %d retried", pool.done, pool.failed, pool.retried)
    return 0


async def _started(pool: AsyncWorkerPool, stopping: asyncio.Event) -> bool:
    """Start the pool, and wait for a server that is away or has no room; False if the worker was told to stop instead.

    A store of this machine is not waited for: what keeps it from being opened does not go by itself.
    """
    pause = FIRST_PAUSE_S
    while not stopping.is_set():
        try:
            started, _ = await first(pool.start(), stopping.wait())
        except (StoreUnavailable, StoreFull, OutcomeUnknown) as exc:
            if pool.storage.capabilities.local:
                raise
            log.error("no work yet: %s; trying again in %.1f s", exc, pause)
            await first(stopping.wait(), timeout=pause)
            pause = min(pause * 2, MAX_PAUSE_S)
            continue
        if started:
            return True
        await pool.stop(0)
    log.info("worker ended before it could start")
    return False


class Limits(Middleware):
    """When a process has done or grown enough to be replaced."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._begun = 0
        self.reached = asyncio.Event()
        self.why = ""

    async def before(self, task: TaskContext) -> None:
        self._begun += 1
        if self._begun == self._plan.max_tasks:
            self._reach(f"it has begun {self._begun} tasks")

    async def watch_memory(self) -> None:
        if self._plan.max_memory is None:
            return
        while not self.reached.is_set():
            used = resident_bytes()
            if used > self._plan.max_memory:
                self._reach(f"it takes {used // 1024**2} MB")
            await asyncio.sleep(REPORT_S)

    def _reach(self, why: str) -> None:
        self.why = self.why or why
        self.reached.set()


def resident_bytes() -> int:
    """How much memory this process takes; where only the most it ever took is known, that."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _numbers(pool: AsyncWorkerPool, recycled: str = "") -> Report:
    return Report(ready=True, running=pool.running, done=pool.done, failed=pool.failed, retried=pool.retried, recycled=recycled)


async def _report(pool: AsyncWorkerPool, link: Link) -> None:
    last: Report | None = None
    while True:
        now = _numbers(pool)
        if now != last:
            link.send(now)
            last = now
        await asyncio.sleep(REPORT_S)


def _follow(link: Link, stopping: asyncio.Event) -> None:
    """Stop in good order when the supervisor dies, however it does."""
    loop = asyncio.get_running_loop()

    def on_end() -> None:
        loop.remove_reader(link.life)
        if not stopping.is_set():
            log.warning("the supervising process is gone: stopping")
            stopping.set()

    loop.add_reader(link.life, on_end)


def _live(pool: AsyncWorkerPool, link: Link | None, log_level: str | None) -> AbstractContextManager[object]:
    if link is not None or not sys.stderr.isatty():
        return nullcontext()
    return LiveLine(lambda: _numbers(pool), log_level)


def _catch_signals(pool: AsyncWorkerPool, stopping: asyncio.Event) -> None:
    def on_signal(number: int) -> None:
        if stopping.is_set():
            log.warning("second signal: leaving now; unfinished tasks come back by themselves")
            show_cursor()
            os._exit(128 + number)
        log.info("stopping: %d tasks have %g s to finish", pool.running, pool.grace)
        stopping.set()

    catch_signals(on_signal)


def catch_signals(on_signal: Callable[[int], None]) -> None:
    listen(asyncio.get_running_loop(), on_signal)
