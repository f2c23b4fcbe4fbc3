"""The file driver against the whole contract and against the reference model, on a folder and on fsspec's memory."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from support import reference

from omniq.storage.file import FileStorage
from omniq.testing import FakeClock, conformance
from omniq.testing.conformance import run_case

_numbers = itertools.count()
_folders: list[Path] = []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the stores of this test are; the factories below are plain functions and cannot ask for fixtures."""
    _folders.append(tmp_path)
    yield tmp_path
    _folders.pop()


def make_storage(clock: FakeClock) -> FileStorage:
    return FileStorage(_folders[-1] / f"{next(_numbers)}", clock=clock, durability="process")


def reopen(storage: FileStorage, clock: FakeClock) -> FileStorage:
    return FileStorage(storage.path, clock=clock, durability="process")


def make_durable(clock: FakeClock) -> FileStorage:
    return FileStorage(_folders[-1] / f"{next(_numbers)}", clock=clock)


def reopen_durable(storage: FileStorage, clock: FakeClock) -> FileStorage:
    return FileStorage(storage.path, clock=clock)


def make_in_memory(clock: FakeClock) -> FileStorage:
    return FileStorage(f"/omniq-tests/{next(_numbers)}", fs=fsspec.filesystem("memory"), clock=clock)


test_conformance = conformance.tests(make_storage, reopen=reopen)
test_conformance_in_memory = conformance.tests(make_in_memory)

_topics = {"lifecycle", "transactions"}
_durable = [case for case in conformance.cases() if case.topic in _topics]


@pytest.mark.parametrize("case", _durable, ids=[case.id for case in _durable])
def test_conformance_with_full_durability(case: conformance.Case) -> None:
    run_case(case, make_durable, reopen_durable)


def test_the_reference_model_agrees() -> None:
    reference.agrees(make_storage, stories=30)


@pytest.mark.slow
def test_the_reference_model_agrees_on_new_stories() -> None:
    reference.agrees_on_new_stories(make_storage, stories_per_round=60)
