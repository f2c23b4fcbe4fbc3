"""A task's function on the worker's side: is it async, and which arguments must regain their types after JSON."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

import msgspec

_RICH = (
    datetime,
    date,
    time,
    timedelta,
    Decimal,
    UUID,
    bytes,
    bytearray,
    set,
    frozenset,
    tuple,
    msgspec.Struct,
    enum.Enum,
)


class Runnable:
    """JSON carries a date as text and a dataclass as an object; the function's annotations say what they were."""

    __slots__ = ("_by_name", "_by_place", "func", "is_async")

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        target = func if inspect.isroutine(func) else getattr(func, "__call__", func)  # noqa: B004 - its code is wanted
        self.is_async = inspect.iscoroutinefunction(target)
        self._by_name = _rich_parameters(func)
        self._by_place: list[Any] = []
        if self._by_name:
            names = [p.name for p in inspect.signature(func).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
            self._by_place = [self._by_name.get(name) for name in names]

    def restore(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Convert in place. A value that does not fit its annotation stays as it is: Python does not enforce them either."""
        if not self._by_name:
            return
        for index, hint in enumerate(self._by_place[: len(args)]):
            if hint is not None:
                args[index] = _convert(args[index], hint)
        for name, value in kwargs.items():
            if name in self._by_name:
                kwargs[name] = _convert(value, self._by_name[name])


def _rich_parameters(func: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(func)
        names = inspect.signature(func).parameters
    except Exception:  # annotations may name what cannot be imported here; then nothing is converted
        return {}
    return {name: hint for name, hint in hints.items() if name in names and _is_rich(hint)}


def _is_rich(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, _RICH) or dataclasses.is_dataclass(cast(Any, hint))
    origin: Any = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if isinstance(origin, type):
        kind = cast("type[Any]", origin)
        if issubclass(kind, _RICH) or (issubclass(kind, dict) and inner[:1] not in ((), (str,))):
            return True
    return any(_is_rich(part) for part in inner)


def _convert(value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, str_keys=True)
    except (msgspec.ValidationError, TypeError):
        return value
