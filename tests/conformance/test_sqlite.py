"""The SQLite driver against the whole contract and against the reference model."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import reference

from omniq.storage.sqlite import SQLiteStorage
from omniq.testing import FakeClock, conformance
from omniq.testing.conformance import run_case

_numbers = itertools.count()
_folders: list[Path] = []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the databases of this test are; the factories below are plain functions and cannot ask for fixtures."""
    _folders.append(tmp_path)
    yield tmp_path
    _folders.pop()


def make_storage(clock: FakeClock) -> SQLiteStorage:
    return SQLiteStorage(_folders[-1] / f"{next(_numbers)}.db", clock=clock, durability="process")


def reopen(storage: SQLiteStorage, clock: FakeClock) -> SQLiteStorage:
    return SQLiteStorage(storage.path, clock=clock, durability="process")


def make_durable(clock: FakeClock) -> SQLiteStorage:
    return SQLiteStorage(_folders[-1] / f"{next(_numbers)}.db", clock=clock)


def reopen_durable(storage: SQLiteStorage, clock: FakeClock) -> SQLiteStorage:
    return SQLiteStorage(storage.path, clock=clock)


def make_in_memory(clock: FakeClock) -> SQLiteStorage:
    return SQLiteStorage(":memory:", clock=clock)


test_conformance = conformance.tests(make_storage, reopen=reopen)
test_conformance_in_memory = conformance.tests(make_in_memory)

_topics = {"lifecycle", "transactions"}
_durable = [case for case in conformance.cases() if case.topic in _topics]


@pytest.mark.parametrize("case", _durable, ids=[case.id for case in _durable])
def test_conformance_with_full_durability(case: conformance.Case) -> None:
    run_case(case, make_durable, reopen_durable)


def test_a_store_in_memory_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run_case(next(c for c in conformance.cases() if c.topic == "lifecycle"), make_in_memory)
    assert list(folder.iterdir()) == []


def test_the_reference_model_agrees() -> None:
    reference.agrees(make_storage, stories=20)


@pytest.mark.slow
def test_the_reference_model_agrees_on_new_stories() -> None:
    reference.agrees_on_new_stories(make_storage, stories_per_round=40)
