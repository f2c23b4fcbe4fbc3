"""The reference of the lake: every table and column, every function and its arguments."""

import inspect
import re

import lake_page

import omniq.spark
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.tables import TABLES

PAGE = lake_page.PAGE.read_text()
TYPES = {"string", "bigint", "int", "timestamp", "date", "double", "boolean", "binary", "array<string>"}


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    assert PAGE.partition(lake_page.BEGIN)[2] == lake_page.tables().partition(lake_page.BEGIN)[2], (
        "run python tests/docs/lake_page.py"
    )


def test_the_sample_sizes_of_the_page_are_those_of_the_code() -> None:
    assert lake_page.samples() in PAGE, "run python tests/docs/lake_page.py"


def test_every_column_has_a_type_and_a_meaning() -> None:
    for table in TABLES.values():
        assert len(set(table.names)) == len(table.names)
        for column in table.columns:
            assert column.type in TYPES, column
            assert len(column.doc) > 5, column


def test_the_signatures_of_the_page_are_those_of_the_functions() -> None:
    for name in ("ingest", "build", "check", "compact", "expire", "erase", "repair"):
        (line,) = re.findall(rf"^{name}\((.*)\) -> (\w+)", PAGE, re.MULTILINE)
        written = re.findall(r"(\w+)(?==|,|$)(?:=([^,]+))?", line[0])
        parameters = inspect.signature(getattr(omniq.spark, name)).parameters
        assert [word for word, _ in written] == list(parameters), name


def test_the_methods_and_checks_are_named() -> None:
    from omniq.spark.lake import checks

    for method in ("init", "table", "files", "views"):
        assert f"`{method}(" in PAGE or f"`Lake.{method}(" in PAGE
        assert hasattr(Lake, method)
    code = "".join(map(inspect.getsource, (checks, omniq.spark.lake.days, omniq.spark.lake.totals)))
    names = set(re.findall(r'name="([a-z ]+)"', code)) - {"note"}
    assert [name for name in names if name not in PAGE] == []


def test_the_events_that_a_lake_knows_are_those_of_the_reference() -> None:
    from omniq.spark.lake import bronze

    events = (lake_page.PAGE.parent / "events.md").read_text()
    assert [name for name in bronze.EVENTS if f"| `{name}` |" not in events] == []
    table = events.partition("## Events")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(bronze.EVENTS)
