"""The rows of a query over a lake, for people and for programs."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

from omniq.cli.exits import say
from omniq.cli.output import compact_json, one_line, print_table
from omniq.spark.lake.plain_rows import numeric, plain_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def print_rows_as_json(found: DataFrame) -> None:
    """One array of objects, a row on a line."""
    between = "[\n"
    for row in plain_rows(found):
        sys.stdout.write(f"{between}  {compact_json(row)}")
        between = ",\n"
    sys.stdout.write("[]\n" if between == "[\n" else "\n]\n")


def print_rows(found: DataFrame, limit: int) -> None:
    rows = list(itertools.islice(plain_rows(found.limit(limit + 1)), limit + 1))
    titles = [f">{name}" if number else name for name, number in zip(found.columns, numeric(found), strict=True)]
    print_table(titles, [[_shown(row[name]) for name in found.columns] for row in rows[:limit]])
    if len(rows) > limit:
        say(f"only the first {limit} rows are shown; --limit shows more, --json all")


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, float):
        return f"{value:.6g}"
    return one_line(value if isinstance(value, str) else compact_json(value), 120)
