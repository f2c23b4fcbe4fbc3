"""Turns: the commands that all connections sent meanwhile become one call of `apply`, so that they share one commit."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from omniq.errors import DriverClosed, DuplicateId, Invalid, Refused, StoreError
from omniq.models import new_token
from omniq.operations import Operation, Reserve, Reserved
from omniq.presence import Presence
from omniq.server.numbers import TaskNumbers
from omniq.server.steps import GiveBack, Step, is_number
from omniq.server.task_log import tell
from omniq.server.waiting import WaitingFetch, WaitingLine, WaitingLines
from omniq.storage.base import BaseStorage, Result
from omniq.storage.sending import Repeats, Sending, Unsendable, until_answered
from omniq.turns import release

if TYPE_CHECKING:
    from omniq.server.session import Session

log = logging.getLogger("omniq.server")

LEASE_US = 30_000_000  # renewed while the connection lives; a killed server's tasks come back when it ends, at the latest
MAX_STEPS = 1000  # per turn, so that nobody waits long for the commit of others
MAX_RESERVE = 1000
REPEAT_FOR_S = 0.5  # connections wait meanwhile
UNKNOWN = "a PUSH with an idempotency_key may be sent again"


class FetchTasks(Step):
    """A FETCH that takes its place in a line once everything before it is on its way."""

    __slots__ = ("queues", "waiter")

    def __init__(self, session: Session, queues: tuple[str, ...], waiter: WaitingFetch) -> None:
        super().__init__(session)
        self.queues, self.waiter = queues, waiter

    def failed(self, exc: Exception) -> None:
        """The waiter is told, together with all others of its line."""


class Engine:
    """Gathers steps and waiters, and carries them out turn by turn. One turn is under way at a time, so order is kept."""

    def __init__(self, storage: BaseStorage, presence: Presence) -> None:
        self.storage, self._presence = storage, presence
        self.numbers = TaskNumbers(storage)
        self.lines = WaitingLines(storage, self.kick)
        self.turns = 0
        self._seen = 0
        self._steps: deque[Step] = deque()
        self._awake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, step: Step) -> None:
        self._steps.append(step)
        if not self._awake.is_set():
            self._awake.set()

    def add_first(self, steps: Iterable[Step]) -> None:
        """Add steps ahead of all others: somebody may wait for a task that is given back."""
        self._steps.extendleft(steps)
        self.kick()

    def kick(self) -> None:
        self._awake.set()

    async def settle(self) -> None:
        """Return when everything that was added has been carried out."""
        while self._steps or not self._idle.is_set():
            await self._idle.wait()
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Carry out all steps that were added, then end."""
        self.lines.close_all()
        await self.settle()
        self._closing = True
        self.kick()
        if self._task is not None:
            await self._task
        await self.numbers.close()

    async def _run(self) -> None:
        while not self._closing:
            if not self._steps and not self.lines.hungry:
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
        steps = self._take_steps()
        served = [(line, self._reserve(line, share)) for line, share in self.lines.to_serve()]
        try:
            answers, reserved = await self._carry_out(steps, [op for _, op in served])
        except Exception as exc:  # whoever asked is told
            log.error("the store failed: %s", exc, exc_info=not isinstance(exc, StoreError))
            self._tell_failure(steps, [line for line, _ in served], exc)
            return
        touched: dict[Session, None] = {}
        for step, answer in zip(steps, answers, strict=True):
            session = step.session
            line = _reply(step, answer)
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

    def _reserve(self, line: WaitingLine, share: int) -> Reserve:
        limit = min(share, MAX_RESERVE)
        return Reserve(queues=line.queues, limit=limit, token=new_token(), lease_us=LEASE_US, worker=self._presence.worker)

    def _take_steps(self) -> list[Step]:
        steps: list[Step] = []
        waiting = self._steps
        while waiting and len(steps) < MAX_STEPS:
            step = waiting.popleft()
            if isinstance(step, FetchTasks):
                session = cast("Session", step.session)
                if session.wants(step.waiter):
                    session.line = self.lines.join(step.queues, step.waiter)
                    if not step.queues:  # names that no queue can have: there will never be anything
                        session.found_nothing(step.waiter)
            steps.append(step)
        return steps

    async def _carry_out(self, steps: list[Step], reserves: list[Reserve]) -> tuple[list[Result | None], list[Result]]:
        wanted = sum(step.numbers for step in steps)
        numbers = iter(await self.numbers.take(wanted) if wanted else ())
        transactions: list[tuple[Operation, ...]] = []
        places: list[int] = []
        answers: list[Result | None] = [None] * len(steps)
        for place, step in enumerate(steps):
            transaction = step.transaction(numbers)
            if transaction is not None:
                transactions.append(transaction)
                places.append(place)
        results = await self._apply([*transactions, *((op,) for op in reserves)])
        for place, result in zip(places, results, strict=False):
            answers[place] = result
        await self._renumber(steps, answers)
        return answers, results[len(places) :]

    async def _renumber(self, steps: list[Step], answers: list[Result | None]) -> None:
        """A task of another door may have a number for an id: then the next number is tried."""
        for place, step in enumerate(steps):
            while isinstance(answers[place], DuplicateId):
                numbers = iter(await self.numbers.take(step.numbers))
                transaction = step.transaction(numbers)
                assert transaction is not None
                (answers[place],) = await self._apply([transaction])

    async def _apply(self, transactions: list[tuple[Operation, ...]]) -> list[Result]:
        if not transactions:
            return []
        sending, repeats = Sending(transactions), Repeats(transactions, for_s=REPEAT_FOR_S, advice=UNKNOWN)
        results = await until_answered(lambda _: sending.send(self.storage), repeats)
        tell(transactions, results)
        return results

    def _tell_failure(self, steps: list[Step], lines: list[WaitingLine], exc: Exception) -> None:
        touched: dict[Session, None] = {}
        for step in steps:
            if step.session is not None:
                step.session.settled(step.failed(exc))
                touched[step.session] = None
            elif isinstance(step, GiveBack) and not isinstance(exc, DriverClosed):
                asyncio.get_running_loop().call_later(0.5, self.add, step)
        for line in lines:
            self._tell_waiters(line, exc, touched)
        for session in touched:
            session.go_on()

    @staticmethod
    def _tell_waiters(line: WaitingLine, exc: Exception, touched: dict[Session, None]) -> None:
        for waiter in list(line.waiters):
            waiter.session.fetch_failed(exc)
            touched[waiter.session] = None

    # -- tasks to waiters --------------------------------------------------------------------------

    async def _hand_out(self, line: WaitingLine, op: Reserve, reserved: Reserved, touched: dict[Session, None]) -> None:
        foreign = [task.id for task in reserved.tasks if not is_number(task.id)]
        given = dict(zip(foreign, await self._numbers_for(len(foreign)), strict=True)) if foreign else {}
        served, left = line.deal(reserved.tasks)
        for waiter in served:
            tasks = [(given.get(task.id) or int(task.id), task) for task in waiter.got]
            waiter.got = []
            waiter.session.served(waiter, tasks)
            touched[waiter.session] = None
        if served:
            self._presence.take(reserved.tasks)
        if left:  # somebody left while the store was asked
            self.add_first([GiveBack(release(task)) for task in left])
        if len(reserved.tasks) == op.limit:
            self.lines.wake(line)
            return
        for waiter in line.newcomers():
            waiter.session.found_nothing(waiter)
        if line.waiters:
            line.watch.begin(self._seen, reserved.next_at_us, paused=bool(reserved.paused))

    async def _numbers_for(self, n: int) -> list[int]:
        while True:
            try:
                return await self.numbers.take(n)
            except StoreError as exc:
                log.error("no numbers for fetched tasks: %s", exc)
                await asyncio.sleep(0.2)


def _reply(step: Step, answer: Result | None) -> bytes | None:
    """Returns the reply to a step. If it cannot be sent, and not because of the client's own words, the server has failed."""
    if isinstance(answer, Unsendable) and not isinstance(answer.__cause__, Invalid):
        return step.failed(answer)
    return step.reply(answer)
