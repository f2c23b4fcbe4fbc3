"""The pictures of a report, as SVG text that stands inside the page."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from omniq.spark.lake.figures import Figures

GOOD, WAIT, BAD, QUIET, LINE = "#2a7f62", "#e09f3e", "#b3323a", "#9aa5b1", "#1f4e79"
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#c5ccd3",
    "axes.grid": True,
    "axes.labelcolor": "#52606d",
    "axes.spines.right": False,
    "axes.spines.top": False,
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


def draw(name: str, paint: Callable[[Figure], None], size: tuple[float, float] = (10, 3)) -> str:
    """One picture. The same numbers give the same text."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def milliseconds(value: float, _: Any = None) -> str:
    """A duration the way people say it."""
    if value != value:
        return "–"
    if value < 1:
        return f"{value:.1g} ms" if value else "0"
    if value < 1000:
        return f"{value:.0f} ms"
    seconds = value / 1000
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 120 else f"{minutes / 60:.3g} h"


def _times(axes: Axes) -> None:
    locator = AutoDateLocator(minticks=3, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.margins(x=0.01)
    if axes.dataLim.width * 1440 < 1:  # a single moment: without a span of ours its axis would show years
        axes.set_xlim(axes.dataLim.x0 - 1 / 48, axes.dataLim.x0 + 1 / 48)


def _durations(axes: Axes) -> None:
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    axes.set_ylim(bottom=0)


def throughput(figures: Figures) -> str:
    table, width = figures.throughput, figures.step

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        wide: Any = width * 0.95
        bottom = np.zeros(len(table))
        for column, colour, label in (
            ("succeeded", GOOD, "succeeded"),
            ("retried", WAIT, "failed, to be tried again"),
            ("failed", BAD, "failed for good"),
            ("expired", QUIET, "worker lost"),
        ):
            axes.bar(table["bucket"], table[column], wide, bottom, color=colour, label=label, align="edge", linewidth=0)
            bottom = bottom + table[column].to_numpy()
        axes.set_ylabel(f"runs per {_span(width)}")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        backlog = axes.twinx()
        backlog.plot(table["bucket"] + width, table["backlog"], color=LINE, linewidth=1.5, label="waiting or running")
        backlog.set_ylabel("tasks waiting or running")
        backlog.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        backlog.set_ylim(bottom=0)
        backlog.grid(False)
        backlog.spines["right"].set_visible(True)
        _times(axes)
        handles = [*axes.get_legend_handles_labels()[0], *backlog.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside upper left", ncols=5)

    return draw("throughput", paint)


def percentiles(figures: Figures, kind: str) -> str:
    table = figures.percentiles

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        marker = "o" if len(table) < 30 else None
        for share, colour in (("p50", GOOD), ("p95", WAIT), ("p99", BAD)):
            axes.plot(table["bucket"], table[f"{kind}_{share}"], color=colour, label=share, marker=marker, markersize=3)
        _durations(axes)
        _times(axes)
        figure.legend(loc="outside upper left", ncols=3)

    return draw(kind, paint, (10, 2.6))


def heat_map(figures: Figures) -> str:
    grid = np.full((7, 24), np.nan)
    for row in figures.hours.itertuples():
        grid[int(row.weekday), int(row.hour)] = row.started

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        shown = axes.pcolormesh(grid, cmap="YlGnBu", edgecolors="white", linewidth=1)
        axes.invert_yaxis()
        axes.set_yticks(np.arange(7) + 0.5, ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"])
        axes.set_xticks(np.arange(0, 24, 2) + 0.5, [f"{hour:02}" for hour in range(0, 24, 2)])
        axes.set_xlabel("hour (UTC)")
        axes.grid(False)
        figure.colorbar(shown, ax=axes, label="runs started", format=FuncFormatter(lambda value, _: f"{value:,.0f}"))

    return draw("hours", paint, (10, 2.6))


def failures(figures: Figures) -> str:
    top = figures.failures.head(6)
    days = sorted(set(figures.failures_by_day["day"]))

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places, bottom = np.arange(len(days)), np.zeros(len(days))
        colours = mpl.color_sequences["tab10"]
        for number, cluster in enumerate(top.itertuples()):
            mine = figures.failures_by_day[figures.failures_by_day["fingerprint"] == cluster.fingerprint]
            counted = mine.groupby("day")["failures"].sum()
            heights = np.array([float(counted.get(day, 0)) for day in days])
            label = f"{cluster.name.rpartition(':')[2]}: {cluster.error_type}"
            axes.bar(places, heights, 0.6, bottom, color=colours[number], label=_short(label, 38))
            bottom = bottom + heights
        axes.set_ylabel("failed runs per day")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=max(0.05, 0.6 - len(days) / 10))
        shown = places[:: -(-len(days) // 10) or 1]
        axes.set_xticks(shown, [str(days[place]) for place in shown])
        figure.legend(loc="outside upper left", ncols=3)

    return draw("failures", paint)


def storms(figures: Figures) -> str:
    table = figures.storms

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        colours = mpl.color_sequences["tab10"]
        for number, (name, rows) in enumerate(table.groupby("name", sort=False)):
            axes.plot(
                rows["window_start"], rows["attempts_per_task"], color=colours[number], linewidth=1, label=_short(name, 38)
            )
        stormy = table[table["storm"].eq(other=True)]
        axes.scatter(stormy["window_start"], stormy["attempts_per_task"], color=BAD, s=28, zorder=3, label="storm")
        axes.set_ylabel("runs per task, in five minutes")
        axes.set_ylim(bottom=0)
        _times(axes)
        figure.legend(loc="outside upper left", ncols=3)

    return draw("storms", paint, (10, 2.6))


def slowest(figures: Figures) -> str:
    table = figures.slowest.iloc[::-1]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = np.arange(len(table))
        axes.barh(places, table["run_p95"], 0.62, color="#cbd9e6", label="p95")
        axes.barh(places, table["run_p50"], 0.3, color=LINE, label="p50")
        axes.set_yticks(places, [_short(name, 44) for name in table["name"]])
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(milliseconds))
        axes.grid(False, axis="y")
        figure.legend(loc="outside upper left", ncols=2)

    return draw("slowest", paint, (10, 0.9 + 0.32 * len(table)))


def groups(figures: Figures) -> str:
    table = figures.groups.iloc[::-1]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = np.arange(len(table))
        axes.barh(places, table["waiting_ms"] / 60_000, 0.62, color="#cbd9e6", label="tasks waited")
        axes.barh(places, table["blocked_ms"] / 60_000, 0.3, color=BAD, label="while as many ran as ever did: its limit")
        axes.set_yticks(places, [_short(f"{row.queue} / {row.group_id}", 44) for row in table.itertuples()])
        axes.set_xlabel("minutes")
        axes.grid(False, axis="y")
        figure.legend(loc="outside upper left", ncols=2)

    return draw("groups", paint, (10, 1 + 0.32 * len(table)))


def capacity(figures: Figures) -> str:
    queues = list(dict.fromkeys(figures.capacity["queue"]))

    def paint(figure: Figure) -> None:
        for axes, queue in zip(np.atleast_1d(figure.subplots(len(queues), 1, sharex=True)), queues, strict=True):
            rows = figures.capacity[figures.capacity["queue"] == queue]
            ahead = rows[rows["is_forecast"].eq(other=True)]
            past = rows[~rows["is_forecast"].eq(other=True)]
            axes.step(past["hour"], past["slots_needed"], where="post", color=LINE, label="needed, measured")
            axes.step(ahead["hour"], ahead["slots_needed"], where="post", color=LINE, linestyle=":", label="needed, forecast")
            axes.step(rows["hour"], rows["slots_seen"], where="post", color=GOOD, label="slots seen")
            short = rows[rows["short"].eq(other=True)]
            axes.scatter(short["hour"], short["slots_needed"], color=BAD, s=16, zorder=3, label="too few")
            if len(ahead):
                axes.axvspan(ahead["hour"].min(), ahead["hour"].max(), color="#f0f4f8", zorder=0)
            axes.set_title(_short(str(queue), 60), loc="left", fontsize=9)
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.set_ylim(bottom=0)
            _times(axes)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4)

    return draw("capacity", paint, (10, 1 + 1.7 * max(len(queues), 1)))


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[1 - limit :]


def _span(step: timedelta) -> str:
    seconds = round(step.total_seconds())
    for size, word in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds % size == 0:
            return word if seconds == size else f"{seconds // size} {word}s"
    return f"{seconds} s"
