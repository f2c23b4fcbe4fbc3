"""The single checks of `omniq spark doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata

from omniq._version import __version__
from omniq.cli.check_results import Finding, fault
from omniq.errors import OmniQError
from omniq.spark.causes import reported
from omniq.spark.java import find_java
from omniq.spark.sessions import session
from omniq.spark.settings import is_local_master
from omniq.spark.working.executors import Executors, look_around

INSTALL = "pip install '.[spark]'"
LITTLE_ROOM = 2 * 1024**3
# The first version that works, and the first that is not known to. The same as in pyproject.toml.
VERSIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "pyspark": ((4, 2), (4, 4)),
    "pandas": ((2, 2), (3,)),
    "pyarrow": ((18,), None),
    "matplotlib": ((3, 9), None),
}
# What Spark obeys, wherever it was set.
VARIABLES = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_DIRS", "HADOOP_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "JAVA_TOOL_OPTIONS")


def examine(master: str, java: str) -> Iterator[Finding]:
    """Every check, in the order in which one would look; Spark is not started when it cannot succeed."""
    faults = False
    for check in (_python, _packages, lambda: _java(java), lambda: _variables(master), _disk):
        for finding in check():
            faults = faults or finding.status == "wrong"
            yield finding
    if not faults:
        yield from _start(master, java)


def _python() -> Iterator[Finding]:
    yield Finding(check="python", status="ok", message=f"Python {platform.python_version()}, omniq {__version__}")


def _packages() -> Iterator[Finding]:
    for name, (first, beyond) in VERSIONS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(check="packages", status="wrong", message=f"{name} is not installed", remedy=INSTALL)
            continue
        number = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        fits = first <= number and (beyond is None or number < beyond)
        remedy = "" if fits else f"{INSTALL} installs one that fits"
        yield Finding(check="packages", status="ok" if fits else "wrong", message=f"{name} {version}", remedy=remedy)


def _java(java: str) -> Iterator[Finding]:
    try:
        found = find_java(java)
    except OmniQError as exc:
        yield fault("java", exc)
    else:
        yield Finding(check="java", status="ok", message=f"Java {found.version}, from {found.origin}: {found.home}")


def _variables(master: str) -> Iterator[Finding]:
    found = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    for name, value in found.items():
        yield Finding(check="variables", status="note", message=f"Spark obeys {name}={value}")
    if python := os.environ.get("PYSPARK_PYTHON"):
        used = "passed over, since all runs on this machine" if is_local_master(master) else "used on the executors"
        yield Finding(check="variables", status="note", message=f"PYSPARK_PYTHON={python} is {used}")


def _disk() -> Iterator[Finding]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    message = f"{free / 1024**3:.1f} GB free in {folder}, where Spark keeps what does not fit into memory"
    if free < LITTLE_ROOM:
        yield Finding(check="disk", status="note", message=message, remedy="free disk space, or set TMPDIR")
    else:
        yield Finding(check="disk", status="ok", message=message)


def _start(master: str, java: str) -> Iterator[Finding]:
    """Start a session as every command does, and run something on it."""
    begun = time.monotonic()
    try:
        with reported():
            spark = session(master=master, java=java, fast_start=True, app_name="omniq spark doctor")
    except OmniQError as exc:
        remedy = "what Spark said stands above; check the master and the variables"
        yield Finding(check="start", status="wrong", message=f"no session with master {master}: {exc}", remedy=remedy)
        return
    started = time.monotonic()
    try:
        with reported():
            spark.range(1000).count()
        asked = time.monotonic()
        message = f"session in {started - begun:.1f} s, first query in {asked - started:.1f} s, master {master}"
        yield Finding(check="start", status="ok", message=message)
        with reported():
            seen = look_around(spark)
        yield from _executors(seen)
    except OmniQError as exc:
        remedy = "install omniq with the extra on every node, or ship the environment with spark.archives"
        yield Finding(check="executors", status="wrong", message=str(exc), remedy=remedy)
    finally:
        spark.stop()


def _executors(seen: Executors) -> Iterator[Finding]:
    for message in seen.differences:
        remedy = "install the same environment on every node, or ship it with spark.archives"
        yield Finding(check="executors", status="wrong", message=message, remedy=remedy)
    if not seen.differences:
        message = f"import the same as the driver, on {', '.join(seen.hosts)}"
        yield Finding(check="executors", status="ok", message=message)
