"""Which file systems belong to another machine."""

from pathlib import Path

import pytest

from omniq import SQLiteStorage, StoreUnavailable
from omniq.storage import local as local_module
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


def test_a_network_file_system_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(local_module, "network_fs", lambda path: "nfs4")

    async def body() -> None:
        refused = SQLiteStorage(tmp_path / "q.db")
        with pytest.raises(StoreUnavailable, match=r"nfs4.*allow_network_fs=True"):
            await refused.open()
        await refused.close()
        assert not (tmp_path / "q.db").exists()
        async with SQLiteStorage(tmp_path / "q.db", allow_network_fs=True) as allowed:
            assert await allowed.queues() == []

    asyncio.run(body())
