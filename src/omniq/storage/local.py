"""What the stores on this machine's disk share: one writer per process, and locks that the kernel lets go."""

from __future__ import annotations

import abc
import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from omniq.errors import ConfigError, DriverClosed, StoreUnavailable
from omniq.models import MAX_AT_ONCE, check_count, check_queue, check_text
from omniq.operations import KEY_TTL_US, Capabilities, Enqueue, EventRow, OnTask, Saved
from omniq.storage import locks
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.filesystems import network_fs
from omniq.storage.ledger import Ledger
from omniq.storage.liveness import WorkerLocks
from omniq.storage.machine.machine import Machine
from omniq.storage.machine.restoring import restore_events, restore_tasks
from omniq.storage.renewals import Renewals
from omniq.storage.writer import Writer

Durability = Literal["full", "process"]
DUE_CAP = 10_000  # scheduled tasks that are due are counted up to here


class Section(Protocol):
    """What a piece of work for the writer finds: the tables, under the store's lock."""

    @property
    def machine(self) -> Machine: ...
    @property
    def ledger(self) -> Ledger: ...


S = TypeVar("S", bound=Section)


class LocalStorage(BaseStorage, abc.ABC, Generic[S]):
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
        self._opening = threading.Lock()
        self._writer: Writer[S] | None = None
        self._pid = os.getpid()
        self._closed = False
        self.waiters.on_waiting = self._listen
        self._locks = None if locks is None else WorkerLocks(locks)
        self._renewals = Renewals(self._lives)
        if self.in_memory:
            self.capabilities = Capabilities(durability="none", push_wait=True, restores=True)
        elif durability == "process":
            self.capabilities = msgspec.structs.replace(self.capabilities, durability="process")

    # -- what each of them does in its own way -----------------------------------------------------

    @abc.abstractmethod
    def _make_writer(self) -> Writer[S]:
        """Check the place and open the store; also in a forked child, which must not touch what its parent opened."""

    @abc.abstractmethod
    async def _busy(self, workers: Collection[str]) -> set[str]:
        """Those of the workers that hold a task."""

    # -- life --------------------------------------------------------------------------------------

    async def _there(self, look: Callable[[], bool]) -> bool:
        """Whether there is a store, by a look at the disk."""
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
        writer = self._writer
        if writer is not None and self._pid == os.getpid() and not self._closed:
            return writer
        with self._opening:
            if self._closed:
                raise DriverClosed(f"the storage {self.path} was closed; make a new one")
            if self._writer is None or self._pid != os.getpid():
                if not self.in_memory:
                    locks.needed()
                self._writer = self._make_writer()
                self._pid = os.getpid()
            return self._writer

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            await self._close_rest()
            if self._writer is not None:
                await asyncio.to_thread(self._writer.close)
        self._writer = None
        self.waiters.notify_all()

    async def _close_rest(self) -> None:
        """What else is open besides the writer."""

    # -- changing ----------------------------------------------------------------------------------

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        if self._writer is None:
            await self.open()
        work, ids = self._work(transactions, now_us, repeat)
        return await self._writing().submit(work, ids, sum(map(len, transactions)))

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        work, ids = self._work(transactions, now_us, repeat)
        return self._writing().submit_blocking(work, ids, sum(map(len, transactions)))

    def _work(
        self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool
    ) -> tuple[Callable[[S], list[Result]], list[str]]:
        def work(section: S) -> list[Result]:
            # Each transaction has its own moment: what one frees stands behind what the one before it enqueued.
            return [section.machine.run(t, self._now(now_us), repeat) for t in transactions]

        return work, [op.id for t in transactions for op in t if isinstance(op, Enqueue | OnTask)]

    async def _do(self, work: Callable[[S], Any], weight: int = 1) -> Any:
        """A piece of work for the writer, under the store's lock."""
        if self._writer is None:
            await self.open()
        return await self._writing().submit(work, weight=weight)

    def _now(self, now_us: int | None) -> int:
        return self.clock() if now_us is None else now_us

    async def allocate_ids(self, n: int) -> int:
        check_count(n, "allocate_ids", 1, MAX_AT_ONCE)
        return await self._do(lambda section: self._allocate(section, n))

    @abc.abstractmethod
    def _allocate(self, section: S, n: int) -> int: ...

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        return await self._do(lambda section: section.machine.sweep(self._now(now_us), limit))

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        return await self._do(lambda section: section.machine.promote(queue, self._now(now_us), limit))

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        return await self._do(lambda section: restore_tasks(section.machine, tasks, key_ttl_us, self.clock()), len(tasks))

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        await self._do(lambda section: restore_events(section.ledger, rows), len(rows))

    async def pause(self, queue: str) -> None:
        check_queue(queue)
        await self._do(lambda section: _set_paused(section, queue, True))

    async def resume(self, queue: str) -> bool:
        check_queue(queue)
        return await self._do(lambda section: _set_paused(section, queue, False))

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        check_queue(queue)
        check_text(group, "group")
        check_count(limit, "group limit", 1)
        await self._do(lambda section: section.machine.set_group_limit(queue, group, limit))

    # -- waiting and liveness ----------------------------------------------------------------------

    async def wait(self, *args: Any, **kwargs: Any) -> None:
        if self._writer is None or self._pid != os.getpid():
            await self.open()
        await super().wait(*args, **kwargs)

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

    def _lives(self, worker: str) -> bool:
        return self._locks is not None and self._locks.held(worker)

    async def lost_workers(self) -> list[str]:
        gone = self._locks.lost() if self._locks is not None else []
        if self._locks is None or not gone:
            return []
        holding = await self._busy(gone)
        for worker in gone:
            if worker not in holding:
                self._locks.forget(worker)
        return [worker for worker in gone if worker in holding]


def _set_paused(section: Section, queue: str, paused: bool) -> bool:
    row = section.ledger.queue(queue)
    was, row.paused = row.paused, paused
    if was is not paused:
        section.ledger.save_queue(row)
    if was and not paused:
        section.machine.ready_queues.add(queue)
    return was
