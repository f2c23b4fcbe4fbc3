"""A queue on each store, and a name that belongs to one test."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.guest import NoGuest, make_guest
from support.redis_server import Server, running

from omniq import AsyncOmniQ, BaseStorage, FileStorage, MemoryStorage, Settings, SQLiteStorage

QUICK = Settings(backoff_base=0.01, grace=5)


@pytest.fixture(params=["memory", "sqlite", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BaseStorage]:
    if request.param == "memory":
        made: BaseStorage = MemoryStorage()
    elif request.param == "sqlite":
        made = SQLiteStorage(tmp_path / "q.db", durability="process")
    else:
        made = FileStorage(tmp_path / "q", durability="process")
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    """An empty Redis."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def guest_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has the published client, which has the name of our package, and nothing of ours."""
    try:
        return make_guest(tmp_path_factory.mktemp("guest"))
    except NoGuest as exc:
        pytest.skip(f"the published client cannot be installed here: {exc}")


@pytest.fixture(params=["memory", "sqlite", "file", "redis"])
def every_storage(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> Iterator[BaseStorage]:
    """For what must be the same on a network store too."""
    urls = {
        "memory": "memory://",
        "sqlite": f"sqlite:///{tmp_path}/q.db?durability=process",
        "file": f"file://{tmp_path}/q?durability=process",
        "redis": redis_url,
    }
    made = BaseStorage.from_url(urls[request.param])
    yield made
    asyncio.run(made.close())


@pytest.fixture(params=["sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store that several processes can share."""
    return f"{request.param}:{'//' if request.param == 'file' else '///'}{tmp_path / 'q'}?durability=process"


@pytest.fixture
def oq(storage: BaseStorage) -> AsyncOmniQ:
    return AsyncOmniQ(storage, settings=QUICK)


@pytest.fixture
def key() -> str:
    """For the counters and gates of `support.jobs`."""
    return uuid.uuid4().hex
