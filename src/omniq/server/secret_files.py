"""Files that hold a secret, and who else can read them."""

from __future__ import annotations

import os
import stat


def readable_by_others(path: str, what: str) -> str | None:
    """Returns a warning if the file's mode lets other users read it. None if not, and where modes mean nothing."""
    if os.name != "posix":
        return None
    try:
        mode = os.stat(path).st_mode
    except OSError:  # whoever reads it says what is wrong
        return None
    if not mode & (stat.S_IRGRP | stat.S_IROTH):
        return None
    return f"other users can read the {what} {path} (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
