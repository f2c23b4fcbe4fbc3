"""From a function to a command: what typer calls takes one parameter per option, and returns when all is done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine of a command to its end."""
    import asyncio

    return asyncio.run(work)


def command(function: Callable[..., Any]) -> Callable[..., None]:
    """Let a command take options as a struct, each field of which is an option of its own, and be a coroutine function.

    So options that several commands have, or that go on to whoever does the work, are written once.
    """
    signature = inspect.signature(function, eval_str=True)
    structs = {p.name: p.annotation for p in signature.parameters.values() if _is_struct(p.annotation)}
    flat: list[Parameter] = []
    for parameter in signature.parameters.values():
        flat += _fields(structs[parameter.name]) if parameter.name in structs else [_by_name(parameter)]

    @functools.wraps(function)
    def called(**given: Any) -> None:
        for name, kind in structs.items():
            given[name] = kind(**{field: given.pop(field) for field in kind.__struct_fields__})
        done = function(**given)
        if inspect.iscoroutine(done):
            run(done)

    # Typer reads the signature; `inspect` alone would show it the one of the function that is wrapped.
    called.__signature__ = Signature(flat)  # pyright: ignore[reportAttributeAccessIssue]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return called


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


# Reading annotations takes a good part of the time that `omniq --help` takes, and many commands share these structs.
@functools.cache
def _fields(kind: type[msgspec.Struct]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    defaults = (Parameter.empty,) * required + kind.__struct_defaults__
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=hints[name], default=default)
        for name, default in zip(kind.__struct_fields__, defaults, strict=True)
    ]


def _by_name(parameter: Parameter) -> Parameter:
    # So an option that must be given may follow one that need not.
    return parameter.replace(kind=Parameter.KEYWORD_ONLY)
