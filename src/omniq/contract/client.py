"""`AsyncContractClient`: the calls of the language-neutral contract, over any store."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast

import msgspec

from omniq.contract.consumer import Consumer
from omniq.contract.handlers import Handler, OnLoop, must_take_a_job
from omniq.contract.signals import Decision
from omniq.contract.words import (
    BACKOFF_MS,
    FAN_IN_TTL_MS,
    LANES,
    MAX_ATTEMPTS,
    MAX_BATCH,
    TIMEOUT_MS,
    BatchResult,
    Job,
    JobOptions,
    Lane,
    Paused,
    due_ms,
    enqueue_of,
    job_of,
    moment_us,
    now_ms,
    queue_base,
    queue_name,
    ulid,
    whole,
)
from omniq.errors import (
    ContractError,
    DuplicateId,
    IdempotencyConflict,
    LeaseLost,
    NotActive,
    NotDead,
    NotWaiting,
    Refused,
    TaskNotFound,
    TokenMismatch,
)
from omniq.models import Record, State, TaskError, new_token
from omniq.operations import (
    Ack,
    CountFanIn,
    Enqueue,
    Enqueued,
    Extend,
    Extended,
    Fail,
    Failed,
    FannedIn,
    Held,
    OpenFanIn,
    Operation,
    Outcome,
    Release,
    Remove,
    Requeue,
    Reserve,
    Reserved,
    Retried,
    Retry,
)
from omniq.policy import after_failure
from omniq.queue import tell_enqueued
from omniq.signals import caught_on_loop
from omniq.storage.base import BaseStorage, Result, must_be_storage

log = logging.getLogger("omniq.contract")

# As in `enqueue_many`: a commit hardly counts among so many, and others need not wait long for it.
ROWS_PER_TRANSACTION = 1000

AckFailResult = tuple[Literal["RETRY"], int] | tuple[Literal["FAILED"], None]


class AsyncContractClient:
    """Publishes, reserves and ends jobs as clients of every language do. Opens itself at its first call.

    A call whose answer got lost is sent again, and recognised. `now_ms_override=0` is the store's own clock.
    """

    queue_base = staticmethod(queue_base)
    now_ms = staticmethod(now_ms)
    ulid = staticmethod(ulid)

    def __init__(self, storage: BaseStorage) -> None:
        must_be_storage(storage)
        self.storage = storage

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """A client of the store that a URL names: `redis://…`, `sqlite:///path.db`, `memory://`."""
        return cls(BaseStorage.from_url(url, **options))

    async def close(self) -> None:
        """Let go of everything. Twice is harmless."""
        await self.storage.close()

    async def __aenter__(self) -> Self:
        await self.storage.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    # -- in ----------------------------------------------------------------------------------------

    async def publish(
        self,
        queue: str,
        payload: object,
        *,
        job_id: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        max_attempts: int = MAX_ATTEMPTS,
        backoff_ms: int = BACKOFF_MS,
        due_ms: int = 0,
        gid: str | None = None,
        group_limit: int = 0,
    ) -> str:
        """Store a job, and return its id. An id that is alive is returned as it is, one that has ended starts anew.

        Raises `TypeError` for a payload that is not a JSON object or array and `ValueError` for NaN and Infinity, before
        anything is written. `group_limit` counts only for a group that has no limit yet.
        """
        op = enqueue_of(
            queue,
            payload,
            job_id=job_id,
            timeout_ms=timeout_ms,
            max_attempts=max_attempts,
            backoff_ms=backoff_ms,
            due_ms=due_ms,
            gid=gid,
            group_limit=group_limit,
        )
        outcome = cast(Enqueued, await self._one(self._due_now(op)))
        if outcome.existed:
            await self._check_queue_of(op)
        tell_enqueued((op,), (outcome,))
        return outcome.id

    async def _check_queue_of(self, op: Enqueue) -> None:
        """Refuse an id that lives in another queue: ids are unique in a store, and that job is not this one."""
        queue = await self.storage.locate(op.id) if await self.storage.get(op.id, op.queue) is None else None
        if queue is not None:
            raise DuplicateId(
                f"job {op.id!r} is alive in queue {queue!r}, so it cannot be published to {op.queue!r}: use another id"
            )

    async def publish_many(self, queue: str, payloads: Iterable[object], **options: Unpack[JobOptions]) -> list[str]:
        """Store a job per payload, in one transaction per 1,000. Returns their ids. Writes nothing if one payload is wrong."""
        made = [self._due_now(enqueue_of(queue, payload, **options)) for payload in payloads]
        for start in range(0, len(made), ROWS_PER_TRANSACTION):
            chunk = tuple(made[start : start + ROWS_PER_TRANSACTION])
            tell_enqueued(chunk, await self.storage.transact(chunk))
        return [op.id for op in made]

    def _due_now(self, op: Enqueue) -> Enqueue:
        """A time that has passed means the end of the lane, not a place before jobs that came earlier.

        A store with a clock of its own decides that itself.
        """
        if op.eta_us is None or self.storage.capabilities.store_clock or op.eta_us > self.storage.clock():
            return op
        return msgspec.structs.replace(op, eta_us=None)

    # -- a lease and its end -----------------------------------------------------------------------

    async def reserve(self, queue: str, now_ms_override: int = 0) -> Paused | Job | None:
        """Lease the next job. None if there is none, `Paused` if the queue is paused."""
        op = Reserve(queues=(queue_name(queue),), token=new_token())
        reserved = cast(Reserved, await self._one(op, now_ms_override))
        if reserved.paused:
            return Paused()
        return job_of(reserved.tasks[0]) if reserved.tasks else None

    async def heartbeat(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> int:
        """Prolong the lease to the job's timeout from now, and return its new end. Raises `LeaseLost`."""
        op = Extend(**_held(queue, job_id, lease_token))
        return cast(Extended, await self._end(op, now_ms_override)).lease_until_us // 1000

    async def ack_success(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> None:
        """The job is done. Twice with the same token is fine. Raises `LeaseLost`."""
        await self._end(Ack(**_held(queue, job_id, lease_token), listed=True), now_ms_override)

    async def ack_fail(
        self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0, error: str | None = None
    ) -> AckFailResult:
        """The run failed: `("RETRY", due_ms)`, or `("FAILED", None)` after the last attempt. Raises `LeaseLost`."""
        held = _held(queue, job_id, lease_token)
        told = None if error is None else TaskError.from_text(error)
        # If the task is gone or another's there is nothing to decide: the store refuses this, or knows it as a repeat.
        op: Retry | Fail = Fail(**held, error=told)
        task = await self.storage.get(job_id, held["queue"])
        if task is not None and task.state is State.RUNNING and task.token == lease_token:
            at = moment_us(now_ms_override)
            op = after_failure(task, told, self.storage.clock() if at is None else at, random.random())  # noqa: S311
        outcome = await self._end(op, now_ms_override)
        if isinstance(outcome, Retried):
            return "RETRY", due_ms(outcome.due_us or await self._due_us(job_id, held["queue"]))
        if cast(Failed, outcome).state is State.DONE:
            raise LeaseLost("TOKEN_MISMATCH", f"job {job_id!r} was acked as done")
        return "FAILED", None

    async def release(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> None:
        """Hand a job back: it is the next of its lane, and the attempt is not spent. Raises `LeaseLost`."""
        await self._end(Release(**_held(queue, job_id, lease_token)), now_ms_override)

    async def _end(self, op: Held, now_ms_override: int) -> Outcome:
        """Carry out an operation of the job's holder."""
        try:
            return await self._one(op, now_ms_override)
        except (NotActive, TokenMismatch) as exc:
            # NOT_ACTIVE says that the token is the last one and yet no lease goes with it.
            code = "TOKEN_MISMATCH"
            if not isinstance(exc, TokenMismatch | TaskNotFound):
                task = await self.storage.get(op.id, op.queue)
                if task is not None and task.token == op.token:
                    code = "NOT_ACTIVE"
            raise LeaseLost(code, str(exc)) from exc

    async def _due_us(self, job_id: str, queue: str) -> int:
        task = await self.storage.get(job_id, queue)
        return self.storage.clock() if task is None else task.due_us

    # -- upkeep ------------------------------------------------------------------------------------

    async def promote_delayed(self, queue: str, max_promote: int = 1000, now_ms_override: int = 0) -> int:
        """Move jobs whose time has come to their lanes. Returns how many: 0 on stores that find due jobs by their time."""
        name, limit, at = queue_name(queue), whole(max_promote, "max_promote", 0), moment_us(now_ms_override)
        if self.storage.capabilities.due_order or not limit:
            return 0
        moved = await self.storage.promote(name, limit, at)
        log.debug("promoted %d delayed jobs of %s", moved, name, extra={"queue": name})
        return moved

    async def reap_expired(self, queue: str, max_reap: int = 1000, now_ms_override: int = 0) -> int:
        """Take back jobs whose lease ran out, to be retried or failed. Returns how many."""
        name, limit, at = queue_name(queue), whole(max_reap, "max_reap", 0), moment_us(now_ms_override)
        return await self.storage.reclaim(at, [name], limit=limit) if limit else 0

    async def repair(self) -> list[str]:
        """Recount group slots, readiness and counters. Returns what was wrong, one sentence each."""
        return await self.storage.check(repair=True)

    # -- steering ----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> str:
        """Stop new reserves. Returns `OK`."""
        await self.storage.pause(queue_name(queue))
        return "OK"

    async def resume(self, queue: str) -> int:
        """Allow reserves again. Returns 1 if the queue was paused, else 0."""
        return int(await self.storage.resume(queue_name(queue)))

    async def is_paused(self, queue: str) -> bool:
        """Whether `pause` holds for a queue."""
        return await self.storage.is_paused(queue_name(queue))

    async def set_group_limit(self, queue: str, gid: str, limit: int) -> None:
        """Set how many jobs of a group may run at once, from now on."""
        await self.storage.set_group_limit(queue_name(queue), gid.strip(), limit)

    async def retry_failed(self, queue: str, job_id: str) -> str:
        """Run a failed job again, with all its attempts. Returns `OK`. Codes: NO_JOB, NOT_FAILED."""
        return _ok((await self.retry_failed_batch(queue, [job_id]))[0])

    async def retry_failed_batch(self, queue: str, job_ids: Sequence[str]) -> list[BatchResult]:
        """`retry_failed` of up to 100 jobs, each for itself."""
        name = queue_name(queue)
        _check_batch(job_ids)
        answers = await self.storage.send([(Requeue(queue=name, id=i, reset_attempts=True),) for i in job_ids])
        return [_batch_result(i, answer) for i, answer in zip(job_ids, answers, strict=True)]

    async def remove_job(self, queue: str, job_id: str, lane: Lane) -> str:
        """Delete a job that is in a lane. Returns `OK`. Codes: BAD_LANE, NO_JOB, ACTIVE, LANE_MISMATCH."""
        return _ok((await self.remove_jobs_batch(queue, lane, [job_id]))[0])

    async def remove_jobs_batch(self, queue: str, lane: Lane, job_ids: Sequence[str]) -> list[BatchResult]:
        """`remove_job` of up to 100 jobs, each for itself."""
        name = queue_name(queue)
        if lane not in LANES:
            raise ContractError("BAD_LANE", f"lane {lane!r} is none of {', '.join(LANES)}")
        _check_batch(job_ids)
        # The look says which code fits. `if_state` keeps what moves on between the look and the call.
        tasks = await asyncio.gather(*[self.storage.get(i, name) for i in job_ids])
        wrong = [_wrong_lane(task, lane) for task in tasks]
        going = [i for i, code in zip(job_ids, wrong, strict=True) if code is None]
        answers = iter(await self.storage.send([(Remove(queue=name, id=i, if_state=LANES[lane]),) for i in going]))
        return [
            _batch_result(job_id, next(answers)) if code is None else BatchResult(job_id, "ERR", code)
            for job_id, code in zip(job_ids, wrong, strict=True)
        ]

    # -- fan-in ------------------------------------------------------------------------------------

    async def childs_init(self, key: str, expected: int, *, ttl_ms: int = FAN_IN_TTL_MS) -> None:
        """Wait for `expected` children to be acked under a key. The same again is fine. Codes: BAD_EXPECTED, ALREADY_INIT."""
        if isinstance(expected, bool) or not isinstance(expected, int) or expected < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ContractError("BAD_EXPECTED", f"expected is a whole number of at least 1, not {expected!r}")
        try:
            await self._one(OpenFanIn(key=key, expected=expected, ttl_us=whole(ttl_ms, "ttl_ms", 1) * 1000))
        except IdempotencyConflict as exc:
            raise ContractError("ALREADY_INIT", str(exc)) from exc

    async def child_ack(self, key: str, child_id: str) -> int:
        """Count a child once. Returns how many are left: 0 for the last one, however often it asks; -1 if nobody waits."""
        return cast(FannedIn, await self._one(CountFanIn(key=key, member=child_id))).left

    # -- consuming ---------------------------------------------------------------------------------

    async def consume(
        self,
        queue: str,
        handler: Handler,
        *,
        concurrency: int = 1,
        drain: bool = True,
        poll_interval: float = 0.25,
        stop: asyncio.Event | None = None,
        signals: bool = True,
        failed_ttl_ms: int | None = None,
    ) -> None:
        """Run the jobs of a queue, `concurrency` at a time, until SIGTERM, SIGINT, or `stop` is set.

        An async handler runs on this loop, any other in threads. Its exception fails the job. SIGTERM, `stop`, and with
        `drain` the first SIGINT, let running jobs end; a second SIGINT, without `drain` the first, and cancelling this
        call hand them back, which spends no attempt. `failed_ttl_ms` deletes jobs of this store that failed so long ago.
        """
        must_take_a_job(handler)
        handlers = OnLoop(handler)
        consumer = Consumer(
            self.storage,
            queue_name(queue),
            handlers,
            concurrency=concurrency,
            poll_interval=poll_interval,
            failed_ttl_ms=failed_ttl_ms,
        )
        watching = [] if stop is None else [asyncio.ensure_future(_then(stop.wait(), consumer.stop))]
        try:
            with caught_on_loop(Decision(drain, consumer.stop, consumer.abandon), wanted=signals):
                await consumer.run()
        finally:
            handlers.close()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    # -- sending -----------------------------------------------------------------------------------

    async def _one(self, op: Operation, now_ms_override: int = 0) -> Outcome:
        return (await self.storage.transact((op,), moment_us(now_ms_override)))[0]


def _held(queue: str, job_id: str, lease_token: str) -> dict[str, Any]:
    name = queue_name(queue)
    if not lease_token:
        raise ContractError("TOKEN_REQUIRED", f"job {job_id!r} is ended with the lease_token that reserve gave")
    return {"queue": name, "id": job_id, "token": lease_token, "late": True}


def _check_batch(job_ids: Sequence[str]) -> None:
    if isinstance(job_ids, str):
        raise TypeError("job_ids is a list of ids, not a text")
    if len(job_ids) > MAX_BATCH:
        raise ContractError("BATCH_TOO_LARGE", f"{len(job_ids)} jobs in a batch; the limit is {MAX_BATCH}")


def _wrong_lane(task: Record | None, lane: str) -> str | None:
    if task is None:
        return "NO_JOB"
    if task.state is State.RUNNING:
        return "ACTIVE"
    grouped = task.group is not None
    wrong = task.state is not LANES[lane] or (lane == "wait" and grouped) or (lane == "gwait" and not grouped)
    return "LANE_MISMATCH" if wrong else None


def _batch_result(job_id: str, answer: Result) -> BatchResult:
    if not isinstance(answer, Refused):
        return BatchResult(job_id, "OK")
    codes: dict[type[Refused], str] = {TaskNotFound: "NO_JOB", NotDead: "NOT_FAILED", NotWaiting: "LANE_MISMATCH"}
    code = codes.get(type(answer))
    if code is None:
        raise answer
    return BatchResult(job_id, "ERR", code)


_WHY = {
    "NO_JOB": "is not in this queue",
    "NOT_FAILED": "has not failed, so there is nothing to retry",
    "ACTIVE": "runs; it can be removed when it has ended",
    "LANE_MISMATCH": "is in another lane",
}


def _ok(result: BatchResult) -> str:
    if result.reason is not None:
        raise ContractError(result.reason, f"job {result.job_id!r} {_WHY[result.reason]}")
    return result.status


async def _then(waiting: Awaitable[object], call: Callable[[], None]) -> None:
    await waiting
    call()
