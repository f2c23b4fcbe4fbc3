"""Format `omniq`: the tables of a store as DataFrames.

Readers travel to other processes, so they hold strings and numbers only, and open the store where they read it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from omniq.errors import ConfigError, EventsLost
from omniq.spark.address import Address, address_of, existing
from omniq.spark.causes import sentence_first
from omniq.spark.reading.filters import pushed
from omniq.spark.reading.offsets import position
from omniq.spark.reading.options import ReadOptions, read_options
from omniq.spark.reading.plan import LENIENT, between, check_whole, packed, parts_for, size
from omniq.spark.reading.schema import arrow_schema, ddl, record_batch
from omniq.storage.bulk import Bulk
from omniq.storage.scanning import Range
from omniq.storage.tables import Columns, Condition

if TYPE_CHECKING:
    import pyarrow as pa

# Spark's module for it runs only while its setting is on, and the setting cannot be asked for from a source.
PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


def reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    """A reader of the columns that the schema names."""
    asked = read_options(options)
    names = checked(asked.table, schema)
    return FilteringReader(asked, names) if asked.push_filters and pushing() else BatchReader(asked, names)


def pushing() -> bool:
    """Whether Spark is about to push filters. It refuses a reader with `pushFilters` while its own setting is off."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return PUSHDOWN in sys.modules or getattr(spec, "name", None) == PUSHDOWN


def checked(table: str, schema: StructType) -> tuple[str, ...]:
    """The names of a schema that the user may have given; raises `ConfigError` where its types are not the table's."""
    from pyspark.sql.pandas.types import to_arrow_schema

    names = tuple(schema.fieldNames())
    expected = arrow_schema(table, names)
    if not to_arrow_schema(schema, timezone="UTC").equals(expected):
        raise ConfigError(f"the schema given for table {table!r} has other types; the table's columns are {ddl(table, names)}")
    return names


class StorePartition(InputPartition):
    """The ranges of one store that one task of Spark reads."""

    def __init__(self, address: Address, ranges: tuple[Range, ...]) -> None:
        self.address, self.ranges = address, ranges


class BatchReader(DataSourceReader):
    """Reads a table as it is now."""

    # Pickled to every executor, so it keeps no store open.
    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self.options = options
        self.names = tuple(names)

    @sentence_first()
    def partitions(self) -> list[InputPartition]:
        asked = self.options
        with existing(asked.url) as bulk:
            address = address_of(asked.url, bulk.info().store_id)
            parts = self._events(bulk) if asked.table == "events" else self._table(bulk)
        return [StorePartition(address, ranges) for ranges in parts]

    def _events(self, bulk: Bulk) -> list[tuple[Range, ...]]:
        asked = self.options
        start, end = position(bulk, asked.start), position(bulk, asked.end)
        check_whole(start, end.store, bulk.event_shards(), not asked.fail_on_data_loss)
        rows = sum(max(upto - start.shards.get(name, 0), 0) for name, upto in end.shards.items())
        return between(start, end, parts_for(rows, cores(), asked.parts))

    def _table(self, bulk: Bulk) -> list[tuple[Range, ...]]:
        whole = bulk.ranges(self.options.table)
        # Each part of the attempts reads the whole log, so more parts than cores only cost.
        most = parts_for(sum(map(size, whole)), cores(), self.options.parts)
        parts = min(most, cores()) if self.options.table == "attempts" and not self.options.parts else most
        return packed(bulk.ranges(self.options.table, parts) if parts > 1 else whole, parts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return record_batches(partition, self.options, self.names)


class FilteringReader(BatchReader):
    """The same, with the filters of one plan.

    Up to Spark 4.3 the filters that a source took stay with the DataFrame, and hold for every other query of it. So they are
    taken only from a query that asks for it, and the option `where` is there for all others.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        taken: list[Condition] = []
        for filter in filters:
            condition = pushed(self.options.table, filter)
            if condition is None:
                yield filter
            else:
                taken.append(condition)
        self.options = msgspec.structs.replace(self.options, where=(*self.options.where, *taken))


def record_batches(partition: Any, options: ReadOptions, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a part, as Arrow."""
    # Where a table has no ranges, Spark asks for a part of its own making.
    if not isinstance(partition, StorePartition):
        return
    arrow = arrow_schema(options.table, names)
    # The id is the same in each row and in no row of the store, which is why conditions on it are met here.
    constants = {"store": partition.address.store} if options.table == "events" else {}
    if not all(condition.holds(constants[condition.column]) for condition in options.where if condition.column in constants):
        return
    where = [condition for condition in options.where if condition.column not in constants]
    with partition.address.opened() as bulk, no_garbage():
        for range in partition.ranges:
            for columns in _scan(bulk, range, options, [name for name in names if name not in constants], where):
                yield record_batch(columns, arrow, constants)


@contextmanager
def no_garbage() -> Generator[None, None, None]:
    """Switch the garbage collector off: rows come and go by millions without cycles, and looking for cycles costs a fifth."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _scan(
    bulk: Bulk, range: Range, options: ReadOptions, names: Sequence[str], where: Sequence[Condition]
) -> Iterator[Columns]:
    """The rows of a range. Events that are gone raise `EventsLost`, or are skipped, as the query asks."""
    # With `seq`, the reading can go on behind the last batch when the rest of the range turns out to be purged.
    wanted = list(names) if options.table != "events" or "seq" in names else [*names, "seq"]
    while True:
        try:
            for columns in bulk.scan(range, wanted, where, options.batch_rows):
                if options.table == "events":
                    range = msgspec.structs.replace(range, after=columns["seq"][-1])
                yield columns
            return
        except EventsLost as exc:
            if options.table != "events" or options.fail_on_data_loss:
                raise EventsLost(
                    f"the query wants the events after {range.after} up to {range.upto}, but {exc}{LENIENT}"
                ) from exc
            # A shard that is gone altogether ends the range; one event further at least, or this could go on for ever.
            first = next((s.first for s in bulk.event_shards() if s.name == range.shard), range.upto + 1)
            range = msgspec.structs.replace(range, after=max(first - 1, range.after + 1))


def cores() -> int:
    return os.cpu_count() or 1
