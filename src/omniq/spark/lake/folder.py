"""The folder that a lake lives in: whole files, moved and replaced at once, and locks that a dead process loses.

Everything that touches the file system of the driver is in this module; Spark itself gets paths only.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from omniq.errors import LakeError
from omniq.storage import locks


class LakeFolder:
    """Files below one root, by names with slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> str:
        return str(self.root / name)

    def address(self, name: str) -> str:
        """The same for Spark, whose default file system may be another one."""
        return f"file://{self.root / name}"

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Replace a file at once: a reader sees the old or the new one, also after a crash."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a rename works within one file system.
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # The file is on the disk before its name, or a power cut could leave a name with nothing behind it.
        draft.replace(target)
        _sync_folder(target.parent)

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted."""
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(self.root / name) if entry.is_dir())
        return []

    def parquet(self, name: str) -> list[str]:
        """The Parquet files below a folder, sorted."""
        return sorted(str(path.relative_to(self.root)) for path in (self.root / name).rglob("*.parquet"))

    def age_s(self, name: str) -> float:
        """Seconds since a file was written; infinite for a file that is gone."""
        try:
            return datetime.now(UTC).timestamp() - (self.root / name).stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def move(self, source: str, target: str) -> list[str]:
        """Move the Parquet files of one folder into another, replacing it, and wait until they are on the disk."""
        # A batch that was killed and is repeated has the same folder, with files of other names in it.
        into = self.root / target
        if into.exists():
            shutil.rmtree(into)
        into.mkdir(parents=True)
        moved: list[str] = []
        for file in sorted((self.root / source).glob("*.parquet")):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
            file.replace(into / file.name)
            moved.append(f"{target}/{file.name}")
        _sync_folder(into)
        _sync_folder(into.parent)
        return moved

    def remove_tree(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files, and the folders that are empty after that."""
        for name in names:
            file = self.root / name
            file.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                file.parent.rmdir()
                file.parent.parent.rmdir()

    @contextmanager
    def lock(self, name: str, what: str, *, wait: bool = False) -> Generator[None]:
        """Hold a lock; the kernel frees that of a dead process. Raises `LakeError` if it is held, unless told to wait."""
        file = self.root / "_locks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # Not emptied on opening: the text is that of the holder until this process holds the lock itself.
        with file.open("a+") as handle:
            try:
                locks.flock(handle.fileno(), locks.EXCLUSIVE | (0 if wait else locks.AT_ONCE))
            except BlockingIOError:
                handle.seek(0)
                raise LakeError(f"the lake {self.root} is in use: {_holder(handle.read())}; wait for it to end") from None
            handle.truncate(0)
            handle.write(
                json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "what": what, "since": _now()}, sort_keys=True)
            )
            handle.flush()
            yield


def _holder(text: str) -> str:
    try:
        held = json.loads(text)
        return f"{held['what']} by process {held['pid']} on {held['host']} since {held['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process writes"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
