"""The amount of data that a report needs before it makes a claim. With less data it says how much there is."""

from __future__ import annotations

import msgspec

from omniq.spark.lake.report.units import DAY_MS, duration, number


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A claim of the report, and the least number of something that it needs. Days of history are compared as time."""

    needed_for: str
    least: int
    of: str

    def enough(self, there: float) -> bool:
        return there >= self.least

    def lacking(self, there: float) -> str:
        """The sentence for a place where nothing is claimed."""
        had = duration(there * DAY_MS) if self.of == _DAYS else number(there)
        return f"too little data to say: {had} of at least {self.least} {self.of}"


# Beyond a p95 is one run of 20, beyond a p99 one of 100: with fewer runs they would only repeat the slowest. The rest are
# judgements; docs/reference/lake.md lists them all.
_DAYS = "days of history"
SHARE = Sample(needed_for="a share in percent", least=20, of="tasks that ended")
P50 = Sample(needed_for="a p50", least=5, of="runs")
P95 = Sample(needed_for="a p95", least=20, of="runs")
P99 = Sample(needed_for="a p99", least=100, of="runs")
PERCENTILES = {"p50": P50, "p95": P95, "p99": P99}
LINE = Sample(needed_for="a line over time", least=3, of="points with enough runs")
WEEK = Sample(needed_for="hours of the week", least=2, of=_DAYS)
KIND = Sample(needed_for="the most frequent kind of failure", least=10, of="failed runs")
DAYS = Sample(needed_for="failures by day", least=2, of="days with failures")
WINDOWS = Sample(needed_for="a picture of retries", least=3, of="points with runs of functions that were tried again")
BASELINE = Sample(needed_for="a retry storm", least=100, of="tasks of the function in the 24 hours before")
LIMIT = Sample(needed_for="a group held up by its limit", least=20, of="runs of the group")
FORECAST = Sample(needed_for="a forecast of slots", least=7, of=_DAYS)

ALL = (SHARE, P50, P95, P99, LINE, WEEK, KIND, DAYS, WINDOWS, BASELINE, LIMIT, FORECAST)
