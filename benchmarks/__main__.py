"""`python -m benchmarks [names] [--quick] [--json] [--folder DIR]`: measure, compare in the same run, print a table."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import drain, enqueue, file, on_redis, pickup, resting, tcp
from benchmarks.bench import RESULTS, Bench
from benchmarks.figures import Figure

SUBJECTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "enqueue": enqueue.run,
    "drain": drain.run,
    "groups": drain.run_grouped,
    "pickup": pickup.run,
    "idle": resting.run_idle,
    "memory": resting.run_memory,
    "redis": on_redis.run,
    "redis-everysec": functools.partial(on_redis.run, appendfsync="everysec"),
    "redis-always": functools.partial(on_redis.run, appendfsync="always"),
    "tcp": tcp.run,
    "file": file.run,
    "waiting": file.run_waiting,
    "spark": lambda bench: _spark().run(bench),
    "ranges": lambda bench: _spark().run_ranges(bench),
    "growth": lambda bench: _spark().run_growth(bench),
}


def _spark() -> ModuleType:
    """Only when asked for: it starts Java."""
    return importlib.import_module("benchmarks.spark")


def main() -> int:
    asked = _arguments()
    unknown = [name for name in asked.names if name not in SUBJECTS]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    with Bench(asked.quick, asked.folder) as bench:
        before = bench.machine()
        figures = [figure for name in asked.names or SUBJECTS for figure in SUBJECTS[name](bench)]
        after = bench.machine()
    report = {
        "machine": before,
        "load_average_after": after["load_average"],
        "quick": asked.quick,
        "figures": [figure.as_json() for figure in figures],
    }
    if asked.json:
        print(json.dumps(report, indent=2))
        return 0
    _show(report, figures)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of omniq, durable.")
    parser.add_argument("names", nargs="*", help=f"which to run: {', '.join(SUBJECTS)}; all without any")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer runs, for a first impression")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table and a file")
    parser.add_argument("--folder", type=Path, help="where the stores are made; default: benchmarks/results")
    return parser.parse_args()


def _show(report: dict[str, Any], figures: list[Figure]) -> None:
    machine = report["machine"]
    title = (
        f"omniq, durable, on {machine['file_system']}; SQLite {machine['sqlite']}, Python {machine['python']}; "
        f"{machine['cpus']} CPUs, load {machine['load_average'][0]} before, {report['load_average_after'][0]} after"
    )
    table = Table(title=title, title_justify="left")
    for heading in (
        "what",
        "median  (min-max)",
        "unit",
        "CPU µs",
        "baseline of the same run",
        "median  (min-max)",
        "ratio",
        "aim",
    ):
        table.add_column(heading, justify="left" if heading in ("what", "unit") or "baseline" in heading else "right")
    for figure in figures:
        mark = {True: "[green]reached[/]", False: "[red]missed[/]", None: ""}[figure.reached]
        table.add_row(
            figure.name,
            figure.measured.show(),
            figure.unit,
            "-" if figure.measured.median_cpu_us is None else f"{figure.measured.median_cpu_us:,.0f}",
            figure.baseline_name or "-",
            figure.baseline.show() if figure.baseline else "-",
            "-" if figure.ratio is None else f"{figure.ratio:.2f}",
            f"{figure.aim} {mark}".strip() or figure.note,
        )
    Console(width=None if sys.stdout.isatty() else 190).print(table)


if __name__ == "__main__":
    sys.exit(main())
