"""The blocking client: one connection, safe to share between threads, kept alive by a thread of its own."""

from __future__ import annotations

import contextlib
import random
import ssl
import threading
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, Unpack

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
    connect,
    is_farewell,
    read_reply,
)
from omniq.errors import ConnectionLost, ErrorReply

T = TypeVar("T")
ANSWER_S = 30.0  # how much later than it should an answer may come


class Client:
    """Speaks to `omniq serve`. Connects at the first command, and again, with growing pauses, when the connection was lost.

    A command that was sent and not answered raises `ConnectionLost`, unless sending it twice is harmless. `heartbeat` is the
    silence in seconds after which a sign of life is sent; `reconnect` how long to try to get a connection.
    """

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
        self._lock = threading.RLock()
        self._socket: Any = None
        self._replies: BinaryIO | None = None
        self._used_at = 0.0
        self._closed = threading.Event()
        self._pinger: threading.Thread | None = None

    # -- commands ----------------------------------------------------------------------------------

    def ping(self) -> None:
        """Ask the server for a sign of life."""
        self._call(requests.ping())

    def push(self, name: str, payload: Any = UNSET, **options: Unpack[PushOptions]) -> int:
        """Store a task, with the options of the protocol. Returns its id."""
        return self._call(requests.push(name, payload, options))

    def fetch(self, queues: Sequence[str] = ("default",), timeout: float | timedelta | None = None) -> FetchedTask | None:
        """Returns the next task of the first queue that has one, or None after `timeout` (at most the heartbeat)."""
        return self._call(requests.fetch(queues, timeout))

    def fetch_many(
        self, count: int, queues: Sequence[str] = ("default",), timeout: float | timedelta | None = None
    ) -> list[FetchedTask]:
        """Returns up to `count` tasks, as soon as there is one."""
        return self._call(requests.fetch_many(count, queues, timeout))

    def ack(self, task: Held, result: Any = UNSET) -> None:
        """The task is done. Raises `TaskNotAcquired` if this connection does not hold it."""
        self._call(requests.ack(task, result))

    def nack(self, task: Held, error: str | None = None) -> None:
        """The task failed: it comes back later, or is dead if no retry is left."""
        self._call(requests.nack(task, error))

    def extend(self, task: Held) -> bool:
        """Renew the lease of a task at once. Returns whether somebody asked for it to be cancelled."""
        return self._call(requests.extend(task))

    def cancel(self, task_id: int | str) -> bool:
        """Cancel a waiting task, or ask for it if it is held. Returns whether it is cancelled now."""
        return self._call(requests.cancel(task_id))

    def result(self, task_id: int | str, timeout: float | timedelta | None = None) -> TaskOutcome:
        """Returns the state of a task. With `timeout`, waits for its end or that long."""
        return self._call(requests.result(task_id, 0.0 if timeout is None else timeout))

    def info(self) -> list[QueueInfo]:
        """Returns the queues of the server, and how many tasks each of them holds."""
        return self._call(requests.info())

    @contextlib.contextmanager
    def transaction(self) -> Generator[Transaction, None, None]:
        """Gather pushes and acks, and send them together when the block ends well: all of them take effect, or none."""
        made = Transaction()
        yield made
        made.ids = self._call(requests.transaction(made.lines))

    # -- the connection ----------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect. Tasks that are still held count as failed."""
        # Before the lock: a thread that rests between two attempts has it, and ends when it hears of this.
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.sendall(b"QUIT\n")
                    self._socket.settimeout(self._connect_timeout)
                    self._read_line()
                self._drop()
        if self._pinger is not None and self._pinger is not threading.current_thread():
            self._pinger.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _call(self, request: Request[T]) -> T:
        with self._lock:
            deadline = time.monotonic() + self._reconnect
            pause = FIRST_PAUSE_S
            while True:
                self._ensure_connected(deadline)
                try:
                    return self._exchange(request)
                except ErrorReply as exc:
                    if is_farewell(exc):
                        self._drop()
                    raise
                except (OSError, ConnectionLost) as exc:
                    self._drop()
                    if not request.repeatable or time.monotonic() + pause >= deadline:
                        raise ConnectionLost(f"the connection to {self._host}:{self._port} was lost: {exc}") from exc
                    pause = self._rest(pause)
                except BaseException as exc:
                    if not isinstance(exc, Exception):  # interrupted between command and reply
                        self._drop()
                    raise

    def _exchange(self, request: Request[T]) -> T:
        self._socket.settimeout(request.wait_s + ANSWER_S)
        self._socket.sendall(request.line)
        word, body = read_reply(self._read_line())
        self._used_at = time.monotonic()
        return request.read(word, body)

    def _read_line(self) -> bytes:
        assert self._replies is not None
        line = self._replies.readline(MAX_REPLY)
        if not line.endswith(b"\n"):
            raise ConnectionLost("the server closed the connection")
        return line

    def _ensure_connected(self, deadline: float) -> None:
        if self._closed.is_set():
            raise ConnectionLost("this client was closed; make a new one")
        pause = FIRST_PAUSE_S
        while self._socket is None:
            try:
                self._connect()
            except (OSError, ConnectionLost) as exc:
                self._drop()
                if time.monotonic() + pause >= deadline:
                    raise ConnectionLost(str(exc)) from exc
                pause = self._rest(pause)
            except BaseException:
                self._drop()
                raise
        if self._pinger is None:
            self._pinger = threading.Thread(target=self._ping_on, name="omniq-client-heartbeat", daemon=True)
            self._pinger.start()

    def _rest(self, pause: float) -> float:
        """Wait before the next attempt. Returns how long to wait before the one after it."""
        self._closed.wait(pause * random.uniform(0.5, 1))  # noqa: S311
        return min(pause * 2, LONGEST_PAUSE_S)

    def _connect(self) -> None:
        self._socket = connect(self._host, self._port, self._connect_timeout, self._tls)
        self._replies = self._socket.makefile("rb")
        if self._token is not None:
            self._exchange(requests.auth(self._token))

    def _drop(self) -> None:
        for part in (self._replies, self._socket):
            if part is not None:
                with contextlib.suppress(OSError):
                    part.close()
        self._socket = self._replies = None

    def _ping_on(self) -> None:
        # Looking at every quarter, silence of a half is noticed before three quarters are over.
        while not self._closed.wait(self._heartbeat / 4):
            # A command that is under way is a sign of life, too.
            if time.monotonic() - self._used_at < self._heartbeat / 2 or not self._lock.acquire(blocking=False):
                continue
            try:
                if self._socket is not None:
                    self._exchange(requests.ping())
            except Exception:  # the next command connects again, and says what is wrong if it cannot
                self._drop()
            finally:
                self._lock.release()
