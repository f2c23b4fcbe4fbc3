"""Every code block of the README and of the documentation runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pages
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
KNOWN = {"python", "sh", "console", "text", "sql", "json"}


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = [b for b in pages.blocks(page) if b.no_test is None]
    if not any(b.language in ("python", "sh", "console") for b in blocks):
        return
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMNIQ_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    if shutil.which("nc") is None:  # then a stand-in of our own: what the pages show is the protocol, not netcat
        environment["PATH"] += f"{os.pathsep}{Path(__file__).with_name('stand-ins')}"
    environment.pop("PYTEST_ADDOPTS", None)
    script = Path(__file__).with_name("pages.py")
    done = subprocess.run(
        [sys.executable, str(script), name(page), msgspec.json.encode(blocks).decode()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in pages.blocks(page):
        where = f"{name(page)}:{block.line}"
        assert block.language in KNOWN, f"{where}: {block.language!r}"
        assert block.no_test is None or len(block.no_test) > 10, f"{where}: say why it does not run"
        if block.language in ("sh", "console") and block.no_test is None and block.file is None:
            for command, _ in pages.commands(block):
                words = [w for w in command.split() if "=" not in w or not w.split("=")[0].isupper()]
                assert not words or words[0] in (*pages.FOR_READERS, *pages.RUN, *pages.LOOK, "#"), f"{where}: {command}"


def test_few_blocks_do_not_run() -> None:
    skipped = [f"{name(page)}:{b.line}" for page in PAGES for b in pages.blocks(page) if b.no_test is not None]
    assert len(skipped) <= 6, skipped


def test_a_wrong_output_is_noticed() -> None:
    pages.compare("a … c\n", "a b c\n")
    with pytest.raises(AssertionError, match="the page shows"):
        pages.compare("a … c\n", "a b d\n")
