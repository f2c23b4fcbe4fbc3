"""`run_worker`: drain a store on the executors of a cluster.

Each slot is a Spark job of one task that runs an ordinary worker for a round, and is started again. So an executor that is
lost takes no other slot with it, and a long task holds back no other slot. Tasks of a lost executor come back by their lease,
as everywhere. The driver keeps itself in the store's registry of workers; when it leaves, the slots finish and end.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.config import Settings
from omniq.errors import ConfigError, Invalid, SparkFailed, StoreError
from omniq.models import new_id, now_us
from omniq.operations import Beat, WorkerInfo
from omniq.portal import Portal
from omniq.spark.address import resolved
from omniq.spark.causes import cause, unwrapped
from omniq.spark.reading.reading import shared
from omniq.spark.sessions import is_connect
from omniq.spark.working.slots import SCHEMA, Round, SlotPlan, rehearsal, slot
from omniq.storage.base import BaseStorage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("omniq.spark")

BEAT_S = 10.0  # as other workers
TICK_S = 0.2
# A lost executor is replaced in a moment, so the first try comes at once; a cluster without nodes is asked less and less.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
# Spark Connect does not tell its cores. Too many slots do no harm, since those without a core wait for one.
SLOTS_OF_CONNECT = 8


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The sums of all rounds. A round that was lost with its executor has counted nothing, and is in `lost`."""

    done: int
    """Runs that succeeded."""
    failed: int
    """Tasks that failed for good."""
    retried: int
    """Runs that failed and are tried again."""
    rounds: int
    lost: int
    stopped: bool
    """Whether it was told to stop before all was drained."""


def run_worker(
    spark: SparkSession,
    url: str,
    queues: Sequence[str] | None = None,
    *,
    modules: Sequence[str] = (),
    slots: int | None = None,
    concurrency: int = 10,
    batch: int = 200,
    lease: float | None = None,
    grace: float | None = None,
    drain: bool = False,
    round_s: float = 300.0,
    settings: Settings | None = None,
    stop: threading.Event | None = None,
) -> WorkerReport:
    """Run tasks on the executors: `slots` workers, by default one per core, with `concurrency` tasks each.

    `queues` are the queues to serve, in order of preference; None serves all. `modules` are imported by every executor, and
    their functions and all registered tasks may run. `batch`, `lease` and `grace` mean the same as for `AsyncWorkerPool`. With
    `drain` it returns when nothing is ready, running or waiting for a retry. Else it returns after SIGINT, SIGTERM or when
    `stop` is set: running tasks may finish within the grace time, the rest is handed back. Signals are left alone outside the
    main thread and where `stop` is given.

    Raises `ConfigError` for a store that the executors cannot reach and for a module that they cannot import.
    """
    chosen = settings or Settings()
    plan = SlotPlan(
        url=shared(spark, url),
        driver=f"{platform.node()}:{os.getpid()}:spark-{new_id()[-8:]}",
        queues=None if queues is None else _names("queues", queues),
        modules=_names("modules", modules),
        concurrency=concurrency,
        batch=batch,
        lease=lease,
        drain=drain,
        round_s=round_s,
        settings=chosen if grace is None else msgspec.structs.replace(chosen, grace=grace),
    )
    if slots is not None and (isinstance(slots, bool) or slots < 1):
        raise Invalid(f"slots must be a whole number of at least 1, not {slots!r}")
    if not 0 < round_s < 1e9:
        raise Invalid(f"round_s must be more than 0 seconds, not {round_s!r}")
    if (spark.conf.get("spark.speculation", "false") or "").lower() == "true":
        raise ConfigError("spark.speculation would end slots in the middle of their tasks: set it to false for workers")
    told = stop or threading.Event()
    # The registration comes first: a slot that does not find its driver there takes no task.
    with _signals(told if stop is None else None), _Registration(plan) as registration:
        _rehearse(spark, plan)
        return _Slots(spark, plan, told, registration).run(slots or _cores(spark))


def _names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise Invalid(f"{what} is a list of names, not {names!r}")
    return tuple(names)


def _cores(spark: SparkSession) -> int:
    return SLOTS_OF_CONNECT if is_connect(spark) else max(1, spark.sparkContext.defaultParallelism)


def _rehearse(spark: SparkSession, plan: SlotPlan) -> None:
    try:
        with unwrapped():
            spark.range(0, 1, 1, 1).mapInArrow(rehearsal(plan), SCHEMA).collect()
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"the executors cannot import omniq ({exc}): use the same environment on each node, or send one with "
            "spark.archives; omniq spark doctor --master … tells more"
        ) from exc


class _Registration:
    """The driver's place in the store's registry of workers. While it is there, slots work."""

    def __init__(self, plan: SlotPlan) -> None:
        self._storage = BaseStorage.from_url(resolved(plan.url), events=plan.settings.events)
        # Whoever can write to a store on the network would else choose what runs on the executors.
        if not plan.modules and not self._storage.capabilities.local:
            raise Invalid("no task may run, since modules is empty: name the modules of your tasks")
        self._info = WorkerInfo(
            worker=plan.driver,
            host=platform.node(),
            pid=os.getpid(),
            queues=plan.queues or (),
            busy={},  # the slots are workers of their own in the registry, and say there what they run
            started_at_us=now_us(),
        )
        self._portal = Portal()
        self._next_at = 0.0

    def __enter__(self) -> _Registration:
        try:
            self._portal.call(self._storage.open())
            self._portal.call(self._storage.hold_worker(self._info.worker))
            self._storage.apply_blocking([(Beat(info=self._info),)])
        except BaseException:
            self._close()
            raise
        return self

    def beat(self) -> None:
        """Send a heartbeat when one is due."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + BEAT_S
        try:
            self._storage.apply_blocking([(Beat(info=self._info),)])
        except StoreError as exc:
            log.error("heartbeat failed: %s", exc)

    def leave(self) -> bool:
        """Tell the slots to end; False when the store could not be told."""
        try:
            self._storage.apply_blocking([(Beat(info=self._info, gone=True),)])
        except StoreError as exc:
            log.error("the slots could not be told to end, trying again: %s", exc)
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._portal.call(self._storage.release_worker(self._info.worker))
        self._close()

    def _close(self) -> None:
        self._portal.call(self._storage.close())
        self._portal.close()


class _Slots:
    """Keeps slots running, each by a thread of its own that waits for Spark."""

    def __init__(self, spark: SparkSession, plan: SlotPlan, told: threading.Event, registration: _Registration) -> None:
        self._spark, self._plan, self._told, self._registration = spark, plan, told, registration
        # `_told` is set from outside. `_ending` is set for any end, also a failed slot, and keeps slots from another round.
        self._ending = threading.Event()
        self._rounds: list[Round] = []
        self._lost = 0
        self._lock = threading.Lock()

    def run(self, slots: int) -> WorkerReport:
        from pyspark import inheritable_thread_target

        # With the job group and pool of the caller, so that cancelling that group cancels the slots.
        keep: Any = inheritable_thread_target(self._spark)(self._keep)
        with ThreadPoolExecutor(slots, thread_name_prefix="omniq-slot") as threads:
            running = [threads.submit(keep) for _ in range(slots)]
            self._watch(running)
        for ended in running:
            ended.result()
        rounds = self._rounds
        return WorkerReport(
            done=sum(r.done for r in rounds),
            failed=sum(r.failed for r in rounds),
            retried=sum(r.retried for r in rounds),
            rounds=len(rounds),
            lost=self._lost + sum(r.again for r in rounds),
            stopped=self._told.is_set(),
        )

    def _watch(self, running: list[Future[None]]) -> None:
        """Wait until all slots have ended. They are told to end when `_told` is set, or when one of them has failed."""
        try:
            while True:
                ended, going = wait(running, TICK_S, FIRST_EXCEPTION)
                if not going or self._told.is_set() or any(future.exception() for future in ended):
                    break
                self._registration.beat()
        finally:
            self._ending.set()
            # Slots that run learn only from the store that they are to end, so a store that is away is tried again.
            while not self._registration.leave() and wait(running, MAX_PAUSE_S).not_done:
                pass
            wait(running)

    def _keep(self) -> None:
        """Run round after round. A lost round is begun again, after a pause that grows."""
        pause = FIRST_PAUSE_S
        while not self._ending.is_set():
            try:
                (row,) = self._spark.range(0, 1, 1, 1).mapInArrow(slot(self._plan), SCHEMA).collect()
            except Exception as exc:
                self._must_be_passing(exc)
                log.warning("a slot was lost and is begun again: %s", _sentence(cause(exc)))
                with self._lock:
                    self._lost += 1
                self._ending.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
                continue
            pause = FIRST_PAUSE_S
            ended = msgspec.convert(row.asDict(), Round)
            with self._lock:
                self._rounds.append(ended)
            if ended.drained:
                return

    def _must_be_passing(self, exc: Exception) -> None:
        """Raise an error that will not pass by itself: one of the code, of a session that has ended, of a cancelled job."""
        found = cause(exc)
        # `cause` notes the traceback of a Python process. Without one Spark lost the process or its node, which passes.
        raised_by_python = bool(getattr(found, "__notes__", ()))
        if isinstance(found, StoreError) or not (raised_by_python or "CANCELLED" in str(exc) or _is_over(self._spark)):
            return
        raise found if found is not exc else SparkFailed(_sentence(exc)) from None


def _is_over(spark: SparkSession) -> bool:
    try:
        if is_connect(spark):
            return bool(spark.is_stopped)  # type: ignore[attr-defined]
        context: Any = spark.sparkContext._jsc  # pyright: ignore[reportPrivateUsage]
        return bool(context.sc().isStopped())
    except Exception:  # it cannot even be asked
        return True


def _sentence(exc: Exception) -> str:
    """Spark's most recent failure of the task, where its text names one; else the first line of the text."""
    said = re.sub(r"\b(?:[a-z]+\.)+[A-Z]\w*(?:Exception|Error): ", "", str(exc).strip())
    return said.rpartition("most recent failure: ")[2].partition("\n")[0] or type(exc).__name__


@contextmanager
def _signals(told: threading.Event | None) -> Generator[None, None, None]:
    """The first SIGINT or SIGTERM sets `told`; the second is handled as it was before."""
    if told is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        log.info("stopping: running tasks have their grace time to finish")
        restore()
        told.set()

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
