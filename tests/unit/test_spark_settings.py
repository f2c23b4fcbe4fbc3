"""The settings of a session, and what a master says about machines; no Java is started here."""

import importlib.util
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from omniq.spark.settings import EVERYWHERE, is_local_master, local_cores, settings

HERE = Path("/tmp/a folder")


@pytest.mark.parametrize(
    "master",
    [
        *["local", "local[4]", "local[*]", "local[2,3]", "local-cluster[2,1,1024]"],
        *["spark://127.0.0.1:7077", "spark://localhost:7077", "spark://[::1]:7077", "spark://127.0.0.1:7077,127.0.0.2:7078"],
    ],
)
def test_this_master_is_on_this_machine(master: str) -> None:
    assert is_local_master(master)


@pytest.mark.parametrize(
    "master",
    [
        *["spark://10.0.0.5:7077", "spark://127.0.0.1:7077,10.0.0.5:7077", "spark://localhost.example:7077", "spark://"],
        *["k8s://https://127.0.0.1:6443", "yarn", "local[two]", "localhost", ""],
    ],
)
def test_this_master_may_be_elsewhere(master: str) -> None:
    assert not is_local_master(master)


def test_the_cores_of_a_local_master() -> None:
    assert [local_cores(master) for master in ("local", "local[3]", "local[ 2 , 5 ]", "spark://127.0.0.1:7077")] == [
        1,
        3,
        2,
        None,
    ]
    assert 1 <= (local_cores("local[*]") or 0) <= (os.cpu_count() or 1)


def test_a_local_session_has_two_partitions_per_core_and_its_own_warehouse() -> None:
    found = settings("local[3]", HERE)
    assert found["spark.sql.shuffle.partitions"] == "6"
    assert found["spark.sql.warehouse.dir"] == "file:///tmp/a%20folder/warehouse"
    assert found["spark.driver.host"] == "127.0.0.1"
    assert EVERYWHERE.items() <= found.items()


def test_only_a_session_for_short_runs_goes_without_the_lines_of_a_program() -> None:
    name = "spark.python.sql.dataFrameDebugging.enabled"
    assert settings("local[2]", HERE, fast_start=True)[name] == "false"
    assert name not in settings("local[2]", HERE)
    assert settings("local[2]", HERE, fast_start=True, conf={name: "true"})[name] == "true"


def test_a_cluster_keeps_its_own_addresses_partitions_and_warehouse() -> None:
    found = settings("spark://10.0.0.5:7077", HERE)
    assert not {"spark.driver.host", "spark.driver.bindAddress", "spark.sql.shuffle.partitions"} & found.keys()
    assert "spark.sql.warehouse.dir" not in found


def test_given_settings_win_but_java_options_are_added() -> None:
    given = {"spark.driver.memory": "8g", "spark.driver.extraJavaOptions": "-Dmine=1"}
    found = settings("local[1]", HERE, conf=given, fast_start=True)
    assert found["spark.driver.memory"] == "8g"
    options = found["spark.driver.extraJavaOptions"]
    assert options.endswith(" -Dmine=1")
    assert '"-Djava.io.tmpdir=/tmp/a folder"' in options
    assert "-XX:TieredStopAtLevel=1" in options
    assert "TieredStopAtLevel" not in settings("local[1]", HERE)["spark.driver.extraJavaOptions"]


def test_the_settings_of_the_log_are_in_the_package() -> None:
    option = settings("local[1]", HERE)["spark.driver.extraJavaOptions"].split()[0]
    file = Path(unquote(urlsplit(option.removeprefix("-Dlog4j2.configurationFile=")).path))
    assert "rootLogger.level = error" in file.read_text()


def test_the_format_is_found_by_a_top_level_package() -> None:
    assert importlib.util.find_spec("pyspark_omniq") is not None
