"""`omniq send`: lines of stdin to a server, its replies to stdout."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections import deque
from typing import BinaryIO

from omniq.cli.serve.token_file import read_token
from omniq.client.wire import command, connect, tls_context
from omniq.errors import ConfigError, ConnectionLost

# Far below the heartbeat of a server: 45 s, unless it was told otherwise.
PING_S = 2.0
# A server that was started a moment ago, in the line before of a script, does not listen yet.
PATIENCE_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25

FAILED, SAID_ERR = 1, 3


def run_send(
    host: str, port: int, token_file: str | None, tls: bool, ca_file: str | None, patience_s: float = PATIENCE_S
) -> int:
    if sys.stdin.isatty():
        raise ConfigError("give commands on stdin, one per line: echo PING | omniq send")
    token = None if token_file is None else read_token(token_file)
    context: ssl.SSLContext | None = tls_context(ca_file) if tls or ca_file is not None else None
    try:
        with _connected(host, port, context, patience_s) as connection:
            connection.settimeout(None)
            return _Conversation(connection, sys.stdout.buffer).hold(sys.stdin.buffer, token)
    except (ConnectionLost, OSError) as exc:
        print(f"omniq: {exc}", file=sys.stderr)
        return FAILED


def _connected(host: str, port: int, context: ssl.SSLContext | None, patience_s: float) -> socket.socket:
    """Connect, and try again while nobody listens. Any other failure is raised at once: it would stay the same."""
    deadline = time.monotonic() + patience_s
    pause = FIRST_PAUSE_S
    while True:
        try:
            return connect(host, port, 10.0, context)
        except ConnectionLost as exc:
            if not isinstance(exc.__cause__, ConnectionError):
                raise
            if time.monotonic() + pause >= deadline:
                advice = "does omniq serve run there, on that port?"
                raise ConnectionLost(f"{exc}, tried for {patience_s:g} s: {advice}") from exc
        time.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_S)


class _Conversation:
    """Knows which lines are answered: each one, but those of a transaction only once, after DONE."""

    def __init__(self, connection: socket.socket, out: BinaryIO) -> None:
        self._connection, self._out = connection, out
        # One line at a time, and in the order in which replies are expected: pings come from a thread of their own.
        self._sending = threading.Lock()
        # Not held while sending: a server whose replies are not read reads no more either, and replies need this lock.
        self._lock = threading.Lock()
        # Of each reply to come, whether it is shown: those to our own pings and to AUTH are not.
        self._expected: deque[bool] = deque()
        self._all_answered = threading.Condition(self._lock)
        # Between ATOMIC and DONE nothing is answered.
        self._in_transaction = False
        # A reply was ERR, which makes the exit code; the connection is gone, so nothing more will be answered.
        self._said_err = self._broken = False
        self._stop = threading.Event()

    def hold(self, lines: BinaryIO, token: str | None) -> int:
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        threading.Thread(target=self._ping, daemon=True).start()
        if token is not None:
            self._send(command("AUTH", {"token": token}), shown=False)
        unsent = False
        for line in lines:
            unsent = self._broken
            if unsent:
                break
            self._send(line if line.endswith(b"\n") else line + b"\n")
        with self._all_answered:
            self._all_answered.wait_for(lambda: self._broken or not self._expected)
            self._stop.set()
            unanswered = len(self._expected)
        if unanswered or unsent:
            left = f"{unanswered} commands have no answer" if unanswered else "not every line was sent"
            print(f"omniq: the server closed the connection; {left}", file=sys.stderr)
            return FAILED
        return SAID_ERR if self._said_err else 0

    def _send(self, line: bytes, shown: bool = True) -> None:
        verb = line.strip(b"\r\n").partition(b" ")[0].upper()
        with self._sending:
            with self._lock:
                # A line of ours comes between no lines of the user's.
                if not shown and (self._in_transaction or self._expected):
                    return
                if self._in_transaction:
                    self._in_transaction = verb != b"DONE"
                    answered = verb == b"DONE"
                else:
                    self._in_transaction = verb == b"ATOMIC"
                    answered = verb != b"ATOMIC"
                if answered:
                    self._expected.append(shown)
            try:
                self._connection.sendall(line)
            except OSError:
                self._broken = True

    def _read(self) -> None:
        with self._connection.makefile("rb") as replies:
            try:
                for reply in replies:
                    self._take(reply)
            except OSError:
                pass
        with self._all_answered:
            self._broken = True
            self._all_answered.notify_all()

    def _take(self, reply: bytes) -> None:
        with self._all_answered:
            failed = reply.startswith(b"ERR")
            shown = self._expected.popleft() if self._expected else True
            self._said_err = self._said_err or failed
            if shown or failed:
                self._out.write(reply)
                self._out.flush()
            self._all_answered.notify_all()

    def _ping(self) -> None:
        """Send a sign of life while stdin is silent, but not inside a transaction, where PING is not allowed."""
        while not self._stop.wait(PING_S):
            self._send(b"PING\n", shown=False)
