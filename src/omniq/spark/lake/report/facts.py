"""The figures of a report: plain values, whoever computed them. Moments are in UTC, times in milliseconds."""

from __future__ import annotations

from datetime import date, datetime

import msgspec

from omniq.spark.lake.layout import Gap

# The id of the store in the generator's histories, or its beginning.
MADE_UP = "synthetic"


def is_made_up(store: str) -> bool:
    """Whether the events of a store were made by the generator."""
    return store == MADE_UP or store.startswith(f"{MADE_UP}-")


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    tasks: int
    succeeded: int
    failed: int
    unfinished: int
    started: int
    retried: int
    expired: int
    workers: int
    failed_runs: int
    wait_p95: float | None
    run_p95: float | None


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that ended in one step; `backlog` tasks waited or ran at its end."""

    at: datetime
    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    expired: int = 0
    backlog: int = 0


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of the runs that ended in one step; None where they were too few."""

    at: datetime
    runs: int
    wait_p50: float | None = None
    wait_p95: float | None = None
    wait_p99: float | None = None
    run_p50: float | None = None
    run_p95: float | None = None
    run_p99: float | None = None


class HourLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that started in an hour of the week, in all weeks together; weekday 0 is Monday."""

    weekday: int
    hour: int
    started: int


class FailureKind(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    name: str
    error_type: str | None
    failures: int
    final: int
    last_seen: datetime
    sample_error: str | None
    sample_ids: list[str]


class DayFailures(msgspec.Struct, frozen=True, kw_only=True):
    day: date
    fingerprint: str
    name: str
    failures: int


class StormWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Five minutes of a function, after `known` tasks in the 24 hours before. `retry_ms` is None where no run is kept."""

    store: str
    name: str
    start: datetime
    attempts: int
    retries: int
    ratio: float | None
    storm: bool
    known: int
    retry_ms: float | None


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """A retry storm from its beginning to its end, and its cost. `ratio` compares its worst window with the day before."""

    store: str
    name: str
    begins: datetime
    ends: datetime
    windows: int
    runs: int
    retries: int
    ratio: float
    retry_ms: float | None


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    name: str
    retries: int


class FunctionTimes(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    queue: str
    runs: int
    failed: int
    run_p50: float | None
    run_p95: float | None
    run_p99: float | None


class GroupWait(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    group_id: str
    started: int
    waiting_ms: float
    blocked_ms: float
    max_wait_ms: float | None


class SlotHour(msgspec.Struct, frozen=True, kw_only=True):
    """An hour of a queue that has `known_hours` hours in all besides its forecast."""

    store: str
    queue: str
    hour: datetime
    slots_needed: int | None
    slots_seen: int | None
    is_forecast: bool
    short: bool | None
    known_hours: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A chapter of a report: the history of some stores, measured or made up."""

    stores: tuple[str, ...]
    made_up: bool
    first: datetime
    last: datetime
    step_s: float
    totals: Totals
    throughput: list[Flow]
    percentiles: list[Percentiles]
    hours: list[HourLoad]
    failures: list[FailureKind]
    failures_by_day: list[DayFailures]
    storms: list[StormWindow]
    retries: list[Retries]
    retries_step_s: float
    slowest: list[FunctionTimes]
    groups: list[GroupWait]
    capacity: list[SlotHour]
    gaps: list[Gap] = msgspec.field(default_factory=list[Gap])

    @property
    def days(self) -> float:
        """The length of the history."""
        return (self.last - self.first).total_seconds() / 86_400
