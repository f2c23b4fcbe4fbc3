"""Checks that every row lies in the folder of its day: by the foot of each file, without Spark and its idea of a day."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import date
from typing import TYPE_CHECKING, Any

from omniq.spark.lake.manifest import File, Manifest
from omniq.spark.lake.tables import GOLD, TABLES
from omniq.spark.lake.totals import SHOWN, CheckResult

if TYPE_CHECKING:
    from omniq.spark.lake.layout import Lake

_DAY_US = 86_400_000_000
# The columns whose moment lies in the day of the row's folder, and the stretch in microseconds that it begins. Attempts do not
# have such a moment; another check counts them against the runs of the day's tasks.
_MOMENTS: dict[str, tuple[tuple[str, ...], int]] = {
    "events": (("enqueued_at",), 1),
    "payloads": (("created_at",), 1),
    "tasks": (("created_at",), 1),
    "queue_minute": (("minute",), 60_000_000),
    "func_hour": (("hour",), 3_600_000_000),
    "group_hour": (("hour",), 3_600_000_000),
    "failure_day": (("first_seen", "last_seen"), 1),
    "retry_storm": (("window_start",), 300_000_000),
    "capacity_hour": (("hour",), 3_600_000_000),
}


def check_days(lake: Lake, looked_at: Iterable[tuple[Manifest, Iterable[date] | None]]) -> list[CheckResult]:
    """Check that the rows of these days of each table, None for all days, are in the folders of their days."""
    edge = lake.about().expired_before
    wrong: set[str] = set()
    frozen: set[str] = set()
    tables: set[str] = set()
    for manifest, days in looked_at:
        for day in misplaced(lake, manifest, days):
            if is_frozen(manifest.table, day, edge):
                frozen.add(day)
            else:
                wrong.add(day)
                tables.add(manifest.table)
    which = ", ".join(name for name in TABLES if name in tables)
    detail = f"folders hold days or hours of another time zone: {named(wrong)} ({which}): run {command(lake)}"
    results = [CheckResult(name="days", ok=not wrong, detail=detail if wrong else "every row is in the folder of its day")]
    if frozen:
        results.append(CheckResult(name="note", ok=True, detail=beyond_repair(frozen), note=True))
    return results


def misplaced(lake: Lake, manifest: Manifest, days: Iterable[date] | None = None) -> dict[str, list[File]]:
    """By day, the files of a table with a row of another day, or of an hour or minute that does not begin on the hour."""
    # An hour of a zone that is 30 or 45 minutes off lies in its day and is still wrong.
    columns, step_us = moments(manifest.table), _MOMENTS.get(manifest.table, ((), 1))[1]
    wanted = None if days is None else {day.isoformat() for day in days}
    found: dict[str, list[File]] = {}
    for day, part in sorted(manifest.parts.items()):
        if wanted is not None and day not in wanted:
            continue
        begins = (date.fromisoformat(day).toordinal() - date(1970, 1, 1).toordinal()) * _DAY_US
        for file in part.files:
            spans = (span_us(lake, file, column) for column in columns)
            ends = [end for span in spans if span is not None for end in span]
            if any(not begins <= end < begins + _DAY_US or end % step_us for end in ends):
                found.setdefault(day, []).append(file)
    return found


def moments(name: str) -> tuple[str, ...]:
    """The columns of a table whose moments lie in the day of the row's folder."""
    return _MOMENTS.get(name, ((), 1))[0]


def is_frozen(name: str, day: str, edge: date | None) -> bool:
    """Whether a day of a table cannot be made anew, because the silver that it was made of has expired."""
    return edge is not None and name in GOLD and day < edge.isoformat()


def span_us(lake: Lake, file: File, column: str) -> tuple[int, int] | None:
    """The least and the greatest moment of a column; None for a column of nulls, and for a file that is gone."""
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    arrow: Any = compute
    if not lake.folder.exists(file.path):
        return None
    source: Any = parquet.ParquetFile(lake.folder.path(file.path))
    foot = source.metadata
    (place,) = [n for n in range(foot.num_columns) if foot.schema.column(n).path == column]
    groups = [foot.row_group(n).column(place).statistics for n in range(foot.num_row_groups)]
    told = groups and all(stats is not None and stats.has_min_max for stats in groups)
    # Raw statistics count in the unit that the file was written with; files of other writers may have none.
    if told and source.schema_arrow.field(column).type == pa.timestamp("us", "UTC"):
        return min(stats.min_raw for stats in groups), max(stats.max_raw for stats in groups)
    moments = source.read([column])[column].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    low, high = (end.as_py() for end in arrow.min_max(moments).values())
    return None if low is None else (low, high)


# -- words ---------------------------------------------------------------------------------------


def command(lake: Lake) -> str:
    return f"omniq lake repair --lake {shlex.quote(str(lake.path))}"


def beyond_repair(days: Iterable[str]) -> str:
    return f"gold was made in another time zone and cannot be made anew, since its events have expired: {named(days)}"


def named(days: Iterable[str]) -> str:
    """The days as text, and of many days the first ones."""
    every = sorted(days)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")
