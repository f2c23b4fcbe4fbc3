"""The settings of a session that omniq starts, each with its reason. `docs/reference/spark-session.md` lists them."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"

EVERYWHERE: dict[str, str] = {
    # Else a table's timestamps would change with the machine that reads it.
    "spark.sql.session.timeZone": "UTC",
    # Beyond this many groups percentiles and sketches are sorted instead of hashed; Spark's 128 makes them crawl.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    # Off in Spark: the format `omniq` would read every row and Spark would throw most away.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    # Spark's own choice has no minimum and maximum in the file, so that no reader can skip by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # With Spark's own choice an overwrite of one partition empties the whole table.
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    # A session of Spark Connect is something else; it is accepted, and never started here.
    "spark.api.mode": "classic",
}

# Compiles less and collects with one thread: a quarter off the start, at the price of slower long aggregations. Java takes the
# first for a reason to reserve little room for compiled code; when that is full it compiles nothing any more.
FAST_START = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"

# Each function of a query would ask Java several times where it was called from, to name the line if it fails: half the time
# that a short query takes to be made.
NO_CALL_SITES = {"spark.python.sql.dataFrameDebugging.enabled": "false"}

JAVA_OPTIONS = "spark.driver.extraJavaOptions"


def settings(
    master: str, folder: Path, *, conf: Mapping[str, str] | None = None, fast_start: bool = False, app_name: str = "omniq"
) -> dict[str, str]:
    """All settings of a session with this master that keeps its temporary files in `folder`; those in `conf` win."""
    found = {"spark.master": master, "spark.app.name": app_name, **EVERYWHERE}
    if is_local_master(master):
        # Spark binds to the machine's outside address unless told.
        found |= {"spark.driver.bindAddress": LOOPBACK, "spark.driver.host": LOOPBACK}
        # A function of the user's own modules runs on executors too.
        found |= {"spark.executorEnv.PYTHONPATH": os.pathsep.join(import_path())}
    if cores := local_cores(master):
        # Each of Spark's 200 costs time even when it is empty.
        found |= {"spark.sql.shuffle.partitions": str(2 * cores), "spark.sql.warehouse.dir": (folder / "warehouse").as_uri()}
    if fast_start:
        found |= NO_CALL_SITES
    given = {name: str(value) for name, value in (conf or {}).items()}
    java = java_options(folder, fast_start)
    return found | given | {JAVA_OPTIONS: f"{java} {given[JAVA_OPTIONS]}" if JAVA_OPTIONS in given else java}


def java_options(folder: Path, fast_start: bool) -> str:
    """The options that the driver's Java starts with: quiet logs, and no file outside `folder`."""
    log = Path(__file__).with_name("log4j2.properties").as_uri()
    options = [
        f"-Dlog4j2.configurationFile={log}",
        f'"-Djava.io.tmpdir={folder}"',
        f'"-Dderby.system.home={folder}"',
        # Else each Java keeps a file in /tmp/hsperfdata_<user>, wherever its own temporary folder is.
        "-XX:-UsePerfData",
    ]
    return " ".join([*options, FAST_START] if fast_start else options)


def import_path() -> list[str]:
    """The folders in which this process finds modules, without those that every Python of its kind has."""
    standard = tuple(sysconfig.get_paths().values())
    found = [os.path.abspath(entry) for entry in sys.path]
    return [entry for entry in dict.fromkeys(found) if os.path.exists(entry) and not entry.startswith(standard)]


def local_cores(master: str) -> int | None:
    """The number of threads that `local`, `local[4]` or `local[*]` means; None for the master of a cluster."""
    match = re.fullmatch(r"local(?:\[\s*(\*|\d+)\s*(?:,.*)?\])?", master)
    if match is None:
        return None
    if match[1] == "*":
        return os.cpu_count() or 1
    return int(match[1] or 1)


def is_local_master(master: str) -> bool:
    """Whether everything under this master runs on this machine."""
    if local_cores(master) is not None or master.startswith("local-cluster["):
        return True
    hosts = master.removeprefix("spark://").split(",") if master.startswith("spark://") else []
    return bool(hosts) and all(is_loopback(re.sub(r":\d+$", "", host)) for host in hosts)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
