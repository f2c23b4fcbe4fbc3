"""Which file systems belong to another machine, and which of fsspec's can keep the promises of a folder."""

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from omniq import FileStorage, MemoryStorage, SQLiteStorage, StoreUnavailable
from omniq.errors import ConfigError
from omniq.storage import local as local_module
from omniq.storage.base import BaseStorage
from omniq.storage.filesystems import network_fs

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /srv/share rw,relatime shared:2 - nfs4 server:/export rw,vers=4.2
31 30 8:2 / /srv/share/local rw,relatime - xfs /dev/sdb1 rw
32 22 0:41 / /srv/with\\040space rw,relatime - cifs //server/share rw
33 22 0:42 / /users/me/cloud rw,nosuid - fuse.sshfs me@host: rw
34 22 0:43 / /tmp rw shared:9 master:1 - tmpfs tmpfs rw
35 22 0:44 / /over rw,relatime - overlay overlay rw,lowerdir=/a:/b
36 22 0:45 / /twice rw - nfs server:/old rw
37 36 8:3 / /twice rw - ext4 /dev/sdc1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/q.db", None),
        ("/srv/share/q.db", "nfs4"),
        ("/srv/share/deep/er/q.db", "nfs4"),
        ("/srv/sharewith/q.db", None),
        ("/srv/share/local/q.db", None),
        ("/srv/with space/q.db", "cifs"),
        ("/users/me/cloud/q.db", "fuse.sshfs"),
        ("/tmp/q.db", None),
        ("/over/q.db", None),
        ("/twice/q.db", None),
    ],
)
def test_the_nearest_mount_decides_and_the_last_one_on_a_place_covers_the_others(path: str, kind: str | None) -> None:
    assert network_fs(Path(path), MOUNTS) == kind


def test_an_empty_or_odd_mount_table_refuses_nothing() -> None:
    assert network_fs(Path("/x"), "") is None
    assert network_fs(Path("/x"), "\n") is None


def test_the_test_folder_itself_is_local(tmp_path: Path) -> None:
    assert network_fs(tmp_path / "q.db") is None


@pytest.mark.parametrize("kind", [SQLiteStorage, FileStorage])
async def test_a_network_file_system_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[SQLiteStorage] | type[FileStorage]
) -> None:
    monkeypatch.setattr(local_module, "network_fs", lambda path: "nfs4")
    refused = kind(tmp_path / "q")
    with pytest.raises(StoreUnavailable, match=r"nfs4.*allow_network_fs=True"):
        await refused.open()
    await refused.close()
    assert not (tmp_path / "q").exists()
    async with kind(tmp_path / "q", allow_network_fs=True) as allowed:
        assert await allowed.queues() == []


def test_of_fsspec_the_local_file_system_is_the_folder_itself(tmp_path: Path) -> None:
    local = fsspec.filesystem("file")
    assert FileStorage(tmp_path / "q", fs=local).path == str(tmp_path / "q")
    inside = FileStorage("q", fs=DirFileSystem(str(tmp_path), local))
    assert inside.path == str(tmp_path / "q")
    assert inside.capabilities.durability == "power"


async def test_the_memory_of_fsspec_touches_no_disk_and_the_memory_url_is_another_store(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    async with FileStorage(f"{tmp_path}/q", fs=memory) as storage:
        assert await storage.queues() == []
        assert memory.exists(f"{tmp_path}/q/README")
    assert list(tmp_path.iterdir()) == []
    memory.rm(f"{tmp_path}/q", recursive=True)
    assert isinstance(BaseStorage.from_url("memory://"), MemoryStorage)


@pytest.mark.parametrize(
    ("fs", "name"),
    [
        (fsspec.filesystem("data"), "data"),
        (fsspec.filesystem("simplecache", target_protocol="memory"), "simplecache"),
        (DirFileSystem("/bucket", fsspec.filesystem("data")), "data"),
        ("memory", "str"),
    ],
)
def test_an_fsspec_file_system_that_cannot_keep_the_promises_is_refused_and_told_why(fs: object, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*no atomic rename.*no locks.*use a local folder"):
        FileStorage("q", fs=fs)
