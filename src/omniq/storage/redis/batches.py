"""Calls that come while others are on their way travel together: many callers share one call of the script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from omniq.errors import DriverClosed, StoreError, StoreFull
from omniq.storage.redis.wire import Entry

Script = Callable[[str, Sequence[Entry], int | None, bool], Awaitable[list[Any]]]
Kind = tuple[int, int | None, bool]  # event loop, time, repeat: only equal ones may travel together

MAX_CALL = 500  # entries of one call
FLYING = 2  # calls on their way before others have to wait


class _Waiting(msgspec.Struct):
    key: str
    entries: Sequence[Entry]
    future: asyncio.Future[list[Any]]


class _Line:
    def __init__(self) -> None:
        self.flying = 0
        self.waiting: list[_Waiting] = []


class Batches:
    """Each call gets the answers to its own transactions. A failure of the store is told to all who travelled."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._lines: dict[Kind, _Line] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, key: str, entries: Sequence[Entry], now: int | None, repeat: bool) -> list[Any]:
        if not entries:
            return []
        loop = asyncio.get_running_loop()
        kind = (id(loop), now, repeat)
        line = self._lines.setdefault(kind, _Line())
        if line.flying >= FLYING or line.waiting:
            waiting = _Waiting(key, entries, loop.create_future())
            line.waiting.append(waiting)
            return await waiting.future
        line.flying += 1
        try:
            return await self._script(key, entries, now, repeat)
        finally:
            self._landed(kind, line)

    async def close(self) -> None:
        if self._sending:
            await asyncio.gather(*self._sending, return_exceptions=True)

    def _landed(self, kind: Kind, line: _Line) -> None:
        line.flying -= 1
        if line.waiting:
            line.flying += 1
            task = asyncio.get_running_loop().create_task(self._send(kind, line, _next_call(line.waiting)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        elif not line.flying:
            self._lines.pop(kind, None)

    async def _send(self, kind: Kind, line: _Line, together: list[_Waiting]) -> None:
        try:
            if not await self._carry(kind, together):
                for call in together:
                    await self._carry(kind, [call])
        finally:
            self._landed(kind, line)

    async def _carry(self, kind: Kind, together: list[_Waiting]) -> bool:
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

    async def _apart(self, together: list[_Waiting], now: int | None) -> None:
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


def _tell(calls: list[_Waiting], exc: BaseException) -> None:
    told = exc if isinstance(exc, Exception) else DriverClosed("the event loop ends")
    for call in calls:
        if not call.future.done():
            call.future.set_exception(told)


def _next_call(waiting: list[_Waiting]) -> list[_Waiting]:
    """Take as many as one call carries, at least one."""
    together = [waiting.pop(0)]
    size = len(together[0].entries)
    while waiting and size + len(waiting[0].entries) <= MAX_CALL:
        size += len(waiting[0].entries)
        together.append(waiting.pop(0))
    return together
