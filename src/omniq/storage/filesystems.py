"""Tells network file systems, whose locks and memory maps cannot be trusted; and one file, or one boot, from another."""

from __future__ import annotations

import os
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
        # The kernel writes a blank in a path as \040.
        mount = Path(left.split(" ")[4].replace("\\040", " "))
        # Of two mounts on the same place the later one hides the other, hence >=.
        if target.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split(" ")[0]
    return kind if kind in _NETWORK else None


def identity(path: str | None) -> tuple[int, int] | None:
    """Returns what tells a file or folder from one that was put in its place later; None where there is none."""
    try:
        found = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)


def boot_id() -> str:
    """Returns the name of the time since this machine was started. What was written since then is still in its memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
