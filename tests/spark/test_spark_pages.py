"""The pages of the documentation that use Spark."""

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import pages

SPARK = [page for page in pages.PAGES if pages.on_spark(pages.to_run(page))]
BY_THEMSELVES = [page for page in SPARK if pages.on_spark(pages.to_run(page), "sh", "console")]


@pytest.fixture
def module(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module of a page, in a folder of its own; its functions are sent to executors whole."""
    from pyspark import cloudpickle

    made = types.ModuleType("page")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "page", made)
    cloudpickle.register_pickle_by_value(made)
    before = set(sys.modules)
    yield made
    cloudpickle.unregister_pickle_by_value(made)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in SPARK if page not in BY_THEMSELVES], ids=pages.name)
def test_the_code_of_a_page_runs_on_the_session_of_the_tests(page: Path, module: types.ModuleType) -> None:
    runner = pages.Runner(module)
    try:
        for block in pages.to_run(page):
            runner.run(pages.name(page), block)
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.timeout(600)  # several commands, each of which starts Spark
@pytest.mark.parametrize("page", BY_THEMSELVES, ids=pages.name)
def test_the_code_of_a_page_with_commands_runs_by_itself(page: Path, tmp_path: Path) -> None:
    pages.run_page(page, tmp_path, timeout=900)
