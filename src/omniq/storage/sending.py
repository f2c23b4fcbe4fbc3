"""How a call reaches its end: what stayed without an answer is sent again, and what cannot be sent costs only itself.

`Repeats` says when a call is sent again and when it is given up; `until_answered` does so, and every door asks it through
`BaseStorage.send`. `Sending` is for callers that gather the transactions of many into one call, and hold on to them until
each has its answer: workers, consumers, heartbeats, the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

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

T = TypeVar("T")

# The pauses before a store that failed is asked again. Short at first, since most failures are a lost connection or a failover;
# the last one is for as long as it takes.
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
REPEAT_FOR_S = 5.0  # no repeat begins later; the last one may take as long as the store lets it
UNANSWERED = 3  # times in a row that a call breaks its connection before halves of it are tried
UNANSWERED_ALONE = 10  # and before a single transaction is given up: its run may have succeeded

Step = tuple[Sequence[Transaction], bool]  # a call to be made, and whether it is a repeat


def pause_s(failures: int) -> float:
    """The pause after so many failures in a row."""
    return PAUSES_S[min(failures, len(PAUSES_S)) - 1]


class Repeats:
    """The repeats of a call that stayed without an answer: their pauses, and in the end an error that says what is known.

    With `patient`, a store that was away from the beginning is asked again too. `advice` is for callers who know no ids.
    """

    __slots__ = ("_advice", "_for_s", "_patient", "_sent", "_transactions", "_unknown", "_until")

    def __init__(
        self,
        transactions: Sequence[Transaction],
        *,
        for_s: float = REPEAT_FOR_S,
        patient: bool = False,
        advice: str = "",
    ) -> None:
        self._transactions, self._patient, self._advice = transactions, patient, advice
        self._for_s = math.inf if patient else for_s
        self._until: float | None = None
        self._unknown: OutcomeUnknown | None = None  # set when the call may have been carried out
        self._sent = 0

    @property
    def repeat(self) -> bool:
        """Whether `apply` hears of a repeat. Not of an `Extend`: it may be done twice, and a lost lease must be told."""
        return self._unknown is not None and not any(isinstance(op, Extend) for t in self._transactions for op in t)

    def after(self, exc: StoreError) -> float:
        """Returns the seconds to wait before the same call is sent again. Raises when there is no repeat left."""
        self._sent += 1
        if isinstance(exc, OutcomeUnknown):
            self._unknown = exc
        elif self._unknown is None and not (self._patient and isinstance(exc, StoreUnavailable)):
            raise exc
        if self._until is None:
            self._until = time.monotonic() + self._for_s
        pause = pause_s(self._sent)
        over = self._sent > len(PAUSES_S) or time.monotonic() + pause >= self._until
        if not over and not isinstance(exc, DriverClosed):
            return pause
        if self._unknown is None:
            raise exc
        last = "" if isinstance(exc, OutcomeUnknown) else f", then: {exc}"
        raise OutcomeUnknown(
            f"{self._unknown} (sent {self._sent} times{last}). It may have been carried out or not; "
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
        if self._unknown is None:
            return answers
        return [_done_before(t, a) if isinstance(a, Refused) else a for t, a in zip(self._transactions, answers, strict=True)]


async def until_answered(call: Callable[[bool], Awaitable[T]], repeats: Repeats) -> T:
    """The answer to `call(repeat)`, which is made again as `repeats` says."""
    while True:
        try:
            return await call(repeats.repeat)
        except StoreError as exc:
            pause = repeats.after(exc)
        await asyncio.sleep(pause)


def until_answered_blocking(call: Callable[[bool], T], repeats: Repeats) -> T:
    """`until_answered` from any thread."""
    while True:
        try:
            return call(repeats.repeat)
        except StoreError as exc:
            pause = repeats.after(exc)
        time.sleep(pause)


def _done_before(transaction: Transaction, refusal: Refused) -> Result:
    done: Outcome
    # By then the task is gone, or no longer dead: the store cannot tell the repeat from the call of somebody else.
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
        """Returns another end for a run whose own end cannot be sent; None where its lease has to run out."""
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
        steps = self._steps(storage)
        try:
            transactions, repeat = next(steps)
            while True:
                try:
                    answers = await storage.apply(transactions, self._now_us, repeat=repeat)
                except BaseException as exc:
                    transactions, repeat = steps.throw(exc)
                else:
                    transactions, repeat = steps.send(answers)
        except StopIteration:
            return cast("list[Result]", self._answers)

    def send_blocking(self, storage: BaseStorage) -> list[Result]:
        """`send` from any thread."""
        steps = self._steps(storage)
        try:
            transactions, repeat = next(steps)
            while True:
                try:
                    answers = storage.apply_blocking(transactions, self._now_us, repeat=repeat)
                except BaseException as exc:
                    transactions, repeat = steps.throw(exc)
                else:
                    transactions, repeat = steps.send(answers)
        except StopIteration:
            return cast("list[Result]", self._answers)

    def _steps(self, storage: BaseStorage) -> Generator[Step, list[Result], None]:
        """The calls to be made, one after the other; each is told its answers, or the error in their place."""
        works = False  # the store has answered a small call, so an error is about the transactions
        while self._parts:
            part, repeat = self._parts[0]
            try:
                answers = yield self._of(part), repeat
            except BaseException as exc:
                # First of all, also after an interrupt: whoever calls again sends this part as the repeat that it may be.
                self._parts[0] = part, repeat or _may_have_happened(exc)
                if self._leaves_out(exc, storage):
                    continue
                if self._is_of_the_store(exc, storage):
                    raise
                if isinstance(exc, OutcomeUnknown) or (isinstance(exc, StoreError) and not works):
                    yield from self._probe(exc)
                    works = True
                self._split(exc)
            else:
                self._answered(answers)

    def _of(self, part: Sequence[int]) -> Sequence[Transaction]:
        whole = len(part) == len(self.transactions)
        return self.transactions if whole else [self.transactions[n] for n in part]

    def _answered(self, answers: list[Result]) -> None:
        part, _ = self._parts.pop(0)
        self._unanswered = 0
        for n, answer in zip(part, answers, strict=True):
            self._answers[n] = answer

    def _leaves_out(self, exc: BaseException, storage: BaseStorage) -> bool:
        """Whether the server is full but takes the part without its new tasks. A full disk takes nothing, so callers wait."""
        full = exc if isinstance(exc, StoreFull) else exc.__cause__
        if not isinstance(full, StoreFull) or storage.capabilities.local:
            return False
        part, repeat = self._parts[0]
        new = [n for n in part if any(isinstance(op, Enqueue | Stage) for op in self.transactions[n])]
        if not new:
            return False
        # One node of a cluster is full and others did their share: each transaction is asked alone.
        if full is not exc:
            self._parts[:1] = [([n], True) for n in part]
            return True
        for n in new:
            self._answers[n] = Unsendable(full)
        rest = [n for n in part if self._answers[n] is None]
        self._parts[:1] = [(rest, repeat)] if rest else []
        log.error("new tasks of %d transactions are refused: %s", len(new), full)
        return True

    def _is_of_the_store(self, exc: BaseException, storage: BaseStorage) -> bool:
        """Whether an error is not about the transactions: the store is away, or somebody interrupted the call."""
        if isinstance(exc, Exception) and (type(exc) is StoreError or not isinstance(exc, StoreError)):
            return False
        # Redis closes the connection on a call of over 512 MB, mostly before its answer can be read. A timeout, a node that is
        # away and a disk say nothing of the size of a call.
        broke_off = isinstance(exc, OutcomeUnknown) and not isinstance(exc.__cause__, StoreError | TimeoutError)
        self._unanswered = self._unanswered + 1 if broke_off and not storage.capabilities.local else 0
        return self._unanswered < self._patience(self._parts[0][0])

    def _patience(self, part: Sequence[int]) -> float:
        """Returns how often a part may stay unanswered. Only its repeat can tell what a lost `Reserve` has leased."""
        if len(part) > 1:
            return UNANSWERED
        return math.inf if isinstance(self.transactions[part[0]][0], Reserve) else UNANSWERED_ALONE

    def _probe(self, exc: StoreError) -> Generator[Step, list[Result], None]:
        """A call that finds nothing: if that fails too, it is the store."""
        operations = [op for n in self._parts[0][0] for op in self.transactions[n]]
        queue = next(filter(None, map(_queue_of, operations)), None)
        if queue is None:
            raise exc
        try:
            # Refused by every store, since nobody has such a task: it writes nothing and needs no room.
            yield [(Extend(queue=queue, id=new_id(), token=new_token()),)], False
        except Exception:
            raise exc from None

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


def _may_have_happened(exc: BaseException) -> bool:
    """Whether some of the call may have been carried out. Only a call that was refused as a whole certainly was not."""
    if isinstance(exc, StoreError):
        return type(exc) is StoreError or isinstance(exc, OutcomeUnknown)
    return not isinstance(exc, Invalid)


def _queue_of(op: Operation) -> str | None:
    return op.queues[0] if isinstance(op, Reserve) else getattr(op, "queue", None)
