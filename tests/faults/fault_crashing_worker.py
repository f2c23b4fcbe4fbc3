"""A worker process that kills itself at a named point: `python fault_crashing_worker.py URL before|after Reserve|Ack`."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from omniq import AsyncOmniQ, BaseStorage, FileStorage, SQLiteStorage
from omniq.operations import Reserved
from omniq.storage.base import Result, Transaction


class Crashing(BaseStorage):
    """Dies before or after the first call that leases a task or that ends one."""

    moment, what = "", ""

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        kinds = {type(op).__name__ for transaction in transactions for op in transaction}
        waiting = [c.ready for c in await self.counts()]
        if self.moment == "before" and self.what in kinds and (self.what == "Ack" or any(waiting)):
            os.kill(os.getpid(), signal.SIGKILL)
        answers = await super()._apply(transactions, now_us, repeat)
        outcomes = [outcome for answer in answers if isinstance(answer, list) for outcome in answer]
        leased = any(isinstance(outcome, Reserved) and outcome.tasks for outcome in outcomes)
        if self.moment == "after" and self.what in kinds and (self.what == "Ack" or leased):
            os.kill(os.getpid(), signal.SIGKILL)
        return answers


class CrashingSQLiteStorage(Crashing, SQLiteStorage):
    pass


class CrashingFileStorage(Crashing, FileStorage):
    pass


async def main(url: str, moment: str, what: str) -> None:
    storage = CrashingFileStorage(url) if url.startswith("file:") else CrashingSQLiteStorage(url)
    storage.moment, storage.what = moment, what
    async with AsyncOmniQ(storage) as oq, await oq.worker():
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
