"""Load for a TCP server: many connections of one process, each playing a script, over plain sockets.

A script is a generator: it yields what to send and how many lines must come back, and is given those lines.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

Script = Generator[tuple[bytes, int], bytes, None]
PAYLOAD = b'{"args":["' + b"x" * 80 + b'"],"kwargs":{}}'


class Dialect(Protocol):
    """How a server is spoken to. Each method gives what to send and how many lines answer it."""

    def push(self, n: int) -> tuple[bytes, int]: ...
    def fetch(self, n: int) -> tuple[bytes, int]: ...
    def ack(self, ids: Sequence[bytes]) -> tuple[bytes, int]: ...
    def ids(self, replies: bytes) -> list[bytes]: ...


class LineProtocol:
    _push = b'PUSH {"name":"work","queue":"bench","payload":' + PAYLOAD + b"}\n"
    _fetch = b'FETCH {"queues":["bench"],"timeout":"20ms"}\n'
    _ids = re.compile(rb'^OK \{"id":(\d+)', re.MULTILINE)

    def push(self, n: int) -> tuple[bytes, int]:
        return self._push * n, n

    def push_atomic(self, n: int) -> tuple[bytes, int]:
        return b"ATOMIC\n" + self._push * n + b"DONE\n", 1

    def fetch(self, n: int) -> tuple[bytes, int]:
        return self._fetch * n, n

    def ack(self, ids: Sequence[bytes]) -> tuple[bytes, int]:
        return b"".join([b'ACK {"id":%b}\n' % i for i in ids]), len(ids)

    def ids(self, replies: bytes) -> list[bytes]:
        return self._ids.findall(replies)


class Beanstalk:
    _push = b"put 0 0 120 %d\r\n%b\r\n" % (len(PAYLOAD), PAYLOAD)
    _ids = re.compile(rb"^RESERVED (\d+)", re.MULTILINE)

    def push(self, n: int) -> tuple[bytes, int]:
        return self._push * n, n

    def fetch(self, n: int) -> tuple[bytes, int]:
        return b"reserve-with-timeout 0\r\n" * n, -n  # a task takes two lines, TIMED_OUT one

    def ack(self, ids: Sequence[bytes]) -> tuple[bytes, int]:
        return b"".join([b"delete %b\r\n" % i for i in ids]), len(ids)

    def ids(self, replies: bytes) -> list[bytes]:
        return self._ids.findall(replies)


def push_all(send: Callable[[int], tuple[bytes, int]], times: int, depth: int) -> Script:
    for _ in range(times):
        yield send(depth)


def fetch_and_ack(dialect: Dialect, times: int, depth: int) -> Script:
    """Each round acknowledges what the one before fetched, and fetches as many again, in one go where `depth` is above one."""
    held: list[bytes] = []
    for _ in range(times):
        data, lines = dialect.fetch(depth)
        if held and depth > 1:
            acks, answers = dialect.ack(held)
            replies = yield acks + data, lines + answers if lines > 0 else lines - answers
        else:
            replies = yield data, lines
        held = dialect.ids(replies)
        if held and depth == 1:
            yield dialect.ack(held)
            held = []
    if held:
        yield dialect.ack(held)


class _Talk:
    def __init__(self, connection: socket.socket, script: Script) -> None:
        self.connection, self.script = connection, script
        self.received: list[bytes] = []
        self.lines = 0
        self.wanted = 0
        self.done = False

    def step(self, replies: bytes | None) -> None:
        try:
            data, self.wanted = next(self.script) if replies is None else self.script.send(replies)
        except StopIteration:
            self.done = True
            return
        self.received, self.lines = [], 0
        self.connection.setblocking(True)
        self.connection.sendall(data)
        self.connection.setblocking(False)

    def read(self) -> None:
        data = self.connection.recv(1 << 20)
        assert data, "the server closed the connection"
        self.received.append(data)
        self.lines += data.count(b"\n")
        if self.wanted >= 0:
            if self.lines >= self.wanted:
                self.step(b"".join(self.received))
        elif self.lines >= -self.wanted and data.endswith(b"\n"):
            whole = b"".join(self.received)
            if self.lines - whole.count(b"RESERVED ") >= -self.wanted:
                self.step(whole)


def play(address: tuple[str, int], scripts: Sequence[Script]) -> float:
    """Play each script on a connection of its own, all at once; the seconds from the first byte to the last."""
    talks: list[_Talk] = []
    with selectors.DefaultSelector() as selector:
        for script in scripts:
            connection = socket.create_connection(address, 30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            talks.append(_Talk(connection, script))
            selector.register(connection, selectors.EVENT_READ, talks[-1])
        begun = time.perf_counter()
        for talk in talks:
            talk.step(None)
        left = sum(not talk.done for talk in talks)
        while left:
            for key, _ in selector.select(60):
                talk: _Talk = key.data
                talk.read()
                if talk.done:
                    selector.unregister(talk.connection)
                    left -= 1
        took = time.perf_counter() - begun
    for talk in talks:
        talk.connection.close()
    return took
