"""The benchmarks start, measure and report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("enqueue", ["tasks/s"] * 3),
        pytest.param("file", ["tasks/s"] * 5, marks=pytest.mark.slow),
        pytest.param("waiting", ["µs", "s", "bytes"] * 3, marks=pytest.mark.slow),
    ],
)
def test_a_quick_benchmark_reports_its_figures(repository: Path, tmp_path: Path, name: str, units: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", "--folder", str(tmp_path), name]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [figure["unit"] for figure in report["figures"]] == units
    assert all(figure["median"] > 0 for figure in report["figures"])
    assert all(figure["ratio"] > 0 for figure in report["figures"] if figure["baseline"])
    assert report["machine"]["cpus"] >= 1
    assert list(tmp_path.iterdir()) == []


def beside(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.beside", *words]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True)


def test_two_trees_are_measured_in_turn(repository: Path) -> None:
    done = beside(repository, str(repository), "enqueue", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "tasks/s" in line]
    assert len(rows) == 3
    assert all(0.1 < float(row.split()[-2]) < 10 for row in rows), "a tree beside itself"


def test_a_folder_that_is_no_tree_is_not_measured(repository: Path, tmp_path: Path) -> None:
    done = beside(repository, str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path} is no checkout of omniq" in done.stderr
