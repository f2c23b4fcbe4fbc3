"""The data pipeline, on one machine: a DataFrame becomes tasks, a worker runs them, their events become a lake and a report.

The lake also gets nine days of history that nobody lived through, from omniq's generator, to have something for pictures of
days and for a forecast. Everything made up is marked as such, and kept apart in the report.

    python examples/lake_demo.py            in a temporary folder; the report stays for you to look at
    python examples/lake_demo.py FOLDER     in FOLDER, where the queue and the lake stay too

Needs the extra `spark`; takes about a minute, most of it for starting Spark.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import omniq
from omniq import OmniQ, SQLiteStorage

console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
ORDERS = 2000
MADE_UP_DAYS, MADE_UP_EVENTS = 9, 24_000


@omniq.task(name="shop.charge", max_retries=2, backoff="fixed:base=200,jitter=0")
async def charge(order: int, amount: float) -> float:
    """Two of a hundred cards are declined for good; five of a hundred banks answer at the second try."""
    await asyncio.sleep(0.002)
    if order % 50 == 7:
        raise ValueError(f"card of order {order} was declined")
    if order % 20 == 3 and omniq.current_task().attempt == 1:
        raise ConnectionError(f"no answer from bank {order % 4} after 30 ms")
    return round(amount * 1.19, 2)


@omniq.task(name="shop.ship")
async def ship(order: int, country: str) -> str:
    await asyncio.sleep(0.004)
    return f"{country}-{order}"


@omniq.task(name="shop.invoice")
def invoice(order: int) -> str:
    return f"invoice {order:06}"


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    start = time.monotonic()
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield
    console.print(f"{what}: {time.monotonic() - start:.1f} s")


def main(folder: Path) -> int:
    from omniq.spark import Lake, build, check, enqueue, ingest, report, session
    from omniq.spark.lake.bronze import take_in
    from omniq.spark.lake.generator import history
    from omniq.spark.lake.report.facts import MADE_UP

    console.print("[bold]The data pipeline on Spark[/]")
    url = f"sqlite:///{(folder / 'shop.db').absolute()}"
    with step("starting Spark"):
        spark = session(master="local[2]", fast_start=True)
    orders = spark.range(ORDERS).selectExpr(
        "id AS order",
        "round(rand(1) * 200, 2) AS amount",
        "element_at(array('de', 'fr', 'it', 'nl'), int(id % 4) + 1) AS country",
    )
    lake = Lake.init(folder / "lake")
    start = datetime.now(UTC).date() - timedelta(days=MADE_UP_DAYS + 1)  # its last tasks have ended by now
    made_up = history(spark, events=MADE_UP_EVENTS, days=MADE_UP_DAYS, start=start)
    beside = ThreadPoolExecutor(1)
    invented = beside.submit(take_in, lake, made_up, stream="made-up", batch=0)
    with step(f"{3 * ORDERS} tasks from a DataFrame of {ORDERS} orders"):
        enqueue(orders, url, charge, key="order", args=["order", "amount"])
        enqueue(orders, url, ship, key="order", args=["order", "country"], group="country", group_limit=5)
        enqueue(orders, url, invoice, key="order", args=["order"])
    with step("a worker with 20 slots"), OmniQ(SQLiteStorage(url)) as oq, oq.worker(concurrency=20) as pool:
        pool.drain()
    with step(f"the rest of {MADE_UP_DAYS} days of made-up history, store {MADE_UP}, into the lake meanwhile"), beside:
        made_up_events = invented.result().rows
    with step("the events of the tasks into the lake"):
        taken = ingest(spark, url, lake)
    with step("silver and gold tables"):
        build(spark, lake)
    with step("checks"):
        checks = check(spark, lake)
    with step("the report"):
        written = report(spark, lake, folder / "report.html", title="The shop")
    lake.views(spark)
    shown = Table(
        title=f"Measured, from {taken.rows} events", title_justify="left", box=box.ROUNDED if console.is_terminal else box.ASCII
    )
    for column in ("function", "runs", "succeeded", "tried again", "failed", "run p50", "run p95"):
        shown.add_column(column, justify="left" if column == "function" else "right")
    query = """SELECT name, sum(runs), sum(succeeded), sum(retried), sum(failed), max(run_p50_ms), max(run_p95_ms)
        FROM func_hour WHERE store <> :made_up GROUP BY name ORDER BY name"""
    for name, *numbers, p50, p95 in spark.sql(query, args={"made_up": MADE_UP}).collect():
        shown.add_row(name, *map(str, numbers), f"{p50:.1f} ms", f"{p95:.1f} ms")
    console.print(shown)
    console.print(f"Made up, for the pictures of days: {written.made_up} tasks, {made_up_events} events. No worker ran them.")
    console.print(f"{sum(c.ok for c in checks)} of {len(checks)} checks passed.")
    for sentence in written.findings:
        console.print(f"  {sentence}")
    console.print(f"Open the report: {written.path}")
    query = "SELECT count(*), count_if(status = 'FAILED') FROM tasks WHERE store <> :made_up"
    tasks = spark.sql(query, args={"made_up": MADE_UP}).first()
    spark.stop()
    return 0 if all(c.ok for c in checks) and tuple(tasks) == (3 * ORDERS, ORDERS // 50) else 1


if __name__ == "__main__":
    logging.getLogger("omniq").addHandler(logging.NullHandler())
    if len(sys.argv) > 1:
        code = main(Path(sys.argv[1]))
    else:
        room = Path(tempfile.mkdtemp(prefix="omniq-demo-"))
        code = main(room)
        for left in ("lake", "shop.db-locks"):
            shutil.rmtree(room / left, ignore_errors=True)
        for left in room.glob("shop.db*"):
            left.unlink()
    sys.exit(code)
