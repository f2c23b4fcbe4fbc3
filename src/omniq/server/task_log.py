"""The DEBUG log lines of a server about tasks: enqueued, fetched by a client, ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from omniq.context import log_fields
from omniq.errors import Refused
from omniq.operations import Ack, Enqueue, Fail, Operation, Release, Reserve, Reserved, Retry
from omniq.queue import tell_enqueued
from omniq.storage.base import Result

log = logging.getLogger("omniq.server")

_ENDS = {Ack: "succeeded", Retry: "failed, it will be retried", Fail: "failed for good", Release: "is handed back"}


def tell(transactions: Sequence[tuple[Operation, ...]], results: Sequence[Result]) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    for transaction, result in zip(transactions, results, strict=True):
        if isinstance(result, Refused):  # the client hears why
            continue
        for op, outcome in zip(transaction, result, strict=True):
            if isinstance(op, Enqueue):
                tell_enqueued((op,), (outcome,))
            elif isinstance(op, Reserve):
                _tell_fetched(cast(Reserved, outcome))
            elif isinstance(op, Ack | Retry | Fail | Release):
                error = f": {op.error}" if isinstance(op, Retry | Fail) else ""
                log.debug("task %s %s%s", op.id, _ENDS[type(op)], error, extra={"task_id": op.id, "queue": op.queue})


def _tell_fetched(reserved: Reserved) -> None:
    for task in reserved.tasks:
        log.debug("task %s is fetched, attempt %d", task.name, task.attempts, extra=log_fields(task))
