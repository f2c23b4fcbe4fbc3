"""The few things that the file store asks of a file system, so that tests can put another one underneath.

Paths are relative to the store's folder and made by the store alone: no user's text ever becomes part of one. Inside that
folder no symbolic link is followed, folders are 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from omniq.errors import ConfigError, StoreUnavailable
from omniq.storage import locks

Kind = Literal["file", "folder", "other"]

WRITE_LOCK = "locks/write"
OPEN_FILES = 64  # descriptors that are kept: a large store has more files than a process may have open


class Files(Protocol):
    """The operations of the store in its folder. Each may raise `OSError`; a write that fails may have happened in part."""

    def lock(self) -> None:
        """Wait until this is the only process (and storage object) that changes the folder."""
        ...

    def unlock(self) -> None: ...
    def names(self, folder: str) -> list[tuple[str, Kind]]: ...
    def make_folder(self, folder: str) -> None: ...
    def size(self, path: str) -> int | None:
        """Returns the size of a file; None if there is none."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes: ...
    def write(self, path: str, offset: int, data: bytes) -> None:
        """Write at an offset. Makes the file if there is none."""
        ...

    def truncate(self, path: str, size: int) -> None: ...
    def sync(self, path: str) -> None: ...
    def sync_folder(self, folder: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None:
        """Remove a file. Harmless if there is none."""
        ...

    def forget(self, path: str) -> None:
        """Close what is kept open of a file that another process removed or replaced."""
        ...

    def close(self) -> None: ...


class LocalFiles:
    """A folder of this machine, through descriptors that are kept open."""

    def __init__(self, base: Path) -> None:
        self.base = base
        missing = [folder for folder in (base, *base.parents) if not folder.exists()]
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in missing:  # a power cut must not take the way to the store
            parent = os.open(made.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(parent)
            os.close(parent)
        self._root = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not os.listdir(self._root):  # a folder with something in it may serve others too
            os.fchmod(self._root, 0o700)
        # Files are opened from these descriptors: no link that somebody puts into the path later leads out of the store.
        self._folders: dict[str, int] = {"": self._root}
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = -1
        self.take: Callable[[int], None] = _take
        self._gate = threading.Lock()  # reads come from other threads than writes

    def lock(self) -> None:
        if self._lock < 0:
            self._lock = self._open_file(WRITE_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            # Before every commit: a task that is written to a folder which was removed or replaced is lost without a word.
            found = os.stat("write", dir_fd=self._folder("locks"), follow_symlinks=False)
            here = os.stat(self.base)
        except FileNotFoundError:
            found = here = None
        mine, root = os.fstat(self._lock), os.fstat(self._root)
        if found is None or here is None or not (os.path.samestat(found, mine) and os.path.samestat(here, root)):
            raise StoreUnavailable(f"{self.base} was removed or replaced while it was open; restart this program")
        self.take(self._lock)

    def unlock(self) -> None:
        if self._lock >= 0:
            locks.flock(self._lock, locks.FREE)

    def names(self, folder: str) -> list[tuple[str, Kind]]:
        with os.scandir(self._folder(folder)) as found:
            return sorted((entry.name, _kind(entry)) for entry in found)

    def make_folder(self, folder: str) -> None:
        parent, _, name = folder.rpartition("/")
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._folder(parent))
        self._folder(folder)

    def size(self, path: str) -> int | None:
        try:
            return os.fstat(self._file(path)).st_size
        except FileNotFoundError:
            return None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        descriptor = self._file(path)
        left = os.fstat(descriptor).st_size - offset if length is None else length
        parts: list[bytes] = []
        while left > 0:
            part = os.pread(descriptor, left, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, path: str, offset: int, data: bytes) -> None:
        descriptor = self._file(path, create=True)
        done = os.pwrite(descriptor, data, offset)
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], offset + done)

    def truncate(self, path: str, size: int) -> None:
        os.ftruncate(self._file(path), size)

    def sync(self, path: str) -> None:
        # macOS has no fdatasync.
        os.fdatasync(self._file(path)) if hasattr(os, "fdatasync") else os.fsync(self._file(path))

    def sync_folder(self, folder: str) -> None:
        os.fsync(self._folder(folder))

    def rename(self, old: str, new: str) -> None:
        from_folder, _, from_name = old.rpartition("/")
        to_folder, _, to_name = new.rpartition("/")
        # Descriptors are kept by path, and both paths will name something else.
        self.forget(old)
        self.forget(new)
        os.rename(from_name, to_name, src_dir_fd=self._folder(from_folder), dst_dir_fd=self._folder(to_folder))

    def remove(self, path: str) -> None:
        self.forget(path)
        folder, _, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder(folder))

    def forget(self, path: str) -> None:
        with self._gate:
            descriptor = self._open.pop(path, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def close(self) -> None:
        with self._gate:
            for descriptor in (*self._open.values(), *self._folders.values()):
                os.close(descriptor)
            self._open.clear()
            self._folders.clear()
        self.drop_lock()

    def drop_lock(self) -> None:
        """Close the lock's descriptor, which lets go of the lock unless a parent process holds it too."""
        if self._lock >= 0:
            os.close(self._lock)
            # Forgotten with it: a fork closes the number that stands here, which may be that of another file by then.
            self._lock = -1

    def _folder(self, folder: str) -> int:
        descriptor = self._folders.get(folder)
        if descriptor is None:
            parent, _, name = folder.rpartition("/")
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(name, flags, dir_fd=self._folder(parent))
            except OSError as exc:
                if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                    what = "a symbolic link" if (self.base / folder).is_symlink() else "not a folder"
                    raise StoreUnavailable(f"{self.base / folder} is {what}, and must be a real folder: move it away") from None
                raise
            self._folders[folder] = descriptor
        return descriptor

    def _file(self, path: str, create: bool = False) -> int:
        with self._gate:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._open_file(path, os.O_RDWR | (os.O_CREAT if create else 0))
                if len(self._open) >= OPEN_FILES:
                    os.close(self._open.popitem(last=False)[1])
                self._open[path] = descriptor
            else:
                self._open.move_to_end(path)
            return descriptor

    def _open_file(self, path: str, flags: int) -> int:
        folder, _, name = path.rpartition("/")
        try:
            # O_NONBLOCK: to open a pipe that somebody put there would wait for its other end.
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self._folder(folder))
        except OSError as exc:
            if exc.errno == errno.ELOOP:
                raise StoreUnavailable(f"{self.base / path} is a symbolic link, which is not followed: move it away") from None
            if exc.errno == errno.EISDIR:
                raise StoreUnavailable(f"{self.base / path} is a folder and must be a file: move it away") from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StoreUnavailable(f"{self.base / path} is not a regular file: move it away")
        return descriptor


def _take(descriptor: int) -> None:
    locks.flock(descriptor, locks.EXCLUSIVE)


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "folder" if entry.is_dir(follow_symlinks=False) else "other"


_mutexes: dict[str, threading.Lock] = {}  # by folder: several storage objects may share one


class SharedMemoryFiles:
    """A folder of fsspec's memory file system: for one process, gone with it."""

    def __init__(self, fs: Any, base: str) -> None:
        self._fs = fs
        self._base = "/" + base.strip("/")
        self._mutex = _mutexes.setdefault(self._base, threading.Lock())
        fs.makedirs(self._base, exist_ok=True)

    def _path(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def lock(self) -> None:
        self._mutex.acquire()

    def unlock(self) -> None:
        self._mutex.release()

    def names(self, folder: str) -> list[tuple[str, Kind]]:
        found: list[dict[str, Any]] = self._fs.ls(self._path(folder), detail=True)
        return sorted((str(f["name"]).rpartition("/")[2], "file" if f["type"] == "file" else "folder") for f in found)

    def make_folder(self, folder: str) -> None:
        self._fs.makedirs(self._path(folder), exist_ok=True)

    def size(self, path: str) -> int | None:
        return int(self._fs.size(self._path(path))) if self._fs.isfile(self._path(path)) else None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else offset + length
        return bytes(self._fs.cat_file(self._path(path), start=offset, end=end))

    def write(self, path: str, offset: int, data: bytes) -> None:
        if not self._fs.isfile(self._path(path)):
            self._fs.pipe_file(self._path(path), b"")
        with self._fs.open(self._path(path), "r+b") as file:
            file.seek(offset)
            file.write(data)

    def truncate(self, path: str, size: int) -> None:
        with self._fs.open(self._path(path), "r+b") as file:
            file.truncate(size)

    def sync(self, path: str) -> None:
        pass

    def sync_folder(self, folder: str) -> None:
        pass

    def rename(self, old: str, new: str) -> None:
        self._fs.mv(self._path(old), self._path(new))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def forget(self, path: str) -> None:
        pass

    def close(self) -> None:
        pass


def local_or_memory(fs: Any, base: str) -> tuple[Any, str]:
    """Returns the memory file system to use, or None for the local one, and the folder in it. Refuses all others."""
    if fs is None:
        return None, base
    protocol = getattr(fs, "protocol", None)
    names = {protocol} if isinstance(protocol, str) else set(protocol or ())
    if "dir" in names:
        return local_or_memory(fs.fs, f"{str(fs.path).rstrip('/')}/{base.lstrip('/')}")
    if names & {"file", "local"}:
        return None, base
    if "memory" in names:
        return fs, base
    kind = "/".join(sorted(names)) or type(fs).__name__
    raise ConfigError(
        f"FileStorage cannot keep its promises on the fsspec file system {kind!r}: it has no atomic rename, no write in place "
        "and no locks that a dead process lets go; use a local folder, or Redis for several machines"
    )
