"""Which workers of this host are alive, and which leases they renew though by this process's clock they are over.

Each worker holds a file lock that the kernel lets go when its process dies: a POSIX lock, which belongs to a process and is not
inherited by a forked child (a `flock` would be kept by the child). It also vanishes when the process closes *any* descriptor of
the file, so a process never opens the files of its own workers again.

A clock that is ahead, or was set forward, makes every lease look overdue. So a store that can tell by a lock of the kernel
that the holder lives also watches its leases, by a clock that nobody sets: one that moved has a holder that renews it. One that
stood still for most of its length is over, whatever else its holder does.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from omniq.storage import locks

# (device, inode) of a lock file → (pid, descriptor), for the workers of this very process. A path will not do: the same store
# may be known by two of them.
_own: dict[tuple[int, int], tuple[int, int]] = {}
# Held by whoever looks at a lock file: closing a descriptor of one that this process has just locked would free the lock.
_own_lock = threading.Lock()

MAX_NAME = 200  # of 255 that a file name may have
_HASHED = "+"  # `quote` never leaves one
PATIENCE = 0.6  # of a lease's length: a holder renews after a third, so this one missed a renewal at least
WATCHED_FROM = 2 / 3  # of a lease's length is left: one that is renewed in time seldom gets there
MAX_SEEN = 10_000  # leases that are remembered when only those of some queues are looked at, so that old ones do not gather


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
            # A forked child has this entry and not the lock: the file is still that of its parent.
            pid, descriptor = _own.pop(_identity(path), (0, -1))
            if pid == os.getpid():
                # Before the lock goes, or others would find a free lock and take this worker for dead.
                path.unlink(missing_ok=True)
                os.close(descriptor)

    def lost(self) -> list[str]:
        """Returns the workers whose lock is free although they did not release it."""
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
    """Returns the locks of a store that has no folder on this host: in the folder for temporary files, for this user only.

    None where that folder cannot be used; then the lease alone decides.
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


# -- leases ----------------------------------------------------------------------------------------


class WatchedLease(msgspec.Struct, frozen=True, gc=False):
    """A lease. `since_us`: when it began or its holder last beat, by the holder's clock, since a beat comes with a renewal."""

    seq: int
    token: str
    worker: str
    until_us: int
    since_us: int


class Renewals:
    """The leases of a store as this process saw them move. `lives` tells whether the process of a worker lives."""

    def __init__(self, lives: Callable[[str], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._lives, self._clock = lives, clock
        self._seen: dict[tuple[int, str], tuple[int, float]] = {}  # until when it went, and since when it has
        self._lock = threading.Lock()

    def over(
        self, held: Sequence[WatchedLease], now_us: int, lost: Collection[str], *, whole: bool, given: bool = False
    ) -> list[WatchedLease]:
        """Returns the leases that are over or whose worker is lost, the longest over first.

        `whole`: `held` is all that is watched. `given`: the moment is the caller's word, which no clock can contradict.
        """
        moment = self._clock()
        with self._lock:
            before = self._seen
            seen = {} if whole or len(before) > MAX_SEEN else dict(before)
            for lease in held:
                place = lease.seq, lease.token
                last = before.get(place)
                seen[place] = last if last is not None and last[0] == lease.until_us else (lease.until_us, moment)
            self._seen = seen
        alive: dict[str, bool] = {}
        found = [
            lease
            for lease in held
            if lease.worker in lost
            or (
                lease.until_us <= now_us
                and (given or not self._may_be_renewed(lease, moment - seen[lease.seq, lease.token][1], alive))
            )
        ]
        return sorted(found, key=lambda lease: (lease.until_us, lease.seq))

    def _may_be_renewed(self, lease: WatchedLease, watched_s: float, alive: dict[str, bool]) -> bool:
        if watched_s * 1e6 >= (lease.until_us - lease.since_us) * PATIENCE:
            return False
        if lease.worker not in alive:
            alive[lease.worker] = bool(lease.worker) and self._lives(lease.worker)
        return alive[lease.worker]
