"""The whole contract in this process's memory: for tests, and for scripts whose tasks may end with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from omniq.errors import DriverClosed
from omniq.models import new_id, now_us
from omniq.operations import Capabilities, StoreInfo
from omniq.storage.base import Result, Transaction
from omniq.storage.ledger_storage import LedgerStorage, Section
from omniq.storage.table_ledger import TableLedger
from omniq.storage.url import options_of

T = TypeVar("T")


class MemoryStorage(LedgerStorage[Section[TableLedger]]):
    """Everything in this process; gone with it."""

    capabilities = Capabilities(durability="none", push_wait=True, restores=True)
    default_url = "memory://"

    def __init__(self, url: str = default_url, *, clock: Callable[[], int] = now_us, **options: Any) -> None:
        super().__init__(clock=clock, **options)
        options_of(url)
        self._store_id = new_id()
        self._lock = threading.RLock()
        self._closed = False
        self._ledger = TableLedger(self.events_on)

    async def open(self) -> None:
        self._do_blocking(lambda section: None)

    async def close(self) -> None:
        self._closed = True
        self.waiters.notify_all()

    def _do_blocking(self, work: Callable[[Section[TableLedger]], T], weight: int = 1) -> T:
        with self._lock:
            if self._closed:
                raise DriverClosed("this MemoryStorage was closed; make a new one")
            section = Section(self._ledger)
            answer = work(section)
        self._wake(section.machine)
        return answer

    # Nothing here waits for a disk, so no call needs a thread of its own.

    async def _do(self, work: Callable[[Section[TableLedger]], T], weight: int = 1) -> T:
        return self._do_blocking(work, weight)

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        return self._apply_blocking(transactions, now_us, repeat)

    async def info(self) -> StoreInfo:
        await self.open()
        return StoreInfo(store_id=self._store_id, format=1, url=self.default_url, capabilities=self.capabilities)
