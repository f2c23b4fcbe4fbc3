"""`omniq spark worker`: a session, signals, and a line that tells how far it is."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from types import FrameType

import msgspec

from omniq.cli.logs import set_up_logging
from omniq.cli.modules import import_modules
from omniq.cli.stores import settings_and_url
from omniq.cli.worker.status_line import LiveLine, show_cursor
from omniq.core import OmniQ
from omniq.errors import StoreError
from omniq.spark.address import must_reach, resolved
from omniq.spark.causes import reported
from omniq.spark.sessions import session
from omniq.spark.settings import is_local_master
from omniq.spark.working.draining import run_worker
from omniq.storage.url import mask

log = logging.getLogger("omniq.cli")


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """What the store has gained since the command began. It does not count retries."""

    running: int = 0
    done: int = 0
    failed: int = 0
    retried: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the command was told to do."""

    modules: tuple[str, ...]
    store: str | None
    master: str
    java: str
    conf: dict[str, str]
    queues: list[str] | None
    slots: int | None
    concurrency: int
    lease: float | None
    grace: float | None
    drain: bool


def work(plan: Plan) -> None:
    settings, url = settings_and_url(plan.store)
    set_up_logging(settings.log_level)
    must_reach(url, is_local_master(plan.master))
    import_modules(plan.modules)  # before the session starts, which hands the import path on
    with reported(), ExitStack() as ending:
        spark = session(master=plan.master, java=plan.java, conf=plan.conf, app_name="omniq worker")
        ending.callback(spark.stop)
        log.info("store %s; modules %s; master %s", mask(resolved(url)), ", ".join(plan.modules), plan.master)
        stopping = threading.Event()
        _catch_signals(stopping)
        with _live(resolved(url), plan.queues, settings.log_level):
            report = run_worker(
                spark,
                url,
                plan.queues,
                modules=plan.modules,
                slots=plan.slots,
                concurrency=plan.concurrency,
                lease=plan.lease,
                grace=plan.grace,
                drain=plan.drain,
                settings=settings,
                stop=stopping,
            )
    lost = f"; not counted: what {report.lost} lost rounds had done" if report.lost else ""
    log.info("all slots ended: %d done, %d failed, %d retried%s", report.done, report.failed, report.retried, lost)


def _catch_signals(stopping: threading.Event) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            log.warning("second signal: leaving now; unfinished tasks come back by themselves")
            show_cursor()
            os._exit(128 + number)
        log.info("stopping: running tasks have their grace time to finish")
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _live(url: str, queues: Sequence[str] | None, log_level: str | None) -> AbstractContextManager[object]:
    if not sys.stderr.isatty():
        return nullcontext()
    stack = ExitStack()
    watch = Watch(stack.enter_context(OmniQ.from_url(url)), queues)
    stack.enter_context(LiveLine(watch.numbers, log_level))
    return stack


class Watch:
    """Asks the store how far it is: slots report only when they end."""

    def __init__(self, oq: OmniQ, queues: Sequence[str] | None) -> None:
        self._oq, self._queues = oq, queues
        self._last = Numbers()
        self._before = self._now()

    def numbers(self) -> Numbers:
        with suppress(StoreError):  # the driver says so
            now, before = self._now(), self._before
            self._last = Numbers(running=now.running, done=now.done - before.done, failed=now.failed - before.failed)
        return self._last

    def _now(self) -> Numbers:
        counts = [c for c in self._oq.counts() if self._queues is None or c.queue in self._queues]
        return Numbers(
            running=sum(c.running for c in counts), done=sum(c.done for c in counts), failed=sum(c.dead for c in counts)
        )
