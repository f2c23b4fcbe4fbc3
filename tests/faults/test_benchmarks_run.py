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
        ("file", ["tasks/s"] * 5),
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
