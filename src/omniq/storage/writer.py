"""One writer thread per process and store: everything that waits when it is free shares one commit.

Nothing is answered and nobody woken before the commit. What a commit is, a driver says in `_transact`.
"""

from __future__ import annotations

import abc
import asyncio
import os
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

from omniq.errors import DriverClosed, OmniQError, OutcomeUnknown
from omniq.storage.bell import Bell
from omniq.storage.locks import LOOK_S, Contended, WriteLock
from omniq.storage.machine.machine import Machine
from omniq.storage.waiting import Waiters

S = TypeVar("S")
T = TypeVar("T")

MAX_WEIGHT = 2000  # operations in one commit, so that no writer holds the store longer than some 50 ms


class WriteRequest(Generic[S]):
    """A piece of work on its way to the writer, and what its caller waits for: a future, or without a loop a lock.

    A plain lock, since Ctrl-C in the middle of a `concurrent.futures.Future` can leave it locked for the writer too.
    """

    __slots__ = ("_begun", "_claim", "_settled", "answer", "error", "future", "ids", "loop", "weight", "work")

    def __init__(
        self, work: Callable[[S], Any], ids: Sequence[str], weight: int, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.work, self.ids, self.weight, self.loop = work, ids, weight or len(ids), loop
        self.future: asyncio.Future[Any] | None = loop.create_future() if loop is not None else None
        self.answer: Any = None
        self.error: BaseException | None = None
        if loop is None:
            self._settled = threading.Lock()
            self._settled.acquire()
        self._claim = threading.Lock()  # who takes it decides: the writer carries the work out, or the watcher gives it up
        self._begun = False  # the writer has it; a batch that failed is begun anew, request by request

    def begin(self) -> bool:
        """Whether to carry it out; False if its caller was told already that nothing was done. Only the writer asks."""
        self._begun = self._begun or self._claim.acquire(blocking=False)
        return self._begun

    def give_up(self, error: BaseException) -> bool:
        """Tell the caller that it is not carried out, unless it has begun."""
        if not self._claim.acquire(blocking=False):
            return False
        self.error = error
        return True

    def wait(self) -> Any:
        self._settled.acquire()
        if self.error is not None:
            raise self.error
        return self.answer

    def settle(self) -> None:
        if self.future is None:
            self._settled.release()
            return
        if self.future.done():  # the caller was cancelled; the commit stands
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.answer)


_writers: weakref.WeakSet[Writer[Any]] = weakref.WeakSet()


def _before_fork() -> None:
    """No fork in the middle of a commit: the child would inherit what it holds."""
    for writer in list(_writers):
        writer.section.acquire()
        _forking.append(writer)


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().section.release()


def _after_fork_in_child() -> None:
    """A `flock` is shared with a forked child, which would go on holding the store if its parent were killed."""
    while _forking:
        writer = _forking.pop()
        writer.section.release()
        writer.drop_locks()


_forking: list[Writer[Any]] = []
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


class Writer(abc.ABC, Generic[S]):
    """Runs work on a store, in the order it came, in as few commits as possible. `S` is what work is given to use."""

    def __init__(self, place: str, waiters: Waiters) -> None:
        self.bell: Bell | None = None  # rung for other processes, where there may be any
        self._place = place
        self._waiters = waiters
        self._requests: queue.SimpleQueue[WriteRequest[S] | None] = queue.SimpleQueue()
        self._closed = threading.Event()  # no request joins any more; those that wait are still carried out
        self._opened = False  # only between opening and shutting may a caller's own thread carry out its request
        self._batch: list[WriteRequest[S]] = []  # under way: the watcher of a stuck lock has to tell these callers, too
        self.lock = WriteLock(place, self._give_up)
        self.section = threading.RLock()  # held during a commit, and during a fork

    def start(self) -> None:
        """Open the store in the writer's thread; returns when it is open, raises when it cannot be."""
        _writers.add(self)
        opened: Future[None] = Future()
        # Daemon: a script that forgets `close` must still be able to end.
        self._thread = threading.Thread(target=self._run, args=(opened,), name="omniq-writer", daemon=True)
        self._thread.start()
        while True:
            try:
                # Opening takes the write lock too, in a thread whose wait cannot be broken off: this caller looks for itself.
                return opened.result(LOOK_S)
            except TimeoutError:
                error = self.lock.stuck()
                if error is not None:
                    self._let_end()
                    raise error from None

    def take_lock(self, descriptor: int) -> None:
        """Wait for this process's turn. A caller's own thread does not: its request goes to the writer's then."""
        self.lock.take(descriptor, wait=threading.current_thread() is self._thread)

    # -- what a driver brings ----------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self) -> None: ...

    @abc.abstractmethod
    def _shut(self) -> None: ...

    @abc.abstractmethod
    def _transact(self, batch: list[WriteRequest[S]]) -> Machine:
        """Carry out each request's work, commit once, and return the machine that knows whom it concerns."""

    @abc.abstractmethod
    def translate(self, exc: BaseException) -> BaseException:
        """Returns the store's error for a failure of the layer below."""

    @abc.abstractmethod
    def drop_locks(self) -> None:
        """In a forked child: close the copies of the locks' descriptors; the parent's stay locked."""

    # -- from any thread ---------------------------------------------------------------------------

    async def submit(self, work: Callable[[S], T], ids: Sequence[str] = (), weight: int = 0) -> T:
        """Carry out `work` in the next commit. `ids` are tasks to load together for it, `weight` how many operations it is."""
        request = WriteRequest(work, ids, weight, asyncio.get_running_loop())
        self._put(request)
        return await cast("asyncio.Future[T]", request.future)

    def submit_blocking(self, work: Callable[[S], T], ids: Sequence[str] = (), weight: int = 0) -> T:
        """The same from any thread. When nobody else writes, the calling thread does, which saves two changes of thread."""
        request = WriteRequest(work, ids, weight, None)
        # Only with nothing in the queue: work is carried out in the order in which it came.
        if self._opened and _uninterrupted() and self._requests.empty() and self.section.acquire(blocking=False):
            try:
                if not self._closed.is_set():
                    self._carry_out([request])
                    return request.wait()
            except Contended:
                pass
            finally:
                self.section.release()
        self._put(request)
        return request.wait()

    def _put(self, request: WriteRequest[S]) -> None:
        if self._closed.is_set():
            raise DriverClosed(f"the storage {self._place} was closed; make a new one")
        self._requests.put(request)

    def close(self) -> None:
        """Finish what was sent, then let go. A writer that waits without an end is left to itself."""
        self._let_end()
        while self._thread.is_alive() and self.lock.stuck() is None:
            self._thread.join(LOOK_S)

    def _let_end(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._requests.put(None)

    def _give_up(self, error: BaseException) -> None:
        """Nobody knows when this process may write again: tell all who wait. In the watcher's thread."""
        waiting = list(self._batch)
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                break
            if request is None:
                self._requests.put(None)
                break
            waiting.append(request)
        self._settle([request for request in waiting if request.give_up(error)])

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, opened: Future[None]) -> None:
        try:
            self._open()
        except BaseException as exc:
            opened.set_exception(self.translate(exc))
            return
        self._opened = True
        opened.set_result(None)
        try:
            while (batch := self._next_batch()) is not None:
                self._carry_out(batch)
        finally:
            # A caller's own thread may be in the middle of its request; it finds the store open until it is done.
            with self.section:
                self._opened = False
                self._shut()
            self._refuse_rest()

    def _next_batch(self) -> list[WriteRequest[S]] | None:
        first = self._requests.get()
        if first is None:
            return None
        batch, weight = [first], first.weight
        while weight < MAX_WEIGHT:
            try:
                more = self._requests.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._requests.put(None)
                break
            batch.append(more)
            weight += more.weight
        return batch

    def _carry_out(self, batch: list[WriteRequest[S]]) -> None:
        try:
            with self.section:
                self._batch = batch
                machine = self._transact(batch)
            if machine.ready_queues or machine.ended_tasks:
                self._waiters.notify(machine.ready_queues, machine.ended_tasks)
        except Contended:
            raise
        except OutcomeUnknown as exc:  # it may have happened, so it is not tried again here
            for request in batch:
                if request.begin():
                    request.error = exc
        except Exception as exc:
            if len(batch) > 1:  # only the guilty one shall fail: each gets a commit of its own
                for request in batch:
                    self._carry_out([request])
                return
            if batch[0].begin():
                batch[0].error = exc if isinstance(exc, OmniQError) else self.translate(exc)
        self._settle([request for request in batch if request.begin()])

    @staticmethod
    def _settle(batch: list[WriteRequest[S]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[WriteRequest[S]]] = defaultdict(list)
        for request in batch:
            if request.loop is None:
                request.settle()
            else:
                by_loop[request.loop].append(request)
        # One wake-up per loop and not per caller: each is a system call.
        for loop, requests in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle_all, requests)
            except RuntimeError:  # the loop was closed; nobody waits any more
                continue

    def _refuse_rest(self) -> None:
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if request is not None and request.begin():
                request.error = DriverClosed(f"the storage {self._place} was closed")
                self._settle([request])


def _settle_all(requests: list[WriteRequest[Any]]) -> None:
    for request in requests:
        request.settle()


def _uninterrupted() -> bool:
    """Whether this thread is safe from Ctrl-C, which is raised in the main one, between any two steps of a commit too."""
    return threading.current_thread() is not threading.main_thread()
