"""How a call is split: on a cluster one call of the script per slot, and what would span slots is refused; a `Reserve` of very
many queues, on any server, into slices, between which others are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from omniq.errors import CrossQueue, OutcomeUnknown, StoreFull, StoreUnavailable
from omniq.operations import Beat, CountFanIn, Enqueue, OnRun, OnTask, OpenFanIn, Operation, Reserve, Reserved, Stage
from omniq.storage.checks import Transaction
from omniq.storage.redis.packing import Packed

WIDE = 250  # queues that one call of the script asks for tasks
STORE = "omniq.store"  # the name, refused to queues, of what belongs to no queue


class SlotCall:
    """One call of the script: transactions of one slot, and where their answers go."""

    def __init__(self, plan: SplitCall, transactions: Sequence[Transaction], take: Callable[[list[Any]], None]) -> None:
        self._plan, self._packed, self._take = plan, Packed(transactions), take
        self.entries = self._packed.entries

    def take(self, answers: list[Any]) -> None:
        self._plan.carried_out = True
        self._take(self._packed.read(answers))

    def miss(self, exc: StoreUnavailable | StoreFull) -> None:
        """The node of this slot is away, or has no room."""
        self._plan.fail(exc)


class ReserveShare(SlotCall):
    """A queue's share of a `Reserve`: while its node is away, the other queues have their turn."""

    away: StoreUnavailable | StoreFull | None = None

    def miss(self, exc: StoreUnavailable | StoreFull) -> None:
        self.away = exc


class SplitCall:
    """A call in steps: transactions by slot, in order within each. A `Reserve` over several slots, or wide, asks in turn."""

    def __init__(self, transactions: Sequence[Transaction], slot_of: Callable[[str], int], repeat: bool = False) -> None:
        self._transactions, self._slot_of, self._repeat = transactions, slot_of, repeat
        self.answers: list[Any] = [None] * len(transactions)
        self.carried_out = False  # a part of the call was: then "nothing happened" is no longer true

    def fail(self, exc: StoreUnavailable | StoreFull) -> None:
        """Raise the error of a part: as it is while nothing happened, as `OutcomeUnknown` once another slot did its share."""
        if not self.carried_out:
            raise exc
        raise OutcomeUnknown(f"a part of this call was carried out, and then {exc}") from exc

    def steps(self) -> Iterable[tuple[str, SlotCall]]:
        open_parts: dict[int, tuple[str, list[int]]] = {}
        for n, transaction in enumerate(self._transactions):
            queues = list(dict.fromkeys(_queues_of(transaction)))
            slots = {self._slot_of(q) for q in queues}
            if len(slots) <= 1 and not is_wide(transaction):
                key = f"{{{queues[0]}}}:meta" if queues else f"{{{STORE}}}:meta"
                open_parts.setdefault(next(iter(slots), -1), (key, []))[1].append(n)
            elif isinstance(transaction[0], Reserve):
                # First what was given before it: its tasks may be those that are to be leased.
                yield from self._flush(open_parts)
                yield from self._reserve(n, transaction[0])
            else:
                self.answers[n] = CrossQueue(
                    f"queues {', '.join(map(repr, queues))} are in different slots of the cluster: "
                    "a transaction, its blockers and its dead queue must be in one"
                )
        yield from self._flush(open_parts)

    def _flush(self, parts: dict[int, tuple[str, list[int]]]) -> Iterable[tuple[str, SlotCall]]:
        for key, numbers in parts.values():
            transactions = [self._transactions[n] for n in numbers]

            def take(answers: list[Any], numbers: list[int] = numbers) -> None:
                for n, answer in zip(numbers, answers, strict=True):
                    self.answers[n] = answer

            yield key, SlotCall(self, transactions, take)
        parts.clear()

    def _reserve(self, n: int, op: Reserve) -> Iterable[tuple[str, SlotCall]]:
        slices = self._slices(op.queues)
        if self._repeat:  # what the first call may have leased is found before anything else is
            held: list[Reserved] = []
            for queues in slices:
                # With a limit of nothing a queue gives back what the token holds, and leases nothing.
                yield self._ask(op, queues, 0, held, SlotCall)
            tasks = [task for found in held for task in found.tasks]
            if tasks:
                self.answers[n] = [Reserved(tasks=tasks)]
                return
        whole, away = Reserved(tasks=[]), list[StoreUnavailable | StoreFull]()
        for queues in slices:
            got: list[Reserved] = []
            # with nothing left a queue still tells of its pause and its next moment
            key, part = self._ask(op, queues, op.limit - len(whole.tasks), got, ReserveShare)
            yield key, part
            if isinstance(part, ReserveShare) and part.away is not None:
                away.append(part.away)
                continue
            moments = [m for m in (whole.next_at_us, got[0].next_at_us) if m is not None]
            whole = Reserved(
                tasks=whole.tasks + got[0].tasks,
                paused=whole.paused + got[0].paused,
                next_at_us=min(moments, default=None),
            )
        if len(away) == len(slices):
            self.fail(away[0])
        self.answers[n] = [whole]

    def _slices(self, queues: Sequence[str]) -> list[tuple[str, ...]]:
        """Neighbours of one slot together, but not too many. They keep their order, by which the caller prefers them."""
        slices: list[tuple[str, ...]] = []
        for queue in queues:
            if slices and len(slices[-1]) < WIDE and self._slot_of(slices[-1][0]) == self._slot_of(queue):
                slices[-1] += (queue,)
            else:
                slices.append((queue,))
        return slices

    def _ask(
        self, op: Reserve, queues: tuple[str, ...], limit: int, got: list[Reserved], kind: type[SlotCall]
    ) -> tuple[str, SlotCall]:
        def take(answers: list[Any]) -> None:
            got.extend(answers[0])

        return f"{{{queues[0]}}}:meta", kind(self, [(msgspec.structs.replace(op, queues=queues, limit=limit),)], take)


def is_wide(transaction: Transaction) -> bool:
    """Whether a `Reserve` asks more queues than one call of the script should."""
    return isinstance(op := transaction[0], Reserve) and len(op.queues) > WIDE


def spans_slots(transaction: Transaction, slot_of: Callable[[str], int]) -> bool:
    """Whether a cluster refuses this transaction; a `Reserve` is split."""
    return not isinstance(transaction[0], Reserve) and len({slot_of(q) for q in _queues_of(transaction)}) > 1


def _queues_of(transaction: Sequence[Operation]) -> Iterable[str]:
    for op in transaction:
        if isinstance(op, Enqueue):
            yield op.queue
            if op.dead_queue is not None:
                yield op.dead_queue
            for blocker in op.blocked_by:
                yield blocker.queue or op.queue
        elif isinstance(op, OnTask | OnRun):
            yield op.queue
            if isinstance(op, Stage):
                yield from (task.dead_queue for task in op.tasks if task.dead_queue is not None)
        elif isinstance(op, Reserve):
            yield from op.queues
        elif isinstance(op, Beat):
            yield STORE
        elif isinstance(op, OpenFanIn | CountFanIn):
            # Clients of the contract keep a fan-in under `{cc:key}:…`, which has a slot of its own.
            yield f"cc:{op.key}"
