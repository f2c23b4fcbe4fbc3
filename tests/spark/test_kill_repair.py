"""A repair is killed at any moment; what bronze holds is the old days or the new ones, and the next repair ends it."""

import os
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from drivers import Process
from lake_rows import filed_by, rows

from omniq.spark import Lake, check
from omniq.spark.lake.tables import GOLD, SILVER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS = min(int(os.environ.get("ROUNDS") or 20), 6)  # each starts Spark
START_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.costly, pytest.mark.timeout(3600)]


def days(lake: Lake) -> dict[str, int]:
    assert all(Path(path).exists() for path in lake.files("events"))
    return {day: part.rows for day, part in lake.manifest("events").parts.items()}


def test_a_killed_repair_leaves_the_old_days_or_the_new_ones(spark: "SparkSession", built: Lake, tmp_path: Path) -> None:
    dice = random.Random(os.environ.get("SEED"))
    lake = Lake(shutil.copytree(built.path, tmp_path / "lake"))
    filed_by(spark, lake, "America/New_York", "Asia/Kolkata")
    old, new = days(lake), days(built)
    assert old != new
    wrong = shutil.copytree(lake.path, tmp_path / "wrong")
    span = 0.0
    for n in range(ROUNDS + 1):
        with Process(tmp_path, "repair_driver.py", str(lake.path)) as driver:
            driver.until("begin")
            begun = time.monotonic()
            if n == 0:  # how long it takes
                driver.until("repaired")
                span = time.monotonic() - begun
                assert driver.process.wait(START_S) == 0
            else:
                driver.kill_within(dice.uniform(0, span))
        found = days(lake)
        assert found in (old, new)
        print(f"round {n}: the days are the {'new' if found == new else 'old'} ones")
        if n < ROUNDS // 2 or n == 0:
            lake = Lake(shutil.copytree(wrong, tmp_path / f"lake{n}"))
    with Process(tmp_path, "repair_driver.py", str(lake.path)) as driver:
        driver.until("repaired")
        assert driver.process.wait(START_S) == 0
    assert [result for result in check(spark, lake) if not result.ok] == []
    for name in ("events", *SILVER, *GOLD):
        assert rows(lake, name) == rows(built, name), name
