"""The server: listens, keeps the leases of the tasks that its connections hold, and stops in good order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Self, cast

from omniq.errors import ConfigError, OmniQError
from omniq.models import Record
from omniq.operations import Retention
from omniq.policy import SERVER_PREFIX
from omniq.presence import Presence
from omniq.server import protocol
from omniq.server.engine import LEASE_US, Engine
from omniq.server.lines import LineBuffer
from omniq.server.metrics import Tally, start_metrics
from omniq.server.options import ServeOptions
from omniq.server.secret_files import readable_by_others
from omniq.server.session import Session
from omniq.storage.base import BaseStorage

log = logging.getLogger("omniq.server")

READ_HIGH = 256 * 1024  # bytes of replies that wait for a client before its commands wait too
LAST_S = 1.0  # of the grace time, for handing tasks back
HANDSHAKE_S = 10.0  # how long a client may take to agree on TLS
FAREWELL_S = 1.0  # how long a client that was told to go may take to close its side, while the server stops


class Server:
    """The line protocol in front of a store. `start()` returns when it listens; `stop()` drains it.

    The store is opened, but not closed: it may serve others of the same process.
    """

    def __init__(self, storage: BaseStorage, options: ServeOptions | None = None, retention: Retention | None = None) -> None:
        self.storage = storage
        self.options = options or ServeOptions()
        self.tally = Tally()
        self.connections: dict[Session, Connection] = {}
        self.stopping = False
        self.address: tuple[str, int] = (self.options.host, self.options.port)
        self.metrics_port: int | None = None
        self._retention = retention or Retention()
        self._spawned: set[asyncio.Task[None]] = set()
        self._stop_metrics: Callable[[], None] | None = None

    async def start(self) -> None:
        """Raises `OmniQError` when the store or the port cannot be had, `ConfigError` for a certificate that cannot be read."""
        raise_file_limit()
        self._loop = asyncio.get_running_loop()
        self._tls = _tls_context(self.options)
        self._presence = Presence(
            self.storage,
            self._retention,
            held=self._held,
            queues=self._queues,
            busy=self._busy,
            on_cancel=self._cancel,
            on_lost=self._lose,
            lease_us=LEASE_US,
            prefix=SERVER_PREFIX,
        )
        self.engine = Engine(self.storage, self._presence)
        await self.storage.open()
        await self._presence.arrive()
        try:
            await self.storage.reclaim(lost_workers=await self.storage.lost_workers())  # what the last one held goes first
            await self.storage.apply([self._presence.beat()])
            await self._listen()
        except BaseException:
            await self._presence.leave()
            raise
        self.engine.start()
        self._presence.start()
        self._listening_to_hearts = self._loop.create_task(self._listen_to_hearts())

    async def _listen(self) -> None:
        options = self.options
        with _refusals(options.host, options.port, "--port"):
            self._listener = await self._loop.create_server(
                lambda: Connection(self),
                options.host,
                options.port,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
                backlog=1024,
            )
        try:
            bound = self._listener.sockets[0].getsockname()
            self.address = (bound[0], bound[1])
            if options.metrics_port is not None:
                with _refusals(options.metrics_host, options.metrics_port, "--metrics-port"):
                    self.metrics_port, self._stop_metrics = start_metrics(self, options.metrics_host, options.metrics_port)
        except BaseException:
            self._listener.close()
            raise

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    # -- while it runs -----------------------------------------------------------------------------

    async def _listen_to_hearts(self) -> None:
        """One look at all connections instead of a timer for each; often enough to notice within a few per cent."""
        limit = self.options.heartbeat
        while True:
            for session, connection in list(self.connections.items()):
                if session.silent_s() > limit and not session.gone:
                    self.tally.missed_heartbeats += 1
                    session.dismiss(protocol.NO_HEARTBEAT)
                    session.lost()
                    self._loop.call_later(limit, connection.abort)  # whoever does not even read is not waited for
            longest = max((session.silent_s() for session in self.connections if not session.gone), default=0.0)
            await asyncio.sleep(max(min(limit - longest, limit / 8), limit / 200, 0.002))

    # What clients hold is what runs, and its leases are kept. All but the last two are asked in another thread.

    def _held(self) -> list[Record]:
        return [task for session in list(self.connections) for task in list(session.held.values())]

    def _busy(self) -> Counter[str]:
        return Counter(task.queue for task in self._held())

    def _queues(self) -> tuple[str, ...]:
        """Returns the queues that clients work on or wait for."""
        return tuple(sorted({task.queue for task in self._held()} | self.engine.lines.queues))

    def _cancel(self, task: Record) -> None:
        task.cancel_requested = True

    def _lose(self, task: Record) -> None:
        if any(session.lose(task) for session in self.connections):
            log.warning("task %s was lost: its lease ran out", task.id, extra={"task_id": task.id})

    # -- the end -----------------------------------------------------------------------------------

    async def stop(self, grace: float | None = None) -> None:
        """Take no connections and no fetches; let clients end what they hold; then hand back the rest and close."""
        if self.stopping:
            return
        self.stopping = True
        allowed = self.options.grace if grace is None else grace
        deadline = time.monotonic() + max(allowed - LAST_S, allowed / 2)
        self._listener.close()
        for session in list(self.connections):
            session.stop_waiting()
        while self.connections and time.monotonic() < deadline:
            for session in [s for s in self.connections if s.idle]:
                session.dismiss(protocol.STOPPING)
            self._cut_off_the_silent()
            await asyncio.sleep(0.01)
        for session in list(self.connections):
            session.let_go()
            session.dismiss(protocol.STOPPING)
        await self.engine.settle()
        for connection in list(self.connections.values()):
            connection.abort()
        self._listening_to_hearts.cancel()
        await asyncio.gather(self._listening_to_hearts, *self._spawned, return_exceptions=True)
        await self.engine.close()
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
        await self._presence.leave()

    def _cut_off_the_silent(self) -> None:
        """Over TLS both sides say goodbye, and a client that is busy, frozen or gone does not."""
        told_by = self._loop.time() - FAREWELL_S
        for session, connection in list(self.connections.items()):
            if session.dismissed_at is not None and session.dismissed_at < told_by and connection.all_sent:
                connection.abort()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.stop()


class Connection(asyncio.Protocol):
    """Bytes of one client: cut into lines for its session, and back."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lines = LineBuffer(server.options.max_line)
        self._session: Session | None = None
        self._reading = True
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(READ_HIGH, 0)
        server = self._server
        if server.stopping:  # it began to agree on TLS before
            self._transport.write(protocol.err(protocol.STOPPING))
            self._transport.close()
            return
        if len(server.connections) >= server.options.max_connections:
            server.tally.refused_connections += 1
            self._transport.write(protocol.err(f"too many connections: max-connections is {server.options.max_connections}"))
            self._transport.close()
            return
        server.tally.connections += 1
        self._session = Session(server, self)
        server.connections[self._session] = self

    def data_received(self, data: bytes) -> None:
        session = self._session
        if session is None:
            return
        self._server.tally.bytes_in += len(data)
        lines = self._lines.feed(data)
        if lines:
            session.receive(lines)

    def eof_received(self) -> bool:
        if self._session is None:
            return False
        self._session.end_of_input()
        return not self._closing and self._server.options.tls_cert is None  # TLS knows no half-closed connection

    def pause_writing(self) -> None:
        if self._session is not None:
            self._session.congest(True)

    def resume_writing(self) -> None:
        if self._session is not None:
            self._session.congest(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        session = self._session
        if session is not None:
            self._server.connections.pop(session, None)
            session.lost()

    # -- what the session asks ---------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._closing:
            return
        self._server.tally.bytes_out += len(data)
        self._transport.write(data)

    def pace(self) -> None:
        """Read no faster than the commands are carried out."""
        session = self._session
        if session is None or self._closing or self._transport.is_closing():
            return
        if session.congested and self._reading:
            self._reading = False
            self._transport.pause_reading()
        elif not session.congested and not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def unsent(self) -> int | None:
        return None if self._transport.is_closing() else self._transport.get_write_buffer_size()

    @property
    def all_sent(self) -> bool:
        return self._transport.get_write_buffer_size() == 0

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._transport.close()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def set_line_limit(self, limit: int) -> None:
        self._lines.limit = limit


@contextlib.contextmanager
def _refusals(host: str, port: int, option: str) -> Generator[None, None, None]:
    """Turn the system's error about a port into a sentence."""
    try:
        yield
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise OmniQError(f"port {port} of {host} is taken: stop what listens there, or use {option}") from exc
        raise OmniQError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def raise_file_limit() -> None:
    """Each connection is an open file: allow as many as the system lets this process have."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as exc:  # macOS names no limit and allows less
            log.debug("the limit of open files stays at %d: %s", soft, exc)


def _tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    if warning := readable_by_others(cast(str, options.tls_key), "TLS key"):
        log.warning("%s", warning)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"the TLS certificate {options.tls_cert} and its key cannot be used: {exc}") from exc
    return context
