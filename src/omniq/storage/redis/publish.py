"""One new task without extras, as arguments of the script: nothing is packed here, and next to nothing unpacked there."""

from __future__ import annotations

import functools
from typing import Any

from omniq.errors import Refused
from omniq.models import State
from omniq.operations import Enqueue, Enqueued, Outcome
from omniq.storage.checks import Transaction
from omniq.storage.redis import wire


def publish_call(transaction: Transaction, now: int | None, flags: str) -> list[Any] | None:
    """The arguments that `lua/publish.lua` names; None for what travels as others do."""
    op = transaction[0]
    if len(transaction) > 1 or not isinstance(op, Enqueue):
        return None
    shape = wire.enqueue_shape(op)
    if shape is None:
        return None
    empty = op.payload is None
    head: list[Any] = [b"", b"" if now is None else now, flags + "n" if empty else flags, op.id]
    return [*head, b"null" if empty else op.payload, op.fingerprint, *_common(shape)]


@functools.lru_cache(256)
def _common(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tasks of one shape share."""
    op = wire.of_shape(shape)
    ttl = b"" if op.result_ttl_us is None else wire.ms_up(op.result_ttl_us)
    lease, options = wire.lease_ms(op), wire.options_of(op)
    return (op.queue, op.name, ttl, options, op.on_conflict, lease, *wire.common_fields(op))


def publish_answer(transaction: Transaction, answers: list[Any]) -> list[Outcome] | Refused:
    ((answer,),) = answers
    if answer == 1:
        op: Any = transaction[0]
        return [Enqueued(id=op.id, existed=False, state=State.READY)]
    return wire.decode_answer(transaction, answer)
