"""The journal of a file store: all that a commit writes is first appended here, in one piece.

A record is a line of JSON (which bytes go to which place of which file, which stretches are blanked, which files go, which
small rows change), then the bytes themselves, then a line with the checksum of it all. A commit has happened when its record
is whole on disk. Everything in it can be done twice, so whoever finds the remains of a dead process does it again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import msgspec

from omniq.storage.file.changes import Rows

FOLDER = "journal"
_START = b'{"commit":'  # fields are written in the order of the class, so every head begins so


class Commit(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The head of a record. Files are named by their paths, places by offset and length."""

    commit: int
    puts: list[tuple[str, int, int]] = []
    blanks: list[tuple[str, int, int]] = []
    drops: list[str] = []
    gone: list[str] = []
    unkept: list[str] = []
    keys_gone: list[tuple[str, str]] = []
    rows: Rows = msgspec.field(default_factory=Rows)


class JournalRecord(msgspec.Struct, frozen=True):
    """A whole record in a journal: its head, its bytes, and where it ends."""

    head: Commit
    body: bytes
    end: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Commit).decode


def journal_path(number: int) -> str:
    return f"{FOLDER}/{number:012d}.log"


def record_of(head: Commit, body: Sequence[bytes]) -> bytes:
    data = b"".join((_encode(head), b"\n", *body))
    return b'%b{"end":%d,"sum":"%08x"}\n' % (data, head.commit, zlib.crc32(data))


def read_record(data: bytes, at: int) -> JournalRecord | None:
    """Returns the record that begins at a place, if it is whole."""
    newline = data.find(b"\n", at)
    if newline < 0 or not data.startswith(_START, at):
        return None
    try:
        head = _decode(memoryview(data)[at:newline])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    start = newline + 1
    stop = start + sum(length for _, _, length in head.puts)
    end = data.find(b"\n", stop) + 1
    if end <= 0 or data[stop:end] != b'{"end":%d,"sum":"%08x"}\n' % (head.commit, zlib.crc32(memoryview(data)[at:stop])):
        return None
    return JournalRecord(head, data[start:stop], end)


def records(data: bytes) -> Iterator[JournalRecord]:
    """Yields the whole records from the start of `data` up to the first that is not."""
    at = 0
    while (found := read_record(data, at)) is not None:
        yield found
        at = found.end


def next_start(data: bytes, at: int) -> int | None:
    """Returns the place where the next record may begin, behind one that cannot be read."""
    found = data.find(b"\n" + _START, at)
    return None if found < 0 else found + 1
