import os
import random
from collections.abc import Iterator
from pathlib import Path

import fault_small_files
import pytest
from fault_processes import Fleet

from omniq.storage.file import folder as file_folder


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Processes on one store, in SQLite unless the test asks for others; all are killed when the test ends."""
    monkeypatch.setenv(fault_small_files.VARIABLE, "1")
    for name, size in fault_small_files.SIZES.items():
        monkeypatch.setattr(file_folder, name, size)
    made = Fleet(tmp_path, getattr(request, "param", "sqlite"))
    yield made
    made.end()


@pytest.fixture
def seed() -> int:
    """Printed with a failure; `FAULT_SEED=n` repeats the plan of kills (not the scheduling of the machine)."""
    chosen = int(os.environ.get("FAULT_SEED") or random.randrange(1 << 32))
    print(f"FAULT_SEED={chosen}")
    return chosen
