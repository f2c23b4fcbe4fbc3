"""`enqueue`: a task per row of a DataFrame, each key once, all of them visible at one moment or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from omniq.durations import in_seconds
from omniq.errors import Invalid
from omniq.models import duration_us, new_id
from omniq.spark.address import address_of, must_reach, resolved
from omniq.spark.progress import Tell, shown, watching
from omniq.spark.rows import TaskRows, rows_of
from omniq.spark.sessions import is_local
from omniq.spark.writing.columns import ETA, GROUP, ID, KEY, Choice, choice, chosen
from omniq.spark.writing.staging import (
    StagedCount,
    Work,
    aborting,
    begin,
    committed,
    counted,
    parts_of,
    staged,
)
from omniq.storage.bulk import Bulk, open_bulk
from omniq.tasks import OptionFields

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# How long a driver that died may be started again and go on; the docs promise a day.
RUN_TTL_S = 86_400.0

Func = Callable[..., Any] | str
Arguments = Sequence[str] | Mapping[str, str]


class EnqueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `enqueue`: `inserted` tasks are new, as the store counted them; the other rows were known or repeated."""

    run_id: str
    queue: str
    rows: int
    inserted: int
    already_there: int
    seconds: float


def enqueue(
    df: DataFrame,
    url: str,
    func: Func,
    *,
    key: str | Sequence[str],
    args: Arguments | None = None,
    queue: str | None = None,
    group: str | None = None,
    eta: str | None = None,
    group_limit: int = 0,
    timeout: float | timedelta | UnsetType | None = UNSET,
    max_retries: int | UnsetType = UNSET,
    result_ttl: float | timedelta | UnsetType = UNSET,
    dead_queue: str | UnsetType | None = UNSET,
    run_id: str | None = None,
    on_conflict: Literal["skip", "error"] = "skip",
    dedupe: str | float | timedelta = "14d",
    namespace: str | None = None,
    progress: Tell | bool | None = None,
) -> EnqueueReport:
    """Enqueue a call of `func` for each row, once per key, however often the call is repeated; all become visible at once.

    `key` names the column that tells the rows apart, or several columns; `group` and `eta` name columns too. `args` are
    columns passed in order, or keyword → column. Options that are not given come from `@omniq.task` or the settings.

    A key is known for as long as its task is kept, and at least for `dedupe`. A row whose key is known is passed over, or
    refused with `on_conflict="error"` if its task has another body. With the `run_id` of a run that was committed, nothing is
    enqueued and its report is returned; with the `run_id` of a driver that died, its run goes on.

    Raises `Invalid` for rows without a key and for columns that no task can have, `IdempotencyConflict` for such a conflict,
    and `StoreError` when the store failed; then nothing was enqueued, unless the text says otherwise.
    """
    if on_conflict not in ("skip", "error"):
        raise Invalid(f"on_conflict is 'skip' or 'error', not {on_conflict!r}")
    options: dict[str, Any] = {
        "queue": queue or UNSET,
        "group_limit": group_limit or UNSET,
        "timeout": timeout,
        "max_retries": max_retries,
        "result_ttl": result_ttl,
        "dead_queue": dead_queue,
    }
    picked = choice(key, args, group, eta)
    rows = task_rows(func, picked, options, dedupe=dedupe, namespace=namespace)
    report, _ = load(df, url, picked, rows, run_id=run_id, strict=on_conflict == "error", progress=progress)
    return report


def task_rows(
    func: Func, choice: Choice, options: Mapping[str, Any], *, dedupe: str | float | timedelta, namespace: str | None = None
) -> TaskRows:
    """The rule by which the columns of `chosen` become tasks; options that are unset are left out."""
    made = rows_of(
        func,
        key=KEY,
        args=choice.places if choice.keywords is None else dict(zip(choice.keywords, choice.places, strict=True)),
        group=None if choice.group is None else GROUP,
        eta=None if choice.eta is None else ETA,
        namespace=namespace,
        options=cast(OptionFields, {name: value for name, value in options.items() if value is not UNSET}),
    )
    seconds = in_seconds(dedupe) if isinstance(dedupe, str) else dedupe
    form = msgspec.structs.replace(made.form, key_ttl_us=duration_us(seconds, "dedupe"))
    # Spark has computed the ids already, to sort the rows by them.
    return msgspec.structs.replace(made, form=form, id=ID, once=True)


def load(
    df: DataFrame,
    url: str,
    choice: Choice,
    rows: TaskRows,
    *,
    run_id: str | None = None,
    strict: bool = False,
    keep_ids: bool = False,
    progress: Tell | bool | None = None,
) -> tuple[EnqueueReport, StagedCount]:
    """Stage the rows and commit them; returns the report, and the counts and ids that Spark collected."""
    began, asked, queue = time.monotonic(), run_id or new_id(), rows.form.queue
    # Everything that can be refused without the store is refused before a run is opened there.
    must_reach(url, is_local(df.sparkSession))
    picked = chosen(df, rows.namespace, choice)
    with shown(progress) as tell, open_bulk(resolved(url)) as bulk:
        run, done = begin(bulk, asked, queue, RUN_TTL_S)
        if done is not None:
            tally = counted(picked, keep_ids)
        else:
            work = Work(
                address=address_of(url, bulk.info().store_id),
                run_id=run,
                rows=rows,
                names=choice.names,
                strict=strict,
                keep_ids=keep_ids,
            )
            with aborting(bulk, lambda: [run]), watching(lambda: _staged(bulk, run), tell):
                tally = staged(picked, work, parts_of(df.sparkSession, url))
            # Outside of `aborting`: a commit that has begun is finished by somebody, and must not be aborted.
            with watching(lambda: _released(bulk, run), tell):
                done = committed(bulk, run)
    report = EnqueueReport(
        run_id=asked,
        queue=queue,
        rows=tally.rows,
        inserted=done.released,
        already_there=tally.rows - done.released,
        seconds=time.monotonic() - began,
    )
    return report, tally


def _staged(bulk: Bulk, run_id: str) -> tuple[str, int, int | None] | None:
    found = bulk.run(run_id)
    return None if found is None else ("staged", found.new + found.claimed, None)


def _released(bulk: Bulk, run_id: str) -> tuple[str, int, int | None] | None:
    found = bulk.run(run_id)
    return None if found is None else ("committed", found.released, found.new + found.claimed)
