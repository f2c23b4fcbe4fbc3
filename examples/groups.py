"""Groups: tasks of one customer run one after another, while customers share the worker fairly."""

import asyncio
from collections import Counter

from omniq import AsyncOmniQ, SQLiteStorage

order: list[str] = []
running: Counter[str] = Counter()
most: Counter[str] = Counter()


async def send_invoice(customer: str, number: int) -> None:
    order.append(f"{customer}{number}")
    running[customer] += 1
    most[customer] = max(most[customer], running[customer])
    await asyncio.sleep(0.02)
    running[customer] -= 1


async def main() -> None:
    async with AsyncOmniQ(SQLiteStorage("groups.db")) as oq:
        for customer in ("ada", "ben", "cleo"):
            mine = oq.options(queue="invoices", group=customer, group_limit=1)
            await mine.enqueue_many(send_invoice, [(customer, number) for number in range(4)])

        pool = await oq.worker(concurrency=6, queues=["invoices"])
        async with pool:
            await pool.drain()

    print("started in this order:", " ".join(order))
    print("at most at once:", dict(most))
    assert set(most.values()) == {1}, "a group never runs more than its limit"


if __name__ == "__main__":
    asyncio.run(main())
