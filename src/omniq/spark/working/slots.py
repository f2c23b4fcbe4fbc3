"""A slot: an ordinary worker inside a Spark task, for one round. This is what runs on executors."""

from __future__ import annotations

import asyncio
import importlib
import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from omniq.config import Settings
from omniq.core import AsyncOmniQ
from omniq.errors import ConfigError, DriverClosed, StoreError
from omniq.racing import first
from omniq.spark.address import resolved
from omniq.worker import AsyncWorkerPool

LOOK_S = 0.5  # between two looks whether the driver still wants the slot
AWAY_S = 1.0  # before a store that failed is asked again

SCHEMA = "done long, failed long, retried long, again long, drained boolean"


class SlotPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The orders of every slot. `driver` is in the store's registry of workers for as long as slots are to work."""

    url: str
    driver: str
    queues: tuple[str, ...] | None
    modules: tuple[str, ...]
    concurrency: int
    batch: int
    lease: float | None
    drain: bool
    round_s: float
    settings: Settings


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one round; `again` is the number of times that Spark had to start it anew."""

    done: int = 0
    failed: int = 0
    retried: int = 0
    again: int = 0
    drained: bool = False


def rehearsal(plan: SlotPlan) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for `mapInArrow` that does all but take tasks, so that an executor's lack of a module costs no attempt."""
    return _one_row(lambda: asyncio.run(_rehearse(plan)))


def slot(plan: SlotPlan) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for `mapInArrow` that works for a round and yields its counts."""
    return _one_row(lambda: asyncio.run(_work(plan)))


def _one_row(work: Callable[[], Round]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        # The job has one row, so this is done once.
        for _ in batches:
            task = TaskContext.get()
            found = msgspec.structs.replace(work(), again=task.attemptNumber() if task is not None else 0)
            yield pyarrow.RecordBatch.from_pylist([msgspec.to_builtins(found)])

    return run


async def _rehearse(plan: SlotPlan) -> Round:
    async with _queue(plan) as oq:
        await _pool(oq, plan)
        await oq.workers()
    return Round()


async def _work(plan: SlotPlan) -> Round:
    async with _queue(plan) as oq:
        # The job may have waited for a core for so long that its driver has left meanwhile.
        if not await _is_wanted(oq, plan.driver):
            return Round()
        pool = await _pool(oq, plan)
        async with pool:
            drain = _until_drained(pool) if plan.drain else asyncio.Event().wait()
            unwanted, drained = await first(_until_unwanted(oq, plan.driver), drain, timeout=plan.round_s)
            # The round is over, and its tasks may take as long as they need, unless the driver leaves: then the pool's grace
            # time holds, as for any worker that is told to stop.
            if not unwanted and not drained:
                await first(_until_unwanted(oq, plan.driver), pool.finish())
        return Round(done=pool.done, failed=pool.failed, retried=pool.retried, drained=drained)


def _queue(plan: SlotPlan) -> AsyncOmniQ:
    if plan.settings.log_level is not None:
        logging.getLogger("omniq").setLevel(plan.settings.log_level)
    for module in plan.modules:
        try:
            importlib.import_module(module)
        except Exception as exc:
            raise ConfigError(
                f"the executor on {platform.node()} cannot import the module {module!r} ({type(exc).__name__}: {exc}): "
                "install it there, or send it with spark.submit.pyFiles or spark.archives"
            ) from exc
    return AsyncOmniQ.from_url(resolved(plan.url), settings=plan.settings)


async def _pool(oq: AsyncOmniQ, plan: SlotPlan) -> AsyncWorkerPool:
    allow = plan.modules or None
    return await oq.worker(plan.concurrency, queues=plan.queues, allow=allow, batch=plan.batch, lease=plan.lease)


async def _is_wanted(oq: AsyncOmniQ, driver: str) -> bool:
    return any(worker.worker == driver for worker in await oq.workers())


async def _until_unwanted(oq: AsyncOmniQ, driver: str) -> None:
    wanted = True
    while wanted:
        await asyncio.sleep(LOOK_S)
        with suppress(StoreError):  # the pool says so, and goes on when it is back
            wanted = await _is_wanted(oq, driver)


async def _until_drained(pool: AsyncWorkerPool) -> None:
    while True:
        try:
            await pool.drain()
            return
        except DriverClosed:
            raise
        except StoreError:
            await asyncio.sleep(AWAY_S)
