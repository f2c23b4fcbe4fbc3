"""Each command of a client as a line to send and a function that reads its reply. Nothing here touches a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar, Unpack

import msgspec

from omniq.client.wire import (
    UNSET,
    FetchedTask,
    PushOptions,
    QueueInfo,
    TaskOutcome,
    command,
    duration,
    fetch_body,
    push_body,
    tasks_of,
)
from omniq.errors import Invalid

T = TypeVar("T")
Held = FetchedTask | int


class Request(msgspec.Struct, Generic[T], frozen=True):
    """A command. If it is `repeatable`, it may be sent twice, so that a lost connection does not concern the caller."""

    line: bytes
    read: Callable[[str, dict[str, Any]], T]
    repeatable: bool = False
    wait_s: float = 0.0  # how long the server may take on purpose


def ping() -> Request[None]:
    return Request(command("PING"), _nothing, True)


def auth(token: str) -> Request[None]:
    return Request(command("AUTH", {"token": token}), _nothing, True)


def push(name: str, payload: Any, options: PushOptions) -> Request[int]:
    # The server recognises a PUSH that comes twice by its key alone.
    line = command("PUSH", push_body(name, payload, options))
    return Request(line, lambda _, body: body["id"], options.get("idempotency_key") is not None)


def fetch(queues: Sequence[str], timeout: float | timedelta | None) -> Request[FetchedTask | None]:
    def read(word: str, body: dict[str, Any]) -> FetchedTask | None:
        tasks = tasks_of(word, body)
        return tasks[0] if tasks else None

    # What a reply that got lost has handed out went back with the connection, so this may ask again.
    return Request(command("FETCH", fetch_body(_queues(queues), timeout, None)), read, True, _seconds(timeout))


def fetch_many(count: int, queues: Sequence[str], timeout: float | timedelta | None) -> Request[list[FetchedTask]]:
    return Request(command("FETCH", fetch_body(_queues(queues), timeout, count)), tasks_of, True, _seconds(timeout))


def ack(task: Held, result: Any) -> Request[None]:
    # Never sent again: on a new connection the task is not held any more, and may run elsewhere.
    return Request(command("ACK", {"id": _id(task), "result": result}), _nothing)


def nack(task: Held, error: str | None) -> Request[None]:
    return Request(command("NACK", {"id": _id(task), "error": UNSET if error is None else error}), _nothing)


def extend(task: Held) -> Request[bool]:
    return Request(command("EXTEND", {"id": _id(task)}), lambda _, body: body["cancel_requested"])


def cancel(task_id: int | str) -> Request[bool]:
    return Request(command("CANCEL", {"id": task_id}), lambda _, body: body["cancelled"], True)


def result(task_id: int | str, timeout: float | timedelta | None) -> Request[TaskOutcome]:
    body = {"id": task_id, "timeout": UNSET if timeout is None else duration(timeout)}
    return Request(command("RESULT", body), lambda _, got: msgspec.convert(got, TaskOutcome), True, _seconds(timeout))


def info() -> Request[list[QueueInfo]]:
    return Request(command("INFO"), lambda _, body: msgspec.convert(body["queues"], list[QueueInfo]), True)


def transaction(lines: Sequence[bytes]) -> Request[list[int]]:
    return Request(b"".join((b"ATOMIC\n", *lines, b"DONE\n")), lambda _, body: body.get("ids", []))


def _nothing(_: str, __: dict[str, Any]) -> None:
    return None


def _queues(queues: Sequence[str]) -> Sequence[str]:
    if isinstance(queues, str):
        raise Invalid(f"queues is a list of queue names, not the text {queues!r}")
    return queues


def _id(task: Held) -> int:
    return task.id if isinstance(task, FetchedTask) else task


def _seconds(timeout: float | timedelta | None) -> float:
    if timeout is None:
        return 86_400.0  # half of a heartbeat that only the server knows
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


class Transaction:
    """The commands of `client.transaction()`, gathered before anything is sent.

    After the block, `ids` has the ids of what was pushed, in order.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.ids: list[int] = []

    def push(self, name: str, payload: Any = UNSET, **options: Unpack[PushOptions]) -> None:
        """As `push` of the client. In `blocked_by`, -1 is the last push of this transaction, -2 the one before, and so on."""
        self.lines.append(push(name, payload, options).line)

    def ack(self, task: Held, result: Any = UNSET) -> None:
        """As `ack` of the client."""
        self.lines.append(ack(task, result).line)
