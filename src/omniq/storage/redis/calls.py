"""How a call reaches the script: in how many parts, on which nodes, and again where that is safe.

The order of the steps is written once, as generators that ask for a script call or a command and are given the answer. Event
loops and threads have one loop each that carries them out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from omniq.errors import OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from omniq.operations import Enqueue, OnRun, OnTask, Reserve
from omniq.storage.base import Result
from omniq.storage.checks import Transaction
from omniq.storage.redis.batches import Batches
from omniq.storage.redis.packing import Entry, Packed, grows, joined, publish_answer, publish_call, rest_of
from omniq.storage.redis.plan import STORE, SplitCall, is_wide, spans_slots
from omniq.storage.redis.records import text_of
from omniq.storage.redis.wire import encode_call, ms_down
from omniq.storage.waiting import Waiters

if TYPE_CHECKING:
    from omniq.storage.redis.client import RedisClient

T = TypeVar("T")
Ask = tuple[Literal["script", "command"], tuple[Any, ...]]
Steps = Generator[Ask, Any, T]

QUEUES = f"{{{STORE}}}:queues"


class Calls:
    """Sends transactions and upkeep to the script, and tells who waits in this process what became of them."""

    def __init__(self, client: RedisClient, waiters: Waiters, slot_of: Callable[[str], int], *, events: bool) -> None:
        self._client, self._waiters, self._events = client, waiters, events
        self._cluster = client.target.cluster
        self.slot_of: Callable[[str], int] = slot_of if self._cluster else lambda _: 0  # one server is one slot, as it were
        self._batches = Batches(self.script)
        self._listed: set[str] = set()  # queues that are on the store's list

    async def close(self) -> None:
        await self._batches.close()

    async def apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        now = None if now_us is None else ms_down(now_us)
        # Before the call: a script that wrote to a queue that is on no list would leave tasks that no sweep finds.
        if new := self._new_queues(transactions):
            await self.list_queues(new)
        if self._is_split(transactions) or _is_of_runs(transactions):
            return await self._carry_out(self._apply(_parts(transactions), now, repeat))
        packed = Packed(transactions)
        return packed.read(await self._batches.send(key_of(transactions), packed.entries, now, repeat))

    def apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        now = None if now_us is None else ms_down(now_us)
        if new := self._new_queues(transactions):
            self._carry_out_blocking(self._list(new))
        if len(transactions) == 1:
            # A lone plain task goes as mere arguments: the script ends before it makes the functions of its other parts.
            flags = ("e" if self._events else "") + ("c" if self._cluster else "") + ("a" if repeat else "")
            call = publish_call(transactions[0], now, flags)
            if call is not None:
                reply = self._client.script_blocking(key_of(transactions), *call)
                return [publish_answer(transactions[0], self._heard(reply))]
        parts = _parts(transactions)
        if len(parts) > 1 and not self._cluster:
            with contextlib.suppress(StoreFull):  # the first call is answered before a second one flies: nothing happened
                return self._fly(parts, now, repeat)
        return self._carry_out_blocking(self._apply(parts, now, repeat))

    async def script(self, key: str, entries: Sequence[Entry], now: int | None, repeat: bool) -> list[Any]:
        """One answer per entry."""
        return await self._carry_out(self._whole(key, entries, now, repeat))

    async def list_queues(self, names: Iterable[str]) -> None:
        """Put queues on the store's list before their first use, also those that only other clients feed."""
        if new := set(names) - self._listed:
            await self._carry_out(self._list(new))

    # -- carrying out ------------------------------------------------------------------------------

    async def _carry_out(self, steps: Steps[T]) -> T:
        try:
            what, arguments = next(steps)
            while True:
                try:
                    ask = self._client.script if what == "script" else self._client.command
                    answer = await ask(*arguments)
                except StoreError as exc:
                    what, arguments = steps.throw(exc)
                else:
                    what, arguments = steps.send(answer)
        except StopIteration as end:
            return end.value

    def _carry_out_blocking(self, steps: Steps[T]) -> T:
        try:
            what, arguments = next(steps)
            while True:
                try:
                    ask = self._client.script_blocking if what == "script" else self._client.command_blocking
                    answer = ask(*arguments)
                except StoreError as exc:
                    what, arguments = steps.throw(exc)
                else:
                    what, arguments = steps.send(answer)
        except StopIteration as end:
            return end.value

    # -- steps -------------------------------------------------------------------------------------

    def _apply(self, parts: Sequence[Sequence[Transaction]], now: int | None, repeat: bool) -> Steps[list[Result]]:
        answers: list[Result] = []
        for part in parts:
            with _begun(answers):
                answers += yield from self._part(part, now, repeat)
        return answers

    def _part(self, part: Sequence[Transaction], now: int | None, repeat: bool) -> Steps[list[Result]]:
        if not self._is_split(part):
            packed = Packed(part)
            return packed.read((yield from self._whole(key_of(part), packed.entries, now, repeat)))
        plan = SplitCall(part, self.slot_of, repeat)
        for key, step in plan.steps():
            try:
                answers = yield from self._whole(key, step.entries, now, repeat)
            except (StoreUnavailable, StoreFull) as exc:
                step.miss(exc)
            else:
                step.take(answers)
        return plan.answers

    def _whole(self, key: str, entries: Sequence[Entry], now: int | None, repeat: bool) -> Steps[list[Any]]:
        """Carry out entries by as many calls of the script as that takes: mostly one."""
        answers = yield from self._once(key, entries, now, repeat)
        rest = rest_of(entries, answers)
        while rest:
            with _begun(answers):
                more = yield from self._once(key, rest, now, repeat)
            answers, rest = joined(entries, answers, more), rest_of(rest, more)
        return answers

    def _once(self, key: str, entries: Sequence[Entry], now: int | None, repeat: bool) -> Steps[list[Any]]:
        try:
            reply = yield "script", (key, self.encode(entries, now, repeat))
        except StoreFull:
            if grows(entries):
                raise
            # Nothing new comes in, and what ends or extends tasks has to work, or a full server would stay full.
            reply = yield "script", (key, self.encode(entries, now, repeat, full=True))
        return self._heard(reply)

    def _list(self, new: set[str]) -> Steps[None]:
        try:
            yield "command", ("SADD", QUEUES, *new)
        except StoreFull:  # those that are on it need nothing; of the others nothing new comes in now
            there = yield "command", ("SMEMBERS", QUEUES)
            new &= {text_of(name) for name in there}
        self._listed |= new

    # -- a call ------------------------------------------------------------------------------------

    def encode(self, entries: Sequence[Entry], now: int | None, repeat: bool, full: bool = False) -> bytes:
        """`full`: go beyond `maxmemory`, on a server that has none left."""
        call: dict[str, Any] = {"transactions": entries, "events": self._events}
        if full:
            call["full"] = True
        if now is not None:
            call["now"] = now
        if repeat:
            call["again"] = True
        if self._cluster:
            call["cluster"] = True
        return encode_call(call)

    def _heard(self, reply: list[Any]) -> list[Any]:
        """Returns the answers of a call, and tells those who wait in this process."""
        answers, ready, ended, _ = reply
        if ready or ended:
            self._waiters.notify([text_of(name) for name in ready], [text_of(id) for id in ended])
        return answers

    def _fly(self, parts: Sequence[Sequence[Transaction]], now: int | None, repeat: bool) -> list[Result]:
        """On a single node the next call is packed while the server works on the one before: bulk staging keeps both busy."""
        answers: list[Result] = []
        flying: deque[Packed] = deque()

        def calls() -> Iterator[bytes]:
            for part in parts:
                flying.append(Packed(part))
                yield self.encode(flying[-1].entries, now, repeat)

        with _begun(answers):
            for reply in self._client.scripts_blocking(key_of(parts[0]), calls()):
                answers += flying.popleft().read(self._heard(reply))
        return answers

    def _is_split(self, transactions: Sequence[Transaction]) -> bool:
        return self._cluster or any(is_wide(transaction) for transaction in transactions)

    def _new_queues(self, transactions: Sequence[Transaction]) -> set[str]:
        new = _queues_of(transactions) - self._listed
        if new and self._cluster:  # what is refused leaves not even a name behind
            new &= _queues_of([t for t in transactions if not spans_slots(t, self.slot_of)])
        return new


def key_of(transactions: Sequence[Transaction]) -> str:
    """The key that routes a call. One server serves every key, so any queue's will do."""
    for transaction in transactions:
        for op in transaction:
            if isinstance(op, Enqueue | OnTask | OnRun):
                return meta_key(op.queue)
    return meta_key(STORE)


def meta_key(queue: str) -> str:
    """The key of a queue that only routes a call: nothing is ever stored there."""
    return f"{{{queue}}}:meta"


@contextlib.contextmanager
def _begun(answers: Sequence[Any]) -> Generator[None]:
    """Turn an error that says "nothing happened" into `OutcomeUnknown` once a part of the call was answered."""
    try:
        yield
    except (StoreUnavailable, StoreFull) as exc:
        if not answers:
            raise
        raise OutcomeUnknown(f"a part of this call was carried out, and then {exc}") from exc


def _is_of_runs(transactions: Sequence[Transaction]) -> bool:
    return any(isinstance(transaction[0], OnRun) for transaction in transactions)


def _parts(transactions: Sequence[Transaction]) -> list[Sequence[Transaction]]:
    """Parts for one call of the script each: mostly a single one. Staging and settling take long, so each is a part."""
    return [[transaction] for transaction in transactions] if _is_of_runs(transactions) else [transactions]


def _queues_of(transactions: Sequence[Transaction]) -> set[str]:
    names: set[str] = set()
    for transaction in transactions:
        for op in transaction:
            if isinstance(op, Enqueue | OnTask | OnRun):
                names.add(op.queue)
            elif isinstance(op, Reserve):
                names.update(op.queues)
    return names
