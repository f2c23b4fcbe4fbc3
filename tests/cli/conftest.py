"""The real command on a store of each kind that other processes can see."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.redis_server import Server, running
from support.shell import JOBS, Shell, url_of


@pytest.fixture(params=["sqlite", "file"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def shells(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Shell]]:
    """Makes shells on stores of the kind asked for. On Redis, every name that a test uses is an empty database."""
    databases: dict[str, str] = {}

    def redis_url(name: str) -> str:
        if name not in databases:
            server: Server = request.getfixturevalue("redis_server")
            with server.client() as client:
                client.execute_command("SELECT", len(databases))
                client.flushdb()
            databases[name] = f"redis://127.0.0.1:{server.port}/{len(databases)}"
        return databases[name]

    made: list[Shell] = []
    (tmp_path / "jobs.py").write_text(JOBS)

    def make(kind: str, name: str = "queue") -> Shell:
        shell = Shell(tmp_path, redis_url(name) if kind == "redis" else url_of(kind, tmp_path / name))
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
