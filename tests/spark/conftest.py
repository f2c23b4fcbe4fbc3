"""One session for all tests here: to start Spark takes longer than most of them."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lake_rows import DAYS, EVIL, FIRST
from support.redis_server import Server, running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from omniq.spark import Lake

START_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the start, which takes long on a busy machine."""
    here = os.path.dirname(__file__) + os.sep
    for item in items:
        if not str(item.path).startswith(here) or item.get_closest_marker("slow") or item.get_closest_marker("timeout"):
            continue
        item.add_marker(pytest.mark.timeout(START_S))


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """The session that the tests share: leave its settings as they were, and stop every stream."""
    from omniq.spark import session

    # For so few rows it takes longer to compile and adapt a query than to run it; the tests with sessions of their own do both.
    conf = {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    started = session(master="local[2]", fast_start=True, app_name="omniq-tests", conf=conf)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def events(spark: "SparkSession") -> "DataFrame":
    """The history of a shop, one of whose functions has a name that a page must not take for its own text."""
    from pyspark.sql import functions as F

    from omniq.spark.lake.generator import history

    name = F.when(F.col("name") == "shop.orders.charge", F.lit(EVIL)).otherwise(F.col("name")).alias("name")
    made = history(spark, events=2000, days=DAYS, start=FIRST, seed=7)
    return made.select(*[name if column == "name" else column for column in made.columns]).cache()


@pytest.fixture(scope="session")
def built(spark: "SparkSession", events: "DataFrame", tmp_path_factory: pytest.TempPathFactory) -> "Lake":
    """A lake with that history, for tests that only look: built in two steps, most of it and then the rest."""
    from omniq.spark import Lake, build
    from omniq.spark.lake.bronze import take_in
    from omniq.spark.lake.tables import GOLD

    lake = Lake.init(tmp_path_factory.mktemp("lakes") / "lake")
    most = int(events.count() * 0.8)
    take_in(lake, events.where(f"seq <= {most}"), stream="test", batch=0)
    build(spark, lake)
    take_in(lake, events.where(f"seq > {most}"), stream="test", batch=1)
    report = build(spark, lake, grace=timedelta(0))
    untouched = (FIRST + timedelta(days=1)).isoformat()
    assert report.days["tasks"] == [(FIRST + timedelta(days=2)).isoformat()]
    assert all(untouched not in report.days[name] for name in GOLD)
    return lake


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("file", "redis"))])
def each_store(request: pytest.FixtureRequest, tmp_path: Path, redis_server: Server) -> str:
    """The URL of an empty store of each kind. What Spark does with a store is the same; stores have tests of their own."""
    if request.param == "redis":
        with redis_server.client() as client:
            client.flushall()
        return redis_server.url
    return f"{request.param}:{'//' if request.param == 'file' else '///'}{tmp_path / 'q'}?durability=process"


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of an empty store, for what does not depend on its kind."""
    return f"sqlite:///{tmp_path / 'q.db'}?durability=process"
