"""The writer of a file store: everything that waits shares one commit, one append and one sync."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omniq.errors import StoreError, StoreFull, StoreUnavailable
from omniq.storage import ledger_storage
from omniq.storage.bell import Bell
from omniq.storage.file.disk import Files, LocalFiles
from omniq.storage.file.folder import Folder
from omniq.storage.file.folder_ledger import FolderLedger
from omniq.storage.file.opening import load, prepare
from omniq.storage.machine.machine import Machine
from omniq.storage.waiting import Waiters
from omniq.storage.writer import Writer, WriteRequest

T = TypeVar("T")
Work = Callable[["FileSection"], T]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a used quota, a limit on the size of files


class FileSection(ledger_storage.Section[FolderLedger]):
    """The folder and its ledger for a piece of work, while it is its turn."""

    def __init__(self, folder: Folder, events_on: bool) -> None:
        super().__init__(FolderLedger(folder, events_on))
        self.folder = folder
        self.index = folder.index


class FileWriter(Writer[FileSection]):
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
            # Entered at once, so that what a dead process left is mended, and what cannot be read is told, by the opening.
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

    def _transact(self, batch: list[WriteRequest[FileSection]]) -> Machine:
        folder = self._folder
        assert folder is not None
        folder.enter()
        try:
            section = FileSection(folder, self._events_on)
            try:
                for request in batch:
                    if request.begin():
                        request.answer = request.work(section)
                changes = section.ledger.changes()
                if changes:
                    folder.write(changes)
            except BaseException:
                folder.held.clear()  # these records may carry what did not happen
                # The index was changed on the way, and nothing of it is in the folder.
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
        # Behind the lock: it syncs every file, and others go on meanwhile.
        folder.checkpoint()
        return machine

    def translate(self, exc: BaseException) -> BaseException:
        return translate(exc, self._where)


def translate(exc: BaseException, where: str) -> BaseException:
    """Returns the store's error for one of the operating system."""
    if isinstance(exc, StoreError) or not isinstance(exc, OSError):
        return exc
    if exc.errno in _NO_ROOM:
        return StoreFull(f"no room left for {where}: free disk space and try again ({exc.strerror})")
    return StoreUnavailable(f"{where}: {exc.strerror or exc}")
