"""What must stay true of the repository itself, whatever the code does."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.browser import browse

import omniq
from omniq.storage.url import GROUP, OWN, backend_of

# Split, so that this file does not contain what it looks for.
FORBIDDEN = {
    "a home folder": re.compile(r"/(?:home|Us" + r"ers)/\w|/ro" + r"ot/"),
    "a package index": re.compile(r"pypi\.(?:org|python)|python" + r"hosted\.|index-" + r"url|find-" + r"links|/sim" + r"ple/"),
}


def tracked_files(repository: Path) -> list[Path]:
    """Committed files and new ones that git would not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a clone")
    return [path for name in listed.split("\0") if name and (path := repository / name).is_file()]


def test_the_version_is_written_once(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/omniq/_version.py"

    written = re.compile(rf'^\s*_*version_*\s*[:=].*{re.escape(omniq.__version__)}["\']', re.IGNORECASE | re.MULTILINE)
    sources = [path for path in tracked_files(repository) if path.suffix in {".py", ".toml", ".yml", ".cfg"}]
    found = [path.relative_to(repository).as_posix() for path in sources if written.search(path.read_text())]
    assert found == ["src/omniq/_version.py"]


def test_constraints_are_exact_pins_and_nothing_else(repository: Path) -> None:
    pin = re.compile(r'[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; sys_platform == "\w+")?')
    lines = (repository / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#") and not pin.fullmatch(line)] == []


def test_every_direct_dependency_is_pinned(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    pinned = {line.partition("==")[0].lower() for line in (repository / "constraints.txt").read_text().splitlines()}
    assert {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in wanted} - pinned == set()


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names_a_place_that_others_do_not_have(repository: Path, what: str) -> None:
    found: list[str] = []
    for path in tracked_files(repository):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(repository)}: {match[0]}" for match in FORBIDDEN[what].finditer(text)]
    assert found == []


def test_the_readme_names_both_commands(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_every_page_is_in_the_navigation(repository: Path) -> None:
    docs = repository / "docs"
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    navigation = (repository / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)) == pages


def test_the_home_page_leads_to_every_page_but_those_of_single_commands(repository: Path) -> None:
    docs = repository / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"index.md"}
    linked = set(re.findall(r"\]\(([\w/.-]+\.md)\)", (docs / "index.md").read_text()))
    assert {page for page in pages - linked if not page.startswith("reference/cli/")} == set()


def test_the_readme_says_how_to_install_what_most_users_need(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].keys()
    named = set(re.findall(r"pip install '\.\[(\w+)\]'", (repository / "README.md").read_text()))
    assert {"redis", "spark", "all"} <= named <= extras


def test_every_store_is_named_where_the_product_is_described(repository: Path) -> None:
    backends = {backend_of(f"{scheme}:") for scheme in OWN}
    told = {"sqlite": "sqlite", "file": "folder", "redis": "redis", "memory": "memory"}
    assert told.keys() == backends
    for name in ("README.md", "mkdocs.yml", "pyproject.toml", "docs/index.md"):
        text = (repository / name).read_text()[:2000].lower()
        assert [word for word in told.values() if word not in text] == [], name
    setting = next(row for row in (repository / "docs/how-to/settings.md").read_text().splitlines() if "`OMNIQ_BACKEND`" in row)
    assert [name for name in backends if f"`{name}`" not in setting] == []


def test_our_own_schemes_are_registered_like_those_of_other_packages(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert project["project"]["entry-points"][GROUP] == OWN


class Assets(HTMLParser):
    """Collects the address of everything that a browser would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"link": ("href",), "a": (), "form": ("action",)}.get(tag, ("src", "srcset", "data", "poster"))
        self.addresses += [value for name, value in attrs if name in names and value]


def foreign_assets(site: Path) -> Iterator[str]:
    foreign = re.compile(r"(?:https?:)?//", re.IGNORECASE)
    for page in site.rglob("*.html"):
        assets = Assets()
        assets.feed(page.read_text())
        yield from (f"{page.name}: {address}" for address in assets.addresses if foreign.match(address))
    imported = re.compile(r"url\([\"']?(?:https?:)?//[^)]*", re.IGNORECASE)
    for sheet in site.rglob("*.css"):
        yield from (f"{sheet.name}: {found}" for found in imported.findall(sheet.read_text()))


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs, from the extra dev")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    assert (site / "index.html").is_file()
    assert list(foreign_assets(site)) == []


def test_a_page_opened_from_the_disk_can_search(site: Path, tmp_path: Path) -> None:
    address = (site / "how-to" / "workers.html").as_uri() + "?q=heartbeat"
    page = browse(address, tmp_path, "--virtual-time-budget=10000", "--dump-dom")
    assert re.search(r"md-search-result__meta[^>]*>\s*\d+ matching documents", page)
