"""`replay`: copies of tasks that a query found are enqueued, each once per label and linked to its original."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions as F

from omniq.errors import Invalid
from omniq.models import Record, check_queue, check_text, new_id
from omniq.operations import Enqueue
from omniq.spark.address import Address, address_of, existing, must_reach
from omniq.spark.causes import unwrapped
from omniq.spark.progress import Tell, shown, watching
from omniq.spark.sessions import is_local
from omniq.spark.writing.columns import ID, KEY, column, id_of, in_ranges
from omniq.spark.writing.staging import aborting, committed, parts_of
from omniq.storage.bulk import Bulk
from omniq.translate import fingerprint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REPLAY_OF, REPLAY = "replay_of", "replay"  # headers of a copy: the id of its original, and the label
# As long as `enqueue` remembers its keys unless told: the same call within that time copies nothing twice.
KEY_TTL_US = 14 * 86_400_000_000
MAX_LABEL = 100
SAMPLE = 5
COPIED, THERE, UNENDED, MISSING = "copied", "already there", "unended", "missing"
TALLY = "what string, queue string, name string, tasks long, sample array<string>"
_TEXT = pa.string()
_TALLY = pa.schema([("what", _TEXT), ("queue", _TEXT), ("name", _TEXT), ("tasks", pa.int64()), ("sample", pa.list_(_TEXT))])


class ReplayCount(msgspec.Struct, kw_only=True):
    """The number of tasks of one function in one queue, and a few of their ids; `what` says if and why they are copied."""

    what: str
    queue: str
    name: str
    tasks: int = 0
    sample: list[str] = []


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a replay, or in a dry run the effect that it would have.

    Of the `rows` (ids, each counted once) `replayed` were copied, or would be; `already_there` were copied under this label
    before; `unended` wait or run, so there is nothing to repeat; `missing` are not in the store any more. `found` counts them
    by function and queue, with a few ids each.
    """

    label: str
    dry_run: bool
    rows: int
    replayed: int
    already_there: int
    unended: int
    missing: int
    seconds: float
    found: list[ReplayCount]


class Copying(msgspec.Struct, frozen=True):
    """All that a process of Spark needs to copy tasks; in a dry run there is no run."""

    address: Address
    label: str
    queue: str | None = None
    run_id: str | None = None


def replay(
    df: DataFrame,
    url: str,
    *,
    label: str,
    dry_run: bool = True,
    queue: str | None = None,
    progress: Tell | bool | None = None,
) -> ReplayReport:
    """Enqueue a copy of every task that `df` names in its column `id`; a dry run only counts.

    A copy has the arguments and options of its original and begins anew, in the same queue or in `queue`. Its id follows from
    the label and the original's id: the same call again adds nothing, another label makes other copies. The headers
    `replay_of` and `replay` of a copy name the original and the label. The copies of one queue become visible all at once.

    Raises `Invalid` without a column `id` or for a label that is none, and `StoreError` when the store failed; the same call
    again then replays the rest.
    """
    began = time.monotonic()
    ids = _ids(df, label)
    if queue is not None:
        check_queue(queue)
    must_reach(url, is_local(df.sparkSession))
    with shown(progress) as tell, existing(url) as bulk:
        # A new run for each call: what keeps copies from doubling is their ids, so a run that failed is never gone on with.
        copying = Copying(address_of(url, bulk.info().store_id), label, queue, None if dry_run else f"replay-{new_id()}")
        out = in_ranges(ids, parts_of(df.sparkSession, url)).mapInArrow(lambda batches: copy(batches, copying), TALLY)
        with aborting(bulk, lambda: _joined(bulk, copying)), watching(lambda: _progress(bulk, copying), tell), unwrapped():
            found = merged(msgspec.convert(out.toArrow().to_pylist(), list[ReplayCount]))
        tasks = {what: sum(f.tasks for f in found if f.what == what) for what in (COPIED, THERE, UNENDED, MISSING)}
        copied = tasks[COPIED]
        if copying.run_id is not None:
            queues = sorted({queue or f.queue for f in found if f.what == COPIED})
            copied = sum(committed(bulk, name).released for name in _joined(bulk, copying, queues))
    return ReplayReport(
        label=label,
        dry_run=dry_run,
        rows=sum(tasks.values()),
        replayed=copied,
        # Only a dry run looks for copies beforehand; else the store passes over those that it has and counts the new ones.
        already_there=tasks[THERE] + tasks[COPIED] - copied,
        unended=tasks[UNENDED],
        missing=tasks[MISSING],
        seconds=time.monotonic() - began,
        found=found,
    )


def _ids(df: DataFrame, label: str) -> DataFrame:
    check_text(label, "label")
    if len(label) > MAX_LABEL:
        raise Invalid(f"label {label[:40]!r}…: at most {MAX_LABEL} characters")
    if "id" not in df.columns:
        raise Invalid(f"replay needs a column id of the tasks' ids; the DataFrame has {', '.join(df.columns)}")
    taken, _ = column(df, "id")
    originals = df.select(taken.cast("string").alias(KEY)).distinct()
    return originals.select(id_of(f"{REPLAY}/{label}", F.col(KEY)).alias(ID), KEY)


def merged(parts: Sequence[ReplayCount]) -> list[ReplayCount]:
    """The counts of all processes, added up; the most frequent first."""
    whole: dict[tuple[str, str, str], ReplayCount] = {}
    for part in parts:
        empty = ReplayCount(what=part.what, queue=part.queue, name=part.name)
        one = whole.setdefault((part.what, part.queue, part.name), empty)
        one.tasks += part.tasks
        one.sample = (one.sample + part.sample)[:SAMPLE]
    return sorted(whole.values(), key=lambda one: (one.what, -one.tasks, one.queue, one.name))


def run_of(copying: Copying, queue: str) -> str:
    """The run of a queue's copies: a run belongs to one queue, so there is one for each."""
    return f"{copying.run_id}-{queue}"


def _joined(bulk: Bulk, copying: Copying, queues: Sequence[str] | None = None) -> list[str]:
    """The runs of these queues, or of all queues of the store."""
    if copying.run_id is None:
        return []
    # Of all, when it is to be aborted or shown: until Spark's processes have ended, only they know which queues they met.
    queues = bulk.call(bulk.storage.queues()) if queues is None else queues
    for queue in queues:
        bulk.join_run(run_of(copying, queue), queue)
    return [run_of(copying, queue) for queue in queues]


def _progress(bulk: Bulk, copying: Copying) -> tuple[str, int, int | None] | None:
    if copying.run_id is None:
        return None
    runs = [bulk.run(name) for name in _joined(bulk, copying)]
    return "copied", sum(run.new for run in runs if run is not None), None


def copy(batches: Iterator[pa.RecordBatch], copying: Copying) -> Iterator[pa.RecordBatch]:
    """In a process of Spark: look at the originals, and stage their copies unless it is a dry run."""
    found: dict[tuple[str, str, str], ReplayCount] = {}
    opened: set[str] = set()
    with copying.address.opened() as bulk:
        for batch in batches:
            copies: dict[str, list[Enqueue]] = {}
            for id, original, task, what in _looked_at(bulk, batch, dry_run=copying.run_id is None):
                place = (what, "", "") if task is None else (what, task.queue, task.name)
                seen = found.setdefault(place, ReplayCount(what=what, queue=place[1], name=place[2]))
                seen.tasks += 1
                if len(seen.sample) < SAMPLE:
                    seen.sample = [*seen.sample, original]
                if task is not None and what == COPIED:
                    made = copy_of(task, id, copying.label, copying.queue or task.queue)
                    copies.setdefault(made.queue, []).append(made)
            if copying.run_id is not None:
                for queue, tasks in copies.items():
                    name = run_of(copying, queue)
                    if queue not in opened:
                        bulk.open_run(name, queue)
                        opened.add(queue)
                    bulk.stage(name, tasks)
    yield pa.RecordBatch.from_pylist([msgspec.structs.asdict(one) for one in found.values()], schema=_TALLY)


def _looked_at(bulk: Bulk, batch: pa.RecordBatch, *, dry_run: bool) -> Iterator[tuple[str, str, Record | None, str]]:
    """For each row the id of the copy, the id of the original, the original if it is there, and what becomes of it."""
    ids: list[Any] = batch.column(ID).to_pylist()
    originals: list[Any] = batch.column(KEY).to_pylist()
    tasks = bulk.records([original for original in originals if original])
    copies = bulk.records([id for id in ids if id]) if dry_run else {}
    for id, original in zip(ids, originals, strict=True):
        task = tasks.get(original)
        if task is None:
            yield id, str(original), None, MISSING
        elif not task.state.final:
            yield id, original, task, UNENDED
        else:
            yield id, original, task, THERE if id in copies else COPIED


def copy_of(task: Record, id: str, label: str, queue: str) -> Enqueue:
    """A copy of a task that begins anew: no attempts, no eta, no interval."""
    return Enqueue(
        id=id,
        name=task.name,
        queue=queue,
        payload=task.payload,
        encoding=task.encoding,
        headers={**(task.headers or {}), REPLAY_OF: task.id, REPLAY: label},
        origin=task.origin,
        timeout_us=task.timeout_us,
        lease_us=task.lease_us,
        result_ttl_us=task.result_ttl_us,
        max_attempts=task.max_attempts,
        backoff=task.backoff,
        group=task.group,
        dead_queue=task.dead_queue,
        idempotency_key=id,
        key_ttl_us=KEY_TTL_US,
        fingerprint=fingerprint(task.payload, task.name, label, task.id),
    )
