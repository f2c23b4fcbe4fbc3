"""The last line of a terminal while workers run; log lines pass above it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from omniq.cli.logs import set_up_logging


class Numbers(Protocol):
    """What the line tells."""

    @property
    def running(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def retried(self) -> int | None: ...


def show_cursor() -> None:
    """For a program that leaves at once: the line had hidden it."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()


class LiveLine:
    """Shows numbers on stderr, four times a second, and how many tasks end per second."""

    def __init__(self, numbers: Callable[[], Numbers], log_level: str | None) -> None:
        self._numbers, self._log_level = numbers, log_level
        self._spinner = Spinner("dots", style="cyan")
        self._seen: list[tuple[float, int]] = []
        both = sys.stdout.isatty()
        self._live = Live(
            get_renderable=self._show,
            console=Console(stderr=True),
            refresh_per_second=4,
            transient=True,
            redirect_stdout=both,
            redirect_stderr=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        set_up_logging(self._log_level)  # onto the stderr that knows of the line
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()
        set_up_logging(self._log_level)

    def _show(self) -> Spinner:
        n, now = self._numbers(), time.monotonic()
        ended = n.done + n.failed + (n.retried or 0)
        self._seen = [(at, count) for at, count in self._seen if now - at < 5] + [(now, ended)]
        first_at, first = self._seen[0]
        rate = (ended - first) / (now - first_at) if now - first_at > 0.2 else 0.0
        failed = f"[red]{n.failed} failed[/]" if n.failed else "0 failed"
        retried = "" if n.retried is None else f"{n.retried} retried · "
        self._spinner.update(text=f"[bold]{n.running} running[/] · {n.done} done · {failed} · {retried}{rate:.1f}/s")
        return self._spinner
