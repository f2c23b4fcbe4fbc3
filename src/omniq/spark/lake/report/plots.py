"""The pictures of a report, drawn from plain values, as SVG text that stands inside the page."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from omniq.spark.lake.report import samples, units
from omniq.spark.lake.report.facts import (
    DayFailures,
    FailureKind,
    Flow,
    FunctionTimes,
    GroupWait,
    HourLoad,
    Incident,
    Percentiles,
    Retries,
    SlotHour,
)
from omniq.spark.lake.report.scales import Scale, counts, durations, moments

# Each has one meaning in all pictures: green is good or usual, yellow was tried again or is rare, red failed or is the worst.
GOOD, WAIT, BAD, QUIET, LINE, PALE = "#2a7f62", "#e09f3e", "#b3323a", "#9aa5b1", "#1f4e79", "#cbd9e6"
SEEN = "#a5d3c1"  # the pale GOOD
KINDS = 6  # of failures with a colour of their own; the others are grey together
_WIDTH = 10
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#c5ccd3",
    "axes.grid": True,
    "axes.labelcolor": "#52606d",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.color": "#e4e7eb",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, and it can be searched
    "text.color": "#1f2933",
    "text.parse_math": False,  # a function may have a $ in its name
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
}

P = ParamSpec("P")


# Not `mpl.style.use`: a report in a notebook would change the pictures of its user.
def _styled(paint: Callable[P, Figure]) -> Callable[P, Figure]:
    @functools.wraps(paint)
    def painted(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(_STYLE):
            return paint(*args, **kwargs)

    return painted


def svg(name: str, figure: Figure) -> str:
    """The SVG text of one picture, the same for the same numbers. Each picture of a page needs a `name` of its own."""
    # Ids inside a picture come from the salt: by chance they would differ from run to run, and without a name they would be
    # those of other pictures on the page.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]


# -- axes ----------------------------------------------------------------------------------------


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _across(axes: Axes, scale: Scale, room: float = 0.01) -> None:
    """Set the horizontal axis; `room` at both ends, as a part of its length, keeps points from being cut."""
    _scaled(axes.set_xscale, scale)
    margin = 0 if scale.log else (scale.high - scale.low) * room
    axes.set_xlim(scale.low if scale.low == 0 else scale.low - margin, scale.high + margin)
    axes.set_xticks(scale.marks, scale.words)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(scale.caption, loc="right")


def _up(axes: Axes, scale: Scale) -> None:
    _scaled(axes.set_yscale, scale)
    axes.set_ylim(scale.low, scale.high)
    axes.set_yticks(scale.marks, scale.words)
    axes.yaxis.set_minor_locator(NullLocator())


def _scaled(choose: Callable[..., Any], scale: Scale) -> None:
    # A value below the first mark, such as a wait of 0, is drawn on it.
    choose("log", nonpositive="clip") if scale.log else choose("linear")


def _length(values: Sequence[float | None]) -> Scale:
    known = [value for value in values if value is not None]
    return durations(min((value for value in known if value > 0), default=0), max(known, default=0))


def _seconds(at: datetime) -> float:
    return at.timestamp()


def _rows(axes: Axes, labels: Sequence[str]) -> Any:
    """Make a row for each label, the first on top, and return the heights of the rows."""
    places = np.arange(len(labels))[::-1]
    axes.set_yticks(places, [_short(label, 44) for label in labels])
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.grid(False, axis="y")
    return places


# -- pictures ------------------------------------------------------------------------------------


@_styled
def throughput(flows: Sequence[Flow], step_s: float, first: datetime, last: datetime) -> Figure:
    figure = _figure(3)
    axes = figure.subplots()
    at = [_seconds(flow.at) for flow in flows]
    bottom = np.zeros(len(flows))
    for kind, colour, label in (
        ("succeeded", GOOD, "succeeded"),
        ("retried", WAIT, "failed, to be tried again"),
        ("failed", BAD, "failed for good"),
        ("expired", QUIET, "worker lost"),
    ):
        heights = np.array([getattr(flow, kind) for flow in flows])
        axes.bar(at, heights, step_s * 0.95, bottom, color=colour, label=label, align="edge", linewidth=0)
        bottom = bottom + heights
    axes.set_ylabel(f"runs per {units.step(step_s)}")
    _up(axes, counts(float(bottom.max(initial=0))))
    # On an axis of its own: a backlog of thousands would leave runs per minute flat on the ground.
    backlog = axes.twinx()
    ends, waiting = [moment + step_s for moment in at], [flow.backlog for flow in flows]
    tasks = [0, *waiting] if at else []
    backlog.step([*at[:1], *ends], tasks, where="post", color=LINE, linewidth=1.2, label=_BACKLOG, clip_on=False)
    backlog.set_ylabel("tasks")
    _up(backlog, counts(max(waiting, default=0)))
    backlog.grid(False)
    backlog.spines["right"].set_visible(True)
    _across(axes, _span(flows, step_s, first, last))
    handles = [*axes.get_legend_handles_labels()[0], *backlog.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper left", ncols=5)
    return figure


_THURSDAY = 3  # the weekday of 1970-01-01, from which hours are counted
_BACKLOG = "waiting or running (right axis)"


def _span(rows: Sequence[Flow | Percentiles | Retries], step_s: float, first: datetime, last: datetime) -> Scale:
    """The axis from the first step to the end of the last step."""
    ends = [row.at + timedelta(seconds=step_s) for row in rows]
    return moments(min([first, *(row.at for row in rows)]), max([last, *ends]))


@_styled
def percentiles(rows: Sequence[Percentiles], kind: str, step_s: float, first: datetime, last: datetime) -> Figure:
    figure = _figure(2.6)
    axes = figure.subplots()
    at = [_seconds(row.at) + step_s / 2 for row in rows]
    shown: list[float | None] = []
    for share, colour in (("p50", GOOD), ("p95", WAIT), ("p99", BAD)):
        values: list[float | None] = [getattr(row, f"{kind}_{share}") for row in rows]
        if not samples.LINE.enough(sum(value is not None for value in values)):
            continue
        shown += values
        # A gap in the line where a step had too few runs: joining its neighbours would claim a value for it.
        drawn = [float("nan") if value is None else value for value in values]
        axes.plot(at, drawn, color=colour, label=share, marker="o", markersize=3 if len(rows) < 60 else 1, clip_on=False)
    _up(axes, _length(shown))
    _across(axes, _span(rows, step_s, first, last))
    figure.legend(loc="outside upper left", ncols=3)
    return figure


@_styled
def heat_map(hours: Sequence[HourLoad], first: datetime, last: datetime) -> Figure:
    """The mean of all weeks, since a history may have two Mondays and one Tuesday. An hour that was not seen is blank."""
    grid, weeks = np.zeros((7, 24)), np.zeros((7, 24))
    for hour in range(int(_seconds(first) // 3600), int(-(-_seconds(last) // 3600))):
        weeks[(hour // 24 + _THURSDAY) % 7, hour % 24] += 1
    for row in hours:
        grid[row.weekday, row.hour] = row.started
    grid = np.divide(grid, weeks, out=np.full((7, 24), np.nan), where=weeks > 0)
    scale = counts(float(np.nanmax(grid)))
    figure = _figure(2.6)
    axes = figure.subplots()
    # Coloured by the root: one hour of a storm would else leave all others as pale as the night.
    by_root = PowerNorm(0.5, vmin=0, vmax=scale.high)
    shown = axes.pcolormesh(grid, cmap="YlGnBu", edgecolors="white", linewidth=1, norm=by_root)
    axes.invert_yaxis()
    axes.set_yticks(np.arange(7) + 0.5, ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"])
    axes.set_xticks(np.arange(0, 24, 2), [f"{hour:02}:00" for hour in range(0, 24, 2)])
    axes.set_xlabel("UTC", loc="right")
    axes.grid(False)
    bar = figure.colorbar(shown, ax=axes, label="runs started, mean")
    bar.set_ticks(list(scale.marks), labels=list(scale.words))
    return figure


@_styled
def failures(kinds: Sequence[FailureKind], by_day: Sequence[DayFailures]) -> Figure:
    """Failures by day and kind, with a place for days without a failure."""
    first, last = min(row.day for row in by_day), max(row.day for row in by_day)
    days = [first + timedelta(days=n) for n in range((last - first).days + 1)]
    figure = _figure(3)
    axes = figure.subplots()
    places, bottom = np.arange(len(days)), np.zeros(len(days))
    colours = mpl.color_sequences["tab10"]
    left = dict.fromkeys(days, 0)
    named = {(kind.fingerprint, kind.name): number for number, kind in enumerate(kinds[:KINDS])}
    heights = np.zeros((len(named), len(days)))
    for row in by_day:
        number = named.get((row.fingerprint, row.name))
        if number is None:
            left[row.day] += row.failures
        else:
            heights[number, (row.day - first).days] += row.failures
    for number, kind in enumerate(kinds[:KINDS]):
        label = f"{kind.name.rpartition(':')[2]}: {kind.error_type}"
        axes.bar(places, heights[number], 0.7, bottom, color=colours[number], label=_short(label, 56))
        bottom = bottom + heights[number]
    if any(left.values()):
        axes.bar(places, list(left.values()), 0.7, bottom, color=QUIET, label="others")
        bottom = bottom + np.array(list(left.values()))
    axes.set_ylabel("failed runs per day")
    _up(axes, counts(float(bottom.max())))
    # Room for seven days at least, or the bars of two days would fill the picture.
    axes.set_xlim(min(-0.5, len(days) / 2 - 4), max(len(days) - 0.5, len(days) / 2 + 3))
    shown = places[:: -(-len(days) // 10) or 1]
    axes.set_xticks(shown, [units.day(days[place]) for place in shown])
    axes.set_xlabel(f"{first.year}, UTC" if first.year == last.year else f"{first.year} to {last.year}, UTC", loc="right")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


@_styled
def retries(rows: Sequence[Retries], found: Sequence[Incident], step_s: float, first: datetime, last: datetime) -> Figure:
    figure = _figure(2.8)
    axes = figure.subplots()
    colours = mpl.color_sequences["tab10"]
    bottom: dict[datetime, int] = {}
    for number, name in enumerate(dict.fromkeys(row.name for row in rows)):
        mine = [row for row in rows if row.name == name]
        below = [bottom.get(row.at, 0) for row in mine]
        at, heights = [_seconds(row.at) for row in mine], [row.retries for row in mine]
        axes.bar(at, heights, step_s * 0.95, below, color=colours[number], label=_short(name, 44), align="edge", linewidth=0)
        bottom.update({row.at: low + row.retries for row, low in zip(mine, below, strict=True)})
    for number, incident in enumerate(found):
        begins, ends = _seconds(incident.begins), _seconds(incident.ends)
        axes.axvspan(begins, ends, color=BAD, alpha=0.15, zorder=0, linewidth=0, label="" if number else "storm")
    axes.set_ylabel(f"retries per {units.step(step_s)}")
    _up(axes, counts(max(bottom.values(), default=0)))
    _across(axes, _span(rows, step_s, first, last))
    figure.legend(loc="outside upper left", ncols=3)
    return figure


@_styled
def slowest(rows: Sequence[FunctionTimes]) -> Figure:
    """A line from the p50 to the p95 of each function; functions without a p95 are left out."""
    rows = [row for row in rows if row.run_p95 is not None]
    figure = _figure(1.1 + 0.32 * len(rows))
    axes = figure.subplots()
    places = _rows(axes, [row.name for row in rows])
    half, most = [row.run_p50 or 0.0 for row in rows], [row.run_p95 or 0.0 for row in rows]
    scale = _length([*half, *most])
    axes.hlines(places, np.maximum(half, scale.low), most, color=PALE, linewidth=5)
    axes.plot(np.maximum(half, scale.low), places, "o", color=LINE, label="p50", clip_on=False)
    axes.plot(most, places, "o", color=WAIT, label="p95", clip_on=False)
    _across(axes, scale)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


@_styled
def groups(rows: Sequence[GroupWait]) -> Figure:
    figure = _figure(1.1 + 0.32 * len(rows))
    axes = figure.subplots()
    places = _rows(axes, [f"{row.queue} / {row.group_id}" for row in rows])
    axes.barh(places, [row.waiting_ms for row in rows], 0.62, color=PALE, label="tasks waited")
    limited = "while as many ran as ever did: its limit"
    blocked = [row.blocked_ms if samples.LIMIT.enough(row.started) else 0 for row in rows]
    axes.barh(places, blocked, 0.3, color=BAD, label=limited)
    _across(axes, durations(0, max(row.waiting_ms for row in rows)))
    figure.legend(loc="outside upper left", ncols=2)
    return figure


@_styled
def capacity(queues: Mapping[str, Sequence[SlotHour]]) -> Figure:
    figure = _figure(1 + 1.7 * len(queues))
    every = [row.hour for rows in queues.values() for row in rows]
    span = moments(min(every), max(every) + timedelta(hours=1))
    below = np.atleast_1d(figure.subplots(len(queues), 1))
    for axes, (queue, rows) in zip(below, queues.items(), strict=True):
        past, ahead = [row for row in rows if not row.is_forecast], [row for row in rows if row.is_forecast]
        # Wide and below, because the slots needed are often just those that were seen.
        axes.step(*_slots(rows, "slots_seen"), where="post", color=SEEN, linewidth=5, label="slots seen", clip_on=False)
        for some, style, label in ((past, "-", "needed, measured"), (ahead, ":", "needed, forecast")):
            axes.step(*_slots(some, "slots_needed"), where="post", color=LINE, linestyle=style, label=label, clip_on=False)
        short = [row for row in ahead if row.short]
        axes.scatter(*_slots(short, "slots_needed"), color=BAD, s=16, zorder=3, label="too few", clip_on=False)
        if ahead:
            axes.axvspan(_seconds(ahead[0].hour), _seconds(ahead[-1].hour) + 3600, color="#f0f4f8", zorder=0)
        axes.set_title(_short(queue, 60), loc="left", fontsize=9)
        _up(axes, counts(max(max(row.slots_needed or 0, row.slots_seen or 0) for row in rows)))
        _across(axes, span)
        if axes is not below[-1]:
            axes.set_xlabel("")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4)
    return figure


def _slots(rows: Sequence[SlotHour], name: str) -> tuple[list[float], list[float]]:
    found = [float("nan") if (value := getattr(row, name)) is None else float(value) for row in rows]
    return [_seconds(row.hour) for row in rows], found


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[1 - limit :]
