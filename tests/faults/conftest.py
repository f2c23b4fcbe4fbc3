import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_processes import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Processes on one SQLite file; all are killed when the test ends."""
    made = Fleet(tmp_path)
    yield made
    made.end()


@pytest.fixture
def seed() -> int:
    """Printed with a failure; `FAULT_SEED=n` repeats the plan of kills (not the scheduling of the machine)."""
    chosen = int(os.environ.get("FAULT_SEED") or random.randrange(1 << 32))
    print(f"FAULT_SEED={chosen}")
    return chosen
