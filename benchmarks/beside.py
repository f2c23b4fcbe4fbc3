"""`python -m benchmarks.beside OTHER [names]`: measure this source tree and another one in turn, and compare their figures.

OTHER is a checkout, for example of the commit before a change. Each tree runs its own benchmarks in processes of its own, in
turn, and another one begins each round, so that a busy minute hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
Medians = dict[tuple[str, str], list[float]]  # the median of each round, by name and unit of the figure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument("other", type=Path, help="the source tree to compare with, such as a clone of an older commit")
    parser.add_argument("names", nargs="*", default=["enqueue", "drain"], help="which benchmarks; by default enqueue and drain")
    parser.add_argument("--rounds", type=int, default=5, help="how often each tree is measured; default 5")
    parser.add_argument("--full", action="store_true", help="full sizes; by default those of --quick")
    asked = parser.parse_args()
    if not (asked.other / "src" / "omniq").is_dir() or not (asked.other / "benchmarks").is_dir():
        print(f"{asked.other} is no checkout of omniq: it has no src/omniq, or no benchmarks", file=sys.stderr)
        return 2
    words = [*asked.names, "--json", *([] if asked.full else ["--quick"])]
    trees: list[tuple[Path, Medians]] = [(asked.other.resolve(), {}), (HERE, {})]
    for n in track(range(2 * asked.rounds), "measuring", console=Console(stderr=True)):
        tree, found = trees[(n + n // 2) % 2]  # other, here, here, other, …
        for figure in _figures(tree, words):
            found.setdefault((figure["name"], figure["unit"]), []).append(figure["median"])
    _show(*(found for _, found in trees))
    return 0


def _figures(tree: Path, words: list[str]) -> list[dict[str, object]]:
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "benchmarks", *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed in {tree}:\n{done.stderr}")
    return json.loads(done.stdout)["figures"]


def _show(other: Medians, here: Medians) -> None:
    table = Table(title="median of the rounds (lowest to highest); ratio: here to other", title_justify="left")
    for heading in ("what", "unit", "other", "here", "ratio"):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for key in [key for key in here if key in other]:
        ratio = statistics.median(here[key]) / (statistics.median(other[key]) or 1)
        table.add_row(*key, _said(other[key]), _said(here[key]), f"{ratio:.2f}")
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _said(values: list[float]) -> str:
    median, low, high = (f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})"


if __name__ == "__main__":
    sys.exit(main())
