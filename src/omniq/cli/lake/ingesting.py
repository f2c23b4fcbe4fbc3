"""Long work on a lake: how far it is goes to stderr, and Ctrl-C ends it in good order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omniq.spark.lake.ingest import IngestReport
    from omniq.spark.lake.layout import Lake


@contextmanager
def steps() -> Generator[Callable[[str], None]]:
    """Gives a function that shows what is being done, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as line:
        yield line.update


def ingest_store(
    spark: SparkSession, url: str, lake: Lake, every: str | None, payloads: bool, accept_gap: bool
) -> IngestReport:
    """Take events in; with `every`, until a signal comes."""
    from omniq.spark.lake.ingest import AVAILABLE_NOW, ingest

    taken = 0
    with steps() as show:

        def tell(batch: Any) -> None:
            nonlocal taken
            taken += batch.rows
            show(f"{taken:,} events")

        if every is None:
            return ingest(spark, url, lake, trigger=AVAILABLE_NOW, payloads=payloads, accept_gap=accept_gap, on_batch=tell)
        with _stopping() as stop:
            return ingest(spark, url, lake, trigger=every, payloads=payloads, accept_gap=accept_gap, stop=stop, on_batch=tell)


@contextmanager
def _stopping() -> Generator[threading.Event]:
    """Set by SIGINT and SIGTERM; a second one ends the command at once."""
    stop = threading.Event()

    def heard(number: int, _: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
