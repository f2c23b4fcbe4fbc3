"""A synthetic history: events as a store would have written them, the same for the same seed, in any number.

Everything is a function of the seed and the task's number, by hashing; so the rows do not depend on how Spark splits the work.
The shape is that of a shop: queues of different speed, busy days and quiet nights, groups (customers) with limits, functions
that fail in their own ways, and once a week an hour in which one of them fails most of the time, and is asked for more.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from omniq.spark.lake.report.facts import MADE_UP

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS_PER_TASK = 3.27  # about, with the shares and failure rates below
ATTEMPTS = 4  # with the last one a task fails for good
STORM_WEEKDAY, STORM_HOUR = 3, 14  # days count from the first one
_CHARGE = 2  # the kind that fails then
_FEW = 100_000  # tasks, which one process sorts faster than many
_US = 1_000_000

# queue, function, share of all tasks, mean run in ms, part of runs that fail, errors
_KINDS: tuple[tuple[str, str, float, float, float, tuple[tuple[str, str], ...]], ...] = (
    (
        "mail",
        "shop.mail.send_receipt",
        0.26,
        120.0,
        0.03,
        (
            ("ConnectionRefusedError", "[Errno 111] connect to 10.2.{a}.{b}:587 refused"),
            ("SMTPServerDisconnected", "mailbox <user{n}@example.org> closed after {ms} ms"),
        ),
    ),
    ("mail", "shop.mail.send_newsletter", 0.14, 60.0, 0.01, (("ValueError", "template 'spring-{a}' has no field 'name{b}'"),)),
    (
        "orders",
        "shop.orders.charge",
        0.2,
        450.0,
        0.05,
        (
            ("TimeoutError", "no answer from https://pay.example.com/v1/charges/{n} within {ms} ms"),
            ("CardDeclined", "charge {hex} declined: code {a}"),
            ("IntegrityError", 'duplicate key value violates "orders_{a}_key": ({n})'),
        ),
    ),
    ("orders", "shop.orders.ship", 0.12, 200.0, 0.02, (("KeyError", "'parcel-{n}'"),)),
    (
        "images",
        "shop.images.resize",
        0.2,
        900.0,
        0.02,
        (
            ("MemoryError", "cannot allocate {n} bytes at 0x{hex}"),
            ("UnidentifiedImageError", "cannot identify image file '/data/{hex}.jpg'"),
        ),
    ),
    ("reports", "shop.reports.daily", 0.08, 6000.0, 0.04, (("OperationalError", "could not read block {a} of relation {n}"),)),
)


def history(
    spark: SparkSession,
    *,
    events: int = 100_000,
    days: int = 14,
    start: date = date(2026, 1, 1),
    seed: int = 0,
    store: str = MADE_UP,
    by_queue: bool = False,
    first: int = 0,
) -> DataFrame:
    """About `events` events of tasks that were stored on `days` days, with the columns of the table `events`.

    `by_queue` numbers the events per queue, as Redis does; else the store has one shard. `first` is the number of the first
    task: two histories with other numbers have no task in common. Sequence numbers begin at 1 in each. A report shows a store
    called `synthetic`, or `synthetic-…`, as made up.
    """
    n = max(1, round(events / EVENTS_PER_TASK))
    rows = spark.range(first, first + n, 1, max(1, n // _FEW) if n > _FEW else 2)
    told = _told(_tasks(rows, n, first, days, start, seed))
    return _numbered(told, store, by_queue, at_once=n <= _FEW)


def _tasks(rows: DataFrame, n: int, first: int, days: int, start: date, seed: int) -> DataFrame:
    """One row per task, with its kind, its times and how its runs end."""

    def u(salt: str) -> Column:
        """A number from 0 to 1 that depends on the seed, the task and the salt."""
        # 40 bits, which a double holds exactly: the same number on every machine.
        return F.pmod(F.xxhash64(F.lit(seed), F.col("id"), F.lit(salt)), F.lit(1 << 40)) / float(1 << 40)

    base = int(datetime(start.year, start.month, start.day, tzinfo=UTC).timestamp()) * _US
    day_us = 86_400 * _US
    rows = rows.select("id", u("pick").alias("pick"))
    kind: Column = F.lit(len(_KINDS) - 1)
    upto = 1.0
    for index in range(len(_KINDS) - 2, -1, -1):
        upto -= _KINDS[index + 1][2]
        kind = F.when(F.col("pick") < upto, F.lit(index)).otherwise(kind)
    rows = rows.select("*", kind.alias("kind"))
    # Two thirds of a day's tasks come between 8 and 20 o'clock.
    evenly = (F.col("id") - first + u("when")) * (days / n)
    day = F.floor(evenly)
    within = evenly - day
    clock = (
        F.when(within < 1 / 6, within * 2)
        .when(within < 5 / 6, 1 / 3 + (within - 1 / 6) * 0.75)
        .otherwise(5 / 6 + (within - 5 / 6))
    )
    # Half of the charges of a bad day are made in its storm: so few tasks a day would not show it otherwise.
    surge = (F.col("kind") == _CHARGE) & (F.pmod(day, F.lit(7)) == STORM_WEEKDAY) & (u("surge") < 0.5)
    clock = F.when(surge, (STORM_HOUR + u("again")) / 24).otherwise(clock)
    enqueued = (F.lit(base) + day * day_us + (clock * day_us).cast("bigint")).cast("bigint")

    def of_kind(value: int) -> Column:
        return F.element_at(F.array(*[F.lit(k[value]) for k in _KINDS]), F.col("kind") + 1)

    hour = F.pmod(F.floor((F.col("enqueued") - base) / (3600 * _US)), F.lit(24))
    weekday = F.pmod(F.floor((F.col("enqueued") - base) / day_us), F.lit(7))
    storm = (F.col("kind") == _CHARGE) & (hour == STORM_HOUR) & (weekday == STORM_WEEKDAY)
    # One group in ten tasks of its queue is greedy; others share the rest. Newsletters have no group.
    group = (
        F.when(F.col("kind") == 1, F.lit(None).cast("string"))
        .when(u("greedy") < 0.12, F.lit("acme"))
        .when(u("grouped") < 0.5, F.format_string("customer-%02d", (u("group") * 40).cast("int")))
    )
    rows = rows.select("*", enqueued.alias("enqueued"))
    delay = F.when(u("later") < 0.05, (u("delay") * 3600 * _US).cast("bigint")).otherwise(F.lit(0).cast("bigint"))
    rows = rows.select(
        "*",
        of_kind(0).alias("queue"),
        of_kind(1).alias("name"),
        of_kind(3).alias("mean_ms"),
        F.when(storm, F.lit(0.8)).otherwise(of_kind(4)).alias("fails"),
        group.alias("group_id"),
        (F.col("enqueued") + delay).alias("due"),
        F.concat(
            F.lpad(F.lower(F.hex(F.xxhash64(F.lit(seed), F.col("id")))), 16, "0"), F.lpad(F.lower(F.hex("id")), 16, "0")
        ).alias("task_id"),
        F.format_string("web%d:%d", (u("host") * 4).cast("int"), (u("pid") * 6 + 100).cast("int")).alias("worker"),
        (u("size") * 400 + 20).cast("int").alias("payload_bytes"),
        (u("cancel") < 0.01).alias("cancelled"),
        (u("lost") < 0.002).alias("lost"),
    )
    kinds = F.element_at(
        F.array(*[F.array(*[F.struct(F.lit(t).alias("type"), F.lit(m).alias("message")) for t, m in k[5]]) for k in _KINDS]),
        F.col("kind") + 1,
    )
    rows = rows.select("*", F.element_at(kinds, (u("error") * F.size(kinds)).cast("int") + 1).alias("template"))
    message = F.col("template.message")
    for mark, value in (
        ("{a}", (u("a") * 250).cast("int").cast("string")),
        ("{b}", (u("b") * 250).cast("int").cast("string")),
        ("{n}", (u("n") * 9e6).cast("int").cast("string")),
        ("{ms}", (u("ms") * 9000 + 1000).cast("int").cast("string")),
        ("{hex}", F.lower(F.hex(F.xxhash64(F.lit(seed), F.col("id"), F.lit("hex"))))),
    ):
        message = F.replace(message, F.lit(mark), value)
    error = F.struct(F.col("template.type").alias("type"), message.alias("message"))
    rows = rows.select("*", F.to_json(F.struct(error.alias("error"))).alias("error"))
    # Waits grow with the hour's load and for the greedy group, which stands behind its own limit.
    crowd = F.when(hour.between(9, 18), F.lit(4.0)).otherwise(F.lit(1.0)) * F.when(
        F.col("group_id") == "acme", F.lit(8.0)
    ).otherwise(F.lit(1.0))

    def wait(a: int) -> Column:
        return (-F.log(1 - u(f"wait{a}")) * 0.4 * crowd * _US).cast("bigint") + 1

    def run(a: int) -> Column:
        return (F.exp(F.sqrt(-2 * F.log(1 - u(f"run{a}"))) * 0.8 - 0.9) * F.col("mean_ms") * 1000).cast("bigint") + 1

    columns: list[Column] = [F.col("due")]
    rows = rows.select("*", *[wait(a).alias(f"wait{a}") for a in range(1, ATTEMPTS + 1)])
    rows = rows.select("*", *[run(a).alias(f"run{a}") for a in range(1, ATTEMPTS + 1)])
    rows = rows.select("*", *[(u(f"fail{a}") < F.col("fails")).alias(f"fail{a}") for a in range(1, ATTEMPTS + 1)])
    rows = rows.select("*", (columns[0] + F.col("wait1")).alias("start1"))
    for a in range(1, ATTEMPTS + 1):
        held = F.when(F.col("lost") & (F.lit(a) == 1), F.lit(60 * _US)).otherwise(F.col(f"run{a}"))
        rows = rows.select("*", (F.col(f"start{a}") + held).alias(f"end{a}"))
        if a < ATTEMPTS:
            backoff = F.lit(10 * _US * 3 ** (a - 1))
            rows = rows.select("*", (F.col(f"end{a}") + backoff).alias(f"due{a + 1}"))
            rows = rows.select("*", (F.col(f"due{a + 1}") + F.col(f"wait{a + 1}")).alias(f"start{a + 1}"))
    return rows


def _told(tasks: DataFrame) -> DataFrame:
    """The events of each task."""
    number = "bigint"

    def said(
        when: Column, event: str, at: Column, attempt: int, status: str, due: Column, data: Column, worker: bool = True
    ) -> Column:
        return F.when(
            when,
            F.struct(
                at.cast(number).alias("us"),
                F.lit(event).alias("event"),
                F.lit(attempt).alias("attempt"),
                (F.col("worker") if worker else F.lit(None).cast("string")).alias("worker"),
                due.cast(number).alias("due"),
                F.lit(status).alias("status"),
                data.alias("data"),
            ),
        )

    nothing = F.lit(None).cast("string")
    stored = F.format_string('{"payload_bytes":%d}', "payload_bytes")
    due = F.col("due")
    events = [said(F.lit(True), "enqueued", F.col("enqueued"), 0, "PENDING", due, stored, False)]
    waits = F.lit(True) & ~F.col("cancelled")
    events.append(said(F.col("cancelled"), "cancelled", due + F.col("wait1"), 0, "CANCELLED", due, nothing, False))
    for a in range(1, ATTEMPTS + 1):
        ran = F.col(f"run{a}")
        lost = F.col("lost") if a == 1 else F.lit(False)
        fails = F.col(f"fail{a}") & ~lost
        at = F.col(f"end{a}")
        failed = F.concat(F.expr("substring(error, 1, length(error) - 1)"), F.format_string(',"ran_us":%d}', ran))
        gone = F.lit('{"error":{"type":"WorkerLost","message":"the lease ran out"},"lost":"expired"}')
        done = F.format_string('{"ran_us":%d,"result_bytes":%d}', ran, F.col("payload_bytes") % 50)
        events.append(said(waits, "started", F.col(f"start{a}"), a, "RUNNING", due, nothing))
        events.append(said(waits & ~fails & ~lost, "succeeded", at, a, "SUCCESS", due, done))
        last = a == ATTEMPTS
        next_due = due if last else F.col(f"due{a + 1}")
        events.append(
            said(waits & fails, "failed" if last else "retried", at, a, "FAILED" if last else "RETRYING", next_due, failed)
        )
        if a == 1:
            events.append(said(waits & lost, "expired", at, a, "RETRYING", next_due, gone))
        waits, due = waits & (fails | lost), next_due
    every = tasks.select(
        "id", "task_id", "queue", "name", "group_id", "enqueued", F.posexplode(F.array(*events)).alias("k", "e")
    )
    return every.where(F.col("e").isNotNull()).select("id", "task_id", "queue", "name", "group_id", "enqueued", "k", "e.*")


def _numbered(told: DataFrame, store: str, by_queue: bool, at_once: bool) -> DataFrame:
    """The rows numbered per shard in the order of time, without a gap; hour by hour, so that no process sorts them all."""
    from pyspark.sql import Window

    rows = told.select("*", (F.col("queue") if by_queue else F.lit("")).alias("shard"))
    if at_once:
        place = F.row_number().over(Window.partitionBy("shard").orderBy("us", "id", "k"))
        rows = rows.select("*", place.alias("place"), F.lit(0).alias("earlier"))
    else:
        rows = rows.select("*", F.floor(F.col("us") / (3600 * _US)).alias("h"))
        before = Window.partitionBy("shard").orderBy("h").rowsBetween(Window.unboundedPreceding, -1)
        counts = rows.groupBy("shard", "h").agg(F.count(F.lit(1)).alias("n"))
        offsets = counts.select("shard", "h", F.coalesce(F.sum("n").over(before), F.lit(0)).alias("earlier"))
        within = Window.partitionBy("shard", "h").orderBy("us", "id", "k")
        rows = rows.select("*", F.row_number().over(within).alias("place")).join(F.broadcast(offsets), ["shard", "h"])
    moment = F.timestamp_micros
    return rows.select(
        F.lit(store).alias("store"),
        "shard",
        (F.col("earlier") + F.col("place")).cast("bigint").alias("seq"),
        moment("us").alias("ts"),
        "event",
        "task_id",
        "queue",
        "name",
        "group_id",
        F.col("attempt").cast("int").alias("attempt"),
        "worker",
        moment("enqueued").alias("enqueued_at"),
        moment("due").alias("due_at"),
        "status",
        "data",
    )
