"""Wakes other processes: a small file that is written after a commit and watched by the kernel's file notification.

The file holds a count of all rings. A process compares it with its own rings, so that it never wakes itself; where the
kernel has no inotify (macOS) the count is polled instead.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("omniq.storage")

POLL_S = 0.02  # where there is no inotify: a task of another process waits so long at most


class Bell:
    """`ring` must be called by one process at a time (under the store's write lock); `listen` starts the watcher."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._own = 0  # rings of this object; the others are those of other processes
        self._heard = self._count()
        self._closing = False
        self._wanted = threading.Event()  # set while anybody waits: an idle process reads nothing
        self._thread: threading.Thread | None = None

    def _count(self) -> int:
        return int.from_bytes(os.pread(self._fd, 8, 0))

    def ring(self) -> None:
        """Never fails, since the commit that it tells of has happened: whoever is not woken looks again after a while."""
        # Before the write, since the watcher may read the count at once and take this ring for that of another process.
        self._own += 1
        try:
            os.pwrite(self._fd, ((self._count() + 1) % (1 << 64)).to_bytes(8), 0)  # whatever somebody wrote there
        except OSError as exc:
            self._own -= 1
            log.warning("%s: other processes could not be woken: %s", self._path, exc)

    def listen(self, heard: Callable[[], None], anyone: Callable[[], bool]) -> None:
        """Call `heard` from a thread when another process rang; nothing is read while `anyone` waits for nothing."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(heard, anyone), name="omniq-bell", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wanted.set()
        if self._thread is not None:
            os.utime(self._fd)  # wakes the watchers, ours to end; the others see that nobody rang
            self._thread.join()
        os.close(self._fd)

    def _watch(self, heard: Callable[[], None], anyone: Callable[[], bool]) -> None:
        wait = self._kernel_wait() if sys.platform == "linux" else None
        pause = threading.Event()
        while not self._closing:
            others = self._count() - self._own  # also before the first wait: somebody may have rung while the watch was set up
            if others != self._heard:
                self._heard = others
                heard()
            if not anyone():
                self._wanted.clear()
                if self._closing or anyone():  # it came between the two lines
                    self._wanted.set()
            self._wanted.wait()
            if self._closing:
                return
            if wait is None:
                pause.wait(POLL_S)
            else:
                try:
                    wait()
                except (OSError, ValueError):  # the interpreter ends and has closed the watch
                    return

    def _kernel_wait(self) -> Callable[[], object] | None:
        try:
            from asyncinotify import Inotify, Mask

            inotify = Inotify()
            # `close` changes the time of the file, which wakes its own watcher (ATTRIB) and rings for nobody.
            inotify.add_watch(str(self._path), Mask.MODIFY | Mask.ATTRIB)  # pyright: ignore[reportUnknownMemberType]
        except (ImportError, OSError) as exc:
            log.warning("no inotify (%s): polling for wake-ups every %d ms", exc, POLL_S * 1000)
            return None
        return inotify.sync_get
