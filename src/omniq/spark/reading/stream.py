"""Format `omniq` as a stream: the event log, read from the position in the checkpoint on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from omniq.operations import Shard
from omniq.spark.address import address_of, existing, identity
from omniq.spark.causes import sentence_first
from omniq.spark.reading.offsets import position
from omniq.spark.reading.options import ReadOptions, read_options
from omniq.spark.reading.plan import Offset, advance, between, check_whole, latest, offset_of
from omniq.spark.reading.source import StorePartition, checked, record_batches
from omniq.storage.bulk import Bulk

if TYPE_CHECKING:
    import pyarrow as pa


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches on the driver and reads them on executors. Its position is in the checkpoint alone."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.given = dict(options)
        self.schema = schema
        # Set by the trigger availableNow: the log's end when the query started, since a busy store would never let it end.
        self.target: Offset | None = None
        # The identity of the store's file, the store and how to close it. For executors Spark makes a reader of its own, so an
        # open store is never pickled.
        self._open: tuple[Any, Bulk, ExitStack] | None = None

    @cached_property
    def options(self) -> ReadOptions:
        # Not in __init__: Spark hides an error that is raised there behind one of its own.
        return read_options(self.given, streaming=True)

    @sentence_first()
    def initialOffset(self) -> dict[str, Any]:
        return position(self._bulk(), self.options.start).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_rows)

    @sentence_first()
    def prepareForTriggerAvailableNow(self) -> None:
        self.target = latest(*self._look())

    @sentence_first()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = offset_of(start)
        store, shards = self._look()
        check_whole(begin, store, shards, not self.options.fail_on_data_loss)
        target = self.target or latest(store, shards)
        return advance(begin, target, shards, limit.max_rows if isinstance(limit, ReadMaxRows) else None).to_json()

    @sentence_first()
    def reportLatestOffset(self) -> dict[str, Any]:
        return latest(*self._look()).to_json()

    @sentence_first()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        # The id is that of the offsets and not of the store now: executors refuse a store that was replaced since the plan.
        upto = offset_of(end)
        parts = between(offset_of(start), upto, self.options.parts)
        address = address_of(self.options.url, upto.store)
        return [StorePartition(address, ranges) for ranges in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return record_batches(partition, self.options, checked(self.options.table, self.schema))

    def stop(self) -> None:
        if self._open is not None:
            self._open[2].close()
            self._open = None

    def _look(self) -> tuple[str, list[Shard]]:
        bulk = self._bulk()
        return bulk.info().store_id, bulk.event_shards()

    def _bulk(self) -> Bulk:
        """The store, which stays open between batches until another file is put in its place."""
        there = identity(self.options.url)
        if self._open is None or self._open[0] != there:
            self.stop()
            stack = ExitStack()
            self._open = there, stack.enter_context(existing(self.options.url)), stack
        return self._open[1]
