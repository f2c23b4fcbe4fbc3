"""One session for all tests here: to start Spark takes longer than most of them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.redis_server import Server, running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


START_S = 300.0
FEW_ROUNDS = 5


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the start, which takes long on a busy machine. Few rounds leave costly ones out."""
    if int(os.environ.get("ROUNDS") or 20) < FEW_ROUNDS:
        costly = [item for item in items if item.get_closest_marker("costly")]
        config.hook.pytest_deselected(items=costly)
        items[:] = [item for item in items if item not in costly]
    for item in items:
        quick = not (item.get_closest_marker("slow") or item.get_closest_marker("timeout"))
        if quick and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(START_S))


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """The session that the tests share: leave its settings as they were, and stop every stream."""
    from omniq.spark import session

    # For so few rows it takes longer to compile and adapt a query than to run it; the tests with sessions of their own do both.
    conf = {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    started = session(master="local[2]", fast_start=True, app_name="omniq-tests", conf=conf)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", "file", "redis"])
def each_store(request: pytest.FixtureRequest, tmp_path: Path, redis_server: Server) -> str:
    """The URL of an empty store of each kind."""
    if request.param == "redis":
        with redis_server.client() as client:
            client.flushall()
        return redis_server.url
    return f"{request.param}:{'//' if request.param == 'file' else '///'}{tmp_path / 'q'}?durability=process"


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of an empty store, for what does not depend on its kind."""
    return f"sqlite:///{tmp_path / 'q.db'}?durability=process"
