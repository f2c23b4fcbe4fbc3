"""Which lake a command works on, and a session of Spark to work on it with."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.spark.options import SessionOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omniq.spark import Lake

LakeOption = Annotated[str, typer.Option("--lake", metavar="DIR", help="The folder of the lake.")]


@contextmanager
def working(folder: str, session: SessionOptions) -> Generator[tuple[SparkSession, Lake]]:
    """The lake, and a session to work on it with."""
    from omniq.spark import Lake
    from omniq.spark.causes import reported

    with reported():
        # First of all, since Spark takes seconds to start: a wrong folder is told at once.
        lake = Lake(folder)
        yield session.start(), lake
