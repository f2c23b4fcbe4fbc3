"""`ContractClient`: the blocking twin of `AsyncContractClient`."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from omniq.contract.client import AckFailResult, AsyncContractClient
from omniq.contract.consumer import Consumer
from omniq.contract.handlers import Abandoned, Handler, InCaller, InThreads, must_take_a_job
from omniq.contract.signals import Decision, caught
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
from omniq.errors import DriverClosed
from omniq.models import Record
from omniq.operations import Operation
from omniq.portal import Portal
from omniq.runnable import Runnable
from omniq.storage.base import BaseStorage, Result

T = TypeVar("T")

LOOK_UP_S = 0.05  # how often an idle caller looks at `stop`, and hears of a signal that came just before it began to wait


class _InThread(AsyncContractClient):
    """Its calls of a single job need no event loop: the thread of the caller carries them out to their end."""

    def __init__(self, storage: BaseStorage, portal: Portal) -> None:
        super().__init__(storage)
        self._portal = portal

    async def _apply(self, transactions: Sequence[Sequence[Operation]], at: int | None, repeat: bool) -> list[Result]:
        return self.storage.apply_blocking(transactions, at, repeat=repeat)

    async def _get(self, job_id: str, queue: str) -> Record | None:
        return self._portal.call(self.storage.get(job_id, queue))

    async def _locate(self, job_id: str) -> str | None:
        return self._portal.call(self.storage.locate(job_id))

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no loop


class ContractClient:
    """The same calls as on `AsyncContractClient`, for scripts and threads."""

    queue_base = staticmethod(queue_base)
    now_ms = staticmethod(now_ms)
    ulid = staticmethod(ulid)

    def __init__(self, storage: BaseStorage) -> None:
        self.storage = storage
        self._async = AsyncContractClient(storage)
        self._portal = Portal()
        self._here = _InThread(storage, self._portal)
        self._opened = self._closed = False

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """See `AsyncContractClient.from_url`."""
        return cls(BaseStorage.from_url(url, **options))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise DriverClosed("this ContractClient was closed; make a new one")
        return self._portal.call(coroutine)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Carry out a call of `_here`, which waits for nothing but the store."""
        if not self._opened:
            try:
                self._call(self.storage.open())
            except BaseException:
                coroutine.close()
                raise
            self._opened = True
        if self._closed:
            coroutine.close()
            raise DriverClosed("this ContractClient was closed; make a new one")
        try:
            coroutine.send(None)
        except StopIteration as end:
            return cast(T, end.value)
        coroutine.close()
        raise RuntimeError(f"{coroutine} waits for an event loop, and there is none")

    def close(self) -> None:
        if not self._closed:
            self._call(self._async.close())
            self._closed = True
            self._portal.close()

    def __enter__(self) -> Self:
        self._call(self.storage.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

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
        """See `AsyncContractClient.publish`."""
        return self._run(
            self._here.publish(
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
        """See `AsyncContractClient.publish_many`."""
        return self._run(self._here.publish_many(queue, payloads, **options))

    # -- a lease and its end -----------------------------------------------------------------------

    def reserve(self, queue: str, now_ms_override: int = 0) -> Paused | Job | None:
        """See `AsyncContractClient.reserve`."""
        return self._run(self._here.reserve(queue, now_ms_override))

    def heartbeat(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> int:
        """See `AsyncContractClient.heartbeat`."""
        return self._run(self._here.heartbeat(queue, job_id, lease_token, now_ms_override))

    def ack_success(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> None:
        """See `AsyncContractClient.ack_success`."""
        self._run(self._here.ack_success(queue, job_id, lease_token, now_ms_override))

    def ack_fail(
        self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0, error: str | None = None
    ) -> AckFailResult:
        """See `AsyncContractClient.ack_fail`."""
        return self._run(self._here.ack_fail(queue, job_id, lease_token, now_ms_override, error))

    def release(self, queue: str, job_id: str, lease_token: str, now_ms_override: int = 0) -> None:
        """See `AsyncContractClient.release`."""
        self._run(self._here.release(queue, job_id, lease_token, now_ms_override))

    # -- upkeep ------------------------------------------------------------------------------------

    def promote_delayed(self, queue: str, max_promote: int = 1000, now_ms_override: int = 0) -> int:
        """See `AsyncContractClient.promote_delayed`."""
        return self._call(self._async.promote_delayed(queue, max_promote, now_ms_override))

    def reap_expired(self, queue: str, max_reap: int = 1000, now_ms_override: int = 0) -> int:
        """See `AsyncContractClient.reap_expired`."""
        return self._call(self._async.reap_expired(queue, max_reap, now_ms_override))

    def repair(self) -> list[str]:
        """See `AsyncContractClient.repair`."""
        return self._call(self._async.repair())

    # -- steering ----------------------------------------------------------------------------------

    def pause(self, queue: str) -> str:
        """Stop new reserves; `OK`."""
        return self._call(self._async.pause(queue))

    def resume(self, queue: str) -> int:
        """1 if the queue was paused, else 0."""
        return self._call(self._async.resume(queue))

    def is_paused(self, queue: str) -> bool:
        return self._call(self._async.is_paused(queue))

    def set_group_limit(self, queue: str, gid: str, limit: int) -> None:
        """How many jobs of a group may run at once, from now on."""
        self._call(self._async.set_group_limit(queue, gid, limit))

    def retry_failed(self, queue: str, job_id: str) -> str:
        """See `AsyncContractClient.retry_failed`."""
        return self._call(self._async.retry_failed(queue, job_id))

    def retry_failed_batch(self, queue: str, job_ids: Sequence[str]) -> list[BatchResult]:
        """See `AsyncContractClient.retry_failed_batch`."""
        return self._call(self._async.retry_failed_batch(queue, job_ids))

    def remove_job(self, queue: str, job_id: str, lane: Lane) -> str:
        """See `AsyncContractClient.remove_job`."""
        return self._call(self._async.remove_job(queue, job_id, lane))

    def remove_jobs_batch(self, queue: str, lane: Lane, job_ids: Sequence[str]) -> list[BatchResult]:
        """See `AsyncContractClient.remove_jobs_batch`."""
        return self._call(self._async.remove_jobs_batch(queue, lane, job_ids))

    # -- fan-in ------------------------------------------------------------------------------------

    def childs_init(self, key: str, expected: int, *, ttl_ms: int = FAN_IN_TTL_MS) -> None:
        """See `AsyncContractClient.childs_init`."""
        self._run(self._here.childs_init(key, expected, ttl_ms=ttl_ms))

    def child_ack(self, key: str, child_id: str) -> int:
        """See `AsyncContractClient.child_ack`."""
        return self._run(self._here.child_ack(key, child_id))

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
        """Run the jobs of a queue until SIGTERM, SIGINT, or `stop` is set; see `AsyncContractClient.consume`.

        One job at a time runs in this thread, several run in threads. Signals reach a consumer in the main thread only.
        """
        must_take_a_job(handler)
        if Runnable(handler).is_async or inspect.iscoroutinefunction(handler):
            raise TypeError("an async handler needs an AsyncContractClient")
        if self._closed:
            raise DriverClosed("this ContractClient was closed; make a new one")
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
            if here.busy:
                raise Abandoned

        try:
            with caught(Decision(drain, lambda: tell(consumer.stop), abandon), wanted=signals):
                running = self._portal.start(consumer.run())
                running.add_done_callback(lambda _: here.close())
                self._serve(consumer, here, stop)
            running.result()
        finally:
            if there is not None:
                there.close()

    def _serve(self, consumer: Consumer, here: InCaller, stop: threading.Event | None) -> None:
        """In the caller's thread, until the consumer has ended: run what it hands over, and hear of signals and `stop`."""
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
