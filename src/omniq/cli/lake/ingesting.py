"""Long work on a lake: how far it is goes to stderr, and Ctrl-C ends it in good order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from omniq.cli.output import steps
from omniq.signals import caught

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omniq.spark.lake.ingest import IngestReport
    from omniq.spark.lake.layout import Lake


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
        stop = threading.Event()
        with caught(lambda _: _end(stop)):
            return ingest(spark, url, lake, trigger=every, payloads=payloads, accept_gap=accept_gap, stop=stop, on_batch=tell)


def _end(stop: threading.Event) -> None:
    # The second signal ends the command at once. A lake bears that at any moment: a batch counts when it is published.
    if stop.is_set():
        raise KeyboardInterrupt
    stop.set()
