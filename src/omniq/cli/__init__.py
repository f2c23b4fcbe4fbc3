"""The command `omniq`."""

from __future__ import annotations

from omniq.cli.app import main

__all__ = ["main"]
