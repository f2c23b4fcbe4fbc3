"""The last line of a terminal while workers run; log lines pass above it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from omniq.cli.logs import log_lines

REFRESHES = 4  # per second
# The rate is the mean over so much time, and over less than the second number it would be chance.
SPAN_S = 5.0
LEAST_S = 0.2


class WorkerNumbers(msgspec.Struct, kw_only=True):
    """The numbers in the line. `retried` is None where nobody counts it."""

    running: int = 0
    done: int = 0
    failed: int = 0
    retried: int | None = None


@contextmanager
def live_line(numbers: Callable[[], WorkerNumbers], log_level: str | None) -> Generator[None, None, None]:
    """Show numbers on stderr, and how many tasks end per second. Without a terminal it shows nothing."""
    if not sys.stderr.isatty():
        yield
        return
    live = Live(
        get_renderable=_Line(numbers).show,
        console=Console(stderr=True),
        refresh_per_second=REFRESHES,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
    # The line has put a stderr of its own in place, which writes above it: log lines must go there.
    with live, log_lines(log_level):
        yield


class _Line:
    def __init__(self, numbers: Callable[[], WorkerNumbers]) -> None:
        self._numbers = numbers
        self._spinner = Spinner("dots", style="cyan")
        self._seen: list[tuple[float, int]] = []

    def show(self) -> Spinner:
        n, now = self._numbers(), time.monotonic()
        ended = n.done + n.failed + (n.retried or 0)
        self._seen = [(at, count) for at, count in self._seen if now - at < SPAN_S] + [(now, ended)]
        first_at, first = self._seen[0]
        rate = (ended - first) / (now - first_at) if now - first_at > LEAST_S else 0.0
        failed = f"[red]{n.failed} failed[/]" if n.failed else "0 failed"
        retried = "" if n.retried is None else f"{n.retried} retried · "
        self._spinner.update(text=f"[bold]{n.running} running[/] · {n.done} done · {failed} · {retried}{rate:.1f}/s")
        return self._spinner
