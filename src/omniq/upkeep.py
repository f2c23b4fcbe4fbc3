"""Every worker's share of the upkeep: take back lost leases, finish long cascades, delete what is past its time."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from omniq.errors import DriverClosed, StoreError
from omniq.operations import Retention
from omniq.racing import woken
from omniq.storage.base import BaseStorage

log = logging.getLogger("omniq.worker")

# Tasks of a worker that died on this machine run again within about a second.
REAP_S = 0.5
PURGE_S = 60.0
# Deleted in one transaction, behind which others wait that want to write.
PURGE_BATCH = 1000
MAX_PAUSE_S = 5.0


class Upkeep:
    """Runs until `end` is set. The pauses vary at random, so that many workers do not do it at once."""

    def __init__(self, storage: BaseStorage, retention: Retention, worker: str) -> None:
        self._storage, self._retention, self._worker = storage, retention, worker
        self.end = asyncio.Event()

    async def run(self) -> None:
        purge_at = time.monotonic() + PURGE_S * random.random()  # noqa: S311
        failures = 0
        while not self.end.is_set():
            try:
                await self._reap()
                if time.monotonic() >= purge_at:
                    purge_at = time.monotonic() + PURGE_S * random.uniform(0.8, 1.2)  # noqa: S311
                    await self._purge()
                failures = 0
            except DriverClosed:
                return
            except StoreError as exc:
                failures += 1
                log.warning("upkeep of the store failed, it will be tried again: %s", exc, extra={"worker": self._worker})
            except Exception:  # a record that nobody foresaw must not end what brings lost tasks back
                failures += 1
                log.exception("upkeep of the store failed, it will be tried again", extra={"worker": self._worker})
            await woken(self.end, min(REAP_S * 2**failures, MAX_PAUSE_S) * random.uniform(0.8, 1.2))  # noqa: S311

    async def _reap(self) -> None:
        lost = await self._storage.lost_workers()
        taken = await self._storage.reclaim(lost_workers=lost)
        if taken:
            log.warning("took back %d tasks of lost workers", taken, extra={"worker": self._worker})
        await self._storage.sweep()

    async def _purge(self) -> None:
        while await self._storage.purge(self._retention, limit=PURGE_BATCH) >= PURGE_BATCH and not self.end.is_set():
            await woken(self.end, 0.01)  # let others write
