"""`omniq lake query`: rows of the tables of a lake, for people and for programs."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniq.cli.commands import command
from omniq.cli.exits import say
from omniq.cli.lake.opening import LakeOption, working
from omniq.cli.output import JsonOption, compact_json, one_line, print_table
from omniq.cli.spark.options import SessionOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@command
def query_command(
    *,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A query in Spark SQL over the tables' plain names.")],
    lake: LakeOption,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Rows to show; with --json there is no limit.")
    ] = 1000,
    session: SessionOptions,
    json: JsonOption = False,
) -> None:
    """Ask the tables: events attempts tasks queue_minute func_hour group_hour failure_day retry_storm capacity_hour.

    Example: omniq lake query --lake history "select name, count(*) from tasks where status = 'FAILED' group by name" --json
    """
    with working(lake, session) as (spark, opened):
        opened.views(spark)
        found = spark.sql(sql)
        if json:
            _print_as_json(found)
        else:
            _print(found, limit)


def _print_as_json(found: DataFrame) -> None:
    """One array of objects, a row on a line."""
    from omniq.spark.lake.plain_rows import plain_rows

    between = "[\n"
    for row in plain_rows(found):
        sys.stdout.write(f"{between}  {compact_json(row)}")
        between = ",\n"
    sys.stdout.write("[]\n" if between == "[\n" else "\n]\n")


def _print(found: DataFrame, limit: int) -> None:
    from omniq.spark.lake.plain_rows import numeric, plain_rows

    # One row more than is shown, to know whether to say that there are more.
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
