"""One session for all tests here: to start Spark takes longer than most of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """The session that the tests share: leave its settings as they were, and stop every stream."""
    from omniq.spark import session

    started = session(master="local[2]", fast_start=True, app_name="omniq-tests", conf={"spark.sql.shuffle.partitions": "2"})
    yield started
    started.stop()
