"""Backups: a copy of a store on the disk that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from omniq.errors import Invalid


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Let `write` make something beside `path`, and give it that name when it is complete and on the disk."""
    target = Path(os.path.abspath(path))
    if os.path.lexists(target):
        raise Invalid(f"{target} is there already: name a place for the backup that is not")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    _remove(part)  # of a backup that was cut short
    try:
        write(part)
        # Synced before it gets its name: after a power cut, what has the name is whole.
        for file in (part, *part.rglob("*")):
            if not file.is_symlink():
                _sync(file)
        part.rename(target)
        _sync(target.parent)
    except BaseException:
        _remove(part)
        raise


def copy_database(connection: sqlite3.Connection, path: Path) -> None:
    # One snapshot, while others write. A copy of the file would miss what is still in the log beside it.
    connection.execute("VACUUM INTO ?", (str(path),))


def copy_folder(source: str, path: Path) -> None:
    """Copy all but the locks, which say who works on the original, and special files, such as a pipe that was put aside."""
    top = os.path.abspath(source)
    if Path(top) in path.parents:
        raise Invalid(f"{path.parent} is inside the store: name a place outside of {top} for the backup")
    path.mkdir(mode=0o700)  # nobody else may look in while the copy's own permissions are not set

    def left_out(at: str, names: list[str]) -> set[str]:
        known = (os.path.islink, os.path.isfile, os.path.isdir)
        special = {name for name in names if not any(look(os.path.join(at, name)) for look in known)}
        return special | {"locks"} if os.path.abspath(at) == top else special

    shutil.copytree(top, path, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
