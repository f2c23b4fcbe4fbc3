"""The script that runs, under the name by which another process can import it: what it defines is in `__main__` only here."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

MAIN = "__main__"


def module_of(func: Any) -> str | None:
    """The module of a function; for one of the running script the name of that file, if importing the name would find it."""
    module: str | None = getattr(func, "__module__", None)
    code = getattr(inspect.unwrap(func), "__code__", None) if module == MAIN else None
    if code is None or code.co_filename != getattr(sys.modules.get(MAIN), "__file__", None):
        return module
    return _name_of(code.co_filename) or module


def loaded(name: str) -> ModuleType | None:
    """A module that is there without importing it; the running script also under its own name."""
    found = sys.modules.get(name)
    if found is None and name == _name_of(getattr(sys.modules.get(MAIN), "__file__", None)):
        return sys.modules[MAIN]
    return found


@functools.lru_cache(maxsize=8)
def _name_of(file: str | None) -> str | None:
    if file is None:
        return None
    spec = getattr(sys.modules.get(MAIN), "__spec__", None)
    name = Path(file).stem if spec is None else spec.name  # it has a spec when it was started with -m
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    origin = None if found is None else found.origin
    return name if origin is not None and os.path.exists(origin) and os.path.samefile(origin, file) else None
