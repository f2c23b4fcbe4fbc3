"""The command `omniq`.

A command is in the module of its name, `omniq dlq` in `tasks/dlq.py`; a small one of a group is in that of the group. The
modules beside it do the work, and are imported when it runs: `omniq --help` must answer at once.
"""

from __future__ import annotations

from omniq.cli.app import main

__all__ = ["main"]
