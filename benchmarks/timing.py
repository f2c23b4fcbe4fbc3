"""Wall clock and CPU of a stretch of work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class Stopwatch:
    """`with Stopwatch(tasks) as watch: …`, then tasks per second and CPU per task of this process, all threads."""

    def __init__(self, tasks: int, cpu: Callable[[], float] = time.process_time) -> None:
        self._tasks, self._cpu = tasks, cpu
        self.seconds = self.cpu_s = 0.0

    def __enter__(self) -> Self:
        self.seconds, self.cpu_s = -time.perf_counter(), -self._cpu()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds += time.perf_counter()
        self.cpu_s += self._cpu()

    @property
    def per_second(self) -> float:
        return self._tasks / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / self._tasks * 1e6


def family_cpu_s() -> float:
    """CPU of this process and of all below it, among them Spark's Java. What ended without being waited for is not counted."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue  # ended meanwhile
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")
