"""Retry storms as incidents: neighbouring windows of the table `retry_storm` are one event for whoever has to act."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import groupby

from omniq.spark.lake.report.facts import Incident, StormWindow
from omniq.spark.lake.report.samples import BASELINE

WINDOW = timedelta(minutes=5)  # of the table
# Retries wait before they run: a pause of one window between two storms is part of the same incident.
QUIET_WINDOWS = 1


def incidents(windows: Iterable[StormWindow]) -> list[Incident]:
    """One incident for each series of storms of a function and store, in the order of their beginning.

    A quiet window between two storms counts with them. A window with too little history before it is not counted as a storm.
    """
    found: list[Incident] = []

    def of(window: StormWindow) -> tuple[str, str]:
        return window.store, window.name

    for _, own in groupby(sorted(windows, key=lambda window: (*of(window), window.start)), key=of):
        # Quiet windows wait until the next storm shows that they lie inside of the incident; behind the last storm they do not.
        current: list[StormWindow] = []
        quiet: list[StormWindow] = []
        for window in own:
            if current and window.start - current[-1].start > WINDOW * (QUIET_WINDOWS + 1):
                found.append(_incident(current))
                current, quiet = [], []
            if window.storm and BASELINE.enough(window.known):
                current += [*quiet, window]
                quiet = []
            elif current:
                quiet.append(window)
        if current:
            found.append(_incident(current))
    return sorted(found, key=lambda incident: (incident.begins, incident.store, incident.name))


def unproven(windows: Iterable[StormWindow]) -> StormWindow | None:
    """Of the windows that would be storms, had there been more tasks before them, the one with most."""
    doubtful = [window for window in windows if window.storm and not BASELINE.enough(window.known)]
    return max(doubtful, key=lambda window: window.known, default=None)


def _incident(windows: list[StormWindow]) -> Incident:
    times = [window.retry_ms for window in windows if window.retry_ms is not None]
    return Incident(
        store=windows[0].store,
        name=windows[0].name,
        begins=windows[0].start,
        ends=windows[-1].start + WINDOW,
        windows=sum(window.storm for window in windows),
        runs=sum(window.attempts for window in windows),
        retries=sum(window.retries for window in windows),
        ratio=max(window.ratio or 0.0 for window in windows if window.storm),
        retry_ms=sum(times) if times else None,
    )
