"""The memory driver against the whole contract and against the reference model."""

import pytest
from support import reference

from omniq.storage.memory import MemoryStorage
from omniq.testing import FakeClock, conformance


def make_storage(clock: FakeClock) -> MemoryStorage:
    return MemoryStorage(clock=clock)


test_conformance = conformance.tests(make_storage, capabilities=MemoryStorage.capabilities)


def test_the_reference_model_agrees() -> None:
    reference.agrees(make_storage, stories=60)


@pytest.mark.slow
def test_the_reference_model_agrees_on_new_stories() -> None:
    reference.agrees_on_new_stories(make_storage, stories_per_round=120)
