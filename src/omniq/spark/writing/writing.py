"""Writing with format `omniq`: a task per row, staged by the tasks of Spark and made visible by its driver, all or none."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from omniq.durations import parse_duration
from omniq.errors import ConfigError, IdempotencyConflict, Refused, RunClosed
from omniq.models import new_id
from omniq.operations import Enqueue, Enqueued
from omniq.spark.address import Address, address_of, is_file, resolved
from omniq.spark.causes import sentence_first
from omniq.spark.reading.options import choice, count, known_options, url_of
from omniq.spark.rows import TaskRows, rows_of
from omniq.storage.bulk import Bulk, open_bulk
from omniq.tasks import OptionFields

if TYPE_CHECKING:
    import pyarrow as pa

WRITE = (
    "url",
    "path",
    "func",
    "keyColumn",
    "argColumns",
    "groupColumn",
    "etaColumn",
    "queue",
    "maxRetries",
    "timeout",
    "groupLimit",
    "namespace",
    "runId",
    "runTtl",
    "visible",
    "onConflict",
    "chunkRows",
)
# Rows of one transaction. Longer scripts keep the other clients of a Redis server waiting, and were no faster.
CHUNK = 5000
REDIS_CHUNK = 500


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of a write."""

    url: str
    rows: TaskRows
    run_id: str
    run_ttl_s: float = 86_400.0
    visible: Literal["on_commit", "immediately"] = "on_commit"
    strict: bool = False
    chunk_rows: int = CHUNK


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a write; raises `ConfigError` or `Invalid`, which name the option and its possible values."""
    options = known_options(given, WRITE, "writing")
    url = url_of(options)
    strict = choice(options, "onConflict", ("skip", "error")) == "error"
    rows = _rows(options)
    return WriteOptions(
        url=url,
        rows=msgspec.structs.replace(rows, hashed=True) if strict else rows,
        run_id=options.get("runId") or new_id(),
        run_ttl_s=parse_duration(options.get("runTtl", "24h")) / 1e9,
        visible=choice(options, "visible", ("on_commit", "immediately")),
        strict=strict,
        chunk_rows=count(options, "chunkRows", CHUNK if is_file(resolved(url)) else REDIS_CHUNK),
    )


def _rows(options: Mapping[str, str]) -> TaskRows:
    if "func" not in options:
        raise ConfigError('format omniq writes calls of a function: add .option("func", "module:name")')
    fixed: OptionFields = {}
    if "queue" in options:
        fixed["queue"] = options["queue"]
    if "timeout" in options:
        fixed["timeout"] = parse_duration(options["timeout"]) / 1e9
    if "maxRetries" in options:
        fixed["max_retries"] = count(options, "maxRetries", least=0)
    if "groupLimit" in options:
        fixed["group_limit"] = count(options, "groupLimit")
    return rows_of(
        options["func"],
        key=options.get("keyColumn", "key"),
        args=arguments(options.get("argColumns", ""), "argColumns"),
        group=options.get("groupColumn"),
        eta=options.get("etaColumn"),
        namespace=options.get("namespace"),
        options=fixed,
    )


def arguments(text: str, what: str) -> list[str] | dict[str, str]:
    """`a, b` are columns in order; `x=a, y=b` are keywords with their columns."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not any("=" in part for part in parts):
        return parts
    named = [part.partition("=") for part in parts]
    if not all(sign and column.strip() for _, sign, column in named):
        raise ConfigError(f"{what} {text!r}: name columns in order (a, b), or all by keyword (x=a, y=b)")
    return {keyword.strip(): column.strip() for keyword, _, column in named}


def writer(options: Mapping[str, str], names: Sequence[str], overwrite: bool) -> TaskWriter:
    """Open the run on the driver, so that a mistake is reported before any row is computed."""
    if overwrite:
        raise ConfigError('format omniq only appends tasks and replaces none: write with .mode("append")')
    asked = write_options(options)
    asked.rows.check(names)
    with open_bulk(resolved(asked.url)) as bulk:
        made = TaskWriter(asked, address_of(asked.url, bulk.info().store_id))
        if asked.visible == "on_commit":
            bulk.open_run(asked.run_id, asked.rows.form.queue, asked.run_ttl_s)
    return made


@dataclass
class WrittenTasks(WriterCommitMessage):
    """The rows that one task of Spark stored. A repeated task finds its own rows: only the store counts right (`Bulk.run`)."""

    new: int = 0
    there: int = 0


class TaskWriter(DataSourceArrowWriter):
    """Stages rows in chunks wherever Spark runs it; the driver commits or aborts the run."""

    # Pickled for each of these calls, which may run in different processes: it keeps no store open.
    def __init__(self, options: WriteOptions, address: Address) -> None:
        self.options = options
        self.address = address

    @contextmanager
    def _joined(self) -> Generator[Bulk, None, None]:
        with self.address.opened() as bulk:
            bulk.join_run(self.options.run_id, self.options.rows.form.queue)
            yield bulk

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenTasks:
        written = WrittenTasks()
        with self._joined() as bulk:
            for tasks in chunks(iterator, self.options.rows, self.options.chunk_rows, strict=self.options.strict):
                new, there = self._store(bulk, tasks)
                written.new += new
                written.there += there
        return written

    def _store(self, bulk: Bulk, tasks: Sequence[Enqueue]) -> tuple[int, int]:
        if self.options.visible == "on_commit":
            return bulk.stage(self.options.run_id, tasks, strict=self.options.strict)
        conflict = "error" if self.options.strict else "return"
        operations = tuple(msgspec.structs.replace(task, on_conflict=conflict) for task in tasks)
        (answer,) = bulk.storage.send_blocking([operations])
        if isinstance(answer, Refused):
            raise answer
        there = sum(isinstance(outcome, Enqueued) and outcome.existed for outcome in answer)
        return len(tasks) - there, there

    @sentence_first()
    def commit(self, messages: list[Any]) -> None:
        if self.options.visible == "on_commit":
            with self._joined() as bulk:
                bulk.commit_run(self.options.run_id)

    @sentence_first()
    def abort(self, messages: list[Any]) -> None:
        if self.options.visible == "on_commit":
            # A run whose time is over is aborted already; one that was committed must not be.
            with self._joined() as bulk, suppress(RunClosed):
                bulk.abort_run(self.options.run_id)


def chunks(batches: Iterator[pa.RecordBatch], rows: TaskRows, size: int, *, strict: bool) -> Iterator[list[Enqueue]]:
    """The tasks of all rows, in pieces of `size`. A key that is repeated in a piece is taken once, or refused with another body
    if `strict`."""
    # Repeats in different pieces are left to the store, which knows all keys.
    waiting: dict[str, Enqueue] = {}
    for batch in batches:
        for task in rows.tasks(batch):
            first = waiting.setdefault(task.id, task)
            if strict and first.fingerprint != task.fingerprint:
                raise IdempotencyConflict(f"two rows that differ have the same key: {first.payload!r} and {task.payload!r}")
            if len(waiting) == size:
                yield list(waiting.values())
                waiting = {}
    if waiting:
        yield list(waiting.values())
