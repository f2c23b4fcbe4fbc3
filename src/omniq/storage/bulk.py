"""A store for programs that move a great many tasks at once: synchronous, opened by its URL, nothing to pickle."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from omniq.errors import Refused, RunClosed
from omniq.models import Record, StoredResult, duration_us
from omniq.operations import AbortRun, CommitRun, Enqueue, OnRun, OpenRun, Outcome, RunInfo, Shard, Stage, StoreInfo
from omniq.portal import Portal
from omniq.storage.base import BaseStorage
from omniq.storage.scanning import BATCH, Range
from omniq.storage.tables import Columns, Condition, columns_of, visible

T = TypeVar("T")

CALL = 5000  # tasks of one call
LOOK = 1000  # ids of one look


def open_bulk(url: str, **options: Any) -> Bulk:
    """The bulk side of the store that a URL names; close it, or use it in a `with`."""
    return Bulk(BaseStorage.from_url(url, **options))


class Bulk:
    """Reading a store by ranges, and writing to it in staged runs."""

    def __init__(self, storage: BaseStorage) -> None:
        self.storage = storage
        self._portal = Portal()
        self._queues: dict[str, str] = {}  # of runs, whose calls go by queue and id

    def __enter__(self) -> Self:
        self.call(self.storage.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.call(self.storage.close())
        self._portal.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Any other call of the storage: `bulk.call(bulk.storage.workers())`."""
        return self._portal.call(coroutine)

    def info(self) -> StoreInfo:
        return self.call(self.storage.info())

    # -- staged runs -------------------------------------------------------------------------------

    def open_run(self, run_id: str, queue: str, ttl: float | timedelta = timedelta(days=1)) -> RunInfo:
        """Begin a run, or go on with one that is open; a finished one raises `RunClosed`."""
        self._queues[run_id] = queue
        return self._do(OpenRun(queue=queue, run_id=run_id, ttl_us=duration_us(ttl, "ttl")))[0]

    def join_run(self, run_id: str, queue: str) -> None:
        """Use a run that another process opened, without looking for it."""
        self._queues[run_id] = queue

    def stage(self, run_id: str, tasks: Iterable[Enqueue], *, strict: bool = False) -> tuple[int, int]:
        """Bring tasks in, unseen until the commit. Returns how many were new, and how many were there already.

        Any number of tasks travel in parts, each staged whole. When a part raises, those before it stay staged.
        """
        queue, size = self._queue(run_id), self.storage.stage_rows
        left = iter(tasks)
        new = there = 0
        while some := list(itertools.islice(left, CALL)):
            parts = (some[start : start + size] for start in range(0, len(some), size))
            stages = [Stage(queue=queue, run_id=run_id, tasks=tuple(part), strict=strict) for part in parts]
            for staged in self._do(*stages):
                new, there = new + staged.new, there + staged.there
        return new, there

    def commit_run(self, run_id: str) -> RunInfo:
        """Make all tasks of a run visible. When this returns they all are; if this process dies, `sweep` goes on with it."""
        return self._settled(CommitRun(queue=self._queue(run_id), run_id=run_id))

    def abort_run(self, run_id: str) -> RunInfo:
        """Forget the tasks of a run."""
        return self._settled(AbortRun(queue=self._queue(run_id), run_id=run_id))

    def run(self, run_id: str) -> RunInfo | None:
        """Returns a run as the store counts it; None if there is none of this id."""
        if run_id in self._queues:
            return self.call(self.storage.run(self._queues[run_id], run_id))
        for queue in self.call(self.storage.queues()):
            found = self.call(self.storage.run(queue, run_id))
            if found is not None:
                return found
        return None

    def _queue(self, run_id: str) -> str:
        if run_id not in self._queues:
            found = self.run(run_id)
            if found is None:
                raise RunClosed(f"no run {run_id!r} in this store; open it first")
            self._queues[run_id] = found.queue
        return self._queues[run_id]

    def _settled(self, op: CommitRun | AbortRun) -> RunInfo:
        found: RunInfo = self._do(op)[0]
        # A large run takes several transactions, between which other callers have their turn.
        while not found.settled:
            found = self._do(op)[0]
        return found

    def _do(self, *operations: OnRun) -> list[Any]:
        """Send each in a transaction of its own. All may be repeated, so a store that is away is asked for some seconds."""
        answers = self.storage.send_blocking([(op,) for op in operations], patient=True)
        for answer in answers:
            if isinstance(answer, Refused):
                raise answer
        return [answer[0] for answer in cast("list[list[Outcome]]", answers)]

    # -- reading -----------------------------------------------------------------------------------

    def records(self, ids: Sequence[str]) -> dict[str, Record]:
        """Returns the tasks of these ids that exist, staged ones excepted."""
        found: dict[str, Record] = {}
        for start in range(0, len(ids), LOOK):
            found |= self.call(_records(self.storage, ids[start : start + LOOK]))
        return found

    def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        """Returns the results of the tasks that have ended."""
        found: dict[str, StoredResult] = {}
        for start in range(0, len(ids), LOOK):
            found |= self.call(self.storage.results(ids[start : start + LOOK]))
        return found

    def event_shards(self) -> list[Shard]:
        return self.call(self.storage.event_shards())

    def ranges(self, table: str, parts: int = 1) -> list[Range]:
        """About `parts` ranges of a table, which any process may `scan` on its own."""
        columns_of(table)
        return self.call(self.storage.ranges(table, parts))

    def scan(
        self, range: Range, columns: Sequence[str] | None = None, where: Sequence[Condition] = (), rows: int = BATCH
    ) -> Iterator[Columns]:
        """The rows of a range that meet every condition, as batches of columns.

        A task that is there all the while appears once (on Redis at least once: drop repeats by id).
        """
        names = [column.name for column in columns_of(range.table, columns)]
        columns_of(range.table, [condition.column for condition in where])
        batches = self.storage.scan_blocking(range, names, where, rows)
        if batches is None:
            found = self.storage.scan(range, names, where, rows)
            batches = iter(lambda: self.call(_next(found)), None)
        for batch in batches:
            if batch[names[0]]:
                yield batch


async def _records(storage: BaseStorage, ids: Sequence[str]) -> dict[str, Record]:
    found = await asyncio.gather(*map(storage.get, ids))
    return {task.id: task for task in found if task is not None and visible(task)}


async def _next(batches: Any) -> Columns | None:
    return await anext(batches, None)
