"""A storage that chokes on some transactions: what stands before the first of them is carried out, then it raises."""

from collections.abc import Callable, Sequence
from typing import Any

from omniq.operations import Ack, Operation
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.testing import FaultyStorage


class ChokingStorage(FaultyStorage):
    """`on` says which operations; `acks` is how many acks the largest call had."""

    def __init__(self, inner: BaseStorage, on: Callable[[Operation], bool], error: Exception) -> None:
        super().__init__(inner)
        self.on, self.error = on, error
        self.calls = self.acks = 0

    def _upto(self, transactions: Sequence[Transaction]) -> int:
        self.calls += 1
        self.acks = max(self.acks, sum(isinstance(t[0], Ack) for t in transactions))
        return next((n for n, t in enumerate(transactions) if any(map(self.on, t))), len(transactions))

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        end = self._upto(transactions)
        answers = await super()._apply(transactions[:end], now_us, repeat)
        return answers if end == len(transactions) else self._choke()

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        end = self._upto(transactions)
        answers = super()._apply_blocking(transactions[:end], now_us, repeat)
        return answers if end == len(transactions) else self._choke()

    def _choke(self) -> Any:
        raise self.error
