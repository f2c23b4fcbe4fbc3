"""Opaque cursors of `find`: the place after which the next page begins."""

from __future__ import annotations

import base64
import binascii

from omniq.errors import InvalidCursor

SCAN_LIMIT = 100_000  # rows that one page may look at for filters without an index
_FEW = 8  # one task in so many: beyond that, reading on is quicker than looking up


def few(found: int, all: int, scan_limit: int) -> bool:
    """Whether so many of all tasks are better read from an index than found by looking through."""
    return found <= scan_limit and found * _FEW <= all


def encode_cursor(seq: int) -> str:
    return base64.urlsafe_b64encode(f"s{seq}".encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        # `isdigit` alone takes digits of other scripts, and numbers from 2^63 on are too large for SQLite.
        if not text.startswith("s") or not text[1:].isascii() or not text[1:].isdigit() or int(text[1:]) >= 1 << 63:
            raise ValueError(text)
        return int(text[1:])
    except (ValueError, binascii.Error) as exc:
        raise InvalidCursor(f"cursor {cursor[:40]!r} is not one that this store gave out; start without one") from exc
