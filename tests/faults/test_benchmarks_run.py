"""The benchmarks start, measure and report."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_quick_benchmark_reports_its_figures(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", "--folder", str(tmp_path), "enqueue"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [figure["unit"] for figure in report["figures"]] == ["tasks/s"] * 3
    assert all(figure["median"] > 0 and figure["ratio"] > 0 for figure in report["figures"])
    assert report["machine"]["cpus"] >= 1
    assert list(tmp_path.iterdir()) == []
