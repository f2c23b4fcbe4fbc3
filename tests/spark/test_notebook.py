"""The notebook and the demo of the examples, each in a process and with a Spark of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CELL_S = 1800  # Spark starts slowly on a busy machine


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / "lake.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), (
        "outputs are not kept in the repository"
    )
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.get("text", "") for output in shown)
    tables = "".join(output.get("data", {}).get("text/plain", "") for output in shown)
    # 500 tasks, 10 of which fail twice, and 50 others once at first.
    assert f"{500 * 3 + 60 * 2} events; " in said
    assert "ValueError" in tables
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "error"]


@pytest.mark.slow
def test_the_demo_of_the_pipeline_ends_with_a_report(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMNIQ_")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(EXAMPLES / "lake_demo.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=CELL_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "checks passed" in done.stdout
    assert done.stderr == ""
    assert "days of made-up history, store synthetic" in done.stdout
    assert "No worker ran them." in done.stdout
    assert "  Made up: Retry storm: shop.orders.charge, " in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert page.index("Not all was measured") < page.index("Measured</h2>") < page.index("Made up</h2>")
