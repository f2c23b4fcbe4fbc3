"""The base of blocking doors: each carries out the calls of its async half, over a store that needs no event loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast

from omniq.errors import DriverClosed
from omniq.portal import Portal
from omniq.storage.base import BaseStorage, Result, must_be_storage
from omniq.storage.checks import Transaction

T = TypeVar("T")


class InThread:
    """Stands in for a store whose calls have ended when they return, so that no coroutine over it ever waits.

    What changes the store is sent in the thread of the caller: a trip to the loop of the portal and back costs some 50 µs,
    which is half of an `enqueue` on SQLite and five times one in memory. Every other call makes that trip.
    """

    def __init__(self, storage: BaseStorage, portal: Portal) -> None:
        self._storage, self._portal = storage, portal
        self._opened = False

    async def send(self, transactions: Sequence[Transaction], now_us: int | None = None) -> list[Result]:
        if not self._opened:  # `send_blocking` alone would write to a Redis store without a look at its format
            self._portal.call(self._storage.open())
            self._opened = True
        return self._storage.send_blocking(transactions, now_us)

    transact = BaseStorage.transact  # over the `send` above

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return functools.partial(self._on_loop, found) if inspect.iscoroutinefunction(found) else found

    async def _on_loop(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        return self._portal.call(call(*args, **kwargs))


# Taken for a storage without being a subclass: then the methods of `BaseStorage` would be found before `__getattr__` is asked.
BaseStorage.register(InThread)


class Blocking:
    """A blocking door to a store."""

    def __init__(self, storage: BaseStorage) -> None:
        must_be_storage(storage)
        self.storage = storage
        self._portal = Portal()
        self._in_thread = cast(BaseStorage, InThread(storage, self._portal))  # what the async half works on
        self._closed = False

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Carry out a call of the async half in this thread: it waits for nothing but its store."""
        # Asked here and not in a method: it comes before each enqueue.
        if self._closed:
            self._refuse(coroutine)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        coroutine.close()
        raise RuntimeError(f"{coroutine} waits for an event loop, and there is none in this thread")

    def _call_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Carry out a coroutine over the store itself, which does several things at once or waits again and again."""
        if self._closed:
            self._refuse(coroutine)
        return self._portal.call(coroutine)

    def _refuse(self, *unused: Coroutine[Any, Any, Any]) -> NoReturn:
        # A coroutine that is dropped before its first step would warn that nobody awaited it.
        for coroutine in unused:
            coroutine.close()
        raise DriverClosed(f"this {type(self).__name__} was closed; make a new one")

    def close(self) -> None:
        """Let go of everything. Twice is harmless."""
        if not self._closed:
            self._call(self._in_thread.close())
            self._closed = True
            # Last, since the store is closed on the loop of the portal.
            self._portal.close()

    def __enter__(self) -> Self:
        self._call(self._in_thread.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
