"""The report of a lake: one page that needs nothing but itself, whatever names and errors the tasks had."""

import html
import json
import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lake_rows import FIRST, START, Log
from pyspark.sql import SparkSession
from support.browser import browse
from typer.testing import CliRunner

from omniq.cli.app import app
from omniq.errors import LakeError
from omniq.spark.lake.bronze import take_in
from omniq.spark.lake.build import build
from omniq.spark.lake.generator import history
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.report.facts import Figures
from omniq.spark.lake.report.highlights import findings
from omniq.spark.lake.report.incidents import incidents
from omniq.spark.lake.report.queries import flow_of_minutes, flow_of_runs, gather

if TYPE_CHECKING:
    from omniq.spark.lake.report.page import Report

SECTIONS = [
    "What stands out",
    "Throughput",
    "Waiting",
    "Running",
    "Hours of the week",
    "Failures",
    "Retry storms",
    "Slowest functions",
    "Groups at their limit",
    "Slots: forecast against capacity",
]


def report(spark: SparkSession, lake: Lake, out: Path) -> "Report":
    from omniq.spark.lake.report.page import report  # imports matplotlib, which takes longer than most choices of tests

    return report(spark, lake, out)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        links = [value for name, value in attrs if name in ("src", "href", "xlink:href", "data") and value]
        self.outside += [value for value in links if not value.startswith(("#", "data:"))]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self.headings.append(data)


@pytest.fixture(scope="module")
def written(spark: SparkSession, built: Lake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "out" / "report.html"
    words = ["lake", "report", "--lake", str(built.path), "--out", str(page), "--title", "The shop & co", "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    made = json.loads(done.stdout)
    assert made["path"] == str(page)
    assert made["tasks"] == built.manifest("tasks").rows
    assert made["findings"]
    return page


def test_the_page_has_every_section_and_a_picture_in_most(written: Path) -> None:
    page = _Page(written.read_text())
    assert page.headings == SECTIONS
    assert page.tags.count("svg") >= 8
    assert "The shop &amp; co" in written.read_text()


def test_the_page_loads_nothing_and_runs_nothing(written: Path) -> None:
    text = written.read_text()
    page = _Page(text)
    assert page.outside == []
    assert not {"script", "iframe", "object", "embed", "link", "img"} & set(page.tags)
    assert not re.search(r"url\(\s*['\"]?(?!#|data:)|@import", text)
    assert [entry.name for entry in written.parent.iterdir()] == ["report.html"]


def test_names_are_shown_as_they_are(written: Path) -> None:
    text = written.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;$x^2$" in text


def test_what_the_generator_made_is_called_made_up(written: Path, built: Lake) -> None:
    tasks = f"{built.manifest('tasks').rows:,}"
    assert (
        f"made up {tasks} tasks (store synthetic); no worker ran them. Nothing on this page was measured."
        in written.read_text()
    )


def test_a_browser_shows_it(written: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(written.as_uri(), tmp_path / "profile", "--window-size=1100,3000", f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000


def test_nothing_is_wider_than_a_phone(written: Path, tmp_path: Path) -> None:
    frame = tmp_path / "phone.html"
    page = html.escape(written.read_text())
    measure = "(page => page.scrollWidth + ' of ' + page.clientWidth)(f.contentDocument.documentElement)"
    frame.write_text(
        f"""<meta charset="utf-8"><iframe id="f" style="width:390px;height:900px;border:0" srcdoc="{page}"></iframe>
        <p id="told"></p><script>onload = () => {{ told.textContent = {measure} }}</script>"""
    )
    shown = browse(frame.as_uri(), tmp_path / "profile", "--dump-dom", "--hide-scrollbars")
    assert '<p id="told">390 of 390</p>' in shown


# -- a lake with a measured store and a made-up one ----------------------------------------------


@pytest.fixture(scope="module")
def mixed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A function that ran well for a day, then failed once per task for three times of five minutes, the second one quiet."""
    log = Log()
    for n in range(120):
        log.task(f"good-{n}", at=n * 60).started(n * 60 + 1).succeeded(n * 60 + 2, 1_000_000)
    for number, minute in enumerate((600, 610, 615)):
        for n in range(12):
            at = minute * 60 + n
            bad = log.task(f"bad-{number}-{n}", at=at).started(at + 1).retried(at + 2, at + 20)
            bad.started(at + 21).succeeded(at + 22, 50_000)
    lake = Lake.init(tmp_path_factory.mktemp("mixed") / "lake")
    take_in(lake, log.frame(spark), stream="log", batch=0)
    take_in(lake, history(spark, events=300, days=2, start=FIRST), stream="made-up", batch=0)
    build(spark, lake, grace=timedelta(0))
    return lake


@pytest.fixture(scope="module")
def chapters(spark: SparkSession, mixed: Lake) -> list[Figures]:
    return gather(spark, mixed)


@pytest.mark.slow
def test_what_was_made_up_is_in_no_number_of_what_was_measured(
    spark: SparkSession, mixed: Lake, chapters: list[Figures], tmp_path: Path
) -> None:
    measured, made_up = chapters
    assert (measured.stores, measured.made_up, made_up.stores, made_up.made_up) == (("s1",), False, ("synthetic",), True)
    assert measured.totals.tasks == 120 + 36
    assert measured.totals.retried == 36
    assert {row.name for row in measured.slowest} == {"app:send"}
    written = report(spark, mixed, tmp_path / "report.html")
    assert (written.tasks, written.made_up) == (measured.totals.tasks + made_up.totals.tasks, made_up.totals.tasks)
    page = _Page((tmp_path / "report.html").read_text())
    assert page.headings == ["Measured", "Made up"]


@pytest.mark.slow
def test_a_storm_has_a_beginning_an_end_and_a_cost(chapters: list[Figures]) -> None:
    measured = chapters[0]
    (found,) = incidents(measured.storms)
    assert (found.begins, found.ends) == (START + timedelta(hours=10), START + timedelta(hours=10, minutes=20))
    assert (found.store, found.name, found.windows, found.runs, found.retries) == ("s1", "app:send", 3, 72, 36)
    assert found.retry_ms == 36 * 50
    assert sum("storm" in sentence for sentence in findings(measured)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_the_figures_are_the_same_in_every_zone(spark: SparkSession, mixed: Lake, chapters: list[Figures], zone: str) -> None:
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        assert gather(spark, mixed) == chapters
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_single_runs_tell_the_same_as_minutes(spark: SparkSession, built: Lake) -> None:
    def rows(query: str, *tables: str) -> list[dict[str, Any]]:
        found = spark.sql(query, **{name: built.table(spark, name) for name in tables})
        return [row.asDict() for row in found.collect()]

    by_run = rows(flow_of_runs(60), "attempts", "tasks")
    by_minute = rows(flow_of_minutes(60), "queue_minute")
    quiet = dict.fromkeys(("succeeded", "retried", "failed", "expired", "delta"), 0)
    known = {row["at_us"]: row for row in by_run}
    assert [{**quiet, **known.get(row["at_us"], {"at_us": row["at_us"]})} for row in by_minute] == by_minute
    assert sum(row["succeeded"] for row in by_run) > 100


def test_an_empty_lake_says_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake.init(tmp_path / "lake")
    with pytest.raises(LakeError, match="omniq lake ingest"):
        report(spark, lake, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
