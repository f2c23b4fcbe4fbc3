"""The progress of a long call: a bar on stderr where that is a terminal, or calls of a function that the caller gives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from omniq.errors import StoreError

EVERY_S = 0.5

Tell = Callable[[str, int, int | None], None]
"""Is called with the name of the step, how much of it is done, and how much there is in all if that is known."""

Look = Callable[[], tuple[str, int, int | None] | None]


@contextmanager
def shown(progress: Tell | bool | None) -> Generator[Tell | None, None, None]:
    """The function to report to: the one given, else a bar where stderr is a terminal; None for no reports, also with False."""
    if callable(progress):
        yield progress
    elif progress is False or not sys.stderr.isatty():
        yield None
    else:
        with _bar() as tell:
            yield tell


@contextmanager
def _bar() -> Generator[Tell, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        ids = {}

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in ids:
                ids[what] = bars.add_task(what, total=total)
            bars.update(ids[what], completed=done, total=total)

        yield tell


@contextmanager
def watching(look: Look, tell: Tell | None) -> Generator[None, None, None]:
    """Report progress from a thread every half second while the block runs, and once more at its end."""
    if tell is None:
        yield
        return
    over = threading.Event()

    def once() -> None:
        try:
            seen = look()
        except StoreError:  # the block meets the same error and raises it
            return
        if seen is not None:
            tell(*seen)

    def watch() -> None:
        while not over.wait(EVERY_S):
            once()

    thread = threading.Thread(target=watch, name="omniq-progress", daemon=True)
    thread.start()
    try:
        yield
        # The block may have ended between two looks, and a bar should end full.
        once()
    finally:
        over.set()
        thread.join()
