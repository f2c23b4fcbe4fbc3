"""Packed values with texts that are not UTF-8, as clients of other makes may have stored them."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_WORDS = {0xC0: None, 0xC2: False, 0xC3: True}


def in_utf8(packed: bytes) -> bytes:
    """The same message pack, with a replacement character for each byte that is no text. Of lists, texts and numbers only."""
    return msgspec.msgpack.encode(_value(packed, 0)[0])


def _value(data: bytes, at: int) -> tuple[Any, int]:
    """Returns the value at a place, and the place of the next one."""
    head, after = data[at], at + 1
    if head < 0x80 or head >= 0xE0:
        return (head if head < 0x80 else head - 256), after
    if head in _WORDS:
        return _WORDS[head], after
    if head in _NUMBERS:
        return _number(_NUMBERS[head], data, after)
    if 0xA0 <= head < 0xC0:
        return _text(data, after, head - 0xA0)
    if head in _TEXTS:
        size, after = _number(_TEXTS[head], data, after)
        return _text(data, after, size)
    size, after = (head - 0x90, after) if 0x90 <= head < 0xA0 else _number(_LISTS[head], data, after)
    values: list[Any] = []
    for _ in range(size):
        value, after = _value(data, after)
        values.append(value)
    return values, after


def _number(shape: str, data: bytes, at: int) -> tuple[Any, int]:
    (value,) = struct.unpack_from(shape, data, at)
    return value, at + struct.calcsize(shape)


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    return data[at : at + size].decode("utf-8", "replace"), at + size
