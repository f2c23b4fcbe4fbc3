"""The packages that the executors of a session can import: they may run on other machines, with another environment."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniq._version import __version__
from omniq.spark.sessions import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Executors:
    """The hosts where a few tasks ran, and how their environments differ from the driver's."""

    hosts: list[str]
    differences: list[str]


def look_around(spark: SparkSession, tasks: int | None = None) -> Executors:
    """Run a few tasks that compare the versions of the packages there with the driver's.

    By default there is one task per core; in a session of Spark Connect, whose cores are not known, there are eight.
    """
    import pandas
    import pyarrow

    ours = {"Python": platform.python_version(), "omniq": __version__, "pyspark_omniq": "there"}
    ours |= {"pandas": pandas.__version__, "pyarrow": pyarrow.__version__}
    if tasks is None:
        tasks = 8 if is_connect(spark) else max(1, spark.sparkContext.defaultParallelism)
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(_look(), "host string, name string, version string").collect()
    differing = {
        f"{host} has {name} {version}, the driver {ours[name]}" for host, name, version in rows if version != ours[name]
    }
    return Executors(sorted({row.host for row in rows}), sorted(differing))


def _look() -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that runs on an executor. A nested one, so that Spark sends its code: omniq itself may be missing there."""

    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import importlib
        import platform
        import socket

        import pyarrow

        found = {"Python": platform.python_version()}
        for name in ("omniq", "pyspark_omniq", "pandas", "pyarrow"):
            try:
                found[name] = getattr(importlib.import_module(name), "__version__", "there")
            except ImportError:
                found[name] = "missing"
        host = socket.gethostname()
        rows = [{"host": host, "name": name, "version": version} for name, version in found.items()]
        for _ in batches:
            yield pyarrow.RecordBatch.from_pylist(rows)

    return look
