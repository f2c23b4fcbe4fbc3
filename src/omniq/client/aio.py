"""The async client: one connection, shared by the tasks of one event loop, kept alive by a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncGenerator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from omniq.client import requests
from omniq.client.requests import Held, Request, Transaction
from omniq.client.wire import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_REPLY,
    UNSET,
    FetchedTask,
    PushOptions,
    QueueInfo,
    TaskOutcome,
    is_farewell,
    read_reply,
    tune,
)
from omniq.errors import ConnectionLost, ErrorReply

T = TypeVar("T")
ANSWER_S = 30.0


class AsyncClient:
    """`Client` with async methods. A command that is cancelled costs the connection, since its reply is still due."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 12345,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        heartbeat: float = 10.0,
        reconnect: float = 30.0,
        connect_timeout: float = 10.0,
    ) -> None:
        self._host, self._port, self._token, self._tls = host, port, token, tls
        self._heartbeat, self._reconnect, self._connect_timeout = heartbeat, reconnect, connect_timeout
        # One command at a time: replies carry no number, so their order tells what they answer.
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used_at = 0.0
        self._closed = False
        self._pinger: asyncio.Task[None] | None = None

    # -- commands ----------------------------------------------------------------------------------

    async def ping(self) -> None:
        """Ask the server for a sign of life."""
        await self._call(requests.ping())

    async def push(self, name: str, payload: Any = UNSET, **options: Unpack[PushOptions]) -> int:
        """Store a task, with the options of the protocol. Returns its id."""
        return await self._call(requests.push(name, payload, options))

    async def fetch(self, queues: Sequence[str] = ("default",), timeout: float | timedelta | None = None) -> FetchedTask | None:
        """Returns the next task of the first queue that has one, or None after `timeout` (at most the heartbeat)."""
        return await self._call(requests.fetch(queues, timeout))

    async def fetch_many(
        self, count: int, queues: Sequence[str] = ("default",), timeout: float | timedelta | None = None
    ) -> list[FetchedTask]:
        """Returns up to `count` tasks, as soon as there is one."""
        return await self._call(requests.fetch_many(count, queues, timeout))

    async def ack(self, task: Held, result: Any = UNSET) -> None:
        """The task is done. Raises `TaskNotAcquired` if this connection does not hold it."""
        await self._call(requests.ack(task, result))

    async def nack(self, task: Held, error: str | None = None) -> None:
        """The task failed: it comes back later, or is dead if no retry is left."""
        await self._call(requests.nack(task, error))

    async def extend(self, task: Held) -> bool:
        """Renew the lease of a task at once. Returns whether somebody asked for it to be cancelled."""
        return await self._call(requests.extend(task))

    async def cancel(self, task_id: int | str) -> bool:
        """Cancel a waiting task, or ask for it if it is held. Returns whether it is cancelled now."""
        return await self._call(requests.cancel(task_id))

    async def result(self, task_id: int | str, timeout: float | timedelta | None = None) -> TaskOutcome:
        """Returns the state of a task. With `timeout`, waits for its end or that long."""
        return await self._call(requests.result(task_id, 0.0 if timeout is None else timeout))

    async def info(self) -> list[QueueInfo]:
        """Returns the queues of the server, and how many tasks each of them holds."""
        return await self._call(requests.info())

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction, None]:
        """Gather pushes and acks, and send them together when the block ends well: all of them take effect, or none."""
        made = Transaction()
        yield made
        made.ids = await self._call(requests.transaction(made.lines))

    # -- the connection ----------------------------------------------------------------------------

    async def close(self) -> None:
        """Disconnect. Tasks that are still held count as failed."""
        self._closed = True
        # First, since it may hold the lock.
        if self._pinger is not None:
            self._pinger.cancel()
            await asyncio.gather(self._pinger, return_exceptions=True)
        async with self._lock:
            if self._streams is not None:
                with contextlib.suppress(OSError, ConnectionLost, TimeoutError):
                    self._streams[1].write(b"QUIT\n")
                    async with asyncio.timeout(self._connect_timeout):
                        await self._read_line()
                await self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    async def _call(self, request: Request[T]) -> T:
        async with self._lock:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._reconnect
            pause = FIRST_PAUSE_S
            while True:
                await self._ensure_connected(deadline)
                try:
                    return await self._exchange(request)
                except ErrorReply as exc:
                    if is_farewell(exc):
                        await self._drop()
                    raise
                except (OSError, ConnectionLost, TimeoutError) as exc:
                    await self._drop()
                    if not request.repeatable or loop.time() + pause >= deadline:
                        raise ConnectionLost(f"the connection to {self._host}:{self._port} was lost: {exc}") from exc
                    pause = await self._rest(pause)
                except asyncio.CancelledError:
                    await self._drop()
                    raise

    async def _exchange(self, request: Request[T]) -> T:
        assert self._streams is not None
        self._streams[1].write(request.line)
        async with asyncio.timeout(request.wait_s + ANSWER_S):
            await self._streams[1].drain()
            word, body = read_reply(await self._read_line())
        self._used_at = asyncio.get_running_loop().time()
        return request.read(word, body)

    async def _read_line(self) -> bytes:
        assert self._streams is not None
        line = await self._streams[0].readline()
        if not line.endswith(b"\n"):
            raise ConnectionLost("the server closed the connection")
        return line

    async def _ensure_connected(self, deadline: float) -> None:
        if self._closed:
            raise ConnectionLost("this client was closed; make a new one")
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_S
        while self._streams is None:
            try:
                await self._connect()
            except (OSError, ConnectionLost, TimeoutError) as exc:
                await self._drop()
                if loop.time() + pause >= deadline:
                    raise ConnectionLost(f"cannot connect to {self._host}:{self._port}: {exc}") from exc
                pause = await self._rest(pause)
            except BaseException:
                await self._drop()
                raise
        if self._pinger is None:
            self._pinger = loop.create_task(self._ping_on())

    async def _rest(self, pause: float) -> float:
        """Wait before the next attempt. Returns how long to wait before the one after it."""
        await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
        return min(pause * 2, LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        async with asyncio.timeout(self._connect_timeout):
            # asyncio takes a name of the server with TLS only, and by default a line of 64 KiB at most.
            name = self._host if self._tls is not None else None
            self._streams = await asyncio.open_connection(
                self._host, self._port, limit=MAX_REPLY, ssl=self._tls, server_hostname=name
            )
            tune(self._streams[1].get_extra_info("socket"))
        if self._token is not None:
            await self._exchange(requests.auth(self._token))

    async def _drop(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()

    async def _ping_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Looking at every quarter, silence of a half is noticed before three quarters are over.
            await asyncio.sleep(self._heartbeat / 4)
            # A command that is under way is a sign of life, too.
            if self._streams is None or self._lock.locked() or loop.time() - self._used_at < self._heartbeat / 2:
                continue
            async with self._lock:
                try:
                    await self._exchange(requests.ping())
                except Exception:  # the next command connects again, and says what is wrong if it cannot
                    await self._drop()
