"""A worker process for the fault tests: `python fault_worker.py URL CONCURRENCY`.

Prints `ready` when it takes work, and stops in good order when its standard input closes.
"""

import asyncio
import logging
import sys

import fault_small_files  # noqa: F401

from omniq import AsyncOmniQ, Settings, StoreUnavailable


async def main(url: str, concurrency: int) -> None:
    while True:
        try:
            async with AsyncOmniQ.from_url(url, settings=Settings(grace=5.0)) as oq, await oq.worker(concurrency):
                print("ready", flush=True)
                await asyncio.to_thread(sys.stdin.read)
            return
        except StoreUnavailable as exc:  # somebody who was frozen has the lock
            print(exc, file=sys.stderr)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", level=logging.WARNING)
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
