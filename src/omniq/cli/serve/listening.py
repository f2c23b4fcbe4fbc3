"""A server as a program: its loop, its signals, and the line that says where it listens."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from omniq.cli.logs import log_lines
from omniq.cli.serve.token_file import read_token
from omniq.cli.stopping import stopper
from omniq.config import Settings, load_settings
from omniq.durations import format_duration
from omniq.server import ServeOptions, Server
from omniq.server.options import make_options
from omniq.signals import caught_on_loop
from omniq.storage.base import BaseStorage
from omniq.storage.url import mask

log = logging.getLogger("omniq.server")


def run_server(store: str | None, token_file: str | None, **given: Any) -> None:
    """Serve until told to stop; `given` are the options that are not None, as `make_options` takes them."""
    settings = load_settings()
    with log_lines(settings.log_level):
        token = None if token_file is None else read_token(token_file)
        options = make_options(token=token, **given)
        url = store or settings.url
        storage = BaseStorage.from_url(url, events=settings.events)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(storage, options, settings, mask(url)))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    # A faster loop, where it is installed: Windows has none.
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(storage: BaseStorage, options: ServeOptions, settings: Settings, shown: str) -> None:
    async with storage:
        server = Server(storage, options, settings.retention)
        stopping = asyncio.Event()

        def begin() -> None:
            held = sum(len(session.held) for session in server.connections)
            grace = format_duration(round(options.grace * 1e9))
            log.info("stopping: %d connections hold %d tasks and have %s", len(server.connections), held, grace)

        await server.start()
        with caught_on_loop(stopper(stopping, begin, left="held tasks")):
            try:
                _say_where(server, shown)
                await stopping.wait()
            finally:
                await _stop(server)


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
        # Not through the end of `with`, which closes the store: one that does not answer would be waited for.
        os._exit(1)
