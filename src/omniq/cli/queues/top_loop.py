"""The loop of `omniq top`: look, show, wait for a key or the next look; open the store again when it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager, suppress

import msgspec
from rich.console import Console
from rich.live import Live

from omniq.cli.queues.activity import read_rates
from omniq.cli.queues.top_screen import View, draw
from omniq.cli.stores import must_exist, settings_and_url
from omniq.core import AsyncOmniQ
from omniq.errors import OmniQError
from omniq.models import State, Task
from omniq.operations import Filter
from omniq.racing import first
from omniq.storage.filesystems import identity
from omniq.storage.url import mask

# More running or failed tasks than any screen has lines; the titles of the panels say how many there are.
MAX_TASKS = 100
# A live view shows what happens now, so its rates are over less time than those of `omniq queues`.
RATE_S, LEAST_S = 10.0, 1.0


async def watch(store: str | None, pause_s: float) -> None:
    eye = Eye(store)
    view = await eye.look()
    if view.away:
        await eye.close()
        raise eye.error or OmniQError(view.away)
    woken, leaving = asyncio.Event(), asyncio.Event()
    console = Console()

    async def look() -> None:
        nonlocal view
        view = await eye.look()

    with _keys(woken, leaving), Live(draw(view, console.size), console=console, screen=True, auto_refresh=False) as live:
        while not leaving.is_set():
            live.update(draw(view, console.size), refresh=True)
            woken.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), pause_s)
            # A store that does not answer keeps nobody here.
            await first(look(), leaving.wait())
    await eye.close()


@contextmanager
def _keys(woken: asyncio.Event, leaving: asyncio.Event) -> Generator[None, None, None]:
    """Take keys one by one and do not show them. At the end the terminal is as it was, whatever happens."""
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def on_key() -> None:
        pressed = os.read(keyboard, 64)
        if not pressed or b"q" in pressed.lower() or b"\x03" in pressed:
            leaving.set()
        woken.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, on_key)
    loop.add_signal_handler(signal.SIGWINCH, woken.set)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


class Eye:
    """Looks at a store that may vanish, be replaced, or come back."""

    def __init__(self, store: str | None) -> None:
        self._settings, self._url = settings_and_url(store)
        self._oq: AsyncOmniQ | None = None
        # The file or folder that was opened. It may be replaced while it is open: then it would show the old one for ever.
        self._seen: object = None
        # Shown, with the reason, while the store is away.
        self._last = View(url=mask(self._url))
        self.error: OmniQError | None = None

    async def look(self) -> View:
        try:
            oq = await self._opened()
            self._last, self.error = await _look(oq, self._last.url), None
        except OmniQError as exc:
            await self.close()
            self.error = exc
            self._last = msgspec.structs.replace(self._last, away=str(exc) or type(exc).__name__)
        return self._last

    async def _opened(self) -> AsyncOmniQ:
        """Returns the open queue, and opens it again when another store has taken the place of the one that was opened."""
        if self._oq is not None and identity(self._oq.storage.place) != self._seen:
            await self.close()
        if self._oq is None:
            oq = AsyncOmniQ.from_url(self._url, settings=self._settings)
            await must_exist(oq, self._url, create=False)
            await oq.storage.open()
            self._oq, self._seen = oq, identity(oq.storage.place)
        return self._oq

    async def close(self) -> None:
        if self._oq is not None:
            with suppress(OmniQError):
                await self._oq.close()
            self._oq = None


async def _look(oq: AsyncOmniQ, url: str) -> View:
    queues = await oq.counts()
    return View(
        url=url,
        now_us=oq.storage.clock(),
        queues=queues,
        rates=await read_rates(oq.storage, RATE_S, LEAST_S),
        running=await _find(oq, State.RUNNING) if any(c.running for c in queues) else [],
        failed=await _find(oq, State.DEAD) if any(c.dead for c in queues) else [],
        workers=await oq.workers(),
    )


async def _find(oq: AsyncOmniQ, state: State) -> list[Task]:
    tasks, _ = await oq.find(Filter(states=(state,)), limit=MAX_TASKS)
    return tasks
