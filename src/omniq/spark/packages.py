"""The packages that the extra `spark` brings, and the error for all of them when one is missing."""

from __future__ import annotations

import importlib

from omniq.errors import ConfigError

PACKAGES = ("matplotlib", "pandas", "pyarrow", "pyspark", "py4j", "numpy")


def require_extra() -> None:
    """Raise `ConfigError` with the command to install it when a package of the extra `spark` is missing."""
    for name in ("pandas", "pyarrow", "pyspark.sql"):
        try:
            importlib.import_module(name)
        except ImportError as exc:
            raise missing(exc) from exc


def missing(exc: ImportError) -> ConfigError:
    """The error to raise when a package of the extra cannot be imported."""
    return ConfigError(f"omniq.spark needs the package {exc.name or 'pyspark'!r}: pip install '.[spark]'")
