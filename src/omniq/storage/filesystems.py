"""Which machine is this, and is a path on a file system of another one, where locks and memory maps cannot be trusted?"""

from __future__ import annotations

import sys
from pathlib import Path

_NETWORK = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "davfs",
        "fuse.ceph",
        "fuse.curlftpfs",
        "fuse.glusterfs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "smb2",
        "smb3",
        "smbfs",
    ]
)


def network_fs(path: Path, mountinfo: str | None = None) -> str | None:
    """The type of the network file system that holds `path`, or None. Only Linux tells; elsewhere the answer is None."""
    if mountinfo is None:
        if sys.platform != "linux":
            return None
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return None
    target = path.resolve()
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        left, dash, right = line.partition(" - ")
        if not dash:
            continue
        mount = Path(left.split(" ")[4].replace("\\040", " "))
        if target.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split(" ")[0]
    return kind if kind in _NETWORK else None


def boot_id() -> str:
    """What names the time since this machine was started: whatever was written since then is still in its memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
