"""Enqueueing where Spark repeats its tasks, copies slow ones, or runs behind a server; each by drivers of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import Driver, must_be_once
from support.redis_server import running
from support.spark_cluster import Cluster, cluster
from support.spark_server import connect_server

from omniq import OmniQ
from omniq.storage.bulk import open_bulk

ROWS = 3000
EAGER = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.25",
    "spark.executor.memory": "512m",
}

pytestmark = [pytest.mark.slow, pytest.mark.costly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), ["127.0.0.1", "127.0.0.2"]) as started:  # Spark copies to other machines
        yield started


def test_a_part_that_failed_after_its_write_and_one_that_was_copied_add_nothing(two_nodes: Cluster, tmp_path: Path) -> None:
    """On Redis there are four parts, two for each core, so that those which end let Spark see which does not."""
    (attempts := tmp_path / "attempts").mkdir()
    with running(tmp_path / "redis") as server:
        step = {"url": server.url, "queue": "rows", "rows": ROWS, "run_id": None}
        with Driver(tmp_path, step, master=two_nodes.master, conf=EAGER, trouble=str(attempts)) as driver:
            report = driver.until("done")
        assert (report["rows"], report["inserted"], report["already_there"]) == (ROWS, ROWS, 0)
        found = {path.name for path in attempts.iterdir()}
        assert {"part0-attempt0", "part0-attempt1", "part1-attempt0", "part1-attempt1"} <= found
        with open_bulk(server.url) as bulk:
            must_be_once(bulk, "rows", ROWS)


def test_a_cluster_on_the_loopback_writes_to_a_sqlite_file(two_nodes: Cluster, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    step = {"url": url, "queue": "rows", "rows": ROWS, "run_id": "one"}
    conf = {"spark.executor.memory": "512m"}
    with Driver(tmp_path, step, step, master=two_nodes.master, conf=conf) as driver:
        first, again = driver.until("done"), driver.until("done")
    assert {name: again[name] for name in again if name != "seconds"} == {n: first[n] for n in first if n != "seconds"}
    with open_bulk(url) as bulk:
        must_be_once(bulk, "rows", ROWS)


def test_all_of_it_works_through_spark_connect(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    (folder := tmp_path / "server").mkdir()
    with connect_server(folder) as address, OmniQ.from_url(url) as oq, oq.worker(allow=["support.jobs"], queues=["map"]):
        rows = {"url": url, "queue": "rows", "rows": ROWS, "run_id": None}
        mapped = {"url": url, "queue": "map", "rows": 10, "map": True}
        with Driver(tmp_path, rows, mapped, remote=address) as driver:
            report = driver.until("done")
            results = driver.until("done")["results"]
    assert (report["rows"], report["inserted"]) == (ROWS, ROWS)
    assert results == list(range(10))
    with open_bulk(url) as bulk:
        must_be_once(bulk, "rows", ROWS)
