"""The seam around a running task: subclass `Middleware` and pass instances to `worker(middleware=[…])`."""

from __future__ import annotations

from typing import Any

from omniq.context import TaskContext


class Middleware:
    """Hooks around each run, on the event loop. `before` runs in the order given, `after` and `on_error` in reverse.

    An exception in `before` or `after` fails the run like one of the task; one in `on_error` is logged.
    """

    async def before(self, task: TaskContext) -> None:
        """The task is about to run."""

    async def after(self, task: TaskContext, result: Any) -> None:
        """The task has returned."""

    async def on_error(self, task: TaskContext, error: BaseException) -> None:
        """The run failed; it may be retried."""
