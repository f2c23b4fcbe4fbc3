"""`map_tasks`: a task per row, run by ordinary workers, and their results as columns beside the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omniq.durations import in_seconds
from omniq.errors import Invalid, NotEnded, TasksFailed
from omniq.models import State
from omniq.spark.address import Address, address_of, resolved
from omniq.spark.progress import Tell, shown
from omniq.spark.rows import TaskRows
from omniq.spark.working.outcomes import ATTEMPTS, ERROR, RESULT, STATUS, TASK_ID, TaskWaiter, look_up
from omniq.spark.working.result_columns import UNFIT, Shape
from omniq.spark.writing.columns import Choice, choice, id_of, key_text, quoted
from omniq.spark.writing.enqueueing import Arguments, Func, load, task_rows
from omniq.storage.bulk import open_bulk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

# Time to start a worker while the call waits, without waiting for ever where nobody does.
NO_WORKER_S = 60.0
_LOOKED_UP = {STATUS: T.StringType(), ERROR: T.StringType(), ATTEMPTS: T.IntegerType(), RESULT: T.StringType()}
_READ = "_read"
OnError = Literal["null", "raise", "keep"]


def map_tasks(
    df: DataFrame,
    func: Func,
    url: str,
    *,
    key: str | Sequence[str],
    args: Arguments | None = None,
    returns: str | T.DataType,
    group: str | None = None,
    timeout: float | timedelta | None = None,
    on_error: OnError = "null",
    queue: str | None = None,
    group_limit: int = 0,
    task_timeout: float | timedelta | UnsetType | None = UNSET,
    max_retries: int | UnsetType = UNSET,
    keep: str | float | timedelta = "7d",
    retry_failed: bool = False,
    no_worker_after: float = NO_WORKER_S,
    namespace: str | None = None,
    progress: Tell | bool | None = None,
) -> DataFrame:
    """Run `func` for each row as a task, wait for all tasks, and return the rows with the results beside them.

    The tasks are enqueued as `enqueue` does it, so that they keep their retries and the limits of their groups, and any worker
    of the store runs them. `returns` describes the result of `func`: columns (`"price double, currency string"`) for a dict
    with these keys, or one type (`"double"`), which becomes the column `result`. Four columns follow: `_task_id`, `_status`,
    `_error` and `_attempts`. Results are looked up when the returned DataFrame is computed; they are kept for `keep`.

    A call that was cut short goes on when it is made again: a row whose task has ended is not run again, unless it FAILED and
    `retry_failed` is given. The row of a failed task has nulls; with `on_error="raise"` a failed task raises `TasksFailed`.

    Raises `NotEnded` when tasks have not ended within `timeout` seconds, or when no worker has served the queue for
    `no_worker_after` seconds. With `on_error="keep"` neither is an error, and rows of unended tasks keep their status.
    """
    if on_error not in ("null", "raise", "keep"):
        raise Invalid(f"on_error is 'null', 'raise' or 'keep', not {on_error!r}")
    kept = timedelta(seconds=in_seconds(keep)) if isinstance(keep, str) else keep
    shape = Shape.of(returns, df.columns)
    options = {
        "queue": queue or UNSET,
        "group_limit": group_limit or UNSET,
        "timeout": task_timeout,
        "max_retries": max_retries,
        "result_ttl": kept,
        # In a dead queue a task waits again under the same id, so this call would never see its end.
        "dead_queue": None,
    }
    picked = choice(key, args, group)
    rows = task_rows(func, picked, options, dedupe=kept)
    # A namespace apart from that of `enqueue`, whose tasks may keep no result, or for a shorter time.
    rows = msgspec.structs.replace(rows, namespace=f"map/{rows.namespace}" if namespace is None else namespace)
    with shown(progress) as tell, open_bulk(resolved(url)) as bulk:
        # False, not None: an inner call that is told nothing would draw a bar of its own.
        _, tally = load(df, url, picked, rows, keep_ids=True, progress=tell or False)
        assert tally.ids is not None
        waiting = TaskWaiter(bulk, rows.form.queue, tally.ids.to_pylist(), retry_failed=retry_failed)
        try:
            waiting.wait(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout, no_worker_after, tell)
        except NotEnded:
            if on_error != "keep":
                raise
        if on_error == "raise":
            _refuse_failed(waiting)
        return joined(df, picked, rows, shape, address_of(url, bulk.info().store_id), strict=on_error == "raise")


def _refuse_failed(waiting: TaskWaiter) -> None:
    failed = waiting.first_failure
    if failed is not None:
        count = waiting.ended[State.DEAD] + waiting.ended[State.CANCELLED]
        raise TasksFailed(
            f"{count} of {waiting.total} tasks in queue {waiting.queue!r} failed or were cancelled, for example "
            f"{failed.task_id}: {failed.error or 'CANCELLED'}; repair it, and make the call again with retry_failed=True"
        )


def joined(df: DataFrame, choice: Choice, rows: TaskRows, shape: Shape, address: Address, *, strict: bool) -> DataFrame:
    """The rows of `df`, each with the result of its task. With `strict`, a result of another shape is an error."""
    with_id = df.withColumn(TASK_ID, id_of(rows.namespace, key_text(df, choice.keys)))
    schema = T.StructType([*with_id.schema.fields, *[T.StructField(name, kind) for name, kind in _LOOKED_UP.items()]])
    looked_up = with_id.mapInArrow(lambda batches: look_up(batches, address), schema)
    read = looked_up.withColumn(_READ, shape.read(F.col(RESULT)))
    unfit = F.col(_READ)[UNFIT]
    fitting = F.when(unfit.isNull(), F.col(_READ))
    if strict:
        fitting = fitting.otherwise(F.raise_error(F.concat(F.lit("task "), F.col(TASK_ID), F.lit(": "), shape.unfit(unfit))))
    return read.select(
        *[F.col(quoted(name)) for name in df.columns],
        *[fitting[name].alias(name) for name in shape.columns.names],
        TASK_ID,
        STATUS,
        F.coalesce(F.col(ERROR), shape.unfit(unfit)).alias(ERROR),
        ATTEMPTS,
    )


def map_stream(
    df: DataFrame,
    func: Func,
    url: str,
    *,
    then: Callable[[DataFrame, int], None],
    checkpoint: str,
    trigger: Mapping[str, Any] | None = None,
    query_name: str | None = None,
    **options: Any,
) -> StreamingQuery:
    """`map_tasks` for a stream: a batch is enqueued and waited for, then `then(rows_with_results, batch_id)` is called.

    `options` are those of `map_tasks`. A batch that Spark repeats after a failure has the same keys, so its tasks run once;
    `then` is called again for it, as in `foreachBatch`, with the same `batch_id`. A key that comes in a later batch is the same
    task: put what makes it another one into the key. `trigger` is what `writeStream.trigger` takes: `{"availableNow": True}`.
    """
    if not df.isStreaming:
        raise Invalid("this DataFrame is no stream: use map_tasks")
    # Checked here as well as in each batch, so that a mistake is an error of this call and not of the running query.
    choice(options.get("key", ()), options.get("args"), options.get("group"))
    Shape.of(options.get("returns", ""), df.columns)

    def each(batch: DataFrame, batch_id: int) -> None:
        # Computed twice otherwise: for the tasks, and when `then` reads the rows with their results.
        batch.persist()
        try:
            then(map_tasks(batch, func, url, progress=False, **options), batch_id)
        finally:
            batch.unpersist()

    writer = df.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint)
    if query_name is not None:
        writer = writer.queryName(query_name)
    return (writer.trigger(**trigger) if trigger else writer).start()
