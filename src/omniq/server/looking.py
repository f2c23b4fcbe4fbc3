"""Commands that look at the store or steer a task, without a lease: INFO, RESULT, CANCEL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from omniq import following
from omniq.errors import Refused
from omniq.models import Record, State, status_of
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
    try:
        found = await following.cancel(storage, task_id)
    except Refused as exc:
        return protocol.err(str(exc))
    if found is None:
        return protocol.err(NO_SUCH_TASK)
    record, state = found
    return protocol.ok({"cancelled": state is State.CANCELLED, "status": status_of(state, record.attempts).value})


async def result(storage: BaseStorage, task_id: str, timeout_s: float, unwanted: Callable[[], bool]) -> bytes:
    """Returns how a task ended, or how it stands after `timeout_s`, and as soon as the answer is `unwanted`."""
    found = await following.until_ended(storage, task_id, timeout_s, unwanted)
    if found is None:
        return protocol.err(NO_SUCH_TASK)
    if isinstance(found, Record):
        return protocol.ok({"id": number_of(task_id), "status": found.status.value, "attempts": found.attempts})
    body: dict[str, Any] = {"id": number_of(task_id), "status": status_of(found.state, found.attempts).value}
    if found.result is not None:
        body["result"] = msgspec.Raw(protocol.on_one_line(found.result))
    if found.error is not None:
        body["error"] = str(found.error)
    return protocol.ok(body | {"attempts": found.attempts})
