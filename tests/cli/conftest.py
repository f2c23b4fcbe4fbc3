"""The real command on a store of each kind that other processes can see."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.shell import JOBS, Shell, url_of


@pytest.fixture(params=["sqlite", "file"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Callable[[str], Shell]]:
    """Makes shells on stores of the kind asked for."""
    made: list[Shell] = []
    (tmp_path / "jobs.py").write_text(JOBS)

    def make(kind: str, name: str = "queue") -> Shell:
        shell = Shell(tmp_path, url_of(kind, tmp_path / name))
        made.append(shell)
        return shell

    yield make
    for shell in made:
        shell.close()


@pytest.fixture
def each(shells: Callable[[str], Shell], kind: str) -> Shell:
    """A shell on a store of each kind in turn."""
    return shells(kind)


@pytest.fixture
def sh(shells: Callable[[str], Shell]) -> Shell:
    """A shell on a SQLite store, where the kind does not matter."""
    return shells("sqlite")
