"""Calls as the script reads them, and its answers shared out among the transactions.

Equal neighbours travel as the rows of one entry: `enqueues` (tasks that differ in id, payload and fingerprint only) or `acks`
(of one queue). A single new task without extras travels as plain arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from omniq.errors import Refused
from omniq.models import State
from omniq.operations import Ack, Acked, Enqueue, Enqueued, Operation, Outcome
from omniq.storage.checks import Transaction
from omniq.storage.machine.replies import acked_data
from omniq.storage.redis.wire import (
    GROWING,
    blob,
    common_fields,
    decode_answer,
    encode_operation,
    lease_ms,
    ms_up,
    options_of,
)

Entry = list[dict[str, Any]]  # a transaction, or rows of equal ones

MAX_SHAPES = 256  # a program has a few; who makes up options for every task must not fill the memory

_GROWING = {*GROWING, "enqueues", "restore", "restore_events"}
# Answers are never changed, so most acks share this one.
_DONE = Acked(state=State.DONE)


def grows(entries: Sequence[Entry]) -> bool:
    """Whether a call brings in something new, which a full server has no room for; all others end, extend or delete."""
    return any(op["kind"] in _GROWING for entry in entries for op in entry)


# -- shapes ----------------------------------------------------------------------------------------


class _Shared(NamedTuple):
    """The parts that tasks of one shape share, encoded once: a call for one task costs a third less."""

    entry: dict[str, Any]  # as `enqueues.lua` reads it, without the rows
    arguments: tuple[Any, ...]  # as `publish.lua` names them


# For all stores of the process, as nothing in it depends on one.
_shared_by_shape: dict[tuple[Any, ...], _Shared] = {}


def _shape(transaction: Sequence[Operation]) -> tuple[Any, ...] | None:
    """Returns what equal transactions share; None for one that travels alone. First: whether it fills an entry by itself."""
    first = transaction[0]
    if isinstance(first, Ack):
        if len(transaction) > 1 or first.again_us is not None:
            return None
        return (False, Ack, first.queue, first.late, first.encoding, first.listed)
    if not isinstance(first, Enqueue):
        return None
    shape = _enqueue_shape(first)
    if shape is None or any(not isinstance(op, Enqueue) or _enqueue_shape(op) != shape for op in transaction[1:]):
        return None
    return (len(transaction) > 1, *shape)


def _enqueue_shape(op: Enqueue) -> tuple[Any, ...] | None:
    if not op.plain:
        return None
    options = (op.name, op.max_attempts, op.lease_us, op.backoff, op.origin, op.encoding, op.timeout_us, op.result_ttl_us)
    return (Enqueue, op.queue, op.payload is None, op.on_conflict, *options)


def _shared_of(op: Enqueue, shape: tuple[Any, ...]) -> _Shared:
    shared = _shared_by_shape.get(shape)
    if shared is None:
        fields, lease, options = common_fields(op), lease_ms(op), options_of(op)
        ttl = None if op.result_ttl_us is None else ms_up(op.result_ttl_us)
        entry: dict[str, Any] = {"kind": "enqueues", "queue": op.queue, "name": op.name, "fields": fields, "lease": lease}
        entry |= {"options": blob(options), "on_conflict": op.on_conflict, "empty": op.payload is None}
        if ttl is not None:
            entry["ttl"] = ttl
        arguments = (op.queue, op.name, b"" if ttl is None else ttl, options, op.on_conflict, lease, *fields)
        if len(_shared_by_shape) >= MAX_SHAPES:
            _shared_by_shape.clear()
        shared = _shared_by_shape[shape] = _Shared(entry, arguments)
    return shared


def _payload(op: Enqueue) -> bytes:
    return b"null" if op.payload is None else op.payload


# -- calls -----------------------------------------------------------------------------------------


class Packed:
    """Transactions as entries of a call, and how the answers to them are read."""

    def __init__(self, transactions: Sequence[Transaction]) -> None:
        self._transactions = transactions
        self.entries: list[Entry] = []
        self._spans: list[tuple[int, int, str]] = []  # first transaction, how many, how they travel
        shapes = [_shape(transaction) for transaction in transactions]
        start = 0
        while start < len(transactions):
            end, shape, travels = start + 1, shapes[start], "alone"
            if shape is not None:
                travels = "together" if len(transactions[start]) > 1 else "rows"
                # Neighbours only, since transactions are carried out in the order in which they were given.
                while travels == "rows" and end < len(transactions) and shapes[end] == shape:
                    end += 1
            ops = [op for transaction in transactions[start:end] for op in transaction]
            self.entries.append([encode_operation(op) for op in ops] if shape is None else [_rows(ops, shape)])
            self._spans.append((start, end - start, travels))
            start = end

    def read(self, answers: Sequence[Any]) -> list[list[Outcome] | Refused]:
        """One result per transaction from one answer per entry."""
        results: list[list[Outcome] | Refused] = []
        for (start, count, travels), answer in zip(self._spans, answers, strict=True):
            transactions = self._transactions[start : start + count]
            if travels == "rows":
                results += [_plain(t) if a == 1 else decode_answer(t, a) for t, a in zip(transactions, answer, strict=True)]
            elif travels == "together" and not answer:
                results.append(_all_new(transactions[0]))
            else:
                results.append(decode_answer(transactions[0], answer))
        return results


def _rows(ops: Sequence[Operation], shape: tuple[Any, ...]) -> dict[str, Any]:
    together, first, rows = shape[0], ops[0], list[Any]()
    if isinstance(first, Ack):
        for op in cast("Sequence[Ack]", ops):
            rows += (op.id, op.token, False if op.result is None else blob(op.result), blob(acked_data(op)))
        listed = {"listed": True} if first.listed else {}
        return {"kind": "acks", "queue": first.queue, "late": first.late, "encoding": first.encoding, "rows": rows, **listed}
    for op in cast("Sequence[Enqueue]", ops):
        rows += (op.id, blob(_payload(op)), op.fingerprint)
    return {**_shared_of(cast(Enqueue, first), shape[1:]).entry, "together": together, "rows": rows}


def _plain(transaction: Transaction) -> list[Outcome]:
    """Returns the outcomes of a transaction that the short way of the script answers with a mere 1."""
    return [_DONE] if isinstance(transaction[0], Ack) else _all_new(transaction)


def _all_new(transaction: Transaction) -> list[Outcome]:
    return [Enqueued(id=op.id, existed=False, state=State.READY) for op in cast("Sequence[Enqueue]", transaction)]


def publish_call(transaction: Transaction, now: int | None, flags: str) -> list[Any] | None:
    """The arguments of `publish.lua`; None for a transaction that travels as others do."""
    op = transaction[0]
    if len(transaction) > 1 or not isinstance(op, Enqueue):
        return None
    shape = _enqueue_shape(op)
    if shape is None:
        return None
    head: list[Any] = [b"", b"" if now is None else now, flags if op.payload is not None else flags + "n", op.id]
    return [*head, _payload(op), op.fingerprint, *_shared_of(op, shape).arguments]


def publish_answer(transaction: Transaction, answers: list[Any]) -> list[Outcome] | Refused:
    ((answer,),) = answers
    return _all_new(transaction) if answer == 1 else decode_answer(transaction, answer)


# -- calls that the script leaves unfinished ---------------------------------------------------------


def rest_of(entries: Sequence[Entry], answers: Sequence[Any]) -> list[Entry]:
    """The entries for another call: over very many queues the script answers only as much as its budget allows."""
    if not answers:
        return list(entries)
    left = list(entries[len(answers) :])
    if _is_cut(entries, answers):
        last = entries[len(answers) - 1][0]
        left.insert(0, [last | {"rows": last["rows"][3 * len(answers[-1]) :]}])
    return left


def _is_cut(entries: Sequence[Entry], answers: Sequence[Any]) -> bool:
    """Whether the last entry that was answered was carried out in part."""
    last = entries[len(answers) - 1][0]
    return last["kind"] == "enqueues" and not last["together"] and 3 * len(answers[-1]) < len(last["rows"])


def joined(entries: Sequence[Entry], answers: list[Any], more: Sequence[Any]) -> list[Any]:
    """Answers, and those that another call gave to the rest."""
    if answers and _is_cut(entries, answers):
        return [*answers[:-1], answers[-1] + more[0], *more[1:]]
    return [*answers, *more]
