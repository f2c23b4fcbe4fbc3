"""One page about a lake, for whoever runs the service and whoever pays for it; it needs nothing but itself."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.spark.causes import unwrapped
from omniq.spark.lake import plots
from omniq.spark.lake.figures import Figures, gather
from omniq.spark.lake.layout import About, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CSS = (Path(__file__).parent / "report.css").read_text()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, and what stands out in it."""

    path: str
    tasks: int
    findings: tuple[str, ...]


def report(
    spark: SparkSession, lake: Lake | str | Path, out: str | Path, *, title: str = "omniq", since: date | None = None
) -> Report:
    """Write the page about the tables as they were last built."""
    lake = lake if isinstance(lake, Lake) else Lake(lake)
    with unwrapped():
        figures = gather(spark, lake, since)
    found = findings(figures, told_gaps(lake.about(), since))
    path = Path(out).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(page(figures, found, title), encoding="utf-8")
    draft.replace(path)
    return Report(path=str(path), tasks=int(figures.totals["tasks"]), findings=tuple(found))


# -- what stands out -----------------------------------------------------------------------------


def told_gaps(about: About, since: date | None) -> list[str]:
    """What the lake lacks from a day on: hours in which nothing came in have no row that could be marked."""
    return [
        f"{_n(gap.last - gap.first + 1)} events between {_when(gap.since)} and {_when(gap.until)} were purged before they "
        "came in: counts of that time are too low, and what ended then looks unended."
        for entry in about.stores.values()
        for gap in entry.gaps
        if since is None or gap.until.date() >= since
    ]


def findings(figures: Figures, lost: Iterable[str] = ()) -> list[str]:
    """Sentences for somebody who has a minute; what is `lost` comes first."""
    found = list(lost)
    for cluster in figures.failures.head(1).itertuples():
        kind = f"{cluster.error_type} in {cluster.name}"
        found.append(
            f"Most failures are of one kind: {_n(cluster.failures)} runs ended with {kind}, last {_when(cluster.last_seen)}."
        )
    lost = figures.totals["expired"]
    if lost:
        found.append(f"{_n(lost)} runs lost their worker: look for crashes and for tasks that run longer than their lease.")
    storms = figures.storms[figures.storms["storm"].eq(other=True)]
    if len(storms):
        worst = storms.sort_values("retries").iloc[-1]
        found.append(
            f"{_n(len(storms))} retry {'storm: of' if len(storms) == 1 else 'storms; the worst was of'} {worst['name']}, "
            f"{_when(worst['window_start'])}: {worst['attempts_per_task']:.1f} runs per task."
        )
    for group in figures.groups.itertuples():
        if (group.share_blocked or 0) >= 0.5 and group.blocked_ms >= 60_000:
            found.append(
                f"Group {group.group_id} of queue {group.queue} waited {_ms(group.blocked_ms)} at its limit: "
                "raise the limit if what it protects can bear more."
            )
            break
    short = figures.capacity[figures.capacity["is_forecast"].eq(other=True) & figures.capacity["short"].eq(other=True)]
    for queue, rows in short.groupby("queue", sort=False):
        needed, seen = int(rows["slots_needed"].max()), int(rows["slots_seen"].max())
        ahead = f"too few for {_n(len(rows))} of the hours ahead, the first {_when(rows['hour'].min())}"
        found.append(f"Queue {queue} is likely to need {needed} runs at a time; at most {seen} were seen: {ahead}.")
    return found or ["Nothing stands out."]


# -- the page ------------------------------------------------------------------------------------


def page(figures: Figures, found: Iterable[str], title: str) -> str:
    """The whole page."""
    span = f"{_when(figures.first)} to {_when(figures.last)} UTC"
    sections = [
        ("What stands out", "<ul>" + "".join(f"<li>{_(sentence)}</li>" for sentence in found) + "</ul>"),
        ("Throughput", plots.throughput(figures)),
        ("Waiting", _if(figures.percentiles, lambda: plots.percentiles(figures, "wait"), "No runs.")),
        ("Running", _if(figures.percentiles, lambda: plots.percentiles(figures, "run"), "No runs.")),
        ("Hours of the week", _if(figures.hours, lambda: plots.heat_map(figures), "No runs.")),
        ("Failures", _if(figures.failures, lambda: plots.failures(figures) + _failures(figures), "No run failed.")),
        ("Retry storms", _if(figures.storms, lambda: plots.storms(figures), "No task was tried again.")),
        ("Slowest functions", _if(figures.slowest, lambda: plots.slowest(figures) + _slowest(figures), "No runs.")),
        (
            "Groups at their limit",
            _if(figures.groups, lambda: plots.groups(figures) + _groups(figures), "No group kept tasks waiting."),
        ),
        ("Slots: forecast against capacity", _if(figures.capacity, lambda: plots.capacity(figures), "Not enough history.")),
    ]
    body = "".join(
        f'<section><h2>{_(heading)}</h2><p class="about">{_ABOUT.get(heading, "")}</p>{content}</section>'
        for heading, content in sections
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_(title)}: {_(span)}</title><style>{_CSS}</style></head>
<body><header><h1>{_(title)}</h1><p>{_(span)}</p></header><main>{_tiles(figures)}{body}</main>
<footer>Made by omniq from its lake, {_when(datetime.now(UTC))} UTC.</footer></body></html>
"""


_ABOUT = {
    "Throughput": "Runs that ended, by how they ended; the line counts tasks that were waiting or running.",
    "Waiting": "From the moment a task might run to the moment a worker took it. Half of the runs waited p50 or less.",
    "Running": "How long the functions took.",
    "Hours of the week": "When work is done: dark hours are the busy ones.",
    "Failures": "Errors that differ only in numbers, ids and quoted words are one kind.",
    "Retry storms": "More runs per task than usual, often because something that tasks depend on is down.",
    "Slowest functions": "By the time that 95 % of their runs stay under.",
    "Groups at their limit": "Groups whose tasks waited, and how much of that while their limit was used up.",
    "Slots: forecast against capacity": "Runs at one time that the load needs, and the most that were seen. Shaded: ahead.",
}


def _tiles(figures: Figures) -> str:
    totals = figures.totals
    ended = totals["succeeded"] + totals["failed"]
    shown = (
        (_n(totals["tasks"]), "tasks"),
        (f"{totals['succeeded'] / ended:.1%}" if ended else "–", "of ended tasks succeeded"),
        (_n(totals["failed"]), "failed for good"),
        (_n(totals["retried"]), "runs tried again"),
        (_ms(totals["wait_p95"]), "wait, p95"),
        (_ms(totals["run_p95"]), "run, p95"),
        (_n(totals["unfinished"]), "not ended yet"),
        (_n(totals["workers"]), "workers seen"),
    )
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{_(value)}</b><span>{_(word)}</span></div>" for value, word in shown)
        + "</div>"
    )


def _failures(figures: Figures) -> str:
    rows = (
        (
            _code(row.name),
            row.error_type,
            _n(row.failures),
            _n(row.final),
            _when(row.last_seen),
            row.sample_error or "",
            _ids(row.sample_ids),
        )
        for row in figures.failures.itertuples()
    )
    return _table(("function", "error", "runs", "for good", "last seen", "for example", "tasks"), rows)


def _slowest(figures: Figures) -> str:
    rows = (
        (
            _code(row.name),
            row.queue,
            _n(row.runs),
            _n(row.failed),
            *map(_ms, (row.run_p50, row.run_p95, row.run_p99)),
        )
        for row in figures.slowest.itertuples()
    )
    return _table(("function", "queue", "runs", "failed", "p50", "p95", "p99"), rows)


def _groups(figures: Figures) -> str:
    rows = (
        (
            row.queue,
            row.group_id,
            _n(row.started),
            *(_ms(v) for v in (row.waiting_ms, row.blocked_ms, row.max_wait_ms)),
        )
        for row in figures.groups.itertuples()
    )
    return _table(("queue", "group", "runs", "tasks waited for", "at the limit", "longest wait"), rows)


class _Markup(str):
    """Text that is HTML already."""


def _table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{_(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{_(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _if(table: Any, content: Callable[[], str], otherwise: str) -> str:
    return content() if len(table) else f'<p class="none">{_(otherwise)}</p>'


def _(text: Any) -> str:
    return text if isinstance(text, _Markup) else html.escape(str(text))


def _code(text: str) -> _Markup:
    return _Markup(f"<code>{html.escape(text)}</code>")


def _ids(ids: Any) -> _Markup:
    return _Markup(" ".join(f"<code>{html.escape(str(id))}</code>" for id in list(ids)[:2]))


def _n(value: Any) -> str:
    return f"{int(value):,}"


def _ms(value: Any) -> str:
    return plots.milliseconds(float("nan") if value is None else float(value))


def _when(moment: Any) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"
