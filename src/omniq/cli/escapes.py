"""Text for a terminal or a log: what they would obey instead of show is written out. Tasks come from programs that the
reader may not trust, and so do their names and the messages of their errors."""

from __future__ import annotations

import functools

# Marks of direction change the order in which a line is shown, and two characters end a line without being a newline.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINE_ENDS = (0x2028, 0x2029)
_SURROGATES = range(0xD800, 0xE000)
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str, keep: str = "") -> str:
    """`\\x1b`, `\\n`, `\\u202e` for controls, line ends and marks of direction, except those of `keep`."""
    return text if text.isprintable() else text.translate(_table(keep))


def escape_json(document: str) -> str:
    """A JSON document in which those stand as `\\u202e`: it says the same. Newlines between its values stay."""
    return document.translate(_json_table())


def indented(text: str, by: str = "    ") -> list[str]:
    """The lines of a text, such as a traceback: none of them begins where the lines around it begin."""
    return [by + escape(line) for line in text.rstrip("\n").split("\n")]


@functools.cache
def _table(keep: str) -> dict[int, str]:
    codes = (*_CONTROLS, *_DIRECTIONS, *_LINE_ENDS, *_SURROGATES)
    return {code: _shown(code) for code in codes if chr(code) not in keep}


@functools.cache
def _json_table() -> dict[int, str]:
    # What is below 0x20 is escaped in JSON texts anyway, and between them it is layout.
    codes = (*range(0x7F, 0xA0), *_DIRECTIONS, *_LINE_ENDS, *_SURROGATES)
    return {code: f"\\u{code:04x}" for code in codes}


def _shown(code: int) -> str:
    return _SHORT.get(chr(code)) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
