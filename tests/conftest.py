"""What all tests share: where the repository is, a loop for async tests, and a check that a test leaves nothing running."""

import asyncio
import functools
import gc
import inspect
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forks

LEAVE_S = 5.0
MEMORY = "/dev/shm"
ROOM_BYTES = 4 << 30
FEW_ROUNDS = 5
_LONGEST_FIRST = ("spark", "cli", "integration", "faults", "docs", "conformance", "unit")


def pytest_configure() -> None:
    _be_as_in_a_shell()
    _keep_folders_in_memory()


def _keep_folders_in_memory() -> None:
    """A third of what tests of files compute goes into making and removing folders on a disk; no promise that they ask about
    needs one. Where memory is short, or `--basetemp` or the variable names a place, they lie there."""
    if os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def _be_as_in_a_shell() -> None:
    """Undo what a caller left ignored, as a shell does with Ctrl-C for what runs in the background: programs inherit it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long begin first, so that no process of `make test` is left alone with one at the end. Few rounds leave
    costly tests out."""
    if int(os.environ.get("ROUNDS") or 20) < FEW_ROUNDS:
        costly = {item for item in items if item.get_closest_marker("costly")}
        config.hook.pytest_deselected(items=list(costly))
        items[:] = [item for item in items if item not in costly]
    items.sort(key=lambda item: _rank(item.path))


def pytest_collection_finish() -> None:
    """Nobody looks for garbage among 8,000 tests again and again: a seventh of what short tests compute."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries tell of what is left at the end


@functools.cache
def _rank(file: Path) -> int:
    here = Path(__file__).parent
    folder = file.relative_to(here).parts[0] if file.is_relative_to(here) else ""
    return _LONGEST_FIRST.index(folder) if folder in _LONGEST_FIRST else len(_LONGEST_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the order above, and give all of tests/spark to one process: its tests share a session, and each costs seconds.

    The slow ones start Spark by themselves, so that they may be spread like the others.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneSession(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = "tests/spark/"
            return (
                together if nodeid.startswith(together) and config.option.markexpr != "slow" else super()._split_scope(nodeid)
            )

        def schedule(self) -> None:
            """Add what follows, or the word that nothing does: else a process that took over a single test from one that died
            would wait for it for ever."""
            super().schedule()
            for node in self.nodes:
                self._reschedule(node)

    config.option.loadscopereorder = False
    return OneSession(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on a loop of its own, which begins after its fixtures are made and ends before they are torn down.

    Not in the plugin that ships: there it would take the tests of others away from pytest-asyncio or anyio.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}))
    return True


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


def _children() -> set[int]:
    """Child processes of this one, zombies included, and its forks; only Linux tells."""
    found = forks.running()
    for listing in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            found.update(map(int, listing.read_text().split()))
        except OSError:
            continue
    return found


def _lasting_threads() -> set[threading.Thread]:
    """Threads that would keep the program alive, and every thread of ours: it should end with its pool or storage."""
    return {t for t in threading.enumerate() if not t.daemon or t.name.startswith("omniq")}


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves asyncio tasks, threads or child processes."""
    left_tasks: list[str] = []
    cancel_all: Any = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

    def record_and_cancel(loop: asyncio.AbstractEventLoop) -> None:
        left_tasks.extend(repr(task) for task in asyncio.all_tasks(loop))
        cancel_all(loop)

    monkeypatch.setattr(asyncio.runners, "_cancel_all_tasks", record_and_cancel)
    threads, children = _lasting_threads(), _children()
    yield
    deadline = time.monotonic() + LEAVE_S
    while (new := _lasting_threads() - threads) and time.monotonic() < deadline:
        next(iter(new)).join(0.05)
    assert not new, f"threads left behind: {sorted(t.name for t in new)}"
    while (born := _children() - children) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert not born, f"child processes left behind: {born}"
    assert not left_tasks, f"asyncio tasks left behind: {left_tasks}"
