"""A real browser, of the system's packages."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def browse(address: str, profile: Path, *flags: str) -> str:
    """Open a page without a window; what the browser printed."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("NO BROWSER: install Debian's chromium to see the pages drawn")
    always = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", f"--user-data-dir={profile}"]
    done = subprocess.run([found, *always, *flags, address], check=True, timeout=60, capture_output=True, text=True)
    return done.stdout
