"""One writer thread per process and store: everything that waits when it is free shares one commit.

Between processes a `flock` decides who is next, because SQLite's own busy handler sleeps and starves. Nothing is answered
and nobody woken before the commit.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

from omniq.errors import DriverClosed, OmniQError, StoreError, StoreFull, StoreUnavailable
from omniq.models import Record
from omniq.storage.bell import Bell
from omniq.storage.machine import Machine
from omniq.storage.sqlite_ledger import SQLiteLedger
from omniq.storage.sqlite_schema import migrate
from omniq.storage.waiting import Waiters

log = logging.getLogger("omniq.storage")

T = TypeVar("T")
Work = Callable[["Section"], T]

MAX_WEIGHT = 2000  # operations in one commit, so that no writer holds the store longer than some 50 ms
BUSY_TIMEOUT_MS = 30_000
PAGE_BYTES = 8192  # rows of some 300 bytes: a quarter less time per insert than with 4096
WAL_PAGES = 2000


class Section:
    """What a piece of work may use while it is its turn: the machine, its ledger, and the connection below."""

    def __init__(self, connection: sqlite3.Connection, events_on: bool, held: dict[str, Record]) -> None:
        self.connection = connection
        self.ledger = SQLiteLedger(connection, events_on, held)
        self.machine = Machine(self.ledger)


class _Request:
    __slots__ = ("answer", "error", "future", "ids", "loop", "work")

    def __init__(self, work: Work[Any], ids: Sequence[str], loop: asyncio.AbstractEventLoop | None) -> None:
        self.work, self.ids, self.loop = work, ids, loop
        self.future: Any = loop.create_future() if loop is not None else Future[Any]()
        self.answer: Any = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        if self.future.done():  # the caller was cancelled; the commit stands
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.answer)


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _before_fork() -> None:
    """No fork in the middle of a transaction: the child would inherit SQLite's table of locks with this one held."""
    for writer in list(_writers):
        writer.section.acquire()
        _forking.append(writer)


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().section.release()


def _after_fork_in_child() -> None:
    """A `flock` is shared with a forked child, which would go on holding the store if its parent were killed."""
    while _forking:
        writer = _forking.pop()
        writer.section.release()
        writer.drop_lock()


_forking: list[Writer] = []
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


class Writer:
    """Runs work on the database, in the order it came, as few commits as possible."""

    def __init__(self, path: str, durability: str, events_on: bool, waiters: Waiters) -> None:
        self._path = path
        self._in_memory = path == ":memory:"
        self._full = durability == "full"
        self._events_on = events_on
        self._waiters = waiters
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.section = threading.RLock()  # held during a transaction, and during a fork
        self._connection: sqlite3.Connection | None = None
        self._held: dict[str, Record] = {}
        self._lock_fd = -1
        self._inode: tuple[int, int] | None = None
        self.bell: Bell | None = None
        _writers.add(self)
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="omniq-sqlite", daemon=True)
        self._thread.start()
        opened.result()

    # -- from any thread ---------------------------------------------------------------------------

    async def submit(self, work: Work[T], ids: Sequence[str] = ()) -> T:
        """Carry out `work` in the next commit. The records of `ids` are loaded together with those of its neighbours."""
        request = _Request(work, ids, asyncio.get_running_loop())
        self._put(request)
        return await cast("asyncio.Future[T]", request.future)

    def submit_blocking(self, work: Work[T], ids: Sequence[str] = ()) -> T:
        """The same from any thread. When nobody else writes, the calling thread does, which saves two changes of thread."""
        request = _Request(work, ids, None)
        if self._connection is not None and self._requests.empty() and self.section.acquire(blocking=False):
            try:
                if not self._closed.is_set():
                    self._carry_out(self._connection, [request])
                    return cast("Future[T]", request.future).result()
            finally:
                self.section.release()
        self._put(request)
        return cast("Future[T]", request.future).result()

    def _put(self, request: _Request) -> None:
        if self._closed.is_set():
            raise DriverClosed(f"the storage {self._path} was closed; make a new one")
        self._requests.put(request)

    def close(self) -> None:
        """Finish what was sent, then let go."""
        if not self._closed.is_set():
            self._closed.set()
            self._requests.put(None)
        self._thread.join()

    def drop_lock(self) -> None:
        """In a forked child: close the copy of the lock's descriptor; the parent's stays locked."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, opened: Future[None]) -> None:
        try:
            connection = self._connection = self._connect()
        except BaseException as exc:
            opened.set_exception(translate(exc, self._path))
            return
        opened.set_result(None)
        try:
            while (batch := self._next_batch()) is not None:
                self._carry_out(connection, batch)
        finally:
            with self.section:
                self._connection = None
                connection.close()
            if self.bell is not None:
                self.bell.close()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._refuse_rest()

    def _connect(self) -> sqlite3.Connection:
        if not self._in_memory:
            self._lock_fd = os.open(f"{self._path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        connection = connect(self._path)
        if not self._in_memory:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        try:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # holds for a new database only
            if not self._in_memory:
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._full else 'NORMAL'}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            connection.execute("PRAGMA cache_size = -16384")
            connection.execute("PRAGMA temp_store = MEMORY")
            migrate(connection, self._path)
        except BaseException:
            connection.close()
            raise
        finally:
            if not self._in_memory:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        if not self._in_memory:
            self._inode = _inode(self._path)
            self.bell = Bell(Path(f"{self._path}-bell"))
        return connection

    def _next_batch(self) -> list[_Request] | None:
        first = self._requests.get()
        if first is None:
            return None
        batch, weight = [first], len(first.ids)
        while weight < MAX_WEIGHT:
            try:
                more = self._requests.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._requests.put(None)
                break
            batch.append(more)
            weight += len(more.ids)
        return batch

    def _carry_out(self, connection: sqlite3.Connection, batch: list[_Request]) -> None:
        try:
            self._commit(connection, batch)
        except Exception as exc:
            if len(batch) > 1:  # only the guilty one shall fail: each gets a commit of its own
                for request in batch:
                    self._carry_out(connection, [request])
                return
            batch[0].error = exc if isinstance(exc, OmniQError) else translate(exc, self._path)
        self._settle(batch)

    def _commit(self, connection: sqlite3.Connection, batch: list[_Request]) -> None:
        with self.section:
            machine = self._transact(connection, batch)
        if machine.ready_queues or machine.ended_tasks:
            self._waiters.notify(machine.ready_queues, machine.ended_tasks)

    def _transact(self, connection: sqlite3.Connection, batch: list[_Request]) -> Machine:
        if self._inode is not None and _inode(self._path) != self._inode:
            raise StoreUnavailable(f"{self._path} was removed or replaced while it was open; restart this program")
        if self._lock_fd >= 0:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                section = Section(connection, self._events_on, self._held)
                section.ledger.prefetch([id for request in batch for id in request.ids])
                for request in batch:
                    request.answer = request.work(section)
                section.ledger.flush()
                connection.execute("COMMIT")
                section.ledger.remember_held()
            except BaseException:
                self._held.clear()  # these records may carry what was rolled back
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            machine = section.machine
            if (machine.ready_queues or machine.ended_tasks) and self.bell is not None:
                self.bell.ring()
        finally:
            if self._lock_fd >= 0:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        return machine

    @staticmethod
    def _settle(batch: list[_Request]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Request]] = defaultdict(list)
        for request in batch:
            if request.loop is None:
                request.settle()
            else:
                by_loop[request.loop].append(request)
        for loop, requests in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle_all, requests)
            except RuntimeError:  # the loop was closed; nobody waits any more
                continue

    def _refuse_rest(self) -> None:
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                request.error = DriverClosed(f"the storage {self._path} was closed")
                self._settle([request])


def _settle_all(requests: list[_Request]) -> None:
    for request in requests:
        request.settle()


def connect(path: str) -> sqlite3.Connection:
    """A connection in autocommit mode that waits for locks instead of raising."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def translate(exc: BaseException, path: str) -> BaseException:
    """The store's words for what SQLite says."""
    if isinstance(exc, StoreError):
        return exc
    if isinstance(exc, sqlite3.Error):
        code = getattr(exc, "sqlite_errorname", "") or ""
        if code.startswith("SQLITE_FULL"):
            return StoreFull(f"no room left for {path}: free disk space and try again ({exc})")
        return StoreUnavailable(f"{path}: {exc}{f' ({code})' if code else ''}")
    if isinstance(exc, OSError):
        return StoreUnavailable(f"{path}: {exc.strerror or exc}")
    return exc
