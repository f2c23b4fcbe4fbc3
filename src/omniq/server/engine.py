"""Turns: what all connections sent meanwhile becomes one call of `apply`, so that one commit carries it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from omniq.errors import DriverClosed, DuplicateId, Invalid, Refused, StoreError
from omniq.models import Record, new_token
from omniq.operations import Operation, Release, Reserve, Reserved
from omniq.server.numbers import Numbers
from omniq.server.steps import GiveBack, Job, is_number
from omniq.server.task_log import tell
from omniq.server.waiting import Line, Lines, Waiter
from omniq.storage.base import BaseStorage, Result
from omniq.storage.sending import Repeats, Sending, Unsendable

if TYPE_CHECKING:
    from omniq.server.session import Session

log = logging.getLogger("omniq.server")

LEASE_US = 30_000_000  # renewed while the connection lives; a killed server's tasks come back when it ends, at the latest
MAX_JOBS = 1000  # per turn, so that nobody waits long for the commit of others
MAX_RESERVE = 1000
UNKNOWN_PAUSES_S = (0.05, 0.1, 0.2)  # connections wait meanwhile
UNKNOWN = "a PUSH with an idempotency_key may be sent again"


class FetchTasks(Job):
    """A FETCH that takes its place in a line once everything before it is on its way."""

    __slots__ = ("queues", "waiter")

    def __init__(self, session: Session, queues: tuple[str, ...], waiter: Waiter) -> None:
        super().__init__(session)
        self.queues, self.waiter = queues, waiter

    def failed(self, exc: Exception) -> None:
        """The waiter is told, together with all others of its line."""


class Engine:
    """Gathers jobs and waiters, and carries them out turn by turn. One turn is under way at a time, so order is kept."""

    def __init__(self, storage: BaseStorage, worker: str) -> None:
        self.storage, self.worker = storage, worker
        self.numbers = Numbers(storage)
        self.lines = Lines(storage, self.kick)
        self.turns = 0
        self._seen = 0
        self._jobs: deque[Job] = deque()
        self._awake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._awake.is_set():
            self._awake.set()

    def add_first(self, jobs: Iterable[Job]) -> None:
        """Ahead of everything: what is given back may be what somebody waits for."""
        self._jobs.extendleft(jobs)
        self.kick()

    def kick(self) -> None:
        self._awake.set()

    async def settle(self) -> None:
        """Return when everything that was added has been carried out."""
        while self._jobs or not self._idle.is_set():
            await self._idle.wait()
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Carry out what was added, then end."""
        self.lines.close_all()
        await self.settle()
        self._closing = True
        self.kick()
        if self._task is not None:
            await self._task
        await self.numbers.close()

    async def _run(self) -> None:
        while not self._closing:
            if not self._jobs and not self.lines.hungry:
                self._awake.clear()
                self._idle.set()
                await self._awake.wait()
                continue
            self._idle.clear()
            try:
                await self._turn()
            except Exception:  # a mistake of ours; the server goes on
                log.exception("a turn failed")
            await asyncio.sleep(0)  # a store in memory never waits: let others be heard between turns

    # -- one turn ----------------------------------------------------------------------------------

    async def _turn(self) -> None:
        self.turns += 1
        self._seen = self.storage.changes  # before the look, so that nothing after it is missed
        jobs = self._take_jobs()
        served = [(line, self._reserve(line, share)) for line, share in self.lines.to_serve()]
        try:
            answers, reserved = await self._carry_out(jobs, [op for _, op in served])
        except Exception as exc:  # whoever asked is told
            log.error("the store failed: %s", exc, exc_info=not isinstance(exc, StoreError))
            self._tell_failure(jobs, [line for line, _ in served], exc)
            return
        touched: dict[Session, None] = {}
        for job, answer in zip(jobs, answers, strict=True):
            session = job.session
            line = _reply(job, answer)
            if session is not None:
                session.settled(line)
                touched[session] = None
        for (line, op), result in zip(served, reserved, strict=True):
            if isinstance(result, Refused):
                log.error("nothing can be fetched from %s: %s", ", ".join(line.queues), result)
                self._tell_waiters(line, result, touched)
            else:
                await self._hand_out(line, op, cast(Reserved, result[0]), touched)
        for session in touched:
            session.go_on()

    def _reserve(self, line: Line, share: int) -> Reserve:
        limit = min(share, MAX_RESERVE)
        return Reserve(queues=line.queues, limit=limit, token=new_token(), lease_us=LEASE_US, worker=self.worker)

    def _take_jobs(self) -> list[Job]:
        jobs: list[Job] = []
        waiting = self._jobs
        while waiting and len(jobs) < MAX_JOBS:
            job = waiting.popleft()
            if isinstance(job, FetchTasks):
                session = cast("Session", job.session)
                if session.wants(job.waiter):
                    session.line = self.lines.join(job.queues, job.waiter)
                    if not job.queues:  # names that no queue can have: there will never be anything
                        session.found_nothing(job.waiter)
            jobs.append(job)
        return jobs

    async def _carry_out(self, jobs: list[Job], reserves: list[Reserve]) -> tuple[list[Result | None], list[Result]]:
        wanted = sum(job.numbers for job in jobs)
        numbers = iter(await self.numbers.take(wanted) if wanted else ())
        transactions: list[tuple[Operation, ...]] = []
        places: list[int] = []
        answers: list[Result | None] = [None] * len(jobs)
        for place, job in enumerate(jobs):
            transaction = job.transaction(numbers)
            if transaction is not None:
                transactions.append(transaction)
                places.append(place)
        results = await self._apply([*transactions, *((op,) for op in reserves)])
        for place, result in zip(places, results, strict=False):
            answers[place] = result
        await self._renumber(jobs, answers)
        return answers, results[len(places) :]

    async def _renumber(self, jobs: list[Job], answers: list[Result | None]) -> None:
        """A task of another door may have a number for an id: then the next number is tried."""
        for place, job in enumerate(jobs):
            while isinstance(answers[place], DuplicateId):
                numbers = iter(await self.numbers.take(job.numbers))
                transaction = job.transaction(numbers)
                assert transaction is not None
                (answers[place],) = await self._apply([transaction])

    async def _apply(self, transactions: list[tuple[Operation, ...]]) -> list[Result]:
        if not transactions:
            return []
        sending, repeats = Sending(transactions), Repeats(transactions, pauses_s=UNKNOWN_PAUSES_S, advice=UNKNOWN)
        while True:
            try:
                results = await sending.send(self.storage)
            except StoreError as exc:
                pause = repeats.after(exc)
            else:
                tell(transactions, results)
                return results
            await asyncio.sleep(pause)

    def _tell_failure(self, jobs: list[Job], lines: list[Line], exc: Exception) -> None:
        touched: dict[Session, None] = {}
        for job in jobs:
            if job.session is not None:
                job.session.settled(job.failed(exc))
                touched[job.session] = None
            elif isinstance(job, GiveBack) and not isinstance(exc, DriverClosed):
                asyncio.get_running_loop().call_later(0.5, self.add, job)
        for line in lines:
            self._tell_waiters(line, exc, touched)
        for session in touched:
            session.go_on()

    @staticmethod
    def _tell_waiters(line: Line, exc: Exception, touched: dict[Session, None]) -> None:
        for waiter in list(line.waiters):
            waiter.session.fetch_failed(exc)
            touched[waiter.session] = None

    # -- tasks to waiters --------------------------------------------------------------------------

    async def _hand_out(self, line: Line, op: Reserve, reserved: Reserved, touched: dict[Session, None]) -> None:
        foreign = [task.id for task in reserved.tasks if not is_number(task.id)]
        given = dict(zip(foreign, await self._numbers_for(len(foreign)), strict=True)) if foreign else {}
        served, left = line.deal(reserved.tasks)
        for waiter in served:
            tasks = [(given.get(task.id) or int(task.id), task) for task in waiter.got]
            waiter.got = []
            waiter.session.served(waiter, tasks)
            touched[waiter.session] = None
        if left:  # somebody left while the store was asked
            self.add_first([GiveBack(release(task)) for task in left])
        if len(reserved.tasks) == op.limit:
            self.lines.wake(line)
            return
        for waiter in line.newcomers():
            waiter.session.found_nothing(waiter)
        if line.waiters:
            line.sleep(reserved, self._seen)

    async def _numbers_for(self, n: int) -> list[int]:
        while True:
            try:
                return await self.numbers.take(n)
            except StoreError as exc:
                log.error("no numbers for fetched tasks: %s", exc)
                await asyncio.sleep(0.2)


def _reply(job: Job, answer: Result | None) -> bytes | None:
    """What cannot be sent for another reason than the client's own words is a failure of ours."""
    if isinstance(answer, Unsendable) and not isinstance(answer.__cause__, Invalid):
        return job.failed(answer)
    return job.reply(answer)


def release(task: Record) -> Release:
    return Release(queue=task.queue, id=task.id, token=cast(str, task.token), late=True)
