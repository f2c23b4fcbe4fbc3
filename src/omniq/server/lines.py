"""Cuts a stream of bytes into lines, and keeps a bounded part of it."""

from __future__ import annotations


class LineBuffer:
    """Takes bytes as they come, and gives complete lines without their ends (LF or CRLF). None stands for a line too long."""

    __slots__ = ("_rest", "_skipping", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = bytearray()
        # Inside a line that is too long: its beginning was dropped, and so is the rest up to its end.
        self._skipping = False

    @property
    def partial(self) -> int:
        """How many bytes of an unfinished line are kept."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[bytes | None]:
        parts = data.split(b"\n")
        rest = parts.pop()
        lines: list[bytes | None] = []
        for part in parts:
            if self._skipping:
                self._skipping = False
                lines.append(None)
                continue
            if self._rest:
                self._rest += part
                part = bytes(self._rest)
                self._rest = bytearray()
            if part.endswith(b"\r"):
                part = part[:-1]
            lines.append(part if len(part) <= self.limit else None)
        if not self._skipping and rest:
            self._rest += rest
            if len(self._rest) > self.limit + 1:  # one more for the CR of a CRLF
                self._rest = bytearray()
                self._skipping = True
        return lines
