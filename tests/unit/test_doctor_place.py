"""What the doctor says of the disk below a store."""

import os
import shutil
from pathlib import Path

import pytest

from omniq import FileStorage, SQLiteStorage
from omniq.cli.store import checks as examination

MB = 1024**2


async def found(storage: SQLiteStorage | FileStorage) -> dict[str, examination.Finding]:
    async with storage:
        pass
    return {finding.check: finding for finding in await examination.examine(storage.url, repair=False)}


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [
        (500_000 * MB, 250 * MB, "ok"),
        (500_000 * MB, 150 * MB, "wrong"),
        (1000 * MB, 60 * MB, "ok"),
        (1000 * MB, 40 * MB, "wrong"),
    ],
)
async def test_a_disk_that_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, status: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(total, total - free, free))
    disk = (await found(SQLiteStorage(tmp_path / "q.db")))["disk"]
    assert disk.status == status
    assert f"{free // MB} MB free of {total // MB} MB" in disk.message
    assert ("omniq purge" in disk.remedy) == (status == "wrong")


async def test_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await found(SQLiteStorage(tmp_path / "q.db")))["filesystem"].status == "ok"
    monkeypatch.setattr(examination, "network_fs", lambda path: "nfs4")
    place = (await found(SQLiteStorage(tmp_path / "q.db")))["filesystem"]
    assert (place.status, place.message) == ("wrong", "a network file system (nfs4)")
    assert "local disk" in place.remedy


async def test_the_room_is_that_of_the_store_s_own_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_frsize * os.statvfs(tmp_path).f_blocks // MB
    disk = (await found(FileStorage(tmp_path / "q")))["disk"]
    assert disk.message.endswith(f"of {free} MB")
