"""What the looking calls and the upkeep of every driver refuse before they ask: texts and numbers that no store can keep."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from omniq.models import MAX_AT_ONCE, MAX_COUNT, MAX_TIME_US, check_count, check_encodable
from omniq.operations import Retention

CALLS = ("get", "find", "groups", "events", "run", "task_page", "counts", "workers", "expired", "sweep", "purge", "promote")
_PAGES = ("find", "groups")  # of nothing there is no last one to go on from
_TEXTS = frozenset({"id", "queue", "queues", "lost_workers", "cursor", "run_id", "shard"})
_NUMBERS = {"now_us": (0, MAX_TIME_US), "after": (-1, MAX_COUNT), "upto": (-1, MAX_COUNT), "limit": (0, MAX_AT_ONCE)}

Call = Callable[..., Awaitable[Any]]


def checked(call: Call) -> Call:
    """The same call of a driver, with its arguments looked at first. Raises `Invalid` for the first that is none."""
    names = list(inspect.signature(call).parameters)[1:]
    pages = call.__name__ in _PAGES

    @functools.wraps(call)
    async def looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in zip(names, args, strict=False):
            _check(name, value, pages)
        for name, value in kwargs.items():
            _check(name, value, pages)
        return await call(self, *args, **kwargs)

    return looked_at


def _check(name: str, value: Any, pages: bool) -> None:
    if value is None:
        return
    if name in _TEXTS:
        for text in (value,) if isinstance(value, str) else value:
            check_encodable(text, name)
    elif name in _NUMBERS:
        least, most = _NUMBERS[name]
        check_count(value, name, max(least, int(pages and name == "limit")), most)
    elif isinstance(value, Retention):
        for field in Retention.__struct_fields__:
            if (kept := getattr(value, field)) is not None:
                check_count(kept, field)
