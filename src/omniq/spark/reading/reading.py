"""`read` and `read_stream`: format `omniq` with Python's names, checked before Spark is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from omniq.errors import Invalid
from omniq.spark.address import ENV, anchored, existing, is_file, must_reach, resolved
from omniq.spark.reading.options import MAX_ROWS, read_options
from omniq.spark.sessions import is_connect, is_local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    spark: SparkSession,
    url: str,
    table: str = "tasks",
    *,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    partitions: int | None = None,
) -> DataFrame:
    """A table of a store: tasks, attempts, events, results, queues or groups.

    `columns` and `where` (comparisons joined by AND) keep the rest from leaving the store at all. `url` may be `env:NAME`.
    Spark plans a source once: to see tasks that came after the first action on the DataFrame, read again.
    Raises `StoreUnavailable` where there is no store, and `ConfigError` or `Invalid` for an unknown table, column or predicate
    and for a file on a cluster.
    """
    options = _options(
        url=shared(spark, url),
        table=table,
        columns=None if columns is None else ",".join(columns),
        where=where,
        numPartitions=partitions,
    )
    read_options(options)
    _must_be_there(spark, options["url"])
    return spark.read.format("omniq").options(**options).load()


def read_stream(
    spark: SparkSession,
    url: str,
    table: str = "events",
    *,
    start: str | datetime | Mapping[str, Any] = "earliest",
    max_rows: int = MAX_ROWS,
    fail_on_data_loss: bool = True,
    columns: Sequence[str] | None = None,
    where: str | None = None,
) -> DataFrame:
    """The event log of a store as a stream, at most `max_rows` in a batch.

    A new query begins at `start`: `earliest`, `latest`, a moment or an offset; a query with a checkpoint goes on where it was.
    When events that were not read are gone, or the store is another one, the query fails, unless `fail_on_data_loss` is False.
    """
    options = _options(
        url=shared(spark, url),
        table=table,
        columns=None if columns is None else ",".join(columns),
        where=where,
        startingOffsets=_start(start),
        maxRowsPerTrigger=max_rows,
        failOnDataLoss=fail_on_data_loss,
    )
    read_options(options, streaming=True)
    _must_be_there(spark, options["url"])
    return spark.readStream.format("omniq").options(**options).load()


def shared(spark: SparkSession, url: str) -> str:
    """A URL under which every process of a session finds the store; raises `ConfigError` where some of them cannot.

    The URL of a server that is given as `env:NAME` stays that name. Over Spark Connect the variable is the server's.
    """
    if is_connect(spark) and url.startswith(ENV):
        return url
    must_reach(url, is_local(spark))
    return anchored(url)


def _must_be_there(spark: SparkSession, url: str) -> None:
    """Open the store here first, for a better error than Spark's, unless only the server of Spark Connect can reach it."""
    if not is_connect(spark) or (not url.startswith(ENV) and is_file(resolved(url))):
        with existing(url):
            pass


def _options(**given: Any) -> dict[str, str]:
    words = {name: str(value) for name, value in given.items() if value is not None}
    return {name: text.lower() if isinstance(given[name], bool) else text for name, text in words.items()}


def _start(start: str | datetime | Mapping[str, Any]) -> str:
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise Invalid(f"start {start!r} has no time zone: use datetime.now(timezone.utc) or .astimezone()")
        return start.isoformat()
    return json.dumps(dict(start)) if isinstance(start, Mapping) else start
