"""`omniq serve`: the line protocol over TCP, with signals."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from omniq.cli.logs import set_up_logging
from omniq.cli.serve.token_file import read_token
from omniq.config import Settings, load_settings
from omniq.durations import format_duration
from omniq.server import ServeOptions, Server
from omniq.server.options import make_options
from omniq.signals import listen
from omniq.storage.base import BaseStorage
from omniq.storage.url import mask

log = logging.getLogger("omniq.server")


def run_server(store: str | None, token_file: str | None, **given: Any) -> int:
    settings = load_settings()
    set_up_logging(settings.log_level)
    token = None if token_file is None else read_token(token_file)
    options = make_options(token=token, **given)
    url = store or settings.url
    storage = BaseStorage.from_url(url, events=settings.events)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(storage, options, settings, mask(url)))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(storage: BaseStorage, options: ServeOptions, settings: Settings, shown: str) -> int:
    async with storage:
        server = Server(storage, options, settings.retention)
        stopping = asyncio.Event()
        await server.start()
        try:
            _catch_signals(server, stopping)
            _say_where(server, shown)
            await stopping.wait()
        finally:
            await _stop(server)
    return 0


def _say_where(server: Server, shown: str) -> None:
    host, port = server.address
    host = f"[{host}]" if ":" in host else host
    tls = " with TLS" if server.options.tls_cert is not None else ""
    metrics = "" if server.metrics_port is None else f", metrics on {server.options.metrics_host}:{server.metrics_port}"
    print(f"omniq: listening on {host}:{port}{tls}{metrics}, store {shown}", file=sys.stderr, flush=True)


async def _stop(server: Server) -> None:
    try:
        async with asyncio.timeout(server.options.grace or None):
            await server.stop()
    except TimeoutError:
        log.error("the grace time is over: leaving; held tasks come back by themselves")
        os._exit(1)


def _catch_signals(server: Server, stopping: asyncio.Event) -> None:
    def on_signal(number: int) -> None:
        if stopping.is_set():
            log.warning("second signal: leaving now; held tasks come back by themselves")
            os._exit(128 + number)
        held = sum(len(session.held) for session in server.connections)
        grace = format_duration(round(server.options.grace * 1e9))
        log.info("stopping: %d connections hold %d tasks and have %s", len(server.connections), held, grace)
        stopping.set()

    listen(asyncio.get_running_loop(), on_signal)
