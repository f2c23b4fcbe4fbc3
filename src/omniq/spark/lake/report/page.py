"""One page about a lake, for whoever runs the service and whoever pays for it; it loads nothing from elsewhere."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.spark.causes import unwrapped
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.report import plots
from omniq.spark.lake.report.facts import Figures
from omniq.spark.lake.report.highlights import findings, forecasts
from omniq.spark.lake.report.incidents import incidents, unproven
from omniq.spark.lake.report.queries import QUEUES, gather
from omniq.spark.lake.report.samples import BASELINE, DAYS, FORECAST, LIMIT, LINE, P95, PERCENTILES, SHARE, WEEK, WINDOWS
from omniq.spark.lake.report.units import NOTHING, count, duration, from_to, moment, number, step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Goes into the page itself, which loads nothing from elsewhere.
_CSS = (Path(__file__).parent / "report.css").read_text()
_SHORT_S = 600  # below it the ends of a span are shown with seconds


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The page that was written, and its findings. Of the `tasks`, `made_up` came from the generator."""

    path: str
    tasks: int
    findings: tuple[str, ...]
    made_up: int = 0


def report(
    spark: SparkSession, lake: Lake | str | Path, out: str | Path, *, title: str = "omniq", since: date | None = None
) -> Report:
    """Write the page about the tables as they were last built.

    Tasks that the generator made up have a chapter of their own. Raises `LakeError` when the lake has nothing to report.
    """
    lake = lake if isinstance(lake, Lake) else Lake(lake)
    with unwrapped():
        chapters = gather(spark, lake, since)
    path = Path(out).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole: a report that is written every hour may be open in a browser.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(page(chapters, title), encoding="utf-8")
    draft.replace(path)
    return Report(
        path=str(path),
        tasks=sum(figures.totals.tasks for figures in chapters),
        findings=tuple(
            f"Made up: {sentence}" if figures.made_up else sentence for figures in chapters for sentence in findings(figures)
        ),
        made_up=sum(figures.totals.tasks for figures in chapters if figures.made_up),
    )


# -- the page ------------------------------------------------------------------------------------


def page(chapters: Sequence[Figures], title: str) -> str:
    """The whole page."""
    span = _span(min(figures.first for figures in chapters), max(figures.last for figures in chapters))
    body = "".join(_chapter(figures, alone=len(chapters) == 1) for figures in chapters)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_(title)}: {_(span)}</title><style>{_CSS}</style></head>
<body><header><h1>{_(title)}</h1><p>{_(span)}</p>{_banner(chapters)}</header><main>{body}</main>
<footer>Made by omniq from its lake, {moment(datetime.now(UTC))} UTC.</footer></body></html>
"""


def _banner(chapters: Sequence[Figures]) -> str:
    """The banner that names the tasks that nobody measured; empty without any."""
    invented = next((figures for figures in chapters if figures.made_up), None)
    if invented is None:
        return ""
    whose = f"omniq's generator made up {count(invented.totals.tasks, 'task')} ({_stores(invented)}); no worker ran them."
    if len(chapters) == 1:
        return f'<p class="banner"><b>Made up.</b> {_(whose)} Nothing on this page was measured.</p>'
    where = f'They have <a href="#made-up">a chapter of their own</a>, and no number of the chapter {_(_MEASURED)} counts them.'
    return f'<p class="banner"><b>Not all was measured.</b> {_(whose)} {where}</p>'


_MEASURED, _INVENTED = "Measured", "Made up"


def _stores(figures: Figures) -> str:
    return f"{'store' if len(figures.stores) == 1 else 'stores'} {', '.join(figures.stores)}"


def _chapter(figures: Figures, alone: bool) -> str:
    sections = [
        ("What stands out", "<ul>" + "".join(f"<li>{_(sentence)}</li>" for sentence in findings(figures)) + "</ul>"),
        ("Throughput", _picture(figures, "throughput", _throughput(figures))),
        ("Waiting", _percentiles(figures, "wait")),
        ("Running", _percentiles(figures, "run")),
        ("Hours of the week", _hours(figures)),
        ("Failures", _failures(figures)),
        ("Retry storms", _storms(figures)),
        ("Slowest functions", _slowest(figures)),
        ("Groups at their limit", _groups(figures)),
        ("Slots: forecast against capacity", _slots(figures)),
    ]
    level = "h2" if alone else "h3"
    body = _tiles(figures) + "".join(
        f'<section><{level}>{_(heading)}</{level}><p class="about">{_ABOUT.get(heading, "")}</p>{content}</section>'
        for heading, content in sections
    )
    if alone:
        return body
    heading, name = (_INVENTED, "made-up") if figures.made_up else (_MEASURED, "measured")
    about = f"{_span(figures.first, figures.last)}, {_stores(figures)}"
    return f'<article id="{name}"><h2>{heading}</h2><p class="about">{_(about)}</p>{body}</article>'


_ABOUT = {
    "Throughput": "Runs that ended, by how they ended; the line counts tasks that were waiting or running.",
    "Waiting": "From the moment a task might run to the moment a worker took it. Half of the runs waited p50 or less.",
    "Running": "How long the functions took.",
    "Hours of the week": "When work is done: dark hours are the busy ones, in the mean of the weeks.",
    "Failures": "Errors that differ only in numbers, ids and quoted words are one kind.",
    "Retry storms": "Far more retries per task than in the 24 hours before: often something that tasks need is down.",
    "Slowest functions": "By the time that 95 % of their runs stay under.",
    "Groups at their limit": "Groups whose tasks waited, and how much of that while their limit was used up.",
    "Slots: forecast against capacity": "Runs at one time that the load needs, and the most that were seen, of the "
    f"{QUEUES} queues with the most work. Shaded: ahead.",
}


def _tiles(figures: Figures) -> str:
    totals = figures.totals
    ended = totals.succeeded + totals.failed
    # A share in percent claims more than a few tasks can carry; "2 of 3" does not.
    share = f"{totals.succeeded / ended:.1%}" if SHARE.enough(ended) else f"{number(totals.succeeded)} of {number(ended)}"
    waited, ran = (value if P95.enough(totals.started) else None for value in (totals.wait_p95, totals.run_p95))
    shown = (
        (number(totals.tasks), "task" if totals.tasks == 1 else "tasks"),
        (share if ended else NOTHING, "of ended tasks succeeded"),
        (number(totals.failed), "failed for good"),
        (number(totals.retried), "runs tried again"),
        (duration(waited), "wait, p95"),
        (duration(ran), "run, p95"),
        (number(totals.unfinished), "not ended yet"),
        (number(totals.workers), "worker seen" if totals.workers == 1 else "workers seen"),
    )
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{_(value)}</b><span>{_(word)}</span></div>" for value, word in shown)
        + "</div>"
    )


# -- its sections --------------------------------------------------------------------------------


def _throughput(figures: Figures) -> plots.Figure:
    return plots.throughput(figures.throughput, figures.step_s, figures.first, figures.last)


def _percentiles(figures: Figures, kind: str) -> str:
    if not figures.percentiles:
        return _none("No runs.")
    known = sum(getattr(row, f"{kind}_p50") is not None for row in figures.percentiles)
    if not LINE.enough(known):
        return _none(f"{LINE.lacking(known)}.")
    drawn = plots.percentiles(figures.percentiles, kind, figures.step_s, figures.first, figures.last)
    most = max(row.runs for row in figures.percentiles)
    lacking = ""
    for share, sample in PERCENTILES.items():
        known = sum(getattr(row, f"{kind}_{share}") is not None for row in figures.percentiles)
        if not known:
            lacking += _none(f"{share}: {sample.lacking(most)} per {step(figures.step_s)}.")
        elif not LINE.enough(known):
            lacking += _none(f"{share}: {LINE.lacking(known)}.")
    return _picture(figures, kind, drawn) + lacking


def _hours(figures: Figures) -> str:
    if not figures.totals.started:
        return _none("No runs.")
    if not WEEK.enough(figures.days):
        return _none(f"{WEEK.lacking(figures.days)}.")
    return _picture(figures, "hours", plots.heat_map(figures.hours, figures.first, figures.last))


def _failures(figures: Figures) -> str:
    if not figures.failures:
        return _none("No run failed.")
    rows = (
        (
            _code(row.name),
            row.error_type or "",
            number(row.failures),
            number(row.final),
            moment(row.last_seen),
            row.sample_error or "",
            _ids(row.sample_ids),
        )
        for row in figures.failures
    )
    table = _table(("function", "error", "runs", "for good", "last seen, UTC", "for example", "tasks"), rows)
    if not DAYS.enough(len({row.day for row in figures.failures_by_day})):
        return table
    return _picture(figures, "failures", plots.failures(figures.failures, figures.failures_by_day)) + table


def _storms(figures: Figures) -> str:
    if not figures.totals.retried and not any(row.retries for row in figures.retries):
        return _none("No task was tried again.")
    found, doubtful = incidents(figures.storms), unproven(figures.storms)
    content = ""
    if WINDOWS.enough(len({row.at for row in figures.retries})):
        drawn = plots.retries(figures.retries, found, figures.retries_step_s, figures.first, figures.last)
        content += _picture(figures, "retries", drawn)
    if found:
        several = len(figures.stores) > 1
        heads = (
            "function",
            *(("store",) if several else ()),
            "from and to, UTC",
            "retries",
            "of runs",
            "time of retries",
            "ratio",
        )
        rows = (
            (
                _code(row.name),
                *((row.store,) if several else ()),
                from_to(row.begins, row.ends),
                number(row.retries),
                number(row.runs),
                duration(row.retry_ms),
                f"{row.ratio:,.0f} ×",
            )
            for row in found
        )
        return content + _table(heads, rows)
    if doubtful is not None:
        return content + _none(f"{BASELINE.lacking(doubtful.known)}.")
    return content + _none("Tasks were tried again, but not more than usual.")


def _slowest(figures: Figures) -> str:
    if not figures.slowest:
        return _none("No runs.")
    rows = (
        (
            _code(row.name),
            row.queue,
            number(row.runs),
            number(row.failed),
            *map(duration, (row.run_p50, row.run_p95, row.run_p99)),
        )
        for row in figures.slowest
    )
    table = _table(("function", "queue", "runs", "failed", "p50", "p95", "p99"), rows)
    if all(row.run_p95 is None for row in figures.slowest):
        return _none(f"{P95.lacking(max(row.runs for row in figures.slowest))}.") + table
    return _picture(figures, "slowest", plots.slowest(figures.slowest)) + table


def _groups(figures: Figures) -> str:
    if not figures.groups:
        return _none("No group kept tasks waiting.")
    rows = (
        (
            row.queue,
            row.group_id,
            number(row.started),
            duration(row.waiting_ms),
            duration(row.blocked_ms if LIMIT.enough(row.started) else None),
            duration(row.max_wait_ms),
        )
        for row in figures.groups
    )
    heads = ("queue", "group", "runs", "tasks waited for", "at the limit", "longest wait")
    return _picture(figures, "groups", plots.groups(figures.groups)) + _table(heads, rows)


def _slots(figures: Figures) -> str:
    queues = forecasts(figures)
    if not queues:
        known = max((row.known_hours / 24 for row in figures.capacity), default=figures.days)
        return _none(f"{FORECAST.lacking(known)}.")
    return _picture(figures, "capacity", plots.capacity(queues))


# -- its parts -----------------------------------------------------------------------------------


class _Markup(str):
    """Text that is HTML already; everything else is escaped, since names and errors come from outside."""


def _picture(figures: Figures, name: str, drawn: plots.Figure) -> str:
    return f'<div class="wide">{plots.svg(f"{name} made up" if figures.made_up else name, drawn)}</div>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{_(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{_(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _none(sentence: str) -> str:
    return f'<p class="none">{_(sentence[:1].upper() + sentence[1:])}</p>'


def _(text: Any) -> str:
    return text if isinstance(text, _Markup) else html.escape(str(text))


def _code(text: str) -> _Markup:
    return _Markup(f"<code>{html.escape(text)}</code>")


def _ids(ids: Sequence[str]) -> _Markup:
    return _Markup(" ".join(f"<code>{html.escape(id)}</code>" for id in ids[:2]))


def _span(first: datetime, last: datetime) -> str:
    return f"{from_to(first, last, seconds=(last - first).total_seconds() < _SHORT_S)} UTC"
