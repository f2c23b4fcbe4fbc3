"""The pytest plugin: queues in memory on a fake clock, for tests of code that enqueues.

Fixtures: `omniq_clock` (a `FakeClock`), `oq` (a blocking `OmniQ`) and `async_oq` (an `AsyncOmniQ`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omniq.core import AsyncOmniQ, OmniQ
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import FakeClock


@pytest.fixture
def omniq_clock() -> FakeClock:
    """The clock of `oq` and `async_oq`; it moves only when told to."""
    return FakeClock()


@pytest.fixture
def oq(omniq_clock: FakeClock) -> Iterator[OmniQ]:
    """A queue in memory, empty for each test."""
    with OmniQ(MemoryStorage(clock=omniq_clock)) as made:
        yield made


@pytest.fixture
def async_oq(omniq_clock: FakeClock) -> AsyncOmniQ:
    """A queue in memory with async methods, empty for each test."""
    # Not closed afterwards: that would need the test's event loop, and a store in memory holds nothing that must be let go.
    return AsyncOmniQ(MemoryStorage(clock=omniq_clock))
