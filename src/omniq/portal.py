"""How blocking classes use async ones: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Portal:
    """A private event loop in a thread, so that blocking calls work with and without a running loop around them."""

    def __init__(self, name: str = "omniq-portal") -> None:
        self._name = name
        self._pid = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop, and go on here."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def soon(self, call: Callable[[], None]) -> None:
        """Call a function on the loop, without waiting. Signal handlers may do this, too."""
        self._running().call_soon_threadsafe(call)

    def _running(self) -> asyncio.AbstractEventLoop:
        # Without the lock at first: every call comes by here.
        loop = self._loop
        if loop is None or self._pid != os.getpid():  # a forked child has no threads of its parent
            with self._lock:
                if self._loop is None or self._pid != os.getpid():
                    self._loop = asyncio.new_event_loop()
                    # A daemon: a program that never closes its store must be able to end.
                    self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                    self._thread.start()
                    self._pid = os.getpid()
                loop = self._loop
        return loop

    def close(self) -> None:
        # A forked child has the parent's objects, and nothing behind them that could be stopped or joined.
        if self._loop is not None and self._thread is not None and self._pid == os.getpid():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._loop = self._thread = None
