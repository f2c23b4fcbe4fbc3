"""An environment for the published client, which has the name of our package: a guest, never a dependency."""

import subprocess
import sys
from pathlib import Path

PUBLISHED = "omniq==4.0.0"


class NoGuest(Exception):
    """The published client cannot be installed here."""


def make_guest(folder: Path) -> str:
    """The Python of a new virtual environment in `folder` that has the published client and nothing of ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check", PUBLISHED]
    done = subprocess.run(install, capture_output=True, text=True, timeout=110)
    if done.returncode:
        raise NoGuest(done.stderr.strip()[-300:])
    return python
