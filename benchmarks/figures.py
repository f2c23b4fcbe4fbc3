"""A measured figure: its runs, the baseline of the same minutes, and the aim."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec


class Series(msgspec.Struct, frozen=True):
    """The values of several runs; the median is the figure. `cpu_us` is the CPU per task of each run, where it is known."""

    values: list[float]
    cpu_us: list[float] = []

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def median_cpu_us(self) -> float | None:
        return statistics.median(self.cpu_us) if self.cpu_us else None

    def show(self) -> str:
        low, high = min(self.values), max(self.values)
        if len(self.values) == 1:
            return _number(self.median)
        return f"{_number(self.median)}  ({_number(low)}-{_number(high)})"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    unit: str
    measured: Series
    baseline: Series | None = None
    baseline_name: str = ""
    above: float | None = None  # the aim: more than this
    below: float | None = None  # the aim: less than this
    note: str = ""

    @property
    def ratio(self) -> float | None:
        if self.baseline is None or not self.baseline.median:
            return None
        return self.measured.median / self.baseline.median

    @property
    def reached(self) -> bool | None:
        """Whether the aim is reached; None without an aim."""
        if self.above is not None:
            return self.measured.median > self.above
        if self.below is not None:
            return self.measured.median < self.below
        return None

    @property
    def aim(self) -> str:
        if self.above is not None:
            return f"> {_number(self.above)}"
        return "" if self.below is None else f"< {_number(self.below)}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.measured.median,
            "runs": self.measured.values,
            "cpu_us_per_task": self.measured.median_cpu_us,
            "baseline": self.baseline_name,
            "baseline_median": None if self.baseline is None else self.baseline.median,
            "baseline_runs": [] if self.baseline is None else self.baseline.values,
            "baseline_cpu_us_per_task": None if self.baseline is None else self.baseline.median_cpu_us,
            "ratio": self.ratio,
            "aim": self.aim,
            "reached": self.reached,
            "note": self.note,
        }


def beside(
    name: str,
    unit: str,
    measured: Series,
    other: str,
    baseline: Series,
    *,
    above: float | None = None,
    below: float | None = None,
) -> Figure:
    """A figure whose aim is a ratio to the baseline. CPU is left out: much of it was another process's."""
    return Figure(
        name=name,
        unit=unit,
        measured=Series(measured.values),
        baseline=Series(baseline.values),
        baseline_name=other,
        above=None if above is None else above * baseline.median,
        below=None if below is None else below * baseline.median,
    )


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
