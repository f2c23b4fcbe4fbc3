"""A process that consumes a queue of the contract: `python -m support.contract_consumer URL FOLDER MODE DRAIN`.

Each handler notes that it began, waits for the file `go`, and notes that it ended.
"""

import asyncio
import logging
import sys
import time
from pathlib import Path

from omniq.contract import AsyncContractClient, ContractClient, JobContext

FOLDER = Path(sys.argv[2]) if __name__ == "__main__" else Path()


def note(text: str) -> None:
    with (FOLDER / "notes").open("a") as file:
        file.write(text + "\n")


def handler(ctx: JobContext) -> None:
    note(f"begin {ctx.job_id}")
    while not (FOLDER / "go").exists() and not ctx.lost.is_set():
        time.sleep(0.005)
    note(f"end {ctx.job_id}")


async def async_handler(ctx: JobContext) -> None:
    note(f"begin {ctx.job_id}")
    while not (FOLDER / "go").exists():  # noqa: ASYNC110 - another process makes the file
        await asyncio.sleep(0.005)
    note(f"end {ctx.job_id}")


async def consume_async(url: str, drain: bool) -> None:
    async with AsyncContractClient.from_url(url) as client:
        await client.consume("q", async_handler, drain=drain, concurrency=2)
        note("returned")


def main(url: str, mode: str, drain: bool) -> None:
    logging.basicConfig(level="INFO")
    note("ready")
    if mode == "async":
        asyncio.run(consume_async(url, drain))
        return
    with ContractClient.from_url(url) as client:
        client.consume("q", handler, drain=drain, concurrency=2 if mode == "threads" else 1)
        note("returned")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3], sys.argv[4] == "drain")
