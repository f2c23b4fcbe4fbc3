"""Storage URLs."""

import os
from pathlib import Path

import pytest

from omniq import BaseStorage, ConfigError, MemoryStorage, SQLiteStorage, StoreUnavailable
from omniq.storage import local as local_module
from omniq.storage.url import mask, sqlite_path


def _file(path: str) -> str:
    return path if path == ":memory:" else os.path.abspath(path)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///x.db", "x.db"),
        ("sqlite:///sub/x.db", "sub/x.db"),
        ("sqlite:////x.db", "/x.db"),
        ("sqlite:////var/lib/x.db", "/var/lib/x.db"),
        ("sqlite:///with%20space.db", "with space.db"),
        ("sqlite://", ":memory:"),
        ("sqlite:///:memory:", ":memory:"),
        ("sqlite:///x.db?durability=process", "x.db"),
    ],
)
def test_three_slashes_are_relative_and_four_absolute(url: str, path: str) -> None:
    assert sqlite_path(url) == path
    storage = BaseStorage.from_url(url)
    assert isinstance(storage, SQLiteStorage)
    assert storage.path == _file(path)


def test_memory_needs_nothing_more() -> None:
    assert isinstance(BaseStorage.from_url("memory://"), MemoryStorage)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("sqlite://host/x.db", "three slashes"),
        ("sqlite:///folder/", "path of a file"),
        ("sqlite:x.db", "sqlite:///"),
        ("sqlite:///x.db?colour=red", "'colour'"),
        ("sqlite:///x.db?durability=some", "'process'"),
        ("sqlite:///x.db?allow_network_fs=perhaps", "allow_network_fs"),
        ("memory://?size=5", "'size'"),
        ("mysql://host/db", "unknown scheme"),
        ("redis://[", "Invalid IPv6 URL"),
        ("sqlite:///a%00b.db", "NUL"),
        ("x.db", "sqlite:///"),
        ("", "sqlite:///"),
    ],
)
def test_a_bad_url_is_an_error_that_says_what_to_write(url: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        BaseStorage.from_url(url)


@pytest.mark.parametrize("url", ["sqlite://u:secret@host/x.db", "file://u:secret@host/x", "mysql://u:se/secret@host/x"])
def test_a_bad_url_keeps_its_password_for_itself(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BaseStorage.from_url(url)
    assert "secret" not in str(caught.value)


async def test_the_query_part_becomes_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "network_fs", lambda path: "nfs4")
    async with BaseStorage.from_url(f"sqlite:///{tmp_path}/x.db?durability=process&allow_network_fs=true") as storage:
        assert isinstance(storage, SQLiteStorage)
        assert storage.capabilities.durability == "process"
    refusing = BaseStorage.from_url(f"sqlite:///{tmp_path}/x.db?allow_network_fs=false")
    assert isinstance(refusing, SQLiteStorage)
    with pytest.raises(StoreUnavailable, match="network file system"):
        await refusing.open()


def test_a_url_given_to_the_constructor_keeps_its_options(tmp_path: Path) -> None:
    storage = SQLiteStorage(f"sqlite:///{tmp_path}/x.db?durability=process")
    assert storage.path == f"{tmp_path}/x.db"
    assert storage.capabilities.durability == "process"


@pytest.mark.parametrize("path", ["x.db", "/tmp/with space.db", "50%25.db", "what?.db", "part#1.db", ":memory:"])
def test_the_url_of_a_storage_opens_the_same_place(path: str) -> None:
    again = BaseStorage.from_url(SQLiteStorage(path).url)
    assert isinstance(again, SQLiteStorage)
    assert again.path == _file(path)


def test_a_path_may_be_a_path_object(tmp_path: Path) -> None:
    assert SQLiteStorage(tmp_path / "x.db").path == str(tmp_path / "x.db")


def test_an_empty_path_and_a_bad_durability_are_refused() -> None:
    with pytest.raises(ConfigError):
        SQLiteStorage("")
    with pytest.raises(ConfigError, match="durability"):
        SQLiteStorage("x.db", durability="some")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@host/0", "redis://user:***@host/0"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://user@host", "redis://user@host"),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("redis://u:p%40w@host", "redis://u:***@host"),
        ("redis://:p/w@host/0", "redis://:***@host/0"),
        ("redis://:p#w?@y@host/0", "redis://:***@host/0"),
        ("redis://u:pw@[::1", "redis://u:***@[::1"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("file:///a:b@c", "file:///a:b@c"),
    ],
)
def test_a_password_is_masked(url: str, shown: str) -> None:
    assert mask(url) == shown
