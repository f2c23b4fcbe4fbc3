"""`ContractClient`: the blocking twin of `AsyncContractClient`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Self, Unpack

from omniq.blocking import Blocking
from omniq.contract.client import AckFailResult, AsyncContractClient
from omniq.contract.consumer import Consumer
from omniq.contract.handlers import Abandoned, Handler, InCaller, InThreads, must_take_a_job
from omniq.contract.signals import Decision
from omniq.contract.words import (
    BACKOFF_MS,
    FAN_IN_TTL_MS,
    MAX_ATTEMPTS,
    TIMEOUT_MS,
    BatchResult,
    Job,
    JobOptions,
    Lane,
    Paused,
    now_ms,
    queue_base,
    queue_name,
    ulid,
)
from omniq.functions import Runnable
from omniq.signals import caught
from omniq.storage.base import BaseStorage

LOOK_UP_S = 0.05  # how often an idle caller looks at `stop`, and hears of a signal that came just before it began to wait


class ContractClient(Blocking):
    """The same calls as on `AsyncContractClient`, for scripts and threads."""

    queue_base = staticmethod(queue_base)
    now_ms = staticmethod(now_ms)
    ulid = staticmethod(ulid)

    def __init__(self, storage: BaseStorage) -> None:
        super().__init__(storage)
        self._async = AsyncContractClient(self._in_thread)
        self._on_loop = AsyncContractClient(storage)  # for calls that look for many jobs at once

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """A client of the store that a URL names: `redis://…`, `sqlite:///path.db`, `memory://`."""
        return cls(BaseStorage.from_url(url, **options))

    # -- in ----------------------------------------------------------------------------------------

    def publish(
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
        return self._call(
            self._async.publish(
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
        )

    def publish_many(self, queue: str, payloads: Iterable[object], **options: Unpack[JobOptions]) -> list[str]:
        """Store a job per payload, in one transaction per 1,000. Returns their ids. Writes nothing if one payload is wrong."""
        return self._call(self._async.publish_many(queue, payloads, **options))

    # -- a lease and its end -----------------------------------------------------------------------

    def reserve(self, queue: str, now_ms_override: int = 0) -> Paused | Job | None:
        """Lease the next job. None if there is none, `Paused` if the queue is paused."""
        return self._call(self._async.reserve(queue, now_ms_override))

    def heartbeat(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> int:
        """Prolong the lease to the job's timeout from now, and return its new end. Raises `LeaseLost`."""
        return self._call(self._async.heartbeat(queue, job_id, lease_token, now_ms_override))

    def ack_success(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> None:
        """The job is done. Twice with the same token is fine. Raises `LeaseLost`."""
        self._call(self._async.ack_success(queue, job_id, lease_token, now_ms_override))

    def ack_fail(
        self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0, error: str | None = None
    ) -> AckFailResult:
        """The run failed: `("RETRY", due_ms)`, or `("FAILED", None)` after the last attempt. Raises `LeaseLost`."""
        return self._call(self._async.ack_fail(queue, job_id, lease_token, now_ms_override, error))

    def release(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> None:
        """Hand a job back: it is the next of its lane, and the attempt is not spent. Raises `LeaseLost`."""
        self._call(self._async.release(queue, job_id, lease_token, now_ms_override))

    # -- upkeep ------------------------------------------------------------------------------------

    def promote_delayed(self, queue: str, max_promote: int = 1000, now_ms_override: int = 0) -> int:
        """Move jobs whose time has come to their lanes. Returns how many: 0 on stores that find due jobs by their time."""
        return self._call(self._async.promote_delayed(queue, max_promote, now_ms_override))

    def reap_expired(self, queue: str, max_reap: int = 1000, now_ms_override: int = 0) -> int:
        """Take back jobs whose lease ran out, to be retried or failed. Returns how many."""
        return self._call(self._async.reap_expired(queue, max_reap, now_ms_override))

    def repair(self) -> list[str]:
        """Recount group slots, readiness and counters. Returns what was wrong, one sentence each."""
        return self._call(self._async.repair())

    # -- steering ----------------------------------------------------------------------------------

    def pause(self, queue: str) -> str:
        """Stop new reserves. Returns `OK`."""
        return self._call(self._async.pause(queue))

    def resume(self, queue: str) -> int:
        """Allow reserves again. Returns 1 if the queue was paused, else 0."""
        return self._call(self._async.resume(queue))

    def is_paused(self, queue: str) -> bool:
        """Whether `pause` holds for a queue."""
        return self._call(self._async.is_paused(queue))

    def set_group_limit(self, queue: str, gid: str, limit: int) -> None:
        """Set how many jobs of a group may run at once, from now on."""
        self._call(self._async.set_group_limit(queue, gid, limit))

    def retry_failed(self, queue: str, job_id: str) -> str:
        """Run a failed job again, with all its attempts. Returns `OK`. Codes: NO_JOB, NOT_FAILED."""
        return self._call(self._async.retry_failed(queue, job_id))

    def retry_failed_batch(self, queue: str, job_ids: Sequence[str]) -> list[BatchResult]:
        """`retry_failed` of up to 100 jobs, each for itself."""
        return self._call(self._async.retry_failed_batch(queue, job_ids))

    def remove_job(self, queue: str, job_id: str, lane: Lane) -> str:
        """Delete a job that is in a lane. Returns `OK`. Codes: BAD_LANE, NO_JOB, ACTIVE, LANE_MISMATCH."""
        return self._call_on_loop(self._on_loop.remove_job(queue, job_id, lane))

    def remove_jobs_batch(self, queue: str, lane: Lane, job_ids: Sequence[str]) -> list[BatchResult]:
        """`remove_job` of up to 100 jobs, each for itself."""
        return self._call_on_loop(self._on_loop.remove_jobs_batch(queue, lane, job_ids))

    # -- fan-in ------------------------------------------------------------------------------------

    def childs_init(self, key: str, expected: int, *, ttl_ms: int = FAN_IN_TTL_MS) -> None:
        """Wait for `expected` children to be acked under a key. The same again is fine. Codes: BAD_EXPECTED, ALREADY_INIT."""
        self._call(self._async.childs_init(key, expected, ttl_ms=ttl_ms))

    def child_ack(self, key: str, child_id: str) -> int:
        """Count a child once. Returns how many are left: 0 for the last one, however often it asks; -1 if nobody waits."""
        return self._call(self._async.child_ack(key, child_id))

    # -- consuming ---------------------------------------------------------------------------------

    def consume(
        self,
        queue: str,
        handler: Handler,
        *,
        concurrency: int = 1,
        drain: bool = True,
        poll_interval: float = 0.25,
        stop: threading.Event | None = None,
        signals: bool = True,
        failed_ttl_ms: int | None = None,
    ) -> None:
        """Run the jobs of a queue, `concurrency` at a time, until SIGTERM, SIGINT, or `stop` is set.

        One job at a time runs in this thread, several run in threads. Its exception fails the job. SIGTERM, `stop`, and with
        `drain` the first SIGINT, let running jobs end; a second SIGINT, and without `drain` the first, hand them back, which
        spends no attempt. Signals reach a consumer in the main thread only. `failed_ttl_ms` deletes jobs of this store that
        failed so long ago.
        """
        must_take_a_job(handler)
        if Runnable(handler).is_async or inspect.iscoroutinefunction(handler):
            raise TypeError("an async handler needs an AsyncContractClient")
        if self._closed:
            self._refuse()
        here = InCaller(handler)
        there = None if concurrency == 1 else InThreads(handler)
        consumer = Consumer(
            self.storage,
            queue_name(queue),
            there or here,
            concurrency=concurrency,
            poll_interval=poll_interval,
            failed_ttl_ms=failed_ttl_ms,
        )
        tell = self._portal.soon

        def abandon() -> None:
            tell(consumer.abandon)
            # Raised by the signal, in the middle of the handler: nothing else ends a function that runs in this thread.
            if here.busy:
                raise Abandoned

        try:
            with caught(Decision(drain, lambda: tell(consumer.stop), abandon), wanted=signals):
                running = self._portal.start(consumer.run())
                # However the consumer ends, this thread must not go on waiting for jobs of it.
                running.add_done_callback(lambda _: here.close())
                self._serve(consumer, here, stop)
            running.result()
        finally:
            if there is not None:
                there.close()

    def _serve(self, consumer: Consumer, here: InCaller, stop: threading.Event | None) -> None:
        """In the caller's thread, until the consumer has ended: run the jobs that it hands over, hear of signals and `stop`."""
        while True:
            try:
                if not here.serve(LOOK_UP_S):
                    return
                if stop is not None and stop.is_set():
                    stop = None
                    self._portal.soon(consumer.stop)
            except Abandoned:  # the consumer hands the job back
                continue
            except BaseException:  # such as a KeyboardInterrupt that nobody caught: leave in good order all the same
                self._portal.soon(consumer.abandon)
                here.discard()
                raise
