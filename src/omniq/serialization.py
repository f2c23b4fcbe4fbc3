"""How arguments and results become bytes.

`MsgspecSerializer` (the default) writes JSON that any language reads. `CloudpickleSerializer` takes any Python object and
runs code when it reads, so a reader accepts it only when its own settings ask for it.
"""

from __future__ import annotations

import base64
import logging
import math
import os
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import msgspec

from omniq.errors import ConfigError, SerializationError

log = logging.getLogger("omniq.serialization")


@runtime_checkable
class Serializer(Protocol):
    """Turns values into bytes that are valid JSON, and back. `name` is stored beside the bytes as their encoding."""

    name: ClassVar[str]

    def encode(self, value: Any) -> bytes: ...

    def decode(self, data: bytes) -> Any: ...


def _refuse(value: Any) -> Any:
    """Refuse a value that JSON lacks, and say what to pass instead."""
    kind = type(value).__name__
    if isinstance(value, os.PathLike):
        raise TypeError(f"{kind} is a path: pass str(path)")
    if callable(getattr(value, "model_dump", None)):
        raise TypeError(f"{kind} is a pydantic model: pass model.model_dump(mode='json')")
    if callable(getattr(value, "tolist", None)):
        raise TypeError(f"{kind} is of NumPy or pandas: pass value.tolist()")
    raise TypeError(f"JSON has nothing for an object of type {kind}")


_encoder = msgspec.json.Encoder(enc_hook=_refuse)
_decoder = msgspec.json.Decoder()


class MsgspecSerializer:
    """JSON by msgspec: plain values, and dates, UUIDs, dataclasses, Structs and enums, which arrive as their JSON form."""

    name: ClassVar[str] = "json"

    def encode(self, value: Any) -> bytes:
        try:
            data = _encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise SerializationError(
                f"{_describe(value)} cannot be stored as JSON: {exc}. Pass plain values (numbers, text, lists, dicts, "
                'dates, dataclasses), or set serializer="cloudpickle" on both sides'
            ) from exc
        if b"null" in data:  # JSON has no NaN, and msgspec writes null for it: refuse what would come back as None
            _refuse_nan(msgspec.to_builtins(value))
        return data

    def decode(self, data: bytes) -> Any:
        try:
            return _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
            raise SerializationError(f"stored value is not valid JSON: {exc}") from exc


class CloudpickleSerializer:
    """Any Python object, by cloudpickle. Reading it runs code: for stores that only trusted programs can write."""

    name: ClassVar[str] = "cloudpickle"

    def __init__(self) -> None:
        log.warning("cloudpickle is on: whoever can write to the store can run code in this process")

    def encode(self, value: Any) -> bytes:
        import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

        try:
            data: bytes = cloudpickle.dumps(value)  # pyright: ignore[reportUnknownMemberType]
        except Exception as exc:
            raise SerializationError(f"{_describe(value)} cannot be pickled: {exc}") from exc
        # As a JSON string: whoever only passes a payload on, such as a line of the folder, need not know what is in it.
        return b'"' + base64.b64encode(data) + b'"'

    def decode(self, data: bytes) -> Any:
        import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

        try:
            return cloudpickle.loads(base64.b64decode(_decoder.decode(data)))
        except Exception as exc:
            raise SerializationError(f"stored value cannot be unpickled: {exc}") from exc


def make_serializer(name: str) -> Serializer:
    """Returns the serializer that the settings name."""
    if name == "msgspec":
        return MsgspecSerializer()
    if name == "cloudpickle":
        return CloudpickleSerializer()
    raise ConfigError(f"serializer {name!r}: use 'msgspec' or 'cloudpickle'")


def decode(data: bytes, encoding: str, serializer: Serializer) -> Any:
    """Decode what was stored as `encoding`. JSON is always read, other encodings only by the serializer of the settings."""
    if encoding == serializer.name:
        return serializer.decode(data)
    if encoding == "json":
        return MsgspecSerializer().decode(data)
    raise SerializationError(
        f"value is encoded as {encoding!r}, which this side does not accept; "
        f'set serializer="{encoding}" (or OMNIQ_SERIALIZER={encoding}) here if you trust the writer'
    )


def _refuse_nan(value: Any) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SerializationError(f"{value} has no JSON form; pass None or text instead")
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            _refuse_nan(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            _refuse_nan(item)


def _describe(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
