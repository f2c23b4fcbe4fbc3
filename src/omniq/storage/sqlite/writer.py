"""The writer of a SQLite file: one commit for everything that waits.

Between processes a `flock` decides who is next, because SQLite's own busy handler sleeps and starves.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omniq.errors import StoreError, StoreFull, StoreUnavailable
from omniq.models import Record
from omniq.storage import ledger_storage, locks
from omniq.storage.bell import Bell
from omniq.storage.machine.machine import Machine
from omniq.storage.sqlite.ledger import SQLiteLedger
from omniq.storage.sqlite.schema import migrate
from omniq.storage.waiting import Waiters
from omniq.storage.writer import Writer, WriteRequest

T = TypeVar("T")
Work = Callable[["SQLiteSection"], T]

# Against programs that know nothing of the file lock, such as a shell with an open transaction.
BUSY_TIMEOUT_MS = 30_000
PAGE_BYTES = 8192  # rows of some 300 bytes: a quarter less time per insert than with 4096
WAL_PAGES = 2000  # 16 MB: so much log is written before it goes into the database
# What SQLite says of a value or a row, not of itself: another call may well succeed.
_OF_THE_CALL = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.NotSupportedError,
    sqlite3.ProgrammingError,
)
OLDEST = (3, 33)  # the first with UPDATE … FROM


class SQLiteSection(ledger_storage.Section[SQLiteLedger]):
    """The machine, its ledger, and the connection below, for a piece of work while it is its turn."""

    def __init__(self, connection: sqlite3.Connection, events_on: bool, held: dict[str, Record]) -> None:
        super().__init__(SQLiteLedger(connection, events_on, held))
        self.connection = connection


class SQLiteWriter(Writer[SQLiteSection]):
    """Commits to one database, by one process at a time."""

    def __init__(self, path: str, durability: str, events_on: bool, waiters: Waiters) -> None:
        super().__init__(path, waiters)
        self._path = path
        self._in_memory = path == ":memory:"
        self._full = durability == "full"
        self._events_on = events_on
        self._connection: sqlite3.Connection | None = None
        self._held: dict[str, Record] = {}
        self._lock_fd = -1
        self._inode: tuple[int, int] | None = None
        self.start()

    def drop_locks(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            # Forgotten with it: a fork closes the number that stands here, which may be that of another file by then.
            self._lock_fd = -1

    def _open(self) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            wanted = ".".join(map(str, OLDEST))
            raise StoreUnavailable(
                f"this Python has SQLite {sqlite3.sqlite_version}; {wanted} or newer is needed: use a newer Python"
            )
        if not self._in_memory:
            self._lock_fd = os.open(f"{self._path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        connection = connect(self._path)
        # Of processes that open a new database together one makes it, and the others find it made.
        if not self._in_memory:
            self.take_lock(self._lock_fd)
        try:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # holds for a new database only
            if not self._in_memory:
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._full else 'NORMAL'}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            # A single large transaction makes the log as large, and it would stay so.
            connection.execute("PRAGMA journal_size_limit = 67108864")
            connection.execute("PRAGMA cache_size = -16384")
            connection.execute("PRAGMA temp_store = MEMORY")
            migrate(connection, self._path)
        except BaseException:
            connection.close()
            self.drop_locks()
            raise
        if not self._in_memory:
            locks.flock(self._lock_fd, locks.FREE)
        if not self._in_memory:
            self._inode = _inode(self._path)
            self.bell = Bell(Path(f"{self._path}-bell"))
        self._connection = connection

    def _shut(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self.bell is not None:
            self.bell.close()
        self.drop_locks()

    def _transact(self, batch: list[WriteRequest[SQLiteSection]]) -> Machine:
        connection = self._connection
        assert connection is not None
        # SQLite would go on writing to a file that has no name any more, and every task in it would be lost without a word.
        if self._inode is not None and _inode(self._path) != self._inode:
            raise StoreUnavailable(f"{self._path} was removed or replaced while it was open; restart this program")
        if self._lock_fd >= 0:
            self.take_lock(self._lock_fd)
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                section = SQLiteSection(connection, self._events_on, self._held)
                section.ledger.prefetch([id for request in batch for id in request.ids])
                for request in batch:
                    if request.begin():
                        request.answer = request.work(section)
                section.ledger.flush()
                connection.execute("COMMIT")
                section.ledger.remember_held()
            except BaseException:
                self._held.clear()  # these records may carry what was rolled back
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            # After the commit, or others would look before it can be read; under the lock, since a ring adds to a count.
            machine = section.machine
            if (machine.ready_queues or machine.ended_tasks) and self.bell is not None:
                self.bell.ring()
        finally:
            if self._lock_fd >= 0:
                locks.flock(self._lock_fd, locks.FREE)
        return machine

    def translate(self, exc: BaseException) -> BaseException:
        return translate(exc, self._path)


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
    """Returns the store's error for one of SQLite."""
    if isinstance(exc, StoreError):
        return exc
    if isinstance(exc, _OF_THE_CALL):
        return StoreError(f"{path} cannot take this: {exc}")
    if isinstance(exc, sqlite3.Error):
        code = getattr(exc, "sqlite_errorname", "") or ""
        if code.startswith("SQLITE_FULL"):
            return StoreFull(f"no room left for {path}: free disk space and try again ({exc})")
        return StoreUnavailable(f"{path}: {exc}{f' ({code})' if code else ''}")
    if isinstance(exc, OSError):
        return StoreUnavailable(f"{path}: {exc.strerror or exc}")
    if isinstance(exc, UnicodeDecodeError):  # a damaged name, which SQLite quotes in its complaint
        return StoreUnavailable(f"{path} is damaged: {exc}")
    return exc
