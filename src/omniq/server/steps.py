"""The steps of sessions: each is one transaction for the store, or a reply that must wait for the steps before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from omniq.errors import IdempotencyConflict, NotActive, Refused, TokenMismatch
from omniq.models import Blocker, Record
from omniq.operations import Ack, Enqueue, Enqueued, Extended, Operation, Outcome
from omniq.server import protocol
from omniq.server.protocol import PushCommand
from omniq.storage.base import Result
from omniq.translate import TCP, fingerprint

if TYPE_CHECKING:
    from omniq.server.session import Session


class Step:
    """`numbers` is how many ids the step needs. `transaction` makes the operations, `reply` the line to send."""

    __slots__ = ("session",)
    numbers = 0

    def __init__(self, session: Session | None) -> None:
        self.session = session

    def transaction(self, numbers: Iterator[int]) -> tuple[Operation, ...] | None:
        """Returns None if there is nothing for the store."""
        return None

    def reply(self, answer: Result | None) -> bytes | None:
        return None

    def failed(self, exc: Exception) -> bytes | None:
        """The reply when the store failed."""
        return protocol.err(f"store: {exc}")


class Reply(Step):
    """A line that waits for its turn, after `numbers` ids were used up."""

    __slots__ = ("line", "numbers")

    def __init__(self, session: Session, line: bytes, numbers: int = 0) -> None:
        super().__init__(session)
        self.line, self.numbers = line, numbers

    def transaction(self, numbers: Iterator[int]) -> None:
        for _ in range(self.numbers):
            next(numbers)

    def reply(self, answer: Result | None) -> bytes:
        return self.line

    def failed(self, exc: Exception) -> bytes:
        return self.line


class Then(Step):
    """Calls back when everything before it has been answered."""

    __slots__ = ("action",)

    def __init__(self, session: Session, action: Callable[[], None]) -> None:
        super().__init__(session)
        self.action = action

    def reply(self, answer: Result | None) -> None:
        self.action()

    def failed(self, exc: Exception) -> None:
        self.action()


class PushTask(Step):
    __slots__ = ("id", "push")
    numbers = 1

    def __init__(self, session: Session, push: PushCommand) -> None:
        super().__init__(session)
        self.push = push

    def transaction(self, numbers: Iterator[int]) -> tuple[Operation, ...]:
        self.id = next(numbers)
        push = self.push
        blockers = _blockers(push.blocked_by, cast("Session", self.session)) if push.blocked_by else ()
        return (enqueue(push, self.id, blockers, cast("Session", self.session).backoff),)

    def reply(self, answer: Result | None) -> bytes:
        if isinstance(answer, Refused):
            return protocol.err(_refusal(answer))
        outcome = cast(Enqueued, cast("list[Outcome]", answer)[0])
        if outcome.existed and self.push.idempotency_key is not None:
            return protocol.pushed(number_of(outcome.id), existed=True)
        return protocol.pushed(self.id)


class EndTask(Step):
    """ACK or NACK of a task, which is no longer held. If the store fails, it is held again, so that the client may repeat."""

    __slots__ = ("held", "number", "operation")

    def __init__(self, session: Session, number: int, held: Record, operation: Operation) -> None:
        super().__init__(session)
        self.number, self.held, self.operation = number, held, operation

    def transaction(self, numbers: Iterator[int]) -> tuple[Operation, ...]:
        return (self.operation,)

    def reply(self, answer: Result | None) -> bytes:
        return protocol.err(protocol.NOT_ACQUIRED) if isinstance(answer, Refused) else protocol.OK

    def failed(self, exc: Exception) -> bytes | None:
        if self.session is not None:
            self.session.hold(self.number, self.held)
        return super().failed(exc)


class ExtendTask(Step):
    __slots__ = ("operation",)

    def __init__(self, session: Session, operation: Operation) -> None:
        super().__init__(session)
        self.operation = operation

    def transaction(self, numbers: Iterator[int]) -> tuple[Operation, ...]:
        return (self.operation,)

    def reply(self, answer: Result | None) -> bytes:
        if isinstance(answer, Refused):
            return protocol.err(protocol.NOT_ACQUIRED)
        extended = cast(Extended, cast("list[Outcome]", answer)[0])
        return protocol.ok({"cancel_requested": extended.cancel_requested})


class GiveBack(Step):
    """Ends the lease of a task whose connection is gone, so there is nobody to tell."""

    __slots__ = ("operation",)

    def __init__(self, operation: Operation) -> None:
        super().__init__(None)
        self.operation = operation

    def transaction(self, numbers: Iterator[int]) -> tuple[Operation, ...]:
        return (self.operation,)


class Transact(Step):
    """ATOMIC … DONE. The tasks that it acknowledges are not held while it runs, and are held again if it is refused."""

    __slots__ = ("_acks", "_commands", "ids", "numbers")

    def __init__(self, session: Session, commands: Sequence[PushCommand | Ack], acks: dict[int, Record]) -> None:
        super().__init__(session)
        self._commands, self._acks = commands, acks
        self.numbers = sum(isinstance(c, PushCommand) for c in commands)
        self.ids: list[int] = []

    def transaction(self, numbers: Iterator[int]) -> tuple[Operation, ...] | None:
        session = cast("Session", self.session)
        self.ids = []
        queues: list[str] = []
        operations: list[Operation] = []
        for command in self._commands:
            if isinstance(command, PushCommand):
                number = next(numbers)
                blockers = _blockers(command.blocked_by, session, self.ids, queues) if command.blocked_by else ()
                operations.append(enqueue(command, number, blockers, session.backoff))
                self.ids.append(number)
                queues.append(cast(str, command.queue))
            else:
                operations.append(command)
        return tuple(operations) or None

    def reply(self, answer: Result | None) -> bytes:
        if isinstance(answer, Refused):
            self._hold_again()
            if isinstance(answer, NotActive | TokenMismatch):
                return protocol.err(protocol.NOT_ACQUIRED)
            return protocol.err(_refusal(answer))
        stored = [o for o in answer or () if isinstance(o, Enqueued)]
        return protocol.committed([number_of(o.id) for o in stored])

    def failed(self, exc: Exception) -> bytes | None:
        self._hold_again()
        return super().failed(exc)

    def _hold_again(self) -> None:
        for number, held in self._acks.items():
            cast("Session", self.session).hold(number, held)


_NOTHING = (None,) * 5


def enqueue(push: PushCommand, number: int, blockers: tuple[Blocker, ...], backoff: str) -> Enqueue:
    """The operation that stores a pushed task under a number."""
    payload = push.payload_bytes
    key = push.idempotency_key
    # A task of another door that has this id already has another fingerprint, and is not mistaken for this one.
    mark = TCP
    if key is not None:
        body = (push.name, payload, push.deadqueue, push.retry, push.eta_us, push.group)
        mark = fingerprint(*body) if push.interval is None else fingerprint(*body, push.interval)
    plain = Enqueue(
        id=str(number),
        name=cast(str, push.name),
        queue=cast(str, push.queue),
        payload=payload,
        origin=TCP,
        max_attempts=cast(int, push.retry) + 1,
        backoff=backoff,
        fingerprint=mark,
    )
    # Most tasks ask for nothing else, and are made in half the time; drivers have a fast way for them, too.
    if (push.execute_at, key, push.deadqueue, push.group, push.interval) == _NOTHING and not blockers:
        return plain
    return msgspec.structs.replace(
        plain,
        eta_us=push.eta_us,
        interval_us=push.interval_us,
        group=push.group,
        group_limit=push.group_limit or 0,
        dead_queue=push.deadqueue,
        blocked_by=blockers,
        dead_blockers="ignore",
        idempotency_key=key,
    )


def number_of(task_id: str) -> int | str:
    """Returns the number that an id stands for. The id of another door stays as it is."""
    return int(task_id) if is_number(task_id) else task_id


def is_number(task_id: str) -> bool:
    # 18 digits always fit 64 bits. A number with a leading zero would come back to the client as another id.
    return task_id.isascii() and task_id.isdigit() and task_id[0] != "0" and len(task_id) <= 18


def _blockers(
    wanted: Sequence[int] | None, session: Session, ids: Sequence[int] = (), queues: Sequence[str] = ()
) -> tuple[Blocker, ...]:
    """Positions in the transaction and ids, as the ids of tasks."""
    found: dict[str, Blocker] = {}
    for number in wanted or ():
        blocker = Blocker(session.task_id(number)) if number > 0 else Blocker(str(ids[number]), queues[number])
        found.setdefault(blocker.id, blocker)
    return tuple(found.values())


def _refusal(refusal: Refused) -> str:
    if isinstance(refusal, IdempotencyConflict):
        return "idempotency_key was used for another task"
    return str(refusal)
