"""`omniq top` in a pseudo-terminal: what it shows, how it ends, and a store that goes away and comes back."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.shell import Shell
from support.waiting import wait_for

from omniq import OmniQ
from omniq.storage.cursors import SCAN_LIMIT


def test_queues_running_tasks_workers_and_failures(each: Shell) -> None:
    gate = str(each.folder / "gate")
    running = each.enqueue("jobs:wait_for", f'["{gate}"]', "--queue", "slow")
    failed = each.enqueue("jobs:boom", '["broken [red]thing"]', "--retries", "0")
    each.ok("pause", "resting")
    worker = each.start("worker", "jobs", "--concurrency", "3")
    wait_for(lambda: Path(gate + ".runs").exists(), within=30)
    with each.terminal("top", "--every", "200ms", columns=180) as terminal:
        terminal.until("RuntimeError: broken [red]thing")
        screen = terminal.until("████████░░  75% three of four")
        for words in (running, failed, "jobs:wait_for", "queues 3", "leased 1", "workers 1", "failures 1", "paused"):
            assert words in screen, f"{words!r} is not on\n{screen}"
        Path(gate).touch()
        terminal.until("leased 0")
        terminal.type("q")
        assert terminal.ended() == 0
    assert terminal.raw.endswith(b"\x1b[?25h\x1b[?1049l") or b"\x1b[?1049l" in terminal.raw[-200:]
    assert each.interrupt(worker, signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_running_task_is_on_the_screen_though_100_000_newer_ones_wait(each: Shell) -> None:
    gate = str(each.folder / "gate")
    running = each.enqueue("jobs:wait_for", f'["{gate}"]', "--queue", "slow")
    worker = each.start("worker", "jobs", "--queues", "slow")
    wait_for(lambda: Path(gate + ".runs").exists(), within=30)
    with OmniQ.from_url(each.url) as oq:
        for _ in range(0, SCAN_LIMIT + 1, 5000):
            oq.enqueue_many("jobs:add", [(1,)] * 5000)
    with each.terminal("top", columns=180) as terminal:
        terminal.until(running)
        terminal.type("q")
        assert terminal.ended() == 0
    Path(gate).touch()
    assert each.interrupt(worker, signal.SIGTERM) == 0


def test_it_fits_a_small_terminal_and_follows_its_size(sh: Shell) -> None:
    for n in range(9):
        sh.enqueue("jobs:add", "[1]", "--queue", f"queue-{n}")
    with sh.terminal("top", columns=80, lines=24) as terminal:
        terminal.until("queues 9 · 4 more")
        screen = terminal.until("READY")
        assert all(len(line) <= 80 for line in screen.splitlines())
        terminal.resize(140, 50)
        terminal.until("queue-8")
        terminal.type("Q")
        assert terminal.ended() == 0


def test_it_survives_a_store_that_goes_away_and_comes_back(shells: Callable[..., Shell], kind: str) -> None:
    sh = shells(kind)
    sh.enqueue("jobs:add", "[1]", "--queue", "first")
    place = sh.folder / ("queue.db" if kind == "sqlite" else "queue")
    with sh.terminal("top", "--every", "100ms") as terminal:
        terminal.until("first")
        place.rename(sh.folder / "elsewhere")
        terminal.until("the store is away: no store at")
        for rest in sh.folder.glob("queue.db-*"):
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        sh.enqueue("jobs:add", "[1]", "--queue", "second")
        screen = terminal.until("second")
        assert "away" not in screen
        assert "first" not in screen
        terminal.type("q")
        assert terminal.ended() == 0


def test_ctrl_c_ends_it_and_leaves_the_terminal_as_it_was(sh: Shell) -> None:
    sh.put()
    with sh.terminal("top") as terminal:
        terminal.until("q quits")
        terminal.type("\x03")
        assert terminal.ended() == 130
        assert b"\x1b[?1049l" in terminal.raw
        assert b"Traceback" not in terminal.raw


def test_without_a_terminal_or_a_store_it_says_so(sh: Shell) -> None:
    assert sh("top").sentence() == "omniq top needs a terminal; for programs there is omniq queues --json"
    assert sh("top").code == 2
    with sh.terminal("top") as terminal:
        assert terminal.ended() == 1
        assert "no store at" in terminal.screen()
    sh.put()
    with sh.terminal("top", "--every", "1ms") as terminal:
        assert terminal.ended() == 2


@pytest.mark.parametrize("lines", [8, 5])
def test_a_tiny_terminal_is_no_reason_to_fail(sh: Shell, lines: int) -> None:
    sh.put()
    with sh.terminal("top", columns=40, lines=lines) as terminal:
        terminal.until("omniq top")
        terminal.type("q")
        assert terminal.ended() == 0
