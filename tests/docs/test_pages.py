"""Every code block of the README and of the documentation runs; what uses Spark does so in tests/spark."""

from pathlib import Path

import pages
import pytest
from pages import PAGES, name

KNOWN = {"python", "sh", "console", "text", "sql", "json"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = pages.to_run(page)
    if blocks and not pages.on_spark(blocks):
        pages.run_page(page, tmp_path, timeout=100)


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
