"""Writes a DataFrame as files of a lake: aside first, then moved into place, one folder per day and version."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from omniq.spark.lake.manifest import File

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from omniq.spark.lake.folder import LakeFolder
    from omniq.spark.lake.layout import Lake

# Spark's own choice, INT96, is unknown to other tools and has no least and greatest value in the file.
PARQUET = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS", "spark.sql.sources.partitionOverwriteMode": "static"}


def write_days(
    lake: Lake, df: DataFrame, root: str, partition: str, version: str, sort: Iterable[str] = ()
) -> dict[str, list[File]]:
    """Write the rows as `<root>/<partition>=<day>/<version>/` and return the files of each day.

    A `version` is like `_v=000007`. Called with the settings `PARQUET`.
    """
    # Executors write only here: a task of Spark that goes on after its job was given up cannot reach a folder that counts.
    staging = f"_staging/{uuid.uuid4().hex}"
    target = lake.folder.address(staging)
    ordered = df.sortWithinPartitions(partition, *sort) if sort else df
    try:
        ordered.write.partitionBy(partition).option("compression", "zstd").parquet(target)
        found: dict[str, list[File]] = {}
        for name in lake.folder.folders(staging):
            if name.startswith(f"{partition}="):
                moved = lake.folder.move(f"{staging}/{name}", f"{root}/{name}/{version}")
                found[name.partition("=")[2]] = [described(lake.folder, path) for path in moved]
        return found
    finally:
        lake.folder.remove_tree(staging)


def described(folder: LakeFolder, path: str) -> File:
    """A Parquet file with the number of rows from its footer."""
    import pyarrow.parquet as parquet

    foot: Any = parquet.read_metadata(folder.path(path))
    return File(path, foot.num_rows, folder.size(path))


@contextmanager
def settings(spark: SparkSession, wanted: dict[str, str]) -> Generator[None]:
    """Change settings of the session for the block; a session of the user may have any other values."""
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def days_between(first: date, last: date) -> list[date]:
    return [first + timedelta(days=n) for n in range((last - first).days + 1)]
