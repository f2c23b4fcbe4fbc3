"""The same with async methods, on a store in memory, with a task that fails twice."""

import asyncio
import logging

import omniq
from omniq import AsyncOmniQ, MemoryStorage, current_task


@omniq.task(name="greet", max_retries=2, backoff="fixed:base=100")
async def greet(name: str) -> str:
    if current_task().attempt < 3:
        raise ConnectionError("nobody answered")
    return f"Hello, {name}!"


async def main() -> None:
    async with AsyncOmniQ(MemoryStorage()) as oq:
        task_id = await greet.enqueue(oq, "world")

        async with await oq.worker(concurrency=4):
            result = await oq.get_result(task_id, wait=True, timeout=10)

        print(result.status, result.result)
        for event in await oq.history(task_id):
            print(f"  {event.event:9} attempt {event.attempt}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # hides the warnings about the two retries
    asyncio.run(main())
