"""The wording of all stores: refusals, answers to repeats, data of events. Drivers with a machine of their own use it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from omniq.errors import (
    DuplicateId,
    IdempotencyConflict,
    LeaseExpired,
    LeaseHeld,
    NotActive,
    NotDead,
    NotWaiting,
    Refused,
    TaskNotFound,
    TokenMismatch,
)
from omniq.models import Record, State, TaskError
from omniq.operations import (
    Ack,
    Acked,
    Cancel,
    Cancelled,
    Enqueue,
    Extend,
    Extended,
    Fail,
    Failed,
    Operation,
    Outcome,
    Progress,
    Release,
    Released,
    Requeue,
    Requeued,
    Reschedule,
    Retried,
    Retry,
)

R = TypeVar("R", bound=Refused)

_encode = msgspec.json.Encoder().encode

# -- refusals --------------------------------------------------------------------------------------


def refused(kind: type[R], op: Any, task: Record | None = None) -> R:
    """The refusal of an operation on a task, as this task stands."""
    return kind(_TEXTS[kind](op, task))


def key_in_use(op: Enqueue, task_id: str | None) -> IdempotencyConflict:
    """`task_id`: who has the key; None if an earlier operation of the same transaction asks for it."""
    key = f"idempotency key {op.idempotency_key!r}"
    if task_id is None:
        return IdempotencyConflict(f"{key} twice in a transaction, with two bodies")
    return IdempotencyConflict(f"{key} in queue {op.queue!r} was used for another body (task {task_id})")


def _is_reaper(op: Any) -> bool:
    return getattr(op, "lost", None) is not None


def _not_active(op: Any, task: Any) -> str:
    return f"task {op.id!r} is not running" + (" any more" if _is_reaper(op) or task is None else f"; it is {task.status}")


def _token_mismatch(op: Any, _: Any) -> str:
    if _is_reaper(op):
        return f"task {op.id!r} has been leased again"
    return f"task {op.id!r} is held under another token; stop working on it"


def _not_waiting(op: Any, task: Any) -> str:
    if isinstance(op, Cancel):
        return f"task {op.id!r} is staged; abort its run instead"
    if isinstance(op, Reschedule):
        return f"task {op.id!r} is {task.status}; only a waiting task can be rescheduled"
    if op.if_state is None or task.state in (State.RUNNING, State.STAGED):
        return f"task {op.id!r} is {task.state.name}; cancel it first"
    return f"task {op.id!r} is {task.state.name}, not {op.if_state.name}"


_TEXTS: dict[type[Refused], Callable[[Any, Any], str]] = {
    TaskNotFound: lambda op, _: f"no task {op.id!r} in queue {op.queue!r}",
    NotActive: _not_active,
    LeaseExpired: lambda op, _: f"the lease of task {op.id!r} ran out; stop working on it",
    TokenMismatch: _token_mismatch,
    LeaseHeld: lambda op, _: f"the lease of task {op.id!r} was renewed",
    NotWaiting: _not_waiting,
    NotDead: lambda op, task: f"task {op.id!r} is {task.status}; only a FAILED task can be requeued",
    DuplicateId: lambda op, _: f"task {op.id!r} is already there with another body; leave the id out or use another",
}

# -- repeats ---------------------------------------------------------------------------------------

_DONE_BEFORE: dict[type[Operation], Callable[[Any], Outcome]] = {
    Ack: lambda _: Acked(state=State.DONE, already=True),
    Fail: lambda op: Failed(queue=op.queue, already=True),
    Retry: lambda _: Retried(due_us=0),
    Extend: lambda _: Extended(lease_until_us=0, cancel_requested=False),
    Progress: lambda _: Extended(lease_until_us=0, cancel_requested=False),
    Release: lambda _: Released(state=State.READY),
    Cancel: lambda _: Cancelled(state=State.CANCELLED),
    Requeue: lambda _: Requeued(state=State.READY),
}


def done_before(op: Operation) -> Outcome:
    """The answer to a repeat whose first call was carried out and stayed without an answer."""
    return _DONE_BEFORE[type(op)](op)


# -- data of events --------------------------------------------------------------------------------


# The next two are put together by hand, since every enqueue and every ack needs one of them.
def enqueued_data(payload: bytes | None) -> bytes:
    return b'{"payload_bytes":%d}' % (0 if payload is None else len(payload))


def acked_data(op: Ack) -> bytes:
    size = 0 if op.result is None else len(op.result)
    return b'{"result_bytes":%d}' % size if op.ran_us is None else b'{"ran_us":%d,"result_bytes":%d}' % (op.ran_us, size)


def event_data(error: TaskError | None = None, **given: int | str | None) -> bytes | None:
    """Returns the data of an event, None without any. Of an error it has the kind and the first words; the task has all."""
    data: dict[str, Any] = {} if error is None else {"error": {"type": error.type, "message": error.message[:500]}}
    data.update({name: value for name, value in given.items() if value is not None})
    return _encode(data) if data else None
