"""A run of tasks: opened by the driver, filled by Spark's processes, committed by the driver."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from omniq.errors import Invalid, RunClosed, StoreError
from omniq.operations import Enqueue, RunInfo, RunState
from omniq.spark.address import Address, is_file, resolved
from omniq.spark.causes import unwrapped
from omniq.spark.rows import TaskRows
from omniq.spark.sessions import is_connect
from omniq.spark.writing.columns import ID, KEY, in_ranges
from omniq.spark.writing.writing import CHUNK, chunks
from omniq.storage.bulk import Bulk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# More would only wait for each other: one writes while the other makes tasks of its rows.
FILE_WRITERS = 2
MAX_SHOWN = 200
# One schema for two kinds of rows: a `mapInArrow` has only one. Ids come by chunks, the counts of a part once at its end.
TALLY = "id string, rows long, without_key long, sample string"
_TALLY = pa.schema([("id", pa.string()), ("rows", pa.int64()), ("without_key", pa.int64()), ("sample", pa.string())])


class Work(msgspec.Struct, frozen=True):
    """All that a process of Spark needs to stage rows; strings and numbers only, since it is pickled."""

    address: Address
    run_id: str
    rows: TaskRows
    names: dict[str, str]  # what the user calls the columns
    chunk: int = CHUNK
    strict: bool = False
    keep_ids: bool = False


class StagedCount(msgspec.Struct):
    """The rows of a run as Spark counts them; only the store knows how many tasks were new."""

    rows: int = 0
    without_key: int = 0
    sample: str | None = None
    ids: pa.ChunkedArray | None = None


def parts_of(spark: SparkSession, url: str) -> int:
    """The number of processes that may stage at once."""
    if is_file(resolved(url)):
        return FILE_WRITERS
    # A session of Spark Connect does not tell its cores; the partitions of its shuffles are the nearest thing to them.
    if is_connect(spark):
        return int(spark.conf.get("spark.sql.shuffle.partitions") or 2)
    return 2 * spark.sparkContext.defaultParallelism


def begin(bulk: Bulk, run_id: str, queue: str, ttl_s: float) -> tuple[str, RunInfo | None]:
    """Open a run, or go on with an open one; for a run that was committed its end is returned too.

    A run that failed is over, and the next one of its name is `run~2`, then `run~3`, …: a process of the failed run that
    nobody could stop cannot add to it.
    """
    for n in count(1):
        name = run_id if n == 1 else f"{run_id}~{n}"
        bulk.join_run(name, queue)
        found = bulk.run(name)
        if found is not None and found.state is RunState.COMMITTED:
            # Its driver may have died before all was visible, and a commit may be repeated.
            return name, bulk.commit_run(name)
        if found is None or found.state is RunState.OPEN:
            try:
                bulk.open_run(name, queue, ttl_s)
            except RunClosed:  # its time is over
                continue
            return name, None
    raise AssertionError


def committed(bulk: Bulk, run_id: str) -> RunInfo:
    """Commit a run. Raises an error that says how to go on when the store fails just now."""
    try:
        return bulk.commit_run(run_id)
    except StoreError as exc:
        exc.add_note(f"All rows are staged. Call it again with run_id={run_id!r} to make them visible.")
        raise


@contextmanager
def aborting(bulk: Bulk, run_ids: Callable[[], Sequence[str]]) -> Generator[None, None, None]:
    """Abort the runs when the block fails."""
    try:
        yield
    except BaseException as exc:  # Ctrl-C too: its rows would else be staged for a day
        for run_id in run_ids():
            try:
                bulk.abort_run(run_id)
            except RunClosed:
                continue
            except StoreError as failed:
                exc.add_note(f"The run {run_id} could not be aborted ({failed}); the store forgets it when its time is over.")
        raise


def staged(df: DataFrame, work: Work, parts: int) -> StagedCount:
    """Stage all rows of `df`, whose columns `chosen` made; raises `Invalid` when some have no key."""
    out = in_ranges(df, parts).mapInArrow(lambda batches: stage(batches, work), TALLY)
    with unwrapped():
        table = out.toArrow()
    tally = StagedCount(
        rows=sum(table["rows"].drop_null().to_pylist()),
        without_key=sum(table["without_key"].drop_null().to_pylist()),
        sample=next(iter(table["sample"].drop_null().to_pylist()), None),
        ids=table["id"].drop_null() if work.keep_ids else None,
    )
    if tally.without_key:
        raise Invalid(
            f"{tally.without_key} of {tally.rows} rows have no key ({work.names[KEY]} is null), for example {tally.sample}: "
            "filter them out, or choose another key; nothing was enqueued"
        )
    return tally


def counted(df: DataFrame, keep_ids: bool) -> StagedCount:
    """The count that `staged` would return, of rows whose run was committed before."""
    with unwrapped():
        if not keep_ids:
            return StagedCount(rows=df.count())
        ids = df.select(ID).toArrow()[ID]
    return StagedCount(rows=len(ids), ids=ids.unique())


def stage(batches: Iterator[pa.RecordBatch], work: Work) -> Iterator[pa.RecordBatch]:
    """In a process of Spark: stage the rows of one part. A repeat is harmless, since the ids are the same."""
    seen = StagedCount()
    with work.address.opened() as bulk:
        bulk.join_run(work.run_id, work.rows.form.queue)
        for tasks in chunks(_with_key(batches, seen, work), work.rows, work.chunk, strict=work.strict):
            bulk.stage(work.run_id, tasks, strict=work.strict)
            if work.keep_ids:
                yield _ids(tasks)
    yield pa.RecordBatch.from_pydict(
        {"id": [None], "rows": [seen.rows], "without_key": [seen.without_key], "sample": [seen.sample]}, schema=_TALLY
    )


def _ids(tasks: list[Enqueue]) -> pa.RecordBatch:
    nothing = [pa.nulls(len(tasks), field.type) for field in _TALLY][1:]
    return pa.RecordBatch.from_arrays([pa.array([task.id for task in tasks], pa.string()), *nothing], schema=_TALLY)


def _with_key(batches: Iterator[pa.RecordBatch], seen: StagedCount, work: Work) -> Iterator[pa.RecordBatch]:
    """The batches that can be staged. From the first row without a key on, rows are only counted: the run will fail."""
    for batch in batches:
        seen.rows += batch.num_rows
        keys = batch.column(KEY)
        if keys.null_count:
            seen.without_key += keys.null_count
            if seen.sample is None:
                seen.sample = _shown(batch.filter(keys.is_null()).slice(0, 1), work)
        if not seen.without_key:
            yield batch


def _shown(batch: pa.RecordBatch, work: Work) -> str:
    (row,) = batch.to_pylist(maps_as_pydicts="lossy")
    row: dict[str, Any] = {work.names[name]: value for name, value in row.items() if name not in (ID, KEY)}
    text = repr(row)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
