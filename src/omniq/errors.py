"""Everything omniq raises or returns as a refusal.

    OmniQError
    ├── Invalid                  the call itself is wrong; nothing was sent to the store
    │   ├── TaskIdRequired  NameRequired  QueueRequired  InvalidLease  InvalidCursor
    │   └── DuplicateTarget  LimitExceeded  SerializationError  ConfigError
    ├── Refused                  the store said no; nothing changed
    │   ├── NotActive            the task is not running
    │   │   └── TaskNotFound
    │   ├── TokenMismatch        somebody else holds the task, or nobody does any more
    │   │   └── LeaseExpired
    │   ├── LeaseHeld            a reaper came too early
    │   ├── DuplicateId  IdempotencyConflict
    │   ├── NotDead  NotWaiting  CrossQueue  RunClosed
    │   └── ContractError        what `omniq.contract` raises, with a code
    │       └── LeaseLost        NOT_ACTIVE, TOKEN_MISMATCH
    ├── ClientError              from `omniq.client`, of a TCP server
    │   ├── ConnectionLost       no connection, or it broke; what was sent may have been carried out
    │   └── ErrorReply           the server answered ERR
    │       └── TaskNotAcquired  AuthenticationFailed  LimitReached  ServerStopping
    ├── LakeError                no lake there, one that is in use, or one that is too new or damaged
    │   └── CheckFailed          what the lake holds does not add up; nothing was published
    ├── SparkFailed              from `omniq.spark`: Spark, or code that it ran, failed
    ├── NotEnded                 tasks that were waited for have not ended in time
    ├── TasksFailed              tasks that were waited for FAILED or were CANCELLED
    └── StoreError               the store failed
        ├── StoreUnavailable  StoreFull  StoreTooNew  StoreForeign  DriverClosed  EventsLost
        └── OutcomeUnknown       sent, but no answer: it may have been carried out or not

A function that runs as a task may raise `Retry` or `Unrecoverable` to decide what happens next.
"""

from __future__ import annotations

from datetime import timedelta


class OmniQError(Exception):
    """The root of everything that omniq raises on purpose."""


class Invalid(OmniQError, ValueError):
    """The call itself is wrong. Nothing was sent to the store."""


class TaskIdRequired(Invalid):
    """A task needs an id of 1 to 255 characters without NUL."""


class NameRequired(Invalid):
    """A task needs a name: a function's path, a registered name, or `*` for payload only."""


class QueueRequired(Invalid):
    """A queue name is 1 to 128 characters of `A-Z a-z 0-9 . _ -`."""


class InvalidLease(Invalid):
    """A lease must be longer than zero."""


class InvalidCursor(Invalid):
    """The cursor is not one that this store gave out."""


class DuplicateTarget(Invalid):
    """A transaction may target each task once only."""


class LimitExceeded(Invalid):
    """A field or a transaction is larger than the store takes."""


class ConfigError(Invalid):
    """A setting, an environment variable or a storage URL has a value that omniq cannot use."""


class SerializationError(Invalid, TypeError):
    """A value cannot be encoded, or bytes cannot be decoded, by the serializer in use."""


class Refused(OmniQError):
    """The store said no, and nothing changed."""


class NotActive(Refused):
    """The task is not running, so nobody can ack, retry, fail or extend it."""


class TaskNotFound(NotActive):
    """There is no such task in that queue."""


class TokenMismatch(Refused):
    """The token is not the one of the current lease."""


class LeaseExpired(TokenMismatch):
    """The lease ran out before the call."""


class LeaseHeld(Refused):
    """The lease is still valid, so the task cannot be taken from its holder."""


class DuplicateId(Refused):
    """A task with this id and another body is already there."""


class IdempotencyConflict(Refused):
    """The idempotency key was used for a task with another body."""


class NotDead(Refused):
    """Only dead letters can be requeued."""


class NotWaiting(Refused):
    """Only waiting tasks can be rescheduled or removed."""


class CrossQueue(Refused):
    """This store cannot span several queues in one transaction."""


class RunClosed(Refused):
    """The staged run was already committed or aborted."""


class ContractError(Refused, RuntimeError):
    """A refusal of `omniq.contract`. `code` is the word that clients of every language know; the text ends in it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message}: {code}")
        self.code = code

    def __reduce__(self) -> tuple[type[ContractError], tuple[str, str]]:
        # Without this, unpickling calls the class with the text alone, as for any exception.
        return type(self), (self.code, str(self).removesuffix(f": {self.code}"))


class LeaseLost(ContractError):
    """The lease is not held under this token any more (NOT_ACTIVE, TOKEN_MISMATCH): stop working on the job."""


class ClientError(OmniQError):
    """A TCP server could not be asked, or said no."""


class ConnectionLost(ClientError):
    """There is no connection, or it broke before the answer came; what was sent may have been carried out."""


class ErrorReply(ClientError):
    """The server answered ERR; the text is the server's."""


class TaskNotAcquired(ErrorReply):
    """This connection does not hold the task, or holds it no more."""


class AuthenticationFailed(ErrorReply):
    """The server wants a token, or another one."""


class LimitReached(ErrorReply):
    """Something is larger or more than the server allows; the text names the limit."""


class ServerStopping(ErrorReply):
    """The server is shutting down; connect again later, or to another one."""


class LakeError(OmniQError):
    """There is no lake, or it is in use, too new or damaged."""


class CheckFailed(LakeError):
    """The contents of the lake do not add up. A build that finds this publishes nothing."""


class SparkFailed(OmniQError):
    """Spark failed, or a function that it ran raised an error that is neither omniq's nor Python's own."""


class NotEnded(OmniQError, TimeoutError):
    """Tasks that were waited for have not ended: the time is over, or no worker serves their queue."""


class TasksFailed(OmniQError):
    """Tasks that were waited for FAILED or were CANCELLED; the text says how many, and how the first of them ended."""


class StoreError(OmniQError):
    """The store failed."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or opened; nothing happened, try again."""


class StoreFull(StoreError):
    """The store has no room left; nothing happened."""


class StoreTooNew(StoreError):
    """The store was written by a newer omniq; upgrade this one."""


class StoreForeign(StoreError):
    """The file or database belongs to another program. Nothing was written to it; name another place."""


class DriverClosed(StoreError):
    """The storage object was closed."""


class EventsLost(StoreError):
    """The events after this point are gone, or belong to another store."""


class OutcomeUnknown(StoreError):
    """The call was sent, repeats too, and no answer came: it may have been carried out or not.

    `BaseStorage.apply`, which repeats nothing by itself, raises it after the first time; its caller sends the same call again
    with `repeat=True`.
    """


class Retry(Exception):
    """Raise inside a task to run it again later; it counts as a failed attempt."""

    def __init__(self, message: str = "retry requested", *, after: float | timedelta | None = None) -> None:
        super().__init__(message)
        self.after = after.total_seconds() if isinstance(after, timedelta) else after
        if self.after is not None:
            check_retry_after(self.after)


def check_retry_after(after: object) -> None:
    """Raise `Invalid` if this cannot be a pause. Asked again when the task has ended, since it may have changed `after`."""
    if isinstance(after, bool) or not isinstance(after, int | float) or not 0 <= after < 1e11:  # also refuses NaN
        raise Invalid(f"Retry(after={after!r}): give a timedelta or a number of seconds, 0 or more and finite")


class Unrecoverable(Exception):
    """Raise inside a task to fail it at once, whatever retries are left."""
