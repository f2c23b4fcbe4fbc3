"""One worker process: a pool with signals, log lines, and a reason to end."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import IO

import msgspec

from omniq.cli.commands import run
from omniq.cli.logs import log_lines
from omniq.cli.modules import import_modules
from omniq.cli.stopping import stopper
from omniq.cli.stores import must_exist, settings_and_url
from omniq.cli.worker.options import WorkerOptions
from omniq.cli.worker.status_line import WorkerNumbers, live_line
from omniq.context import Middleware, TaskContext
from omniq.core import AsyncOmniQ
from omniq.errors import OutcomeUnknown, StoreFull, StoreUnavailable
from omniq.racing import first
from omniq.signals import caught_on_loop
from omniq.storage.url import mask
from omniq.tasks import REGISTRY
from omniq.worker import AsyncWorkerPool

log = logging.getLogger("omniq.cli")

# How often the supervisor hears the numbers, for a status line that is drawn as often, and how often memory is looked at.
REPORT_S = 0.25
# Between two tries to start.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0


class ProcessReport(WorkerNumbers, kw_only=True):
    """A worker process's report to its supervisor, sent as one line."""

    ready: bool = False
    recycled: str = ""


class Link:
    """The two pipes to a supervisor: one to report on, and one that ends when the supervisor does."""

    def __init__(self, text: str) -> None:
        number, report, life = map(int, text.split(","))
        self.first = number == 0
        self._report: IO[bytes] = os.fdopen(report, "wb", buffering=0)
        self.life = life

    def send(self, report: ProcessReport) -> None:
        # The supervisor is gone, and the other pipe says so too.
        with suppress(OSError):
            self._report.write(msgspec.json.encode(report) + b"\n")


def work(options: WorkerOptions) -> int:
    """Run tasks in this process. Returns the exit code."""
    settings, url = settings_and_url(options.store)
    with log_lines(settings.log_level):
        if options.grace_s is not None:
            settings = msgspec.structs.replace(settings, grace=options.grace_s)
        import_modules(options.modules)
        link = None if options.link is None else Link(options.link)
        return run(_work(AsyncOmniQ.from_url(url, settings=settings), url, options, link, settings.log_level))


async def _work(oq: AsyncOmniQ, url: str, options: WorkerOptions, link: Link | None, log_level: str | None) -> int:
    await must_exist(oq, url, create=True)
    # Said once and not by each of many processes.
    log.log(
        logging.INFO if link is None or link.first else logging.DEBUG,
        "store %s; modules %s; tasks %s",
        mask(url),
        ", ".join(options.modules),
        ", ".join(sorted(REGISTRY)) or "(none registered)",
    )
    async with AsyncExitStack() as closing:
        closing.push_async_callback(oq.close)
        limits = Limits(options)
        middleware = [limits] if options.max_tasks is not None else []
        pool = await oq.worker(options.concurrency, queues=options.queue_names, allow=options.modules, middleware=middleware)
        stopping = asyncio.Event()

        def begin() -> None:
            log.info("stopping: %d tasks have %g s to finish", pool.running, pool.grace)

        closing.enter_context(caught_on_loop(stopper(stopping, begin)))
        if link is not None:
            _follow(link, stopping)
        if not await _started(pool, stopping):
            return 0
        background = [asyncio.ensure_future(limits.watch_memory())]
        if link is not None:
            background.append(asyncio.ensure_future(_report(pool, link)))
        with live_line(lambda: _numbers(pool), log_level):
            await first(
                stopping.wait(), limits.reached.wait(), pool.drain() if options.drain_and_exit else asyncio.Event().wait()
            )
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
    """Start the pool, and wait for a server that is away or has no room. Returns False if it was told to stop first.

    A store on this machine is not waited for: the cause of its failure does not go away by itself.
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

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        # Begun, not ended: nothing more than --max-tasks begins, even while many run at once.
        self._begun = 0
        self.reached = asyncio.Event()
        self.why = ""

    async def before(self, task: TaskContext) -> None:
        self._begun += 1
        if self._begun == self._options.max_tasks:
            self._reach(f"it has begun {self._begun} tasks")

    async def watch_memory(self) -> None:
        allowed = self._options.max_bytes
        if allowed is None:
            return
        while not self.reached.is_set():
            used = resident_bytes()
            if used > allowed:
                self._reach(f"it takes {used // 1024**2} MB")
            await asyncio.sleep(REPORT_S)

    def _reach(self, why: str) -> None:
        self.why = self.why or why
        self.reached.set()


def resident_bytes() -> int:
    """Returns how much memory this process takes, or the most it ever took where only that is known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _numbers(pool: AsyncWorkerPool, recycled: str = "") -> ProcessReport:
    done, failed, retried = pool.done, pool.failed, pool.retried
    return ProcessReport(ready=True, running=pool.running, done=done, failed=failed, retried=retried, recycled=recycled)


async def _report(pool: AsyncWorkerPool, link: Link) -> None:
    last: ProcessReport | None = None
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
