"""The cases of `tcp_cases/`, against a real server on each store."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tcp import STORES, ServerProcess, redis_for_all
from support.tcp_cases import Case, CaseRun, needs_files, needs_linux, read_cases

CASES = read_cases(Path(__file__).with_name("tcp_cases"))
LINUX = sys.platform == "linux"
SHARED = sorted({case.options for case in CASES if not case.own_server})

Servers = dict[tuple[str, tuple[str, ...]], ServerProcess]


@pytest.fixture(scope="module", autouse=True)
def redis_of_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with redis_for_all(tmp_path_factory.mktemp("redis")):
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, redis_of_this_module: None) -> Iterator[Servers]:
    """One server per store for all cases, and one for each set of options that some cases ask for."""
    started: Servers = {}
    for name, store in STORES.items():
        for options in SHARED:
            folder = tmp_path_factory.mktemp(f"serve-{name}")
            started[name, options] = ServerProcess(store.url(folder), folder, options)
    try:
        for server in started.values():
            server.ready()
        yield started
        codes = {name: server.stop() for (name, _), server in started.items()}
        assert set(codes.values()) == {0}, codes
        errors = [line for s in started.values() for line in s.errors.splitlines() if "Traceback" in line or "ERROR" in line]
        assert errors == []
    finally:
        for server in started.values():
            server.end()


def played(own_server: bool) -> Iterator[Any]:
    """Each case with each store that it is for."""
    for case in CASES:
        for name, store in STORES.items():
            fits = (store.durable or not own_server) and (store.by_time or not case.by_time)
            fits = fits and (store.place is not None or not needs_files(case)) and (LINUX or not needs_linux(case))
            if case.own_server is own_server and not case.default_store and fits:
                yield pytest.param(case, name, id=f"{case.name}-{name}")
        if own_server and case.default_store:
            yield pytest.param(case, "sqlite", id=f"{case.name}-default")


@pytest.mark.parametrize(("case", "store"), list(played(own_server=False)))
def test_a_case_holds(case: Case, store: str, servers: Servers) -> None:
    CaseRun(case, servers[store, case.options], STORES[store], f"case-{CASES.index(case)}").play()


@pytest.mark.parametrize(("case", "store"), list(played(own_server=True)))
def test_a_case_with_a_server_of_its_own_holds(case: Case, store: str, tmp_path: Path) -> None:
    url = None if case.default_store else STORES[store].url(tmp_path)
    server = ServerProcess(url, tmp_path, case.options).ready()
    try:
        CaseRun(case, server, STORES[store], "case").play()
        assert "Traceback" not in server.errors
    finally:
        server.end()


def test_there_are_many_cases_and_each_says_what_it_shows() -> None:
    assert len(CASES) >= 60
    titles = [case.title for case in CASES]
    assert len(set(titles)) == len(titles)
