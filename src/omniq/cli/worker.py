"""`omniq worker`: a worker pool with signals, import path and log lines."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from omniq.config import load_settings
from omniq.core import AsyncOmniQ
from omniq.errors import ConfigError
from omniq.logs import set_up_logging
from omniq.storage.url import mask
from omniq.tasks import REGISTRY
from omniq.worker import AsyncWorkerPool

log = logging.getLogger("omniq.cli")


def run_worker(
    modules: Sequence[str],
    store: str | None,
    queues: Sequence[str] | None,
    concurrency: int,
    grace: float | None,
    drain: bool,
) -> int:
    settings = load_settings()
    set_up_logging(settings.log_level)
    if grace is not None:
        settings = msgspec.structs.replace(settings, grace=grace)
    url = store or settings.url
    _import_modules(modules)
    oq = AsyncOmniQ.from_url(url, settings=settings)
    log.info(
        "store %s; modules %s; tasks %s",
        mask(url),
        ", ".join(modules),
        ", ".join(sorted(REGISTRY)) or "(none registered)",
    )
    return asyncio.run(_work(oq, modules, queues, concurrency, drain))


def _import_modules(modules: Sequence[str]) -> None:
    sys.path.insert(0, os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name is not None and (module == exc.name or module.startswith(exc.name + ".")):
                raise ConfigError(
                    f"no module {module!r}: give it as in 'import {module}', from the folder where that works"
                ) from exc
            raise ConfigError(f"module {module!r} cannot be imported: {exc}") from exc
        except Exception as exc:
            raise ConfigError(f"module {module!r} cannot be imported: {type(exc).__name__}: {exc}") from exc


async def _work(oq: AsyncOmniQ, modules: Sequence[str], queues: Sequence[str] | None, concurrency: int, drain: bool) -> int:
    async with oq:
        pool = await oq.worker(concurrency=concurrency, queues=queues, allow=modules)
        stopping = asyncio.Event()
        _catch_signals(pool, stopping)
        await pool.start()
        log.info("worker %s runs up to %d tasks at once", pool.worker_id, concurrency, extra={"worker": pool.worker_id})
        if drain:
            await _first(pool.drain(), stopping.wait())
        else:
            await stopping.wait()
        await pool.stop()
        log.info("worker ended: %d done, %d failed, %d retried", pool.done, pool.failed, pool.retried)
    return 0


def _catch_signals(pool: AsyncWorkerPool, stopping: asyncio.Event) -> None:
    def on_signal(number: int) -> None:
        if stopping.is_set():
            log.warning("second signal: leaving now; unfinished tasks come back by themselves")
            os._exit(128 + number)
        log.info("stopping: %d tasks have %g s to finish", pool.running, pool.grace)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


async def _first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Return when the first of them ends; the others are cancelled."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
