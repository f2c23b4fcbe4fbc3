"""File layers that go wrong on purpose: one that fails or stops at a chosen call, one that forgets what was not synced."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from omniq.storage.file.disk import Files, Kind
from support.inside import InsideStorage

How = Literal["fail", "stop"]


class Stopped(Exception):
    """The process is dead: nothing that it still does reaches the folder."""


class FaultyFiles:
    """Passes calls on and counts them. After `arm`, the N-th from then on goes wrong.

    "fail" raises an `OSError` once, after a part of the data if `torn`, and works again afterwards; "stop" raises at every
    later call too. `close` always lets go of the real locks and descriptors, as the kernel would. `unlock` never fails: the
    kernel has no reason to refuse it.
    """

    def __init__(self, inner: Files, syncs: bool = False) -> None:
        self._inner = inner
        self._syncs = syncs  # a kill -9 needs no disk: tests of it are faster without
        self.kinds: list[str] = []
        self.fired = False
        self._at = 0
        self._how: How = "fail"
        self._errno = errno.EIO
        self._torn = False
        self._locked = False

    def arm(self, at: int, how: How, error: int = errno.EIO, torn: bool = False) -> None:
        self.kinds.clear()
        self.fired = False
        self._at, self._how, self._errno, self._torn = at, how, error, torn

    def disarm(self) -> None:
        self._at = 0

    def _call(self, kind: str, part: Callable[[], None] | None = None) -> None:
        self.kinds.append(kind)
        if not self._at:
            return
        if len(self.kinds) == self._at and not (self._how == "fail" and kind == "unlock"):
            self.fired = True
            if self._torn and part is not None:
                part()
            if self._how == "fail":
                raise OSError(self._errno, os.strerror(self._errno))
        if self.fired and self._how == "stop":
            raise Stopped(f"at call {self._at}")

    def lock(self) -> None:
        self._call("lock")
        self._inner.lock()
        self._locked = True

    def unlock(self) -> None:
        self._call("unlock")
        self._locked = False
        self._inner.unlock()

    def names(self, folder: str) -> list[tuple[str, Kind]]:
        self._call("names")
        return self._inner.names(folder)

    def make_folder(self, folder: str) -> None:
        self._call("make_folder")
        self._inner.make_folder(folder)

    def size(self, path: str) -> int | None:
        self._call("size")
        return self._inner.size(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._call("read")
        return self._inner.read(path, offset, length)

    def write(self, path: str, offset: int, data: bytes) -> None:
        self._call("write", lambda: self._inner.write(path, offset, data[: len(data) // 2]))
        self._inner.write(path, offset, data)

    def truncate(self, path: str, size: int) -> None:
        self._call("truncate")
        self._inner.truncate(path, size)

    def sync(self, path: str) -> None:
        self._call("sync")
        if self._syncs:
            self._inner.sync(path)

    def sync_folder(self, folder: str) -> None:
        self._call("sync_folder")
        if self._syncs:
            self._inner.sync_folder(folder)

    def rename(self, old: str, new: str) -> None:
        self._call("rename")
        self._inner.rename(old, new)

    def remove(self, path: str) -> None:
        self._call("remove")
        self._inner.remove(path)

    def forget(self, path: str) -> None:
        self._inner.forget(path)

    def close(self) -> None:
        if self._locked:
            self._locked = False
            self._inner.unlock()
        self._inner.close()


class LossyFiles(FaultyFiles):
    """Remembers every change in order, so that the folder can be built as a power cut would leave it."""

    def __init__(self, inner: Files, base: Path) -> None:
        super().__init__(inner)
        self.changes: list[tuple[Any, ...]] = []
        self._first = {str(p.relative_to(base)): p.read_bytes() if p.is_file() else None for p in sorted(base.rglob("*"))}

    def make_folder(self, folder: str) -> None:
        self.changes.append(("make_folder", folder))
        super().make_folder(folder)

    def write(self, path: str, offset: int, data: bytes) -> None:
        self.changes.append(("write", path, offset, data))
        super().write(path, offset, data)

    def truncate(self, path: str, size: int) -> None:
        self.changes.append(("truncate", path, size))
        super().truncate(path, size)

    def sync(self, path: str) -> None:
        self.changes.append(("sync", path))
        super().sync(path)

    def sync_folder(self, folder: str) -> None:
        self.changes.append(("sync_folder", folder))
        super().sync_folder(folder)

    def rename(self, old: str, new: str) -> None:
        self.changes.append(("rename", old, new))
        super().rename(old, new)

    def remove(self, path: str) -> None:
        self.changes.append(("remove", path))
        super().remove(path)

    def after_power_cut(self, target: Path, upto: int, dice: random.Random, luck: float) -> None:
        """Build the folder that is left when power goes after so many changes; `luck` of what was not synced is there."""
        disk = _Disk(self._first)
        for kind, *arguments in self.changes[:upto]:
            getattr(disk, kind)(*arguments)
        disk.build(target, dice, luck)


class _Content:
    """The bytes of a file: those surely on disk, and the changes since."""

    def __init__(self, synced: bytes = b"") -> None:
        self.synced = synced
        self.pending: list[tuple[int, bytes | None]] = []  # an offset and data, or a size and None

    def sync(self) -> None:
        self.synced = _changed(self.synced, self.pending)
        self.pending = []

    def left(self, dice: random.Random, luck: float) -> bytes:
        kept = [change for change in self.pending if dice.random() < luck]
        if kept and luck < 1 and dice.random() < 0.5:  # sectors go one by one
            at, data = kept[-1]
            kept[-1] = (at, None if data is None else data[: dice.randrange(len(data) + 1)])
        return _changed(self.synced, kept)


def _changed(data: bytes, changes: list[tuple[int, bytes | None]]) -> bytes:
    found = bytearray(data)
    for at, new in changes:
        if len(found) < at:
            found.extend(bytes(at - len(found)))
        if new is None:
            del found[at:]
        else:
            found[at : at + len(new)] = new
    return bytes(found)


class _Disk:
    """A folder as programs see it, and as it surely is on disk. A file is there when its folder was synced."""

    def __init__(self, first: dict[str, bytes | None]) -> None:
        self._seen = {path: None if data is None else _Content(data) for path, data in first.items()}
        self._sure = dict(self._seen)
        self._pending: list[tuple[str, str, _Content | None]] = []  # (path that goes, path that comes, what it is)

    def make_folder(self, folder: str) -> None:
        if folder not in self._seen:
            self._seen[folder] = None
            self._pending.append(("", folder, None))

    def write(self, path: str, offset: int, data: bytes) -> None:
        content = self._seen.get(path)
        if content is None:
            content = self._seen[path] = _Content()
            self._pending.append(("", path, content))
        content.pending.append((offset, data))

    def truncate(self, path: str, size: int) -> None:
        content = self._seen.get(path)
        assert content is not None
        content.pending.append((size, None))

    def sync(self, path: str) -> None:
        content = self._seen.get(path)
        if content is not None:
            content.sync()

    def sync_folder(self, folder: str) -> None:
        wanted = [c for c in self._pending if any(p and p.rpartition("/")[0] == folder for p in c[:2])]
        self._pending = [c for c in self._pending if c not in wanted]
        _carry_out(self._sure, wanted)

    def rename(self, old: str, new: str) -> None:
        content = self._seen.pop(old)
        self._seen[new] = content
        self._pending.append((old, new, content))

    def remove(self, path: str) -> None:
        if self._seen.pop(path, None) is not None:
            self._pending.append((path, "", None))

    def build(self, target: Path, dice: random.Random, luck: float) -> None:
        entries = dict(self._sure)
        _carry_out(entries, [change for change in self._pending if dice.random() < luck])
        target.mkdir()
        for path, content in sorted(entries.items()):
            if not (target / path).parent.is_dir():
                continue  # its folder was never on disk
            if content is None:
                (target / path).mkdir()
            else:
                (target / path).write_bytes(content.left(dice, luck))


def _carry_out(entries: dict[str, _Content | None], changes: list[tuple[str, str, _Content | None]]) -> None:
    for old, new, content in changes:
        if old:
            entries.pop(old, None)
        if new:
            entries[new] = content


class LayeredStorage(InsideStorage):
    """A file store on a layer of the test's choice; `files` is that layer once the store was opened."""

    def __init__(self, base_dir: Path, layer: Callable[[Files], FaultyFiles] = FaultyFiles, **options: Any) -> None:
        super().__init__(base_dir, **options)
        self._layer = layer
        self.files: FaultyFiles

    def _make_files(self) -> Files:
        self.files = self._layer(super()._make_files())
        return self.files
