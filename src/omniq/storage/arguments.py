"""Refuses texts and numbers that no store can keep, in the looking calls and the upkeep of every driver."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from omniq.models import MAX_AT_ONCE, MAX_COUNT, MAX_TIME_US, check_count, check_encodable
from omniq.operations import Retention

# Each call of a driver that takes texts or numbers, but for those that check the name of their queue anyway.
CALLS = (
    *("get", "results", "find", "groups", "events", "events_of", "run", "task_page", "counts", "workers"),
    *("expired", "sweep", "purge", "promote"),
)
_PAGES = ("find", "groups")  # of nothing there is no last one to go on from
TEXTS = frozenset({"id", "ids", "queue", "queues", "lost_workers", "cursor", "run_id", "shard"})
NUMBERS = {"now_us": (0, MAX_TIME_US), "after": (-1, MAX_COUNT), "upto": (-1, MAX_COUNT), "limit": (0, MAX_AT_ONCE)}

Call = TypeVar("Call", bound=Callable[..., Awaitable[Any]])


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

    return cast(Call, looked_at)


def _check(name: str, value: Any, pages: bool) -> None:
    if value is None:
        return
    if name in TEXTS:
        for text in (value,) if isinstance(value, str) else value:
            check_encodable(text, "task id" if name in ("id", "ids") else name)
    elif name in NUMBERS:
        least, most = NUMBERS[name]
        check_count(value, name, max(least, int(pages and name == "limit")), most)
    elif isinstance(value, Retention):
        for field in Retention.__struct_fields__:
            if (kept := getattr(value, field)) is not None:
                check_count(kept, field)
