"""Which workers of this host are alive: each holds a file lock that the kernel lets go when its process dies.

POSIX locks belong to a process and are not inherited by a forked child (a `flock` would be kept by the child). They also
vanish when the process closes *any* descriptor of the file, so a process never opens the files of its own workers again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote, unquote

from omniq.storage import locks

# (device, inode) of a lock file → (pid, descriptor), for the workers of this very process. A path will not do: the same store
# may be known by two of them.
_own: dict[tuple[int, int], tuple[int, int]] = {}
_own_lock = threading.Lock()


MAX_NAME = 200  # of 255 that a file name may have
_HASHED = "+"  # `quote` never leaves one


class WorkerLocks:
    """The lock files of one store, in a folder beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def _path(self, worker: str) -> Path:
        """A name that cannot leave the folder; one that is too long, or begins with a dot, is hashed and stands in the file."""
        name = quote(worker, safe="", errors="surrogatepass")
        if len(name) > MAX_NAME or name.startswith("."):
            name = _HASHED + hashlib.sha256(worker.encode(errors="surrogatepass")).hexdigest()
        return self._folder / name

    def hold(self, worker: str) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._path(worker)
        with _own_lock:
            while True:
                descriptor = _open(path, os.O_CREAT)
                try:
                    locks.lockf(descriptor, locks.EXCLUSIVE)
                    here = _identity(path)
                    if here == _identity(descriptor):  # else somebody tidied the file away between open and lock
                        if path.name.startswith(_HASHED):
                            os.pwrite(descriptor, worker.encode(), 0)
                        _own[here] = (os.getpid(), descriptor)
                        return
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)

    def release(self, worker: str) -> None:
        path = self._path(worker)
        with _own_lock:
            pid, descriptor = _own.pop(_identity(path), (0, -1))
            if pid == os.getpid():
                path.unlink(missing_ok=True)
                os.close(descriptor)

    def lost(self) -> list[str]:
        """Workers whose lock nobody holds although nobody let go of it in good order."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        free = [(name, self._worker(name)) for name in names if self._free(self._folder / name)]
        return [worker for name, worker in free if self._path(worker).name == name]  # what else lies there is no worker's

    def _worker(self, name: str) -> str:
        if not name.startswith(_HASHED):
            return unquote(name)
        try:
            return (self._folder / name).read_bytes().decode(errors="replace")
        except FileNotFoundError:  # another process was faster and has tidied it away
            return ""

    def held(self, worker: str) -> bool:
        """Whether a living process holds the lock of a worker."""
        path = self._path(worker)
        return path.exists() and not self._free(path)

    def forget(self, worker: str) -> None:
        """Tidy the file of a dead worker away, unless somebody holds it after all."""
        path = self._path(worker)
        with _own_lock:
            if self._is_own(path):
                return
            try:
                descriptor = _open(path)
            except FileNotFoundError:
                return
            try:
                locks.lockf(descriptor, locks.EXCLUSIVE | locks.AT_ONCE)
                path.unlink(missing_ok=True)
            except OSError:
                pass
            finally:
                os.close(descriptor)

    def _free(self, path: Path) -> bool:
        with _own_lock:
            if self._is_own(path):
                return False
            try:
                descriptor = _open(path)
            except OSError:
                return False
            try:
                locks.lockf(descriptor, locks.EXCLUSIVE | locks.AT_ONCE)
            except OSError:
                return False
            else:
                return True
            finally:
                os.close(descriptor)

    @staticmethod
    def _is_own(path: Path) -> bool:
        return _own.get(_identity(path), (0, -1))[0] == os.getpid()


def host_locks(store_id: str) -> WorkerLocks | None:
    """The locks of a store that has no folder on this host: in the folder for temporary files, for this user only.

    None where that cannot be had; then the lease alone decides.
    """
    if locks.fcntl is None:
        return None
    folder = Path(tempfile.gettempdir(), f"omniq-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return None  # somebody else made it, and could take our workers for dead
    return WorkerLocks(folder / quote(store_id, safe=""))


def _open(path: Path, more: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)


def _identity(file: Path | int) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino
