"""Files of rows as DataFrames, by the ending of their names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omniq.errors import Invalid

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}


def read_rows(spark: SparkSession, path: str, schema: str | None = None) -> DataFrame:
    """The rows of a file, or of a folder of files of one kind. CSV has a header; JSON is one object per line, or one array.

    Raises `Invalid` for a file that is missing or of another kind.
    """
    place = Path(path)
    if "://" not in path and "*" not in path and not place.exists():
        raise Invalid(f"there is no file {path!r}")
    kind = _FORMATS.get(_ending(place))
    if kind is None:
        raise Invalid(f"{path!r} is neither .csv nor .json nor .parquet; convert it, or use omniq.spark.enqueue in a program")
    reader = spark.read.format(kind)
    # Quotes are doubled inside quotes, and a text may go over several lines, as spreadsheets write them.
    if kind == "csv":
        reader = reader.options(header=True, inferSchema=schema is None, multiLine=True, escape='"')
    if kind == "json" and place.is_file():
        reader = reader.option("multiLine", _is_array(place))
    return (reader if schema is None else reader.schema(schema)).load(path)


def _ending(place: Path) -> str:
    """The ending of a file, or of the first file with a known ending in a folder."""
    if place.suffix in _FORMATS or not place.is_dir():
        return place.suffix
    return next((file.suffix for file in sorted(place.rglob("*")) if file.suffix in _FORMATS), "")


def _is_array(place: Path) -> bool:
    # Spark reads JSON by lines or as one document, and does not look which of them a file is.
    with place.open("rb") as file:
        return file.read(1000).lstrip()[:1] == b"["
