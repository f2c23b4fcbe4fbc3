"""The writer of a file store: everything that waits shares one commit, one append and one sync."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omniq.errors import StoreError, StoreFull, StoreUnavailable
from omniq.models import Record
from omniq.storage.bell import Bell
from omniq.storage.file.disk import Files, LocalFiles
from omniq.storage.file.folder import Folder
from omniq.storage.file.index import Entry
from omniq.storage.file.ledger import FileLedger
from omniq.storage.file.opening import load, prepare
from omniq.storage.machine.machine import Machine
from omniq.storage.waiting import Waiters
from omniq.storage.writer import Request, Writer

T = TypeVar("T")
Work = Callable[["Section"], T]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Section:
    """What a piece of work may use while it is its turn."""

    def __init__(self, folder: Folder, events_on: bool) -> None:
        self.folder = folder
        self.index = folder.index
        self.ledger = FileLedger(folder.index, folder.line, events_on, folder.held)
        self.machine = Machine(self.ledger)

    def record(self, entry: Entry) -> Record:
        """A task to hand out."""
        return copy.copy(self.ledger.peek(entry))


class FileWriter(Writer[Section]):
    """Commits to one folder, by one process at a time."""

    def __init__(
        self, make_files: Callable[[], Files], where: str, durable: bool, boot: str, events_on: bool, waiters: Waiters
    ) -> None:
        super().__init__(where, waiters)
        self._make_files = make_files
        self._where = where
        self._durable = durable
        self._boot = boot
        self._events_on = events_on
        self._files: Files | None = None
        self._folder: Folder | None = None
        self.start()

    def drop_locks(self) -> None:
        if isinstance(self._files, LocalFiles):
            self._files.drop_lock()

    def _open(self) -> None:
        files = self._files = self._make_files()
        if isinstance(files, LocalFiles):
            files.take = self.take_lock
        try:
            folder = Folder(files, self._where, self._durable, self._boot, load)
            prepare(folder)
            folder.enter()
            folder.leave()
            folder.checkpoint()
            if isinstance(files, LocalFiles):
                self.bell = Bell(Path(files.base, "locks", "bell"))
        except BaseException:
            files.close()
            raise
        self._folder = folder

    def _shut(self) -> None:
        if self.bell is not None:
            self.bell.close()
        if self._files is not None:
            self._files.close()

    def _transact(self, batch: list[Request[Section]]) -> Machine:
        folder = self._folder
        assert folder is not None
        folder.enter()
        try:
            section = Section(folder, self._events_on)
            try:
                for request in batch:
                    if request.begin():
                        request.answer = request.work(section)
                changes = section.ledger.changes()
                if changes:
                    folder.write(changes)
            except BaseException:
                folder.held.clear()  # these records may carry what did not happen
                section.ledger.undo()
                raise
            section.ledger.remember_held()
            if changes:
                folder.tend()
            machine = section.machine
            if (machine.ready_queues or machine.ended_tasks) and self.bell is not None:
                self.bell.ring()
        finally:
            folder.leave()
        folder.checkpoint()
        return machine

    def translate(self, exc: BaseException) -> BaseException:
        return translate(exc, self._where)


def translate(exc: BaseException, where: str) -> BaseException:
    """The store's words for what the operating system says."""
    if isinstance(exc, StoreError) or not isinstance(exc, OSError):
        return exc
    if exc.errno in _NO_ROOM:
        return StoreFull(f"no room left for {where}: free disk space and try again ({exc.strerror})")
    return StoreUnavailable(f"{where}: {exc.strerror or exc}")
