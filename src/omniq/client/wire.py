"""Sockets and lines, which the blocking and the async client share."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict

import msgspec

from omniq.durations import format_duration
from omniq.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionLost,
    ErrorReply,
    Invalid,
    LimitReached,
    ServerStopping,
    TaskNotAcquired,
)
from omniq.serialization import MsgspecSerializer

UNSET: Any = msgspec.UNSET
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # between attempts to reach the server
_serializer = MsgspecSerializer()
# A reply has at most 8 MiB of payloads, or a single one that may be larger; beyond this it is no reply.
MAX_REPLY = 64 * 1024 * 1024


class FetchedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that this connection holds until it is acknowledged. `payload` is None also when there was none."""

    id: int
    queue: str
    name: str
    payload: Any = None
    failures: int = 0


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks a queue holds in each state."""

    name: str
    ready: int = 0
    delayed: int = 0
    to_ack: int = 0
    blocked: int = 0


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task stands, or how it ended."""

    id: int | str
    status: str
    result: Any = None
    error: str | None = None
    attempts: int = 0


def connect(host: str, port: int, timeout_s: float, context: ssl.SSLContext | None) -> socket.socket:
    """A connected socket. Raises `ConnectionLost`, also for a certificate that is not trusted."""
    try:
        plain = socket.create_connection((host, port), timeout_s)
        tune(plain)
        return plain if context is None else context.wrap_socket(plain, server_hostname=host)
    except OSError as exc:
        raise ConnectionLost(f"cannot connect to {host}:{port}: {exc.strerror or exc}") from exc


def tune(connection: Any) -> None:
    """Send small lines at once, and notice within a minute that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as exc:
        raise ConfigError(f"the certificates in {ca_file} cannot be read: {exc.strerror or exc}") from exc


def command(verb: str, body: Mapping[str, Any] | None = None) -> bytes:
    """Returns the line of a command, without UNSET attributes. Raises `SerializationError` for a value without JSON."""
    if body is None:
        return verb.encode() + b"\n"
    given = {name: value for name, value in body.items() if value is not UNSET}
    return verb.encode() + b" " + _serializer.encode(given) + b"\n"


class PushOptions(TypedDict, total=False):
    """The options of a push beside name and payload, as on the wire."""

    queue: str
    deadqueue: str
    retry: int
    execute_at: datetime
    blocked_by: Sequence[int]
    idempotency_key: str
    group: str
    group_limit: int
    interval: float | timedelta


def push_body(name: str, payload: Any, options: PushOptions) -> dict[str, Any]:
    at = options.get("execute_at")
    if at is not None and at.tzinfo is None:
        raise Invalid(f"execute_at {at!r} has no time zone: use datetime.now(timezone.utc) or .astimezone()")
    unknown = options.keys() - PushOptions.__annotations__.keys()
    if unknown:
        raise Invalid(f"push has no option {sorted(unknown)[0]!r}; there are {', '.join(PushOptions.__annotations__)}")
    body = {"name": name, "payload": payload, **options}
    return body | {"interval": duration(options["interval"])} if "interval" in options else body


def fetch_body(queues: Sequence[str], timeout: float | timedelta | None, count: int | None) -> dict[str, Any]:
    body: dict[str, Any] = {"queues": list(queues)}
    if timeout is not None:
        body["timeout"] = duration(timeout)
    if count is not None:
        body["count"] = count
    return body


def duration(value: float | timedelta) -> str:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    # The server refuses a timeout of 0; the shortest one asks without a wait.
    return format_duration(max(round(seconds * 1e9), 1))


def read_reply(line: bytes) -> tuple[str, dict[str, Any]]:
    """The word and the object of a reply. An ERR is raised as the class that fits its text."""
    word, _, body = line.rstrip(b"\r\n").partition(b" ")
    try:
        fields: dict[str, Any] = msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except msgspec.DecodeError:
        try:
            fields = json.loads(body)  # numbers that only Python's own decoder takes, such as 1e400
        except ValueError as exc:
            raise ConnectionLost(f"the server sent something that is not a reply: {line[:80]!r}") from exc
    if word == b"ERR":
        text = str(fields.get("msg", ""))
        if text == "no heartbeat":  # said unasked before it closed the connection: no answer to what was sent now
            raise ConnectionLost("the server heard nothing for longer than its heartbeat")
        raise error_of(text)
    return word.decode("ascii", "replace"), fields


def error_of(text: str) -> ErrorReply:
    """The typed error of an ERR reply."""
    # By its words, which are part of the protocol: an ERR has no code.
    if text.endswith("not acquired"):
        return TaskNotAcquired(text)
    if text.startswith("authentication"):
        return AuthenticationFailed(text)
    if text == "server is shutting down":
        return ServerStopping(text)
    if "max-" in text or text.endswith("arguments too big"):
        return LimitReached(text)
    return ErrorReply(text)


def is_farewell(exc: ErrorReply) -> bool:
    """Whether the server closes the connection after this reply."""
    return isinstance(exc, ServerStopping) or str(exc).startswith("too many connections")


def tasks_of(word: str, body: dict[str, Any]) -> list[FetchedTask]:
    if word == "EMPTY":
        return []
    return msgspec.convert(body.get("tasks", [body]), list[FetchedTask])
