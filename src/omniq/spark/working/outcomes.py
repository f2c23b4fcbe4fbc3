"""The outcomes of a DataFrame's tasks: the driver waits for them, executors look them up beside their rows."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from omniq.errors import NotEnded, TaskNotFound
from omniq.models import State, StoredResult, status_of
from omniq.operations import Operation, Requeue
from omniq.spark.progress import Tell
from omniq.storage.bulk import LOOK, Bulk
from omniq.storage.url import mask

if TYPE_CHECKING:
    from omniq.spark.address import Address

TASK_ID, STATUS, ERROR, ATTEMPTS, RESULT = "_task_id", "_status", "_error", "_attempts", "_result"

# A look sees at most 20,000 of a million tasks, so that progress and timeouts do not wait for the rest.
LOOKS = 20
SHORT_S, LONG_S = 0.1, 5.0  # pauses: while tasks end, and when none does
# A worker that was silent for longer, nine of its heartbeats, is not counted.
ALIVE_S = 90.0
_JSON = "json"


class TaskWaiter:
    """Waits until tasks have ended. Everything that it knows is in the store, so another one may go on at any time."""

    def __init__(self, bulk: Bulk, queue: str, ids: Iterable[str], *, retry_failed: bool = False) -> None:
        self.bulk, self.queue = bulk, queue
        self.pending = _pieces(ids)
        self.total = self.left
        self.ended: Counter[State] = Counter()
        self.first_failure: StoredResult | None = None
        # Tasks that failed before this moment are run again, each once; one that fails again has failed in this call. 0: none.
        self._retry_before_us = bulk.storage.clock() if retry_failed else 0
        self._retried: set[str] = set()

    @property
    def left(self) -> int:
        return sum(map(len, self.pending))

    def wait(self, timeout: float | None, no_worker_s: float, tell: Tell | None) -> None:
        """Return when all have ended; raises `NotEnded` when the time is over, or when nobody works on them."""
        began = moved = served = time.monotonic()
        pause = SHORT_S
        while True:
            # Before the look: a task that ends between the look and the wait ends the wait at once.
            seen = self.bulk.storage.changes
            found = self._look()
            if tell is not None:
                tell("ended", self.total - self.left, self.total)
            if not self.pending:
                return
            now = time.monotonic()
            if found:
                moved, pause = now, SHORT_S
            if timeout is not None and now - began >= timeout:
                raise NotEnded(self._late(f"have not ended within {timeout:g} s"))
            if found or self._workers():
                served = now
            elif now - served >= no_worker_s:
                raise NotEnded(self._late("wait, and no worker serves their queue"))
            if now - moved > LONG_S:
                self._refuse_gone()
            # Fifty of them are enough to be woken by: the next look sees thousands.
            rest = pause if timeout is None else min(pause, max(began + timeout - now, 0.001))
            self.bulk.call(self.bulk.storage.wait(tasks=self.pending[0][:50], timeout=rest, after=seen))
            pause = min(pause * 1.5, LONG_S)

    def _look(self) -> int:
        """Look at some of the tasks that are left, and return the number that have ended."""
        found = 0
        for _ in range(min(LOOKS, len(self.pending))):
            piece = self.pending.popleft()
            results = self.bulk.results(piece)
            if self._retry_before_us:
                self._run_again(results)
            for result in results.values():
                self.ended[result.state] += 1
                if result.state is not State.DONE and self.first_failure is None:
                    self.first_failure = result
            found += len(results)
            # Behind all others, so that the next look sees other tasks; filled up, so that looks stay few towards the end.
            left = [id for id in piece if id not in results]
            if left and self.pending and len(self.pending[-1]) + len(left) <= LOOK:
                self.pending[-1] += left
            elif left:
                self.pending.append(left)
        return found

    def _run_again(self, results: dict[str, StoredResult]) -> None:
        """Have the tasks run again that failed before this call, each once, and take them out of the results."""
        again = [
            id
            for id, result in results.items()
            if result.state is State.DEAD and result.finished_at_us < self._retry_before_us and id not in self._retried
        ]
        operations: list[tuple[Operation, ...]] = [(Requeue(queue=self.queue, id=id, reset_attempts=True),) for id in again]
        self.bulk.storage.send_blocking(operations)  # a refusal only says that it runs already
        self._retried.update(again)
        for id in again:
            del results[id]

    def _workers(self) -> bool:
        """Whether a worker that is alive serves the queue."""
        since = self.bulk.storage.clock() - round(ALIVE_S * 1e6)
        workers = self.bulk.call(self.bulk.storage.workers())
        return any(self.queue in worker.queues and worker.seen_at_us > since for worker in workers)

    def _refuse_gone(self) -> None:
        """Raise `TaskNotFound` when tasks that are waited for are not in the store at all, and have no result."""
        # Asked only when nothing has ended for a while, since it reads whole records.
        first = self.pending[0][:50]
        gone = set(first) - set(self.bulk.records(first)) - set(self.bulk.results(first))
        if gone:
            raise TaskNotFound(
                f"task {min(gone)!r} was enqueued before and is gone, with its result: it was removed or purged. "
                "Give another namespace to run all tasks anew"
            )

    def _late(self, what: str) -> str:
        counts = next((c for c in self.bulk.call(self.bulk.storage.counts()) if c.queue == self.queue), None)
        paused = counts is not None and counts.paused
        state = "" if counts is None else f" (the queue has {counts.waiting} waiting, {counts.running} running)"
        url = mask(self.bulk.info().url)
        help = f"omniq resume {self.queue}" if paused else f"omniq worker MODULE --store {url} --queues {self.queue}"
        why = ": the queue is paused" if paused else ""
        return (
            f"{self.left} of {self.total} tasks in queue {self.queue!r} {what}{state}{why}. Nothing is lost: run `{help}`, and "
            "make the same call again; it goes on with what has ended by then"
        )


def _pieces(ids: Iterable[str]) -> deque[list[str]]:
    pieces: deque[list[str]] = deque()
    for id in ids:
        if not pieces or len(pieces[-1]) == LOOK:
            pieces.append([])
        pieces[-1].append(id)
    return pieces


def look_up(batches: Iterator[pa.RecordBatch], address: Address) -> Iterator[pa.RecordBatch]:
    """In a process of Spark: put the outcome or present status of its task beside each row."""
    with address.opened() as bulk:
        for batch in batches:
            found = _found(bulk, batch.column(TASK_ID).to_pylist())
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            yield pa.RecordBatch.from_pydict(columns | found)


def _found(bulk: Bulk, ids: list[str | None]) -> dict[str, pa.Array]:
    wanted = list({id for id in ids if id is not None})
    rows: dict[str, tuple[Any, ...]] = {id: _ended(result) for id, result in bulk.results(wanted).items()}
    for id, task in bulk.records([id for id in wanted if id not in rows]).items():
        rows[id] = (task.status.value, None if task.last_error is None else str(task.last_error), task.attempts, None)
    nothing = (None, None, None, None)
    columns = zip(*[rows.get(id or "", nothing) for id in ids], strict=True) if ids else [[]] * 4
    kinds = [pa.string(), pa.string(), pa.int32(), pa.string()]
    return {n: pa.array(c, k) for n, c, k in zip((STATUS, ERROR, ATTEMPTS, RESULT), columns, kinds, strict=True)}


def _ended(result: StoredResult) -> tuple[str, str | None, int, str | None]:
    status = status_of(result.state, result.attempts).value
    error = None if result.error is None else str(result.error)
    if result.result is None:
        return status, error, result.attempts, None
    if result.encoding != _JSON:
        return status, f"its result is encoded as {result.encoding!r}; let its worker use JSON", result.attempts, None
    return status, error, result.attempts, result.result.decode()
