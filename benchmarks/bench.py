"""What every benchmark is given: its size, fresh stores, worker processes, and a line that shows the progress."""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.figures import Series
from benchmarks.timing import Stopwatch

RESULTS = Path(__file__).parent / "results"


def sqlite(store: Path) -> str:
    return f"sqlite:///{store}"


def folder(store: Path) -> str:
    return f"file://{store}"


class Bench:
    """One run of the benchmarks. Stores are made in a folder of this checkout: the usual temporary one may be in memory."""

    def __init__(self, quick: bool, folder: Path | None = None) -> None:
        self.quick = quick
        self.runs = 3 if quick else 5
        self._parent = folder or RESULTS
        self._parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="stores-", dir=self._parent))
        self._made = 0
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Bench:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def fresh(self) -> Path:
        """The path of a store that does not exist yet."""
        self._made += 1
        return self._folder / f"{self._made}.db"

    def drop(self, store: Path) -> None:
        """Delete a store, so that the next run does not share the disk with it."""
        for path in self._folder.glob(f"{store.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def compare(
        self, name: str, run: Callable[[Path], Stopwatch], baseline: Callable[[Path], Stopwatch]
    ) -> tuple[Series, Series]:
        """Run both in turn, on a fresh store each time, so that both meet the same disk and the same neighbours."""
        pairs = [(self._once(run), self._once(baseline)) for _ in self.steps(name, self.runs)]
        measured, compared = zip(*pairs, strict=True)
        return _series(measured), _series(compared)

    def _once(self, run: Callable[[Path], Stopwatch]) -> Stopwatch:
        store = self.fresh()
        try:
            return run(store)
        finally:
            self.drop(store)

    def steps(self, name: str, total: int) -> Iterator[int]:
        line = self.progress.add_task(name, total=total)
        for step in range(total):
            yield step
            self.progress.advance(line)

    @contextmanager
    def worker(self, store: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """`omniq worker` in a process of its own; it may still be starting."""
        command = [sys.executable, "-m", "omniq", "worker", "benchmarks.jobs", "--store", sqlite(store), *options]
        environment = os.environ | {"OMNIQ_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def machine(self) -> dict[str, Any]:
        return {
            "cpus": os.cpu_count(),
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "system": f"{platform.system()} {platform.release()}",
            "file_system": _file_system(self._parent),
        }


def _series(watches: Sequence[Stopwatch]) -> Series:
    return Series([watch.per_second for watch in watches], [watch.cpu_us for watch in watches])


def _file_system(folder: Path) -> str:
    try:
        asked = ["stat", "-f", "-c", "%T", str(folder)]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
