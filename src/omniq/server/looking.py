"""Commands that look at the store or steer a task, without a lease: INFO, RESULT, CANCEL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from omniq.errors import Refused, TaskNotFound
from omniq.models import State, status_of
from omniq.operations import Cancel, Cancelled
from omniq.server import protocol
from omniq.server.steps import number_of
from omniq.storage.base import BaseStorage

NO_SUCH_TASK = "no such task"


async def info(storage: BaseStorage) -> bytes:
    """Queues that have anything but dead letters. One that emptied stays while the results of its tasks are kept."""
    queues: list[dict[str, Any]] = []
    for c in await storage.counts():
        if c.waiting + c.running + c.done + c.cancelled + c.staged:
            shown: dict[str, Any] = {"name": c.queue, "ready": c.ready, "delayed": c.scheduled, "to_ack": c.running}
            queues.append(shown | {"blocked": c.blocked} if c.blocked else shown)
    return protocol.ok({"queues": queues})


async def cancel(storage: BaseStorage, task_id: str) -> bytes:
    for _ in range(3):  # it may move to its dead queue between the look and the call
        record = await storage.get(task_id)
        if record is None:
            break
        (answer,) = await storage.send([(Cancel(queue=record.queue, id=task_id),)])
        if isinstance(answer, TaskNotFound):
            continue
        if isinstance(answer, Refused):
            return protocol.err(str(answer))
        state = cast(Cancelled, answer[0]).state
        return protocol.ok({"cancelled": state is State.CANCELLED, "status": status_of(state, record.attempts).value})
    return protocol.err(NO_SUCH_TASK)


async def result(storage: BaseStorage, task_id: str, timeout_s: float, unwanted: Callable[[], bool]) -> bytes:
    """How a task ended; one that has not after `timeout_s`, or when the answer is `unwanted`, as it stands."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        seen = storage.changes
        record = await storage.get(task_id)
        stored = (await storage.results([task_id])).get(task_id)
        left = deadline - loop.time()
        if stored is not None or record is None or left <= 0 or unwanted():
            break
        await storage.wait(tasks=[task_id], timeout=min(left, 1.0), after=seen)
    if stored is not None:
        body: dict[str, Any] = {"id": number_of(task_id), "status": status_of(stored.state, stored.attempts).value}
        if stored.result is not None:
            body["result"] = msgspec.Raw(protocol.on_one_line(stored.result))
        if stored.error is not None:
            body["error"] = str(stored.error)
        return protocol.ok(body | {"attempts": stored.attempts})
    if record is None:
        return protocol.err(NO_SUCH_TASK)
    return protocol.ok({"id": number_of(task_id), "status": record.status.value, "attempts": record.attempts})
