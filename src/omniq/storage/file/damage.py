"""Damaged and foreign files in a folder: they are put aside into `corrupt/`, with a report, and the rest goes on."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from omniq.models import new_id
from omniq.storage.file.folder import Folder
from omniq.storage.file.index import Segment
from omniq.storage.file.lines import is_sealed

log = logging.getLogger("omniq.storage")

CORRUPT = "corrupt"


class DamageReport(msgspec.Struct, kw_only=True):
    """The report beside something that was put aside."""

    file: str
    found_at: str
    why: str
    kept_lines: int = 0
    lost: list[str] = []


def lines_of(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yields each line that is not blank: where it begins, its bytes with the newline, and whether it is whole."""
    offset = 0
    # `splitlines` is quicker, but also parts at a \r, which only damaged or foreign lines have.
    for line in data.splitlines(keepends=True) if b"\r" not in data else _split(data):
        if line.strip():
            yield offset, line, line.endswith(b"\n") and is_sealed(line[:-1])
        offset += len(line)


def _split(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def mend(folder: Folder, segment: Segment) -> None:
    """Copy a segment to `corrupt/`, and move its good lines to a new one."""
    lines = list(lines_of(folder.files.read(segment.path)))
    lost = [line[:2000].decode("utf-8", "replace") for _, line, whole in lines if not whole]
    kept = sum(whole for *_, whole in lines)
    put_aside(folder, segment.path, "lines that do not fit their checksum", copy=True, kept_lines=kept, lost=lost)
    segment.live = 0
    folder.rewrite(segment)


def put_aside(folder: Folder, path: str, why: str, copy: bool = False, **more: Any) -> None:
    """Move (or copy) something into `corrupt/`, with a report beside it."""
    now = datetime.now(UTC)
    named = path.encode("utf-8", "backslashreplace").decode()  # whoever planted it may have named it in another encoding
    # A foreign file may have a name of 255 bytes, to which nothing can be added.
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", path)[-80:].lstrip(".")
    target = f"{CORRUPT}/{now:%Y%m%dT%H%M%S}-{new_id()[-8:]}-{safe}"
    report = DamageReport(file=named, found_at=now.isoformat(), why=why, **more)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    # The report first: a crash in between leaves no file in `corrupt/` that nothing explains.
    folder.files.write(f"{target}.report", 0, text + b"\n")
    if copy:
        folder.files.write(target, 0, folder.files.read(path) if folder.files.size(path) is not None else b"")
    else:
        folder.files.rename(path, target)
    if folder.durable:
        if copy:
            folder.files.sync(target)
        folder.files.sync_folder(CORRUPT)
    log.warning("%s: put %s aside as %s: %s", folder.where, named, target, why)
