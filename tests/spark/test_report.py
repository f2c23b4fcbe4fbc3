"""The report of a lake: one page that needs nothing but itself, whatever names and errors the tasks had."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from omniq.cli.app import app
from omniq.errors import LakeError
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.reporting import report

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


def test_a_browser_shows_it(written: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("NO BROWSER: install Debian's chromium to see the report drawn")
    picture = tmp_path / "page.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1100,3000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    subprocess.run([browser, *flags, f"--screenshot={picture}", written.as_uri()], check=True, timeout=60, capture_output=True)
    assert picture.stat().st_size > 50_000


def test_an_empty_lake_says_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake.init(tmp_path / "lake")
    with pytest.raises(LakeError, match="omniq lake ingest"):
        report(spark, lake, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
