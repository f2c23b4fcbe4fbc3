"""`omniq spark worker` as a process of its own: on a standalone cluster of the loopback, and when it is told to stop."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import spark_jobs
from support.redis_server import running
from support.shell import Shell, alive
from support.spark_cluster import Cluster, cluster
from support.spark_server import connect_server
from support.waiting import wait_for

JOBS = "support.spark_jobs"
SMALL = ["--conf", "spark.driver.memory=512m", "--conf", "spark.executor.memory=512m"]
WITHIN_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def shell_on(folder: Path, url: str) -> Shell:
    shell = Shell(folder, url)
    tests = Path(__file__).resolve().parents[1]
    shell.environment["PYTHONPATH"] = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return shell


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "runs"
    found.mkdir()
    return found


@pytest.mark.costly
def test_two_nodes_drain_a_sqlite_store_of_their_machine(two_nodes: Cluster, tmp_path: Path, folder: Path) -> None:
    sh = shell_on(tmp_path, f"sqlite:///{tmp_path}/queue.db")
    paths = [str(folder / str(n)) for n in range(60)]
    with sh.queue() as oq:
        oq.enqueue_many(spark_jobs.once, [(path, 0.3) for path in paths])
        oq.enqueue(spark_jobs.at_second, str(folder / "again"))
    words = ["spark", "worker", JOBS, "--master", two_nodes.master, "--slots", "2", "--concurrency", "2", "--drain", *SMALL]
    done = sh(*words, within=WITHIN_S)
    assert done.code == 0, done.err
    assert "all slots ended: 61 done, 0 failed, 1 retried" in done.err
    assert {path: spark_jobs.runs(path) for path in paths} == dict.fromkeys(paths, 1)


def test_the_tasks_of_a_node_that_is_killed_come_back_and_are_done(tmp_path: Path, folder: Path) -> None:
    with cluster(tmp_path / "cluster") as started, running(tmp_path / "redis") as server:
        sh = shell_on(tmp_path, server.url)
        gate = folder / "gate"
        held = [str(folder / f"held{n}") for n in range(8)]
        paths = [str(folder / str(n)) for n in range(40)]
        with sh.queue() as oq:
            ids = oq.options(lease=5).enqueue_many(spark_jobs.until, [(path, str(gate)) for path in held])
            oq.options(queue="later").enqueue_many(spark_jobs.once, [(path,) for path in paths])
            words = ["spark", "worker", JOBS, "--master", started.master, "--queues", "default,later", "--slots", "2"]
            worker = sh.start(*words, "--concurrency", "4", "--drain", *SMALL)
            wait_for(lambda: all(spark_jobs.runs(path) for path in held), within=WITHIN_S)  # four on each node
            assert all(len(node.executors()) == 1 for node in started.workers)
            killed = started.workers[0].kill()
            hit = [id for id, path in zip(ids, held, strict=True) if int(Path(path).read_text()) in killed]
            gate.touch()
            assert worker.wait(WITHIN_S) == 0, sh.said
            results = [oq.get_result(id) for id in ids]
            lost = [id for id in ids if "expired" in [e.event for e in oq.history(id)]]
            counts = {c.queue: (c.done, c.ready + c.running + c.scheduled + c.dead) for c in oq.counts()}
        sh.close()
        assert [r.result for r in results if r is not None] == ["through"] * 8
        assert len(lost) == 4
        assert lost == hit
        assert [r.attempts for r in results if r is not None] == [2 if id in lost else 1 for id in ids]
        assert [spark_jobs.runs(path) for path in held] == [2 if id in lost else 1 for id in ids]
        assert [spark_jobs.runs(path) for path in paths] == [1] * 40
        assert counts == {"default": (8, 0), "later": (40, 0)}
        assert "what 1 lost rounds had done" in sh.said


@pytest.mark.costly
def test_a_signal_stops_it_in_good_order(tmp_path: Path, folder: Path) -> None:
    sh = shell_on(tmp_path, f"sqlite:///{tmp_path}/queue.db")
    gate, path = folder / "gate", str(folder / "runs")
    with sh.queue() as oq:
        id = oq.enqueue(spark_jobs.until, path, str(gate))
        worker = sh.start("spark", "worker", JOBS, "--master", "local[1]", "--grace", "60s")
        wait_for(lambda: spark_jobs.runs(path) == 1, within=WITHIN_S)
        worker.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping: running tasks have their grace time" in sh.said, within=60)
        wait_for(lambda: len(oq.workers()) == 1, within=60)  # the driver has left, the slot has not
        gate.touch()
        assert worker.wait(WITHIN_S) == 0, sh.said
        result = oq.get_result(id)
    sh.close()
    assert result is not None
    assert (result.result, result.attempts) == ("through", 1)
    assert "all slots ended: 1 done, 0 failed, 0 retried" in sh.said
    assert "Traceback" not in sh.said


@pytest.mark.costly
def test_a_terminal_shows_how_far_it_is_and_ctrl_c_stops_it_in_good_order(tmp_path: Path, folder: Path) -> None:
    sh = shell_on(tmp_path, f"sqlite:///{tmp_path}/queue.db")
    gate, path = folder / "gate", str(folder / "runs")
    with sh.queue() as oq:
        oq.enqueue(spark_jobs.until, path, str(gate))
    with sh.terminal("spark", "worker", JOBS, "--master", "local[1]") as terminal:
        terminal.until("1 running · 0 done · 0 failed", WITHIN_S)
        gate.touch()
        terminal.until("0 running · 1 done · 0 failed", WITHIN_S)
        terminal.type("\x03")
        assert terminal.ended(WITHIN_S) == 0
        assert "all slots ended: 1 done, 0 failed, 0 retried" in terminal.screen()
        assert "running ·" not in terminal.screen()


@pytest.mark.costly
def test_the_second_signal_ends_it_at_once_and_the_task_comes_back(tmp_path: Path, folder: Path) -> None:
    sh = shell_on(tmp_path, f"sqlite:///{tmp_path}/queue.db")
    gate, path = folder / "gate", str(folder / "runs")
    with sh.queue() as oq:
        id = oq.enqueue(spark_jobs.until, path, str(gate))
        worker = sh.start("spark", "worker", JOBS, "--master", "local[1]", "--grace", "600s")
        wait_for(lambda: spark_jobs.runs(path) == 1, within=WITHIN_S)
        worker.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping: running tasks have their grace time" in sh.said, within=60)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 128 + signal.SIGTERM
        wait_for(lambda: not alive(int(Path(path).read_text())), within=60)  # the slot
        gate.touch()
        with oq.worker():
            result = oq.get_result(id, wait=True, timeout=60)
    sh.close()
    assert result is not None
    assert (result.result, result.attempts) == ("through", 2)


CONNECT = """
import sys
from pyspark.sql import SparkSession
from omniq.spark import run_worker

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
report = run_worker(spark, sys.argv[2], modules=["support.spark_jobs"], slots=2, drain=True)
print(report.done, report.failed, report.lost)
spark.stop()
"""


@pytest.mark.costly
def test_a_session_of_connect_runs_tasks_too(tmp_path: Path, folder: Path) -> None:
    sh = shell_on(tmp_path, f"sqlite:///{tmp_path}/queue.db")
    (tmp_path / "script.py").write_text(CONNECT)
    paths = [str(folder / str(n)) for n in range(20)]
    with sh.queue() as oq:
        oq.enqueue_many(spark_jobs.once, [(path,) for path in paths])
    with connect_server(tmp_path) as server:
        command = [sys.executable, "script.py", server, sh.url]
        done = subprocess.run(command, cwd=tmp_path, env=sh.environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout) == (0, "20 0 0\n"), done.stderr
    assert [spark_jobs.runs(path) for path in paths] == [1] * 20
