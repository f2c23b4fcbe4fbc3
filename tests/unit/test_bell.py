"""Wake-ups between processes. Two bells on one file stand for two processes."""

import threading
import time
from pathlib import Path

import pytest
from support.waiting import wait_for

from omniq.storage.bell import Bell

FULL = Path("/dev/full")


def rings(path: Path) -> int:
    """How often anybody rang, as the file says."""
    return int.from_bytes(path.read_bytes())


def test_a_ring_of_another_is_heard(tmp_path: Path) -> None:
    mine, theirs = Bell(tmp_path / "bell"), Bell(tmp_path / "bell")
    heard: list[float] = []
    mine.listen(lambda: heard.append(time.monotonic()), lambda: True)
    for n in range(1, 6):
        before = time.monotonic()
        theirs.ring()
        wait_for(lambda n=n: len(heard) >= n)
        assert heard[-1] - before < 1
    mine.close()
    theirs.close()


def test_a_ring_before_the_watch_is_set_up_is_heard_too(tmp_path: Path) -> None:
    for n in range(10):
        mine, theirs = Bell(tmp_path / f"bell-{n}"), Bell(tmp_path / f"bell-{n}")
        heard = threading.Event()
        mine.listen(heard.set, lambda: True)
        theirs.ring()
        assert heard.wait(2), f"bell {n} was not heard"
        mine.close()
        theirs.close()


def test_a_ring_before_anybody_listens_is_no_news(tmp_path: Path) -> None:
    theirs = Bell(tmp_path / "bell")
    theirs.ring()
    mine = Bell(tmp_path / "bell")
    heard: list[int] = []
    mine.listen(lambda: heard.append(1), lambda: True)
    theirs.ring()
    wait_for(lambda: heard)
    assert len(heard) == 1
    mine.close()
    theirs.close()


def test_ones_own_rings_are_not_heard(tmp_path: Path) -> None:
    mine, theirs = Bell(tmp_path / "bell"), Bell(tmp_path / "bell")
    heard: list[int] = []
    mine.listen(lambda: heard.append(1), lambda: True)
    for _ in range(20):
        mine.ring()
    theirs.ring()
    wait_for(lambda: heard)
    assert len(heard) < 5
    assert rings(tmp_path / "bell") == 21
    mine.close()
    theirs.close()


def test_rings_while_nobody_waits_are_heard_by_the_next_who_does(tmp_path: Path) -> None:
    mine, theirs = Bell(tmp_path / "bell"), Bell(tmp_path / "bell")
    heard: list[int] = []
    asked, waiting = threading.Event(), True

    def anyone() -> bool:
        answer = waiting
        asked.set()
        return answer

    mine.listen(lambda: heard.append(1), anyone)
    assert asked.wait(5)  # else the watcher may begin when nobody waits any more, and sleep
    waiting = False
    theirs.ring()
    wait_for(lambda: heard)
    theirs.ring()
    theirs.ring()
    waiting = True
    mine.listen(lambda: heard.append(1), anyone)
    wait_for(lambda: len(heard) >= 2)
    mine.close()
    theirs.close()


def test_a_bell_closes_whenever_it_is_told_to(tmp_path: Path) -> None:
    closed: list[int] = []

    def open_and_close() -> None:
        for n in range(300):
            bell = Bell(tmp_path / "bell")
            bell.listen(lambda: None, lambda: False)
            if n % 3:
                time.sleep(0.0001 * (n % 20))
            bell.close()
            closed.append(n)

    thread = threading.Thread(target=open_and_close, daemon=True)
    thread.start()
    thread.join(10)
    assert len(closed) == 300, f"close() number {len(closed) + 1} hangs"


def test_closing_one_bell_wakes_nobody_else(tmp_path: Path) -> None:
    mine, theirs, third = (Bell(tmp_path / "bell") for _ in range(3))
    heard: list[int] = []
    mine.listen(lambda: heard.append(1), lambda: True)
    theirs.listen(lambda: None, lambda: True)
    theirs.close()
    third.ring()
    wait_for(lambda: heard)
    assert len(heard) == 1
    mine.close()
    third.close()


@pytest.mark.skipif(not FULL.exists(), reason="this system has no file that is always full")
def test_a_ring_that_finds_no_room_fails_nobody_and_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    bell = Bell(FULL)
    bell.ring()
    assert "could not be woken" in caplog.text
    heard: list[int] = []
    looked = threading.Event()

    def anyone() -> bool:
        """Asked after each look at the count, which would differ by a ring of its own that is not in the file."""
        looked.set()
        return True

    bell.listen(lambda: heard.append(1), anyone)
    assert looked.wait(5)
    bell.close()
    assert heard == []
