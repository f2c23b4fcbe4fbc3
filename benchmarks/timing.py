"""Wall clock and CPU of a stretch of work."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self


class Stopwatch:
    """`with Stopwatch(tasks) as watch: …`, then tasks per second and CPU per task of this process, all threads."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self.seconds = self.cpu_s = 0.0

    def __enter__(self) -> Self:
        self.seconds, self.cpu_s = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds += time.perf_counter()
        self.cpu_s += time.process_time()

    @property
    def per_second(self) -> float:
        return self._tasks / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / self._tasks * 1e6
