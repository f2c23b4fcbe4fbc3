"""Silver: one row per run and one per task, from events of every kind."""

from typing import TYPE_CHECKING, Any

import pytest
from lake_rows import Log, second

from omniq.spark.lake import models
from omniq.spark.lake.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


@pytest.fixture(scope="module")
def log() -> Log:
    """One log with a task of each kind."""
    log = Log()
    log.task("well").started(2).event(3, "progress", progress=0.5).succeeded(4, ran_us=1_500_000)
    log.task("third-time", at=10).started(11).retried(12, due=20, error="TimeoutError: after 31 ms").started(25).retried(
        26, due=30, error="TimeoutError: after 7 ms"
    ).started(31).succeeded(32)
    log.task("hopeless", group="g").started(1).failed(2, "KeyError: 'user-17'")
    log.task("handed-back").started(1).event(2, "released", status="PENDING")
    back = log.task("taken-again", at=0)
    back.started(1).attempt = 0
    back.event(5, "released").started(9, "w2").succeeded(10)
    log.task("waiting", at=50)
    log.task("running", at=50).started(51)
    log.task("cancelled", at=50).event(60, "cancelled")
    log.task("stopped", at=50).started(51).event(60, "cancelled")
    log.task("lost").started(1).event(61, "expired", error={"type": "WorkerLost", "message": "gone"}, lost="expired")
    moved = log.task("moved", queue="orders").started(1).failed(2, to_queue="dead")
    moved.queue, moved.attempt, moved.due_at = "dead", 0, moved.enqueued_at
    moved.started(8).succeeded(9)
    log.task("to-be-moved", queue="orders").started(1).failed(2, to_queue="dead")
    again = log.task("interval").started(0).succeeded(1)
    again.attempt = 0
    again.due_at = again.enqueued_at.replace(minute=1)
    again.started(61).succeeded(62)
    dead = log.task("brought-back").started(1).failed(2)
    dead.event(5, "requeued", status="RETRYING").started(6).succeeded(7)
    log.task("blocked").event(9, "failed", error={"type": "BlockerFailed", "message": "task x failed"})
    torso = log.task("torso", at=0)
    torso.attempt = 1
    log.rows.pop()  # its first events were purged
    log.numbers[""] -= 1
    torso.succeeded(5, ran_us=2_000_000)
    log.task("removed").started(1).succeeded(2).event(3, "removed")
    return log


@pytest.fixture(scope="module")
def events(spark: "SparkSession", log: Log) -> "DataFrame":
    from pyspark.sql import functions as F

    return log.frame(spark).withColumn("task_date", F.to_date("enqueued_at")).cache()


@pytest.fixture(scope="module")
def attempts(events: "DataFrame") -> dict[str, list["Row"]]:
    found: dict[str, list[Row]] = {}
    for row in models.attempts(events).orderBy("task_id", "run").collect():
        found.setdefault(row["task_id"], []).append(row)
    return found


@pytest.fixture(scope="module")
def tasks(events: "DataFrame") -> dict[str, "Row"]:
    return {row["id"]: row for row in models.tasks(events).collect()}


@pytest.mark.parametrize("name", ["attempts", "tasks"])
def test_a_table_has_the_columns_that_the_reference_names(events: "DataFrame", name: str) -> None:
    made = getattr(models, name)(events)
    assert made.dtypes == [(column.name, column.type) for column in TABLES[name].columns]


def runs(rows: list[Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_a_run_that_went_well(attempts: dict[str, list["Row"]]) -> None:
    (run,) = attempts["well"]
    assert runs([run], "outcome", "run", "attempt", "worker", "wait_ms", "run_ms", "result_bytes", "again") == [
        ("succeeded", 1, 1, "w1", 2000.0, 1500.0, 3, False)
    ]
    assert [second(run[at]) for at in ("ready_at", "started_at", "finished_at")] == [0, 2, 4]


def test_each_retry_is_a_run_that_waits_from_when_it_was_due(attempts: dict[str, list["Row"]]) -> None:
    assert runs(attempts["third-time"], "run", "attempt", "outcome", "wait_ms", "run_ms") == [
        (1, 1, "retried", 1000.0, 1.0),
        (2, 2, "retried", 5000.0, 1.0),
        (3, 3, "succeeded", 1000.0, 1000.0),
    ]
    first, other, last = attempts["third-time"]
    assert first["fingerprint"] == other["fingerprint"] is not None
    assert last["fingerprint"] is None
    assert last["previous_started_at"] == other["started_at"]


def test_what_was_handed_back_unused_is_no_run_and_waited_all_the_time(attempts: dict[str, list["Row"]], tasks: Any) -> None:
    assert "handed-back" not in attempts
    assert runs(attempts["taken-again"], "run", "worker", "wait_ms") == [(1, "w2", 9000.0)]
    assert (tasks["taken-again"]["runs"], tasks["taken-again"]["releases"]) == (1, 1)


def test_what_goes_on_has_no_end(attempts: dict[str, list["Row"]]) -> None:
    assert runs(attempts["running"], "outcome", "finished_at", "run_ms") == [("running", None, None)]


def test_an_expired_lease_and_a_cancelled_run_are_outcomes(attempts: dict[str, list["Row"]]) -> None:
    assert runs(attempts["lost"], "outcome", "error_type", "run_ms") == [("expired", "WorkerLost", 60_000.0)]
    assert runs(attempts["stopped"], "outcome") == [("cancelled",)]
    assert "cancelled" not in attempts
    assert "blocked" not in attempts


def test_a_dead_queue_an_interval_and_a_requeue_begin_anew(attempts: dict[str, list["Row"]]) -> None:
    assert runs(attempts["moved"], "queue", "run", "attempt", "outcome", "moved_to", "again") == [
        ("orders", 1, 1, "failed", "dead", False),
        ("dead", 2, 1, "succeeded", None, True),
    ]
    assert runs(attempts["interval"], "run", "attempt", "wait_ms", "again") == [(1, 1, 0.0, False), (2, 1, 1000.0, True)]
    assert runs(attempts["brought-back"], "run", "wait_ms", "again") == [(1, 1000.0, False), (2, 1000.0, True)]


def test_an_end_whose_beginning_was_purged_is_a_run_without_a_start(attempts: dict[str, list["Row"]], tasks: Any) -> None:
    assert runs(attempts["torso"], "outcome", "started_at", "wait_ms", "run_ms") == [("succeeded", None, None, 2000.0)]
    assert (tasks["torso"]["status"], tasks["torso"]["runs"]) == ("SUCCESS", 1)


@pytest.mark.parametrize(
    ("id", "status", "count", "runs", "queue"),
    [
        ("well", "SUCCESS", 1, 1, "mail"),
        ("third-time", "SUCCESS", 3, 3, "mail"),
        ("hopeless", "FAILED", 1, 1, "mail"),
        ("waiting", "PENDING", 0, 0, "mail"),
        ("running", "RUNNING", 1, 1, "mail"),
        ("cancelled", "CANCELLED", 0, 0, "mail"),
        ("moved", "SUCCESS", 1, 2, "dead"),
        ("to-be-moved", "PENDING", 0, 1, "dead"),
        ("interval", "SUCCESS", 1, 2, "mail"),
        ("blocked", "FAILED", 0, 0, "mail"),
    ],
)
def test_a_task_stands_where_its_last_event_left_it(
    tasks: dict[str, "Row"], id: str, status: str, count: int, runs: int, queue: str
) -> None:
    task = tasks[id]
    assert (task["status"], task["attempts"], task["runs"], task["queue"]) == (status, count, runs, queue)


def test_the_times_of_a_task(tasks: dict[str, "Row"]) -> None:
    task = tasks["third-time"]
    assert [second(task[at]) for at in ("created_at", "due_at", "started_at", "finished_at")] == [10, 30, 31, 32]
    assert (task["wait_ms"], task["run_ms"], task["total_wait_ms"], task["total_run_ms"]) == (1000, 1000, 7000, 1002)
    assert (task["error_type"], task["error"], task["payload_bytes"]) == ("TimeoutError", "after 7 ms", 7)
    assert tasks["waiting"]["finished_at"] is None
    assert second(tasks["removed"]["removed_at"]) == 3


def test_every_event_is_counted_in_one_task(tasks: dict[str, "Row"], log: Log) -> None:
    assert sum(task["events"] for task in tasks.values()) == len(log.rows)


def test_an_event_that_is_there_twice_changes_nothing(
    spark: "SparkSession", events: "DataFrame", tasks: dict[str, "Row"]
) -> None:
    doubled = events.unionAll(events.where("event = 'started'"))
    assert {row["id"]: row for row in models.tasks(doubled).collect()} == tasks
    assert models.attempts(doubled).count() == models.attempts(events).count()


def test_in_two_shards_the_clock_orders_what_the_numbers_cannot(spark: "SparkSession") -> None:
    from pyspark.sql import functions as F

    log = Log()
    for n in range(5):  # so that the numbers of the first shard are the higher ones
        other = log.task(f"other{n}", queue="orders")
        log.rows[-1]["shard"] = "orders"
        del other
    log.numbers = {"orders": 5}
    life = log.task("t", queue="orders")
    log.rows[-1].update(shard="orders", seq=6)
    life.shard = "orders"
    log.numbers["orders"] = 6
    life.started(1).failed(2, to_queue="dead")
    life.queue, life.shard, life.attempt = "dead", "dead", 0
    life.started(3).succeeded(4)
    events = log.frame(spark).withColumn("task_date", F.to_date("enqueued_at"))
    rows = models.attempts(events).where("task_id = 't'").orderBy("run").collect()
    assert runs(rows, "queue", "outcome") == [("orders", "failed"), ("dead", "succeeded")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("no answer from https://a.example/v1/17 within 900 ms", "no answer from https://a.example/v1/9 within 31 ms"),
        ("KeyError 'user-1'", "KeyError 'somebody else'"),
        ("at 0x7f3a9c connect to 10.0.0.1:5432", "at 0xDEADBEEF connect to 192.168.17.4:99"),
        ("row 9f86d081884c7d65 is locked", "row 60303ae22b998861 is locked"),
        ("task 01J8ZC5V7Q2M4N6P8R0S1T3W5X gone", "task 01J8ZC5V7Q2M4N6P8R0S1T3W5Y gone"),
        ("id 7d444840-9dc0-11d1-b245-5ffdce74fad2", "id 00000000-0000-0000-0000-000000000000"),
        ("two  spaces\nand a line", "two spaces and a line"),
    ],
)
def test_errors_that_differ_in_what_varies_share_a_fingerprint(spark: "SparkSession", one: str, other: str) -> None:
    assert len(set(fingerprints(spark, ("E", one), ("E", other)))) == 1


def test_other_errors_have_other_fingerprints(spark: "SparkSession") -> None:
    found = fingerprints(spark, ("E", "disk full"), ("F", "disk full"), ("E", "disk failed"), ("E", None), (None, "disk full"))
    assert len(set(found)) == 5
    assert found[-1] is None
    assert all(len(value) == 16 for value in found[:-1] if value is not None)


def fingerprints(spark: "SparkSession", *errors: tuple[str | None, str | None]) -> list[str | None]:
    from pyspark.sql import functions as F

    rows = spark.createDataFrame([(n, *error) for n, error in enumerate(errors)], "n int, type string, message string")
    found = rows.select("n", models.fingerprint(F.col("type"), F.col("message")).alias("f")).orderBy("n")
    return [row["f"] for row in found.collect()]


@pytest.mark.parametrize("module", ["silver", "gold", "capacity"])
def test_models_only_describe(module: str) -> None:
    """Else a declarative pipeline would lose the order of its tables: see `omniq.spark.lake.models`."""
    import importlib
    import inspect

    source = inspect.getsource(importlib.import_module(f"omniq.spark.lake.{module}"))
    eager = (".withColumn", ".drop(", ".columns", ".schema", ".dtypes", ".collect(", ".count()", ".isEmpty(")
    assert [word for word in eager if word in source] == []
