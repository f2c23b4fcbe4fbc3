"""A queue in a folder: readable with `ls` and `cat`, durable, shared by any number of processes of one machine.

Each process keeps an index of the folder in memory, some 500 bytes a task; the tasks themselves stay in their files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from omniq.errors import ConfigError, StoreUnavailable
from omniq.models import now_us
from omniq.operations import StoreInfo
from omniq.storage.copies import copy_folder, write_whole
from omniq.storage.file.disk import Files, LocalFiles, SharedMemoryFiles, local_or_memory
from omniq.storage.file.folder import FORMAT
from omniq.storage.file.folder_ledger import check_lines
from omniq.storage.file.index import Entry
from omniq.storage.file.opening import MARKS
from omniq.storage.file.writer import FileSection, FileWriter, translate
from omniq.storage.filesystems import boot_id
from omniq.storage.ledger import TaskRow
from omniq.storage.liveness import WatchedLease
from omniq.storage.local import Durability, LocalStorage
from omniq.storage.url import file_path, file_url, local_options


class FileStorage(LocalStorage[FileSection]):
    """A queue in the folder `base_dir` (a path or a `file:` URL), made if need be.

    `durability="full"` survives a power cut, `"process"` a kill -9. `fs` is an fsspec file system: its local one, or its
    memory one for tests within one process; others are refused. A network file system is refused too, since its locks
    cannot be trusted; `allow_network_fs=True` overrides that.
    """

    default_url = "file:omniq-data"

    def __init__(
        self,
        base_dir: str | os.PathLike[str] = "omniq-data",
        *,
        fs: Any = None,
        durability: Durability = "full",
        allow_network_fs: bool = False,
        clock: Callable[[], int] = now_us,
        **options: Any,
    ) -> None:
        text = os.fspath(base_dir)
        if text.startswith("file:"):
            asked = local_options(text)
            durability = asked.get("durability", durability)
            allow_network_fs = asked.get("allow_network_fs", allow_network_fs)
            text = file_path(text)
        if not text:
            raise ConfigError("FileStorage needs the path of a folder, or a file: URL")
        self._fs, text = local_or_memory(fs, text)
        text = os.path.abspath(text) if self._fs is None else text  # a program that changes its folder keeps its store
        locks = Path(text, "locks", "workers") if self._fs is None else None
        super().__init__(text, locks, durability, allow_network_fs, {"clock": clock, **options})

    @property
    def url(self) -> str:
        return file_url(self.path)

    # -- life --------------------------------------------------------------------------------------

    async def exists(self) -> bool:
        if self._fs is not None:
            return any(self._fs.exists(f"{self.path}/{name}") for name in MARKS)
        return await self._there(lambda: not MARKS.isdisjoint(os.listdir(self.path)))

    def _make_writer(self) -> FileWriter:
        if not self.in_memory:
            if Path(self.path).exists() and not Path(self.path).is_dir():
                raise StoreUnavailable(f"{self.path} is a file; give the path of a folder")
            self._refuse_network("whose locks cannot be trusted")
        durable = self._durability == "full" and not self.in_memory
        # A folder in memory outlives no start of the machine, so any name for that will do.
        boot = "memory" if self.in_memory else boot_id()
        return FileWriter(self._make_files, self.path, durable, boot, self.events_on, self.waiters)

    def _make_files(self) -> Files:
        """Returns the file system of the store. Tests put another layer underneath here."""
        return LocalFiles(Path(self.path)) if self._fs is None else SharedMemoryFiles(self._fs, self.path)

    # -- upkeep ------------------------------------------------------------------------------------

    def _over(
        self, section: FileSection, running: Sequence[TaskRow], now_us: int, lost: set[str], *, whole: bool, given: bool
    ) -> list[TaskRow]:
        """A lease that seems over may be renewed by a holder whose clock is right; see `liveness`."""
        held = [_held(section, cast(Entry, row), now_us) for row in running]
        rows = {row.seq: row for row in running}
        return [rows[x.seq] for x in self._renewals.over(held, now_us, lost, whole=whole, given=given)]

    async def backup(self, path: str | os.PathLike[str]) -> None:
        if self.in_memory:
            await super().backup(path)

        # A piece of work like others, since it needs the write lock: files copied at several moments would mix their commits.
        def work(_: FileSection) -> None:
            try:
                write_whole(path, lambda part: copy_folder(self.path, part))
            except OSError as exc:
                raise translate(exc, os.fspath(path)) from exc

        await self._do(work)

    async def check(self, repair: bool = False) -> list[str]:
        found = await super().check(repair)
        return found + await self._do(lambda section: check_lines(section.folder, repair))

    async def info(self) -> StoreInfo:
        store_id = await self._do(lambda section: section.folder.store_id)
        return StoreInfo(store_id=store_id, format=FORMAT, url=self.url, capabilities=self.capabilities)


def _held(section: FileSection, entry: Entry, now_us: int) -> WatchedLease:
    until, worker, since = entry.lease_until_us or 0, entry.worker or "", 0
    # Only of a lease that seems over is the line read, which says since when it goes.
    if until <= now_us and worker:
        seen = section.index.workers.get(worker)
        since = max(section.ledger.record(entry).started_at_us or 0, seen.seen_at_us if seen is not None else 0)
    return WatchedLease(entry.seq, entry.token or "", worker, until, since)
