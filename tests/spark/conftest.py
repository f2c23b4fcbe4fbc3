"""One session for all tests here: to start Spark takes longer than most of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


START_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the start, which takes long on a busy machine."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(START_S))


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """The session that the tests share: leave its settings as they were, and stop every stream."""
    from omniq.spark import session

    started = session(master="local[2]", fast_start=True, app_name="omniq-tests", conf={"spark.sql.shuffle.partitions": "2"})
    yield started
    started.stop()
