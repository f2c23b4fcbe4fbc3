"""A server that kills itself at a named step of a command: `python fault_crashing_server.py PATH STEP COUNT`.

STEP is `line` (a line has come), `before:KIND` or `after:KIND` (around the store's work of that kind), `reply` (before a
reply is sent) or `sent` (after it); COUNT says at which one of them. Says on stdout where it listens.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from omniq import SQLiteStorage
from omniq.server import ServeOptions, Server, server
from omniq.storage.base import Result, Transaction


class Fuse:
    step, left = "", 0

    @classmethod
    def burn(cls, step: str) -> None:
        if step == cls.step:
            cls.left -= 1
            if cls.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class CrashingStorage(SQLiteStorage):
    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        kinds = [type(op).__name__ for transaction in transactions for op in transaction]
        for kind in kinds:
            Fuse.burn(f"before:{kind}")
        answers = await super()._apply(transactions, now_us, repeat)
        for kind in kinds:
            Fuse.burn(f"after:{kind}")
        return answers

    async def allocate_ids(self, n: int) -> int:
        Fuse.burn("before:ids")
        first = await super().allocate_ids(n)
        Fuse.burn("after:ids")
        return first


class CrashingConnection(server.Connection):
    def data_received(self, data: bytes) -> None:
        Fuse.burn("line")
        super().data_received(data)

    def send(self, data: bytes) -> None:
        Fuse.burn("reply")
        super().send(data)
        Fuse.burn("sent")


async def main(path: str, step: str, count: str) -> None:
    Fuse.step, Fuse.left = step, int(count)
    server.Connection = CrashingConnection  # type: ignore[misc]
    async with CrashingStorage(path) as storage, Server(storage, ServeOptions(port=0)) as running:
        print(f"port {running.address[1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
