"""Whose database a file is, read from its first page without SQLite: opening it would already leave files beside it."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from omniq.errors import StoreForeign, StoreUnavailable
from omniq.storage.sqlite_schema import APPLICATION_ID

# https://www.sqlite.org/fileformat2.html
_MAGIC = b"SQLite format 3\0"
_HEAD = 108  # the file's header, and that of the page in which the schema begins
_VERSION, _APPLICATION, _CELLS = slice(60, 64), slice(68, 72), slice(103, 105)
_LEAF = 0x0D
_WAL_HEADER, _FRAME_HEADER = 32, 24
MAX_NAMES = 3


def refuse_foreign(path: str) -> None:
    """Raise `StoreForeign` for a database of another program. A file that is not there, or empty, is fine."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would keep us waiting for ever
            raise StoreUnavailable(f"{path} is a pipe or a device: give the path of a database file")
        with open(path, "rb") as file:
            head = file.read(_HEAD)
        head = _in_log(Path(f"{path}-wal")) or head
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StoreUnavailable(f"{path}: {exc.strerror}: see who may read and write it") from exc
    if not head:
        return
    if not head.startswith(_MAGIC):
        raise StoreUnavailable(f"{path}: file is not a database: give omniq a file of its own")
    application = int.from_bytes(head[_APPLICATION])
    if application != APPLICATION_ID and (application or int.from_bytes(head[_VERSION]) or not _is_empty(head)):
        raise StoreForeign(
            f"{path} is a database of another program{_with_tables(path)}: give omniq a file of its own, such as"
            f" {Path(path).with_name('omniq.db')}; nothing was written to it"
        )


def _is_empty(head: bytes) -> bool:
    """Whether the schema has no entry."""
    return len(head) >= _CELLS.stop and head[100] == _LEAF and not int.from_bytes(head[_CELLS])


def _in_log(log: Path) -> bytes | None:
    """The first page as the write-ahead log has it: a database that is in use, or was not closed, may be there only."""
    try:
        file = log.open("rb")
    except FileNotFoundError:
        return None
    found = None
    with file:
        start = file.read(_WAL_HEADER)
        if len(start) < _WAL_HEADER:
            return None
        page, salt = int.from_bytes(start[8:12]), start[16:24]
        frame = file.read(_FRAME_HEADER)
        while len(frame) == _FRAME_HEADER and frame[8:16] == salt:
            if int.from_bytes(frame[:4]) == 1:
                found = file.read(_HEAD)
                file.seek(page - len(found), 1)
            else:
                file.seek(page, 1)
            frame = file.read(_FRAME_HEADER)
    return found


def _with_tables(path: str) -> str:
    """Some of its tables, to know it by; without the log, which only their program may touch."""
    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?immutable=1", uri=True)) as connection:
            sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
            names = [row[0] for row in connection.execute(sql)]
    except (sqlite3.Error, UnicodeDecodeError):
        return ""
    told = ", ".join(repr(name) for name in names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
    return f" (with the table{'s' * (len(names) > 1)} {told})" if names else ""
