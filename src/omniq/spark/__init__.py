"""omniq on Spark: tables of a store as DataFrames, DataFrames as tasks, and the lake of events.

Names are imported when they are first used; a name that needs Spark says so when the extra `spark` is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omniq.spark.packages import PACKAGES, missing

if TYPE_CHECKING:
    from omniq.spark.causes import cause, unwrapped
    from omniq.spark.lake.build import build
    from omniq.spark.lake.checks import check
    from omniq.spark.lake.erasure import erase
    from omniq.spark.lake.ingest import ingest
    from omniq.spark.lake.layout import Lake
    from omniq.spark.lake.repairing import repair
    from omniq.spark.lake.report.page import report
    from omniq.spark.lake.upkeep import compact, expire
    from omniq.spark.reading.reading import read, read_stream
    from omniq.spark.sessions import is_local, session
    from omniq.spark.working.draining import WorkerReport, run_worker
    from omniq.spark.working.fanout import map_stream, map_tasks
    from omniq.spark.writing.enqueueing import EnqueueReport, enqueue
    from omniq.spark.writing.replaying import ReplayReport, replay

# No module here may have the name of a function: importing it would put it in the function's place.
_PLACES = {
    "omniq.spark.causes": "cause unwrapped",
    "omniq.spark.working.draining": "WorkerReport run_worker",
    "omniq.spark.writing.enqueueing": "EnqueueReport enqueue",
    "omniq.spark.working.fanout": "map_stream map_tasks",
    "omniq.spark.lake.build": "build",
    "omniq.spark.lake.checks": "check",
    "omniq.spark.lake.erasure": "erase",
    "omniq.spark.lake.ingest": "ingest",
    "omniq.spark.lake.layout": "Lake",
    "omniq.spark.lake.repairing": "repair",
    "omniq.spark.lake.report.page": "report",
    "omniq.spark.lake.upkeep": "compact expire",
    "omniq.spark.reading.reading": "read read_stream",
    "omniq.spark.writing.replaying": "ReplayReport replay",
    "omniq.spark.sessions": "is_local session",
}
_HOME = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'omniq.spark' has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] in PACKAGES:
            raise missing(exc) from exc
        raise
    # Kept in the module's own names, so that `__getattr__` is asked once for each.
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "EnqueueReport",
    "Lake",
    "ReplayReport",
    "WorkerReport",
    "build",
    "cause",
    "check",
    "compact",
    "enqueue",
    "erase",
    "expire",
    "ingest",
    "is_local",
    "map_stream",
    "map_tasks",
    "read",
    "read_stream",
    "repair",
    "replay",
    "report",
    "run_worker",
    "session",
    "unwrapped",
]
