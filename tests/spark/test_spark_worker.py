"""`run_worker` on executors of a local session. On a cluster: test_spark_cluster.py."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import spark_jobs
from support.redis_server import running
from support.waiting import wait_for

import omniq.spark
from omniq import ConfigError, Invalid, OmniQ, Settings, TaskStatus
from omniq.spark import run_worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOBS = "support.spark_jobs"
QUICK = Settings(backoff_base=0.05)


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/queue.db"
        return
    with running(tmp_path / "redis") as server:
        yield server.url


@pytest.fixture
def oq(url: str) -> Iterator[OmniQ]:
    with OmniQ.from_url(url, settings=QUICK) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "runs"
    found.mkdir()
    return found


def test_each_task_runs_as_often_as_it_should(spark: "SparkSession", oq: OmniQ, url: str, folder: Path) -> None:
    good = [str(folder / f"good{n}") for n in range(60)]
    oq.enqueue_many(spark_jobs.once, [(path,) for path in good])
    again = [str(folder / f"again{n}") for n in range(6)]
    oq.options(queue="mail").enqueue_many(spark_jobs.at_second, [(path,) for path in again])
    bad = [str(folder / f"bad{n}") for n in range(3)]
    oq.options(max_retries=1).enqueue_many(spark_jobs.never, [(path,) for path in bad])
    elsewhere = oq.options(queue="other").enqueue(spark_jobs.once, str(folder / "other"))

    report = run_worker(spark, url, ["mail", "default"], modules=[JOBS], slots=2, drain=True, settings=QUICK)

    assert (report.done, report.failed, report.retried) == (66, 3, 9)
    assert (report.lost, report.stopped) == (0, False)
    assert report.rounds >= 2
    assert {path: spark_jobs.runs(path) for path in good} == dict.fromkeys(good, 1)
    assert {path: spark_jobs.runs(path) for path in again + bad} == dict.fromkeys(again + bad, 2)
    assert {c.queue: (c.done, c.dead) for c in oq.counts()} == {"default": (60, 3), "mail": (6, 0), "other": (0, 0)}
    task = oq.get_task(elsewhere)
    assert task is not None
    assert task.status is TaskStatus.PENDING
    assert oq.workers() == []


def test_a_round_that_is_over_is_followed_by_another(spark: "SparkSession", tmp_path: Path, folder: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    paths = [str(folder / str(n)) for n in range(8)]
    with OmniQ.from_url(url) as oq:
        oq.enqueue_many(spark_jobs.once, [(path, 0.3) for path in paths])
    report = run_worker(spark, url, modules=[JOBS], slots=1, concurrency=1, drain=True, round_s=0.5)
    assert report.rounds > 1
    assert (report.done, report.retried) == (8, 0)
    assert [spark_jobs.runs(path) for path in paths] == [1] * 8


def test_told_to_stop_it_finishes_what_runs_and_leaves_the_rest(
    spark: "SparkSession", oq: OmniQ, url: str, folder: Path
) -> None:
    gate, path = folder / "gate", str(folder / "first")
    first = oq.enqueue(spark_jobs.until, path, str(gate))
    rest = oq.enqueue_many(spark_jobs.once, [(str(folder / f"rest{n}"), 0.1) for n in range(600)])  # for a minute
    stop = threading.Event()

    def end() -> None:
        wait_for(lambda: spark_jobs.runs(path) == 1, within=120)
        stop.set()
        wait_for(lambda: len(oq.workers()) == 1, within=60)  # the driver has left, the slot has not
        gate.touch()

    ender = threading.Thread(target=end)
    ender.start()
    report = run_worker(spark, url, modules=[JOBS], slots=1, concurrency=1, grace=60, stop=stop)
    ender.join()
    result = oq.get_result(first)
    assert result is not None
    assert (result.result, result.attempts) == ("through", 1)
    ran = len(list(folder.glob("rest*")))
    assert (report.done, report.stopped) == (1 + ran, True)
    assert ran < len(rest)
    (counts,) = oq.counts()
    assert (counts.done, counts.ready, counts.running) == (1 + ran, 600 - ran, 0)


def test_a_task_that_kills_its_process_costs_no_other_task(spark: "SparkSession", tmp_path: Path, folder: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with OmniQ.from_url(url, settings=QUICK) as oq:
        killer = oq.options(queue="killer", max_retries=1).enqueue(spark_jobs.die, str(folder / "die"))
        paths = [str(folder / str(n)) for n in range(20)]
        oq.enqueue_many(spark_jobs.once, [(path,) for path in paths])
        report = run_worker(spark, url, ["killer", "default"], modules=[JOBS], slots=1, concurrency=1, drain=True)
        assert report.lost == 2
        assert {c.queue: (c.done, c.dead) for c in oq.counts()} == {"default": (20, 0), "killer": (0, 1)}
        assert spark_jobs.runs(folder / "die") == 2
        assert [spark_jobs.runs(path) for path in paths] == [1] * 20
        result = oq.get_result(killer)
    assert result is not None
    assert result.error is not None
    assert (result.status, result.error.type) == (TaskStatus.FAILED, "WorkerLost")


def test_a_module_that_executors_cannot_import_is_named_before_a_task_is_taken(
    spark: "SparkSession", tmp_path: Path, folder: Path
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with OmniQ.from_url(url) as oq:
        task_id = oq.enqueue(spark_jobs.once, str(folder / "one"))
        with pytest.raises(ConfigError, match=r"cannot import the module 'no_such_module' \(ModuleNotFoundError"):
            run_worker(spark, url, modules=["no_such_module"], drain=True)
        assert [e.event for e in oq.history(task_id)] == ["enqueued"]
        assert oq.workers() == []


def test_what_makes_no_sense_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with pytest.raises(ConfigError, match="lives inside one process and Spark runs in several"):
        run_worker(spark, "memory://")
    with pytest.raises(Invalid, match="name the modules of your tasks"):
        run_worker(spark, "redis://127.0.0.1:1/0")
    with pytest.raises(Invalid, match="slots must be a whole number of at least 1, not 0"):
        run_worker(spark, url, slots=0)
    with pytest.raises(Invalid, match="queues is a list of names, not 'default'"):
        run_worker(spark, url, "default")
    with pytest.raises(Invalid, match="round_s must be more than 0 seconds"):
        run_worker(spark, url, round_s=0)
    with pytest.raises(Invalid, match="batch must be a whole number of at least 1, not 0"):  # found by the executor
        run_worker(spark, url, batch=0)


def test_the_report_is_a_public_name() -> None:
    assert omniq.spark.WorkerReport.__name__ == "WorkerReport"
