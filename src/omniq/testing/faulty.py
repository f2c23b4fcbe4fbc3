"""A storage that fails on demand: it is unavailable, loses an answer, or answers late."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

from omniq.errors import OutcomeUnknown, StoreUnavailable
from omniq.operations import Capabilities
from omniq.storage.base import BaseStorage, Result, Transaction

Call = TypeVar("Call", bound=Callable[..., Any])
Fault = Literal["unavailable", "unknown", "delay", "ok"]


def _through(method: Call) -> Call:
    """Returns a method that passes the call on to the storage inside."""

    @functools.wraps(method, updated=())  # with the method's `__dict__` this one would count as abstract too
    async def call(self: FaultyStorage, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.inner, method.__name__)(*args, **kwargs)

    return cast(Call, call)


def _answer(fault: Fault, answers: list[Result]) -> list[Result]:
    if fault == "unknown":
        raise OutcomeUnknown("the faulty storage was told to lose its answer")
    return answers


class FaultyStorage(BaseStorage):
    """Wraps another storage. Faults strike `apply` and `apply_blocking`; every other call goes straight through.

    `unavailable` raises `StoreUnavailable` and does nothing. `unknown` carries the call out and then raises
    `OutcomeUnknown`, as if the answer had been lost on its way. `delay` waits for `delay_s` first. The faults of `script`
    come first, one per call. After them each call fails with the given probabilities, drawn from a generator with the seed
    `seed`; `odds` has these probabilities and may be changed at any time. `done` counts the calls by their faults; `ok` is a
    call without fault.
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
        self.waiters = inner.waiters  # the storage inside wakes who waits on this one
        self.capabilities: Capabilities = inner.capabilities
        self.script: list[Fault] = list(script)
        self.delay_s = delay_s
        self.done: Counter[Fault] = Counter()
        self.odds: dict[Fault, float] = {"unavailable": unavailable, "unknown": unknown, "delay": delay}
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose

    # Passed on, because it is the storage inside that reads pages.
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
        if fault == "unavailable":
            raise StoreUnavailable("the faulty storage was told to be unavailable; nothing happened")
        return fault

    def _draw(self) -> Fault:
        left = self._random.random()
        for fault, odds in self.odds.items():
            left -= odds
            if left < 0:
                return fault
        return "ok"

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        fault = self._next()
        if fault == "delay":
            await asyncio.sleep(self.delay_s)
        return _answer(fault, await self.inner.apply(transactions, now_us, repeat=repeat))

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        fault = self._next()
        if fault == "delay":
            time.sleep(self.delay_s)
        return _answer(fault, self.inner.apply_blocking(transactions, now_us, repeat=repeat))

    # -- straight through --------------------------------------------------------------------------

    # By name and not by `__getattr__`: `BaseStorage` defines these calls already, so that `__getattr__` would never be asked.

    @property
    def changes(self) -> int:
        return self.inner.changes

    exists = _through(BaseStorage.exists)
    open = _through(BaseStorage.open)
    close = _through(BaseStorage.close)
    allocate_ids = _through(BaseStorage.allocate_ids)
    wait = _through(BaseStorage.wait)
    expired = _through(BaseStorage.expired)
    sweep = _through(BaseStorage.sweep)
    purge = _through(BaseStorage.purge)
    promote = _through(BaseStorage.promote)
    check = _through(BaseStorage.check)
    backup = _through(BaseStorage.backup)
    restore = _through(BaseStorage.restore)
    restore_events = _through(BaseStorage.restore_events)
    hold_worker = _through(BaseStorage.hold_worker)
    release_worker = _through(BaseStorage.release_worker)
    lost_workers = _through(BaseStorage.lost_workers)
    get = _through(BaseStorage.get)
    locate = _through(BaseStorage.locate)
    results = _through(BaseStorage.results)
    find = _through(BaseStorage.find)
    counts = _through(BaseStorage.counts)
    queues = _through(BaseStorage.queues)
    groups = _through(BaseStorage.groups)
    workers = _through(BaseStorage.workers)
    info = _through(BaseStorage.info)
    run = _through(BaseStorage.run)
    task_shards = _through(BaseStorage.task_shards)
    task_page = _through(BaseStorage.task_page)
    event_shards = _through(BaseStorage.event_shards)
    events = _through(BaseStorage.events)
    events_of = _through(BaseStorage.events_of)
    pause = _through(BaseStorage.pause)
    resume = _through(BaseStorage.resume)
    is_paused = _through(BaseStorage.is_paused)
    set_group_limit = _through(BaseStorage.set_group_limit)
    # Only because it is abstract: `purge` goes whole to the storage inside.
    _purge = _through(BaseStorage._purge)  # pyright: ignore[reportPrivateUsage]
    _purge_results = _through(BaseStorage._purge_results)  # pyright: ignore[reportPrivateUsage]
