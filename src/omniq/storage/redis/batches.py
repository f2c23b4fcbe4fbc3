"""Calls that come while others are on their way travel together: many callers share one call of the script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from omniq.errors import DriverClosed, StoreError, StoreFull
from omniq.storage.redis.packing import Entry

Script = Callable[[str, Sequence[Entry], int | None, bool], Awaitable[list[Any]]]
Kind = tuple[int, int | None, bool]  # event loop, time, repeat: only equal ones may travel together

MAX_CALL = 500  # entries of one call: the server serves nobody else meanwhile
FLYING = 2  # calls on their way before others have to wait


class _WaitingCall(msgspec.Struct):
    key: str
    entries: Sequence[Entry]
    future: asyncio.Future[list[Any]]


class _Traffic:
    """Calls of one kind: those on their way, and those that wait to travel together."""

    def __init__(self) -> None:
        self.flying = 0
        self.waiting: list[_WaitingCall] = []


class Batches:
    """Each call gets the answers to its own transactions. A failure of the store is told to all who travelled."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._traffic: dict[Kind, _Traffic] = {}
        # The loop itself keeps only weak references to its tasks.
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, key: str, entries: Sequence[Entry], now: int | None, repeat: bool) -> list[Any]:
        if not entries:
            return []
        loop = asyncio.get_running_loop()
        kind = (id(loop), now, repeat)
        traffic = self._traffic.setdefault(kind, _Traffic())
        # Behind others that wait it waits too, even if a call could fly: calls of one loop keep their order.
        if traffic.flying >= FLYING or traffic.waiting:
            waiting = _WaitingCall(key, entries, loop.create_future())
            traffic.waiting.append(waiting)
            return await waiting.future
        # At once and without a task of its own, as most calls are alone.
        traffic.flying += 1
        try:
            return await self._script(key, entries, now, repeat)
        finally:
            self._landed(kind, traffic)

    async def close(self) -> None:
        if self._sending:
            await asyncio.gather(*self._sending, return_exceptions=True)

    def _landed(self, kind: Kind, traffic: _Traffic) -> None:
        traffic.flying -= 1
        if traffic.waiting:
            traffic.flying += 1
            task = asyncio.get_running_loop().create_task(self._send(kind, traffic, _next_call(traffic.waiting)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        elif not traffic.flying:
            self._traffic.pop(kind, None)

    async def _send(self, kind: Kind, traffic: _Traffic, together: list[_WaitingCall]) -> None:
        try:
            if not await self._carry(kind, together):
                for call in together:
                    await self._carry(kind, [call])
        finally:
            self._landed(kind, traffic)

    async def _carry(self, kind: Kind, together: list[_WaitingCall]) -> bool:
        """Send these as one and tell each caller; False, and nothing was done, if each has to be sent by itself."""
        _, now, repeat = kind
        entries = [entry for call in together for entry in call.entries]
        try:
            answers = await self._script(together[0].key, entries, now, repeat)
        except BaseException as exc:
            if isinstance(exc, StoreFull) and len(together) > 1:  # there is no room for what some of them bring
                return False
            if type(exc) is StoreError and len(together) > 1:  # the call of one of them: only that one shall fail
                await self._apart(together, now)
                return True
            _tell(together, exc)
            if not isinstance(exc, StoreError):
                raise
        else:
            start = 0
            for call in together:
                if not call.future.done():
                    call.future.set_result(answers[start : start + len(call.entries)])
                start += len(call.entries)
        return True

    async def _apart(self, together: list[_WaitingCall], now: int | None) -> None:
        """Each alone, as a repeat: what a script did before it failed stays done."""
        for call in together:
            try:
                answers = await self._script(call.key, call.entries, now, True)
            except StoreError as exc:
                _tell([call], exc)
            except BaseException as exc:
                _tell(together, exc)
                raise
            else:
                if not call.future.done():
                    call.future.set_result(answers)


def _tell(calls: list[_WaitingCall], exc: BaseException) -> None:
    # What ends the task that sends is no cancellation of those who wait for it.
    told = exc if isinstance(exc, Exception) else DriverClosed("the event loop ends")
    for call in calls:
        if not call.future.done():
            call.future.set_exception(told)


def _next_call(waiting: list[_WaitingCall]) -> list[_WaitingCall]:
    """Take as many as one call carries, at least one."""
    together = [waiting.pop(0)]
    size = len(together[0].entries)
    while waiting and size + len(waiting[0].entries) <= MAX_CALL:
        size += len(waiting[0].entries)
        together.append(waiting.pop(0))
    return together
