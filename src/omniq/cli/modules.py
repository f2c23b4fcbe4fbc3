"""Importing a user's modules from the working folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from omniq.errors import ConfigError, Invalid
from omniq.tasks import REGISTRY, TaskFunction, func_path, module_meant

if TYPE_CHECKING:
    from omniq.core import Func


def import_modules(modules: Sequence[str]) -> None:
    """Import them, with the working folder on the import path. What goes wrong is a `ConfigError`."""
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules:
        _refuse_file(module)
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name is not None and (module == exc.name or module.startswith(exc.name + ".")):
                raise ConfigError(
                    f"no module {module!r}: give it as in 'import {module}', from the folder where that works"
                ) from exc
            raise ConfigError(f"module {module!r} cannot be imported: {exc}") from exc
        # SystemExit too: a script that was never meant to be imported ends the worker otherwise.
        except (Exception, SystemExit) as exc:
            raise ConfigError(f"module {module!r} cannot be imported: {type(exc).__name__}: {exc}") from exc


def function_of(name: str, modules: Sequence[str]) -> Func:
    """Returns the function that a name means, so that its arguments can be checked; the name if its module is not imported."""
    module, _, path = name.partition(":")
    if name in REGISTRY or module not in modules:
        return name
    found: Any = sys.modules[module]
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise Invalid(f"module {module!r} has no {path!r}: check the name {name!r}") from None
    try:
        known = isinstance(found, TaskFunction) or func_path(found) == name
    # It has another path, if any; a worker may find it by this one.
    except Invalid:
        known = False
    return cast("Func", found) if known else name


def _refuse_file(module: str) -> None:
    name, colon, _ = module.partition(":")
    if colon:
        raise ConfigError(f"{module!r} names a function: give its module, {name}")
    # A package may have a module `py`: only where no such folder is, `jobs.py` must be meant as a file.
    if "/" in module or (module.endswith(".py") and not os.path.isdir(module.removesuffix(".py"))):
        name = module_meant(module)
        raise ConfigError(f"{module!r} names a file: give its module, like {name}, from the folder where 'import {name}' works")
