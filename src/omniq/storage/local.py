"""The common part of stores on this machine's disk: one writer per process, and locks that the kernel lets go."""

from __future__ import annotations

import abc
import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from omniq.errors import ConfigError, DriverClosed, StoreUnavailable
from omniq.models import State
from omniq.operations import Capabilities, Enqueue, OnTask
from omniq.storage import locks
from omniq.storage.base import Result, Transaction
from omniq.storage.filesystems import network_fs
from omniq.storage.ledger import Ledger
from omniq.storage.ledger_storage import LedgerStorage, Section
from omniq.storage.liveness import Renewals, WorkerLocks
from omniq.storage.writer import Writer

Durability = Literal["full", "process"]

S = TypeVar("S", bound=Section[Ledger])
T = TypeVar("T")


class LocalStorage(LedgerStorage[S]):
    """A store in a file or a folder, or in this process's memory for tests."""

    capabilities = Capabilities(durability="power", push_wait=True, kernel_liveness=True, restores=True)

    def __init__(
        self, path: str, locks: Path | None, durability: Durability, allow_network_fs: bool, options: dict[str, Any]
    ) -> None:
        super().__init__(**options)
        if durability not in ("full", "process"):
            raise ConfigError(f"durability {durability!r}: use 'full' (survives a power cut) or 'process' (survives kill -9)")
        self.path = path
        self.in_memory = locks is None
        self._durability: Durability = durability
        self._allow_network_fs = allow_network_fs
        self._opening = threading.Lock()  # threads that come first together shall make one writer
        self._writer: Writer[S] | None = None
        self._pid = os.getpid()  # a forked child has none of its parent's threads, so it makes a writer of its own
        self._closed = False
        self.waiters.on_waiting = self._listen
        self._locks = None if locks is None else WorkerLocks(locks)
        self._renewals = Renewals(self._lives)
        if self.in_memory:
            self.capabilities = Capabilities(durability="none", push_wait=True, restores=True)
        elif durability == "process":
            self.capabilities = msgspec.structs.replace(self.capabilities, durability="process")

    @property
    def place(self) -> str | None:
        return None if self.in_memory else self.path

    # -- what each of them does in its own way -----------------------------------------------------

    @abc.abstractmethod
    def _make_writer(self) -> Writer[S]:
        """Check the place and open the store; also in a forked child, which must not touch what its parent opened."""

    # -- life --------------------------------------------------------------------------------------

    async def _there(self, look: Callable[[], bool]) -> bool:
        """Whether `look` finds a store on the disk."""
        try:
            return await asyncio.to_thread(look)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            raise StoreUnavailable(f"{self.path}: {exc.strerror}") from exc

    def _refuse_network(self, danger: str) -> None:
        kind = None if self._allow_network_fs else network_fs(Path(self.path))
        if kind is not None:
            raise StoreUnavailable(
                f"{self.path} is on a network file system ({kind}), {danger}: "
                "use a local disk, or allow_network_fs=True at your own risk"
            )

    async def open(self) -> None:
        if self._writer is None or self._pid != os.getpid():
            await asyncio.to_thread(self._writing)

    def _writing(self) -> Writer[S]:
        # Every call comes by here, so the usual case takes no lock.
        writer = self._writer
        if writer is not None and self._pid == os.getpid() and not self._closed:
            return writer
        with self._opening:
            if self._closed:
                raise DriverClosed(f"the storage {self.path} was closed; make a new one")
            if self._writer is None or self._pid != os.getpid():
                if not self.in_memory:
                    # Refused here in words of our own, since some systems have no file locks.
                    locks.needed()
                self._writer = self._make_writer()
                self._pid = os.getpid()
            return self._writer

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A forked child has no writer to end; its parent's goes on.
        if self._pid == os.getpid():
            await self._close_rest()
            if self._writer is not None:
                await asyncio.to_thread(self._writer.close)
        self._writer = None
        self.waiters.notify_all()

    async def _close_rest(self) -> None:
        """Close what else is open besides the writer."""

    # -- changing ----------------------------------------------------------------------------------

    # A writer is told which tasks the transactions are about, so that it can load them together.

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        if self._writer is None:
            await self.open()
        work = self._running(transactions, now_us, repeat)
        return await self._writing().submit(work, _ids(transactions), sum(map(len, transactions)))

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        work = self._running(transactions, now_us, repeat)
        return self._writing().submit_blocking(work, _ids(transactions), sum(map(len, transactions)))

    async def _do(self, work: Callable[[S], T], weight: int = 1) -> T:
        if self._writer is None:
            await self.open()
        return await self._writing().submit(work, weight=weight)

    def _do_blocking(self, work: Callable[[S], T], weight: int = 1) -> T:
        return self._writing().submit_blocking(work, weight=weight)

    # -- waiting and liveness ----------------------------------------------------------------------

    def _listen(self) -> None:
        writer = self._writer
        if writer is not None and writer.bell is not None:
            writer.bell.listen(self.waiters.notify_all, self.waiters.anyone)

    async def hold_worker(self, worker: str) -> None:
        await self.open()
        if self._locks is not None:
            try:
                self._locks.hold(worker)
            except OSError as exc:
                raise self._writing().translate(exc) from exc

    async def release_worker(self, worker: str) -> None:
        if self._locks is not None:
            self._locks.release(worker)

    async def _busy(self, workers: Collection[str]) -> set[str]:
        """Returns those of the workers that hold a task."""
        running = await self._look(lambda ledger: ledger.in_state(State.RUNNING, None))
        return {row.worker for row in running if row.worker is not None}.intersection(workers)

    def _lives(self, worker: str) -> bool:
        return self._locks is not None and self._locks.held(worker)

    async def lost_workers(self) -> list[str]:
        gone = self._locks.lost() if self._locks is not None else []
        if self._locks is None or not gone:
            return []
        holding = await self._busy(gone)
        for worker in gone:
            # A dead worker without tasks needs nothing more. The others are named until their tasks have been taken back.
            if worker not in holding:
                self._locks.forget(worker)
        return [worker for worker in gone if worker in holding]


def _ids(transactions: Sequence[Transaction]) -> list[str]:
    return [op.id for t in transactions for op in t if isinstance(op, Enqueue | OnTask)]
