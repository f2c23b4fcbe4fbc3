"""Finds out whose database a file is, without leaving files beside it, as opening it for good would.

The file itself is read through SQLite only: whoever closes a descriptor of it frees all locks that this process has on it, also
those of connections that are in use.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import msgspec

from omniq.errors import StoreForeign, StoreUnavailable
from omniq.storage.sqlite.schema import APPLICATION_ID

# https://www.sqlite.org/fileformat2.html
_HEAD = 108  # the file's header, and that of the page in which the schema begins
_VERSION, _APPLICATION, _CELLS = slice(60, 64), slice(68, 72), slice(103, 105)
_LEAF = 0x0D
_WAL_HEADER, _FRAME_HEADER = 32, 24
MAX_NAMES = 3


class _Head(msgspec.Struct, frozen=True):
    application: int
    version: int
    is_empty: bool  # the schema has no entry


def refuse_foreign(path: str) -> None:
    """Raise `StoreForeign` for a database of another program. A file that is not there, or empty, is fine."""
    try:
        there = os.stat(path)
        if not stat.S_ISREG(there.st_mode):  # a pipe would keep us waiting for ever
            raise StoreUnavailable(f"{path} is a pipe or a device: give the path of a database file")
        if not there.st_size:
            return
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        head = _in_log(Path(f"{path}-wal")) or _in_file(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StoreUnavailable(f"{path}: {exc.strerror}: see who may read and write it") from exc
    if head is None or head.application == APPLICATION_ID:
        return
    if head.application or head.version or not head.is_empty:
        raise StoreForeign(
            f"{path} is a database of another program{_with_tables(path)}: give omniq a file of its own, such as"
            f" {_place_of_its_own(Path(path))}; nothing was written to it"
        )


def _place_of_its_own(path: Path) -> Path:
    """Returns a path beside it, under another name: the file of another program may have the default name of omniq."""
    return path.with_name("omniq.db" if path.name != "omniq.db" else "omniq-tasks.db")


def _looking(path: str) -> closing[sqlite3.Connection]:
    """A connection that takes no locks and leaves the log alone."""
    return closing(sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro&immutable=1", uri=True))


def _in_file(path: str) -> _Head | None:
    try:
        with _looking(path) as connection:
            application, version = (
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            ours = application == APPLICATION_ID
            entries = () if ours else connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
            return _Head(application, version, not entries)
    except sqlite3.Error as exc:
        if exc.sqlite_errorname == "SQLITE_NOTADB":
            raise StoreUnavailable(f"{path}: file is not a database: give omniq a file of its own") from exc
        return None  # damaged: opening it says more


def _in_log(log: Path) -> _Head | None:
    """The first page as the write-ahead log has it: a database that is in use, or was not closed, may be there only."""
    try:
        with log.open("rb") as file:
            heads = [head for page, head in _frames(file) if page == 1]
    except FileNotFoundError:
        return None
    if not heads or len(heads[-1]) < _HEAD:
        return None
    last = heads[-1]
    is_empty = last[100] == _LEAF and not int.from_bytes(last[_CELLS])
    return _Head(int.from_bytes(last[_APPLICATION]), int.from_bytes(last[_VERSION]), is_empty)


def _frames(log: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The number and the head of each page in the log, oldest first. Frames of older logs, with other salt, lie behind them."""
    header = log.read(_WAL_HEADER)
    page_bytes, salt = int.from_bytes(header[8:12]), header[16:24]
    while len(frame := log.read(_FRAME_HEADER)) == _FRAME_HEADER and frame[8:16] == salt:
        head = log.read(_HEAD)
        yield int.from_bytes(frame[:4]), head
        log.seek(page_bytes - len(head), os.SEEK_CUR)


def _with_tables(path: str) -> str:
    """Returns some of its tables, to know it by; without the log, which only their program may touch."""
    try:
        with _looking(path) as connection:
            sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
            names = [row[0] for row in connection.execute(sql)]
    except (sqlite3.Error, UnicodeDecodeError):
        return ""
    told = ", ".join(repr(name) for name in names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
    return f" (with the table{'s' * (len(names) > 1)} {told})" if names else ""
