"""The findings that stand out in a history, in sentences for a reader with a minute. Too little data gives no sentence."""

from __future__ import annotations

from itertools import groupby

from omniq.spark.lake.report.facts import Figures, Incident, SlotHour
from omniq.spark.lake.report.incidents import incidents
from omniq.spark.lake.report.samples import FORECAST, KIND, LIMIT, SHARE
from omniq.spark.lake.report.units import count, duration, from_to, moment, number

# A wait of less is no reason to change a limit.
_BLOCKED_MS = 60_000


def findings(figures: Figures) -> list[str]:
    # Gaps come first, since every number below them may be too low.
    found = [
        *_gaps(figures),
        *_failures(figures),
        *_lost(figures),
        *_storms(figures),
        *_groups(figures),
        *_slots(figures),
    ]
    if found:
        return found
    totals = figures.totals
    ended = totals.succeeded + totals.failed
    return ["Nothing stands out." if SHARE.enough(ended) else f"Nothing stands out; {SHARE.lacking(ended)}."]


def _gaps(figures: Figures) -> list[str]:
    """A sentence for each gap. The tables cannot tell of all: hours in which nothing came in have no row to be marked."""
    return [
        f"{count(gap.last - gap.first + 1, 'event')} between {moment(gap.since)} and {moment(gap.until)} UTC were purged "
        "before they came in: counts of that time are too low, and tasks that ended then look unfinished."
        for gap in figures.gaps
    ]


def _failures(figures: Figures) -> list[str]:
    runs = figures.totals.failed_runs
    if not figures.failures or not KIND.enough(runs):
        return []
    kind = figures.failures[0]
    which = f"{kind.error_type or 'an error'} in {kind.name}"
    often = f"{number(kind.failures)} of {number(runs)} failed runs ended with {which}, last {moment(kind.last_seen)} UTC."
    return [f"Most failures are of one kind: {often}" if kind.failures * 2 > runs else f"The most frequent failure: {often}"]


def _lost(figures: Figures) -> list[str]:
    lost = figures.totals.expired
    if not lost:
        return []
    whose = "its worker" if lost == 1 else "their worker"
    return [f"{count(lost, 'run')} lost {whose}: look for crashes and for tasks that run longer than their lease."]


def _storms(figures: Figures) -> list[str]:
    found = incidents(figures.storms)
    if not found:
        return []
    worst = max(found, key=lambda incident: incident.retries)
    told = incident_told(worst, with_store=len(figures.stores) > 1)
    return [f"Retry storm: {told}" if len(found) == 1 else f"{len(found)} retry storms; most retries: {told}"]


def incident_told(incident: Incident, with_store: bool) -> str:
    """The time of an incident, its cost, and how far it was from the usual, as a sentence."""
    where = f"{incident.name} of store {incident.store}" if with_store else incident.name
    cost = "" if incident.retry_ms is None else f", which took {duration(incident.retry_ms)}"
    part = f"{number(incident.retries)} of {number(incident.runs)} runs were retries{cost}"
    worse = f"at worst {incident.ratio:,.0f} times as many per task as usual"
    return f"{where}, {from_to(incident.begins, incident.ends)} UTC. {part}: {worse}."


def _groups(figures: Figures) -> list[str]:
    # The first that qualifies is the one that lost most: the query has them in that order.
    for group in figures.groups:
        held = group.blocked_ms >= _BLOCKED_MS and group.blocked_ms * 2 >= group.waiting_ms
        if held and LIMIT.enough(group.started):
            return [
                f"Group {group.group_id} of queue {group.queue} waited {duration(group.blocked_ms)} at its limit: "
                "raise the limit if the service behind it can take more."
            ]
    return []


def _slots(figures: Figures) -> list[str]:
    found: list[str] = []
    for queue, rows in forecasts(figures).items():
        short = [row for row in rows if row.is_forecast and row.short]
        if short:
            needed, seen = max(row.slots_needed or 0 for row in short), max(row.slots_seen or 0 for row in short)
            ahead = f"too few for {number(len(short))} of the hours ahead, the first {moment(short[0].hour)} UTC"
            found.append(f"Queue {queue} is likely to need {needed} runs at a time; at most {seen} were seen: {ahead}.")
    return found


def forecasts(figures: Figures) -> dict[str, list[SlotHour]]:
    """The hours of each queue with enough history for a forecast, under its name, with the store where there are several."""
    several = len({row.store for row in figures.capacity}) > 1
    found: dict[str, list[SlotHour]] = {}
    for (store, queue), rows in groupby(figures.capacity, key=lambda row: (row.store, row.queue)):
        hours = list(rows)
        if FORECAST.enough(hours[0].known_hours / 24):
            found[f"{queue} of store {store}" if several else queue] = hours
    return found
