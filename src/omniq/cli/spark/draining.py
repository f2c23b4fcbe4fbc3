"""`omniq spark worker`: a session, signals, and a line that tells how far it is."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from omniq.cli.logs import log_lines
from omniq.cli.modules import import_modules
from omniq.cli.parsing import names, seconds
from omniq.cli.spark.options import SlotOptions, settings_of
from omniq.cli.stopping import stopper
from omniq.cli.stores import settings_and_url
from omniq.cli.worker.status_line import WorkerNumbers, live_line
from omniq.core import OmniQ
from omniq.errors import StoreError
from omniq.signals import caught
from omniq.spark.address import must_reach, resolved
from omniq.spark.causes import reported
from omniq.spark.sessions import session
from omniq.spark.settings import is_local_master
from omniq.spark.working.draining import run_worker
from omniq.storage.url import mask

log = logging.getLogger("omniq.cli")


def work(options: SlotOptions) -> None:
    queues = names(options.queues)
    lease, grace = (None if text is None else seconds(text) for text in (options.lease, options.grace))
    conf = settings_of(options.conf)
    settings, url = settings_and_url(options.store)
    with log_lines(settings.log_level), reported(), ExitStack() as ending:
        must_reach(url, is_local_master(options.master))
        # Before the session starts, which hands the import path on to the processes of executors.
        import_modules(options.modules)
        spark = session(master=options.master, java=options.java, conf=conf, app_name="omniq worker")
        ending.callback(spark.stop)
        log.info("store %s; modules %s; master %s", mask(resolved(url)), ", ".join(options.modules), options.master)
        stopping = threading.Event()
        begin = functools.partial(log.info, "stopping: running tasks have their grace time to finish")
        ending.enter_context(caught(stopper(stopping, begin)))
        if sys.stderr.isatty():
            watch = Watch(ending.enter_context(OmniQ.from_url(resolved(url))), queues)
            ending.enter_context(live_line(watch.numbers, settings.log_level))
        report = run_worker(
            spark,
            url,
            queues,
            modules=options.modules,
            slots=options.slots,
            concurrency=options.concurrency,
            lease=lease,
            grace=grace,
            drain=options.drain,
            settings=settings,
            stop=stopping,
        )
        lost = f"; not counted: what {report.lost} lost rounds had done" if report.lost else ""
        log.info("all slots ended: %d done, %d failed, %d retried%s", report.done, report.failed, report.retried, lost)


class Watch:
    """Asks the store how far it is: slots report only when they end."""

    def __init__(self, oq: OmniQ, queues: Sequence[str] | None) -> None:
        self._oq, self._queues = oq, queues
        self._last = WorkerNumbers()
        self._before = self._now()

    def numbers(self) -> WorkerNumbers:
        # The driver says so in its log lines.
        with suppress(StoreError):
            now, before = self._now(), self._before
            self._last = WorkerNumbers(running=now.running, done=now.done - before.done, failed=now.failed - before.failed)
        return self._last

    def _now(self) -> WorkerNumbers:
        counts = [c for c in self._oq.counts() if self._queues is None or c.queue in self._queues]
        return WorkerNumbers(
            running=sum(c.running for c in counts), done=sum(c.done for c in counts), failed=sum(c.dead for c in counts)
        )
