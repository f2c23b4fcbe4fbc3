"""A storage that fails on demand: before it acts, after it acted, or late."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from omniq.errors import OutcomeUnknown, StoreUnavailable
from omniq.models import Record, StoredResult
from omniq.operations import (
    KEY_TTL_US,
    Capabilities,
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    Page,
    QueueCounts,
    Retention,
    RunInfo,
    Saved,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.storage.base import BaseStorage, Result, Transaction

Fault = Literal["unavailable", "unknown", "delay", "ok"]


class FaultyStorage(BaseStorage):
    """Wraps another storage. Faults strike `apply` and `apply_blocking`; every other call goes straight through.

    `unavailable` raises `StoreUnavailable` and does nothing. `unknown` carries the call out and then raises
    `OutcomeUnknown`, as when the answer got lost on its way. `delay` waits `delay_s` first. The faults of `script` come
    first, one per call; then each call fails with the probabilities given, drawn from a generator seeded with `seed`.
    `done` counts what happened, `ok` included.
    """

    def __init__(
        self,
        inner: BaseStorage,
        script: Iterable[Fault] = (),
        *,
        unavailable: float = 0.0,
        unknown: float = 0.0,
        delay: float = 0.0,
        delay_s: float = 0.01,
        seed: int = 0,
    ) -> None:
        super().__init__(clock=inner.clock, serializer=inner.serializer, events=inner.events_on)
        if min(unavailable, unknown, delay) < 0 or unavailable + unknown + delay > 1:
            raise ValueError("the probabilities of the faults must be positive and add up to 1 at most")
        self.inner = inner
        self.waiters = inner.waiters
        self.capabilities: Capabilities = inner.capabilities
        self.script: list[Fault] = list(script)
        self.delay_s = delay_s
        self.done: Counter[Fault] = Counter()
        self._odds: dict[Fault, float] = {"unavailable": unavailable, "unknown": unknown, "delay": delay}
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose

    @property
    def scan_limit(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.scan_limit

    @scan_limit.setter
    def scan_limit(self, rows: int) -> None:
        self.inner.scan_limit = rows

    def strike(self, *faults: Fault) -> None:
        """Add faults for the next calls of `apply`, one per call."""
        self.script.extend(faults)

    def _next(self) -> Fault:
        fault = self.script.pop(0) if self.script else self._draw()
        self.done[fault] += 1
        return fault

    def _draw(self) -> Fault:
        left = self._random.random()
        for fault, odds in self._odds.items():
            left -= odds
            if left < 0:
                return fault
        return "ok"

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        fault = self._next()
        if fault == "unavailable":
            raise StoreUnavailable("the faulty storage was told to be unavailable; nothing happened")
        if fault == "delay":
            await asyncio.sleep(self.delay_s)
        answers = await self.inner.apply(transactions, now_us, repeat=repeat)
        if fault == "unknown":
            raise OutcomeUnknown("the faulty storage was told to lose its answer")
        return answers

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        fault = self._next()
        if fault == "unavailable":
            raise StoreUnavailable("the faulty storage was told to be unavailable; nothing happened")
        if fault == "delay":
            time.sleep(self.delay_s)
        answers = self.inner.apply_blocking(transactions, now_us, repeat=repeat)
        if fault == "unknown":
            raise OutcomeUnknown("the faulty storage was told to lose its answer")
        return answers

    # -- straight through --------------------------------------------------------------------------

    async def exists(self) -> bool:
        return await self.inner.exists()

    async def backup(self, path: str | os.PathLike[str]) -> None:
        await self.inner.backup(path)

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        return await self.inner.restore(tasks, key_ttl_us)

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        await self.inner.restore_events(rows)

    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        return await self.inner.run(queue, run_id)

    async def task_shards(self) -> list[Shard]:
        return await self.inner.task_shards()

    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        return await self.inner.task_page(shard, after, upto, limit)

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def allocate_ids(self, n: int) -> int:
        return await self.inner.allocate_ids(n)

    @property
    def changes(self) -> int:
        return self.inner.changes

    async def wait(
        self,
        queues: Iterable[str] = (),
        tasks: Iterable[str] = (),
        events: bool = False,
        timeout: float | None = None,
        *,
        after: int | None = None,
    ) -> None:
        await self.inner.wait(queues, tasks, events, timeout, after=after)

    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        return await self.inner.expired(now_us, limit, queues, lost_workers)

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        return await self.inner.sweep(now_us, limit)

    async def purge(self, retention: Retention, now_us: int | None = None, limit: int = 1000) -> int:
        return await self.inner.purge(retention, now_us, limit)

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        return await self.inner.promote(queue, limit, now_us)

    async def hold_worker(self, worker: str) -> None:
        await self.inner.hold_worker(worker)

    async def release_worker(self, worker: str) -> None:
        await self.inner.release_worker(worker)

    async def lost_workers(self) -> list[str]:
        return await self.inner.lost_workers()

    async def check(self, repair: bool = False) -> list[str]:
        return await self.inner.check(repair)

    async def get(self, id: str, queue: str | None = None) -> Record | None:
        return await self.inner.get(id, queue)

    async def locate(self, id: str) -> str | None:
        return await self.inner.locate(id)

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        return await self.inner.results(ids)

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page:
        return await self.inner.find(filter, cursor, limit, newest_first)

    async def counts(self, now_us: int | None = None) -> list[QueueCounts]:
        return await self.inner.counts(now_us)

    async def queues(self, fed: bool = False) -> list[str]:
        return await self.inner.queues(fed)

    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        return await self.inner.groups(queue, cursor, limit)

    async def workers(self, now_us: int | None = None) -> list[WorkerInfo]:
        return await self.inner.workers(now_us)

    async def info(self) -> StoreInfo:
        return await self.inner.info()

    async def event_shards(self) -> list[Shard]:
        return await self.inner.event_shards()

    async def events(self, shard: str = "", after: int = 0, limit: int = 1000, upto: int | None = None) -> list[EventRow]:
        return await self.inner.events(shard, after, limit, upto)

    async def events_of(self, id: str) -> list[EventRow]:
        return await self.inner.events_of(id)

    async def pause(self, queue: str) -> None:
        await self.inner.pause(queue)

    async def resume(self, queue: str) -> bool:
        return await self.inner.resume(queue)

    async def is_paused(self, queue: str) -> bool:
        return await self.inner.is_paused(queue)

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        await self.inner.set_group_limit(queue, group, limit)

    async def _purge_results(self, older_than_us: int) -> int:
        return await self.inner._purge_results(older_than_us)  # pyright: ignore[reportPrivateUsage]
