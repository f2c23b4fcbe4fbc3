"""How a call reaches its end: what stayed without an answer is sent again, and what cannot be sent costs only itself.

`Repeats` is for whoever waits for one call: every door. `Sending` is for whoever gathers the transactions of many into one
call, and holds on to them until each has its answer: workers, consumers, the server.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from omniq.errors import (
    DriverClosed,
    Invalid,
    NotDead,
    OmniQError,
    OutcomeUnknown,
    Refused,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TaskNotFound,
)
from omniq.models import State, TaskError, new_id, new_token
from omniq.operations import (
    Ack,
    Enqueue,
    Extend,
    Fail,
    Operation,
    Outcome,
    Remove,
    Removed,
    Requeue,
    Requeued,
    Reserve,
    Retry,
    Stage,
)
from omniq.storage.checks import Transaction

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage, Result

log = logging.getLogger("omniq.storage")

PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
REPEAT_FOR_S = 5.0  # no repeat begins later; the last one may take as long as the store lets it
UNANSWERED = 3  # times in a row that a call breaks its connection before halves of it are tried
UNANSWERED_ALONE = 10  # and before a single transaction is given up: its run may have succeeded


class Repeats:
    """What follows a call that stayed without an answer: pauses and repeats, and in the end an error that says what is known.

    With `patient`, a store that was away from the beginning is asked again too. `advice` is for callers who know no ids.
    """

    def __init__(
        self,
        transactions: Sequence[Transaction],
        *,
        pauses_s: Sequence[float] | None = None,
        patient: bool = False,
        advice: str = "",
    ) -> None:
        self._transactions, self._patient, self._advice = transactions, patient, advice
        self._pauses = iter(PAUSES_S if pauses_s is None else pauses_s)
        self._until: float | None = None
        self._unknown: OutcomeUnknown | None = None
        self.sent = 0

    @property
    def unknown(self) -> bool:
        """Whether the call may have been carried out."""
        return self._unknown is not None

    @property
    def repeat(self) -> bool:
        """What `apply` is told. A lease may simply be extended twice: that it was lost must not be read as done."""
        return self.unknown and not any(isinstance(op, Extend) for t in self._transactions for op in t)

    def after(self, exc: StoreError) -> float:
        """How many seconds to wait before the same call is sent again; raises when it is over."""
        self.sent += 1
        if isinstance(exc, OutcomeUnknown):
            self._unknown = exc
        elif self._unknown is None and not (self._patient and isinstance(exc, StoreUnavailable)):
            raise exc
        if self._until is None:
            self._until = time.monotonic() + (math.inf if self._patient else REPEAT_FOR_S)
        pause = None if isinstance(exc, DriverClosed) else next(self._pauses, None)
        if pause is not None and time.monotonic() + pause < self._until:
            return pause
        if self._unknown is None:
            raise exc
        last = "" if isinstance(exc, OutcomeUnknown) else f", then: {exc}"
        raise OutcomeUnknown(
            f"{self._unknown} (sent {self.sent} times{last}). It may have been carried out or not; "
            f"{self._advice or self._next_step()}"
        ) from exc

    def _next_step(self) -> str:
        new = [op for t in self._transactions for op in t if isinstance(op, Enqueue)]
        if not new:
            return "look before you do it again"
        if all(op.fingerprint and op.on_conflict != "replace_finished" for op in new):  # a key or an id of the caller's own
            return "the same enqueue again stores it once"
        ids = ", ".join(repr(op.id) for op in new[:3]) + (", …" if len(new) > 3 else "")
        return f"look for {ids} in the store before you enqueue it again"

    def read(self, answers: list[Result]) -> list[Result]:
        """The answers; a refusal that only says that the first call was carried out is read as that."""
        if not self.unknown:
            return answers
        return [_done_before(t, a) if isinstance(a, Refused) else a for t, a in zip(self._transactions, answers, strict=True)]


def _done_before(transaction: Transaction, refusal: Refused) -> Result:
    done: Outcome
    if isinstance(refusal, TaskNotFound) and all(isinstance(op, Remove) for op in transaction):
        done = Removed()
    elif isinstance(refusal, NotDead) and all(isinstance(op, Requeue) for op in transaction):
        done = Requeued(state=State.READY)
    else:
        return refusal
    return [done for _ in transaction]


class Unsendable(Refused):
    """In place of an answer: this transaction cannot be sent. Its `__cause__` says why."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause) if isinstance(cause, OmniQError) else f"{type(cause).__name__}: {cause}")
        self.__cause__ = cause

    @property
    def error(self) -> TaskError:
        return TaskError.of(self.__cause__ or self)

    def instead(self, op: Operation) -> Fail | None:
        """How a run ends whose own end cannot be sent; None where its lease has to run out."""
        if not isinstance(op, Ack | Retry | Fail):
            return None
        again_us = None if isinstance(op, Retry) else op.again_us
        plain = Fail(queue=op.queue, id=op.id, token=op.token, late=True, error=self.error, again_us=again_us)
        was_it = isinstance(op, Fail) and op.error is not None and op.error.type == plain.error.type  # type: ignore[union-attr]
        return None if was_it else plain


class Sending:
    """Transactions on their way, until each has its answer. What cannot be sent is found by halves.

    `send` raises `StoreError` while the store is away; called again, it goes on where it was. What may have been carried out
    already is sent as a repeat, so nothing is done twice. A server that is full has no room for new tasks: whoever brings some
    is told so, and all others are served. A server that closes the connection because a call is too large for it looks as if
    the answer got lost: after some times a small call shows whether it serves others, and the large one is parted.
    """

    def __init__(self, transactions: Sequence[Transaction], now_us: int | None = None) -> None:
        self.transactions, self._now_us = transactions, now_us
        self._answers: list[Result | None] = [None] * len(transactions)
        self._parts: list[tuple[Sequence[int], bool]] = [(range(len(transactions)), False)] if transactions else []
        self._unanswered = 0  # in a row

    async def send(self, storage: BaseStorage) -> list[Result]:
        works = False
        while self._parts:
            part, repeat = self._parts[0]
            try:
                answers = await storage.apply(self._of(part), self._now_us, repeat=repeat)
            except BaseException as exc:
                if self._leaves_out(exc, storage):
                    continue
                self._must_be_its_own(exc, storage)
                if isinstance(exc, OutcomeUnknown) or (isinstance(exc, StoreError) and not works):
                    probe = self._probe(exc)
                    try:
                        await storage.apply([probe])
                    except Exception:
                        raise exc from None
                    works = True
                self._split(exc)
            else:
                self._answered(answers)
        return cast("list[Result]", self._answers)

    def send_blocking(self, storage: BaseStorage) -> list[Result]:
        """`send` from any thread."""
        works = False
        while self._parts:
            part, repeat = self._parts[0]
            try:
                answers = storage.apply_blocking(self._of(part), self._now_us, repeat=repeat)
            except BaseException as exc:
                if self._leaves_out(exc, storage):
                    continue
                self._must_be_its_own(exc, storage)
                if isinstance(exc, OutcomeUnknown) or (isinstance(exc, StoreError) and not works):
                    probe = self._probe(exc)
                    try:
                        storage.apply_blocking([probe])
                    except Exception:
                        raise exc from None
                    works = True
                self._split(exc)
            else:
                self._answered(answers)
        return cast("list[Result]", self._answers)

    def _of(self, part: Sequence[int]) -> Sequence[Transaction]:
        whole = len(part) == len(self.transactions)
        return self.transactions if whole else [self.transactions[n] for n in part]

    def _answered(self, answers: list[Result]) -> None:
        part, _ = self._parts.pop(0)
        self._unanswered = 0
        for n, answer in zip(part, answers, strict=True):
            self._answers[n] = answer

    def _leaves_out(self, exc: BaseException, storage: BaseStorage) -> bool:
        """Whether a server is full that takes the part without its new tasks. A full disk takes nothing: that is waited for."""
        full = exc if isinstance(exc, StoreFull) else exc.__cause__
        if not isinstance(full, StoreFull) or storage.capabilities.local:
            return False
        part, repeat = self._parts[0]
        new = [n for n in part if any(isinstance(op, Enqueue | Stage) for op in self.transactions[n])]
        if not new:
            return False
        if full is not exc:  # one node of a cluster is full, others did their share: each is asked alone
            self._parts[:1] = [([n], True) for n in part]
            return True
        for n in new:
            self._answers[n] = Unsendable(full)
        rest = [n for n in part if self._answers[n] is None]
        self._parts[:1] = [(rest, repeat)] if rest else []
        log.error("new tasks of %d transactions are refused: %s", len(new), full)
        return True

    def _must_be_its_own(self, exc: BaseException, storage: BaseStorage) -> None:
        """Raise what says nothing of the transactions: the store is away, or somebody interrupted this."""
        part, repeat = self._parts[0]
        of_the_store = isinstance(exc, StoreError) and type(exc) is not StoreError
        nothing_happened = isinstance(exc, Invalid) or (of_the_store and not isinstance(exc, OutcomeUnknown))
        self._parts[0] = part, repeat or not nothing_happened
        if of_the_store or not isinstance(exc, Exception):
            broke_off = isinstance(exc, OutcomeUnknown) and not isinstance(exc.__cause__, StoreError | TimeoutError)
            self._unanswered = self._unanswered + 1 if broke_off and not storage.capabilities.local else 0
            if self._unanswered < self._patience(part):
                raise exc

    def _patience(self, part: Sequence[int]) -> float:
        """How often a part may stay without an answer. What a lost `Reserve` has leased only its repeat can tell."""
        if len(part) > 1:
            return UNANSWERED
        return math.inf if isinstance(self.transactions[part[0]][0], Reserve) else UNANSWERED_ALONE

    def _probe(self, exc: StoreError) -> Transaction:
        """A transaction that finds nothing: if that fails too, it is the store."""
        for op in (op for n in self._parts[0][0] for op in self.transactions[n]):
            queue = op.queues[0] if isinstance(op, Reserve) else getattr(op, "queue", None)
            if queue is not None:
                return (Extend(queue=queue, id=new_id(), token=new_token()),)
        raise exc

    def _split(self, exc: BaseException) -> None:
        part, repeat = self._parts[0]
        if len(part) == 1:
            answer = self._answers[part[0]] = Unsendable(cast(Exception, exc))
            del self._parts[0]
            op = self.transactions[part[0]][0]
            task_id = getattr(op, "id", "")
            log.error("%s of task %r cannot be sent: %s", type(op).__name__, task_id, answer, extra={"task_id": task_id})
        else:
            middle = len(part) // 2
            self._parts[:1] = [(part[:middle], repeat), (part[middle:], repeat)]
