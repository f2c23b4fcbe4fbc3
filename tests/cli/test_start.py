"""How little a command loads before it knows what it has to do."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HEAVY = {
    "aiosqlite",
    "asyncio",
    "cloudpickle",
    "fsspec",
    "hypothesis",
    "pandas",
    "pyarrow",
    "pydantic",
    "pyspark",
    "pytest",
    "redis",
    "rich",
    "sqlite3",
    "watchfiles",
}
SHOW_HELP = """
import contextlib, io, json, sys
sys.argv = ["omniq", "--help"]
from omniq.cli import main
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    main()
print(json.dumps([len(shown.getvalue()), sorted(sys.modules)]))
"""


def test_the_help_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW_HELP], capture_output=True, text=True, check=True)
    shown, modules = json.loads(done.stdout)
    assert shown > 500
    assert {module.partition(".")[0] for module in modules} & HEAVY == set()
    assert [m for m in modules if m.startswith(("omniq.storage", "omniq.core", "omniq.worker"))] == []


def test_the_help_answers_at_once() -> None:
    command = [Path(sys.executable).with_name("omniq"), "--help"]
    taken: list[float] = []
    for _ in range(5):
        before, begun = os.times(), time.monotonic()
        subprocess.run(command, capture_output=True, check=True)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        taken.append(min(used, time.monotonic() - begun))  # a busy machine takes longer without working more
    assert min(taken) < 0.3
