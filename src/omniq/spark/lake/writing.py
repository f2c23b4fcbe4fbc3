"""From a DataFrame to files of a lake: written aside, then moved into place, one folder per day and version."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from omniq.spark.lake.manifest import File

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from omniq.spark.lake.folder import Folder
    from omniq.spark.lake.layout import Lake

# Other tools know nothing of INT96, which Spark would write.
PARQUET = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS", "spark.sql.sources.partitionOverwriteMode": "static"}


def write_days(
    lake: Lake, df: DataFrame, root: str, partition: str, version: str, sort: Iterable[str] = ()
) -> dict[str, list[File]]:
    """Write the rows as `<root>/<partition>=<day>/<version>/`; the files of each day. `version` reads like `_v=000007`.

    Called with the settings `PARQUET`.
    """
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


def described(folder: Folder, path: str) -> File:
    """A Parquet file with the number of rows that its foot tells."""
    import pyarrow.parquet as parquet

    foot: Any = parquet.read_metadata(folder.path(path))
    return File(path, foot.num_rows, folder.size(path))


@contextmanager
def settings(spark: SparkSession, wanted: dict[str, str]) -> Generator[None]:
    """Settings of the session for a while; they may be anything else in a session of the user's."""
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
