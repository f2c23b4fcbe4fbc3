"""Files of rows as DataFrames, by what their names end in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omniq.errors import Invalid

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}


def read_rows(spark: SparkSession, path: str, schema: str | None = None) -> DataFrame:
    """The rows of a file, or of a folder of files of one kind. CSV has a header; JSON is one object per line, or one array.

    Raises `Invalid` for a file that is not there or of another kind.
    """
    place = Path(path)
    if "://" not in path and "*" not in path and not place.exists():
        raise Invalid(f"there is no file {path!r}")
    kind = _FORMATS.get(_ending(place))
    if kind is None:
        raise Invalid(f"{path!r} is neither .csv nor .json nor .parquet; convert it, or use omniq.spark.enqueue in a program")
    reader = spark.read.format(kind)
    if kind == "csv":
        reader = reader.options(header=True, inferSchema=schema is None, multiLine=True, escape='"')
    if kind == "json" and place.is_file():
        reader = reader.option("multiLine", _is_array(place))
    return (reader if schema is None else reader.schema(schema)).load(path)


def _ending(place: Path) -> str:
    """Of a folder, that of its first file with one."""
    if place.suffix in _FORMATS or not place.is_dir():
        return place.suffix
    return next((file.suffix for file in sorted(place.rglob("*")) if file.suffix in _FORMATS), "")


def _is_array(place: Path) -> bool:
    with place.open("rb") as file:
        return file.read(1000).lstrip()[:1] == b"["
