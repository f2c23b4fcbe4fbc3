"""URLs of Redis stores, and what its extra is for."""

import sys
from typing import Any

import pytest

from omniq import BaseStorage, ConfigError, RedisStorage
from omniq.storage.redis.client import Target, slot_of


@pytest.mark.parametrize(
    ("url", "hosts", "db"),
    [
        ("redis://", [("localhost", 6379)], 0),
        ("redis://example", [("example", 6379)], 0),
        ("redis://example:7000/3", [("example", 7000)], 3),
        ("redis://[::1]:7000/3", [("::1", 7000)], 3),
        ("redis://a:1,b:2/0?cluster=1", [("a", 1), ("b", 2)], 0),
        ("redis://a,b:2/1?sentinel=main", [("a", 26379), ("b", 2)], 1),
    ],
)
def test_a_url_names_hosts_and_a_database(url: str, hosts: list[tuple[str, int]], db: int) -> None:
    target = Target(url)
    assert (target.hosts, target.db, target.tls) == (hosts, db, False)


def test_a_url_may_carry_a_user_a_password_and_tls() -> None:
    target = Target("rediss://me:p%40ss@example:7000/0")
    assert (target.username, target.password, target.tls) == ("me", "p@ss", True)
    assert target.options["ssl"] is True


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis://host/name", "number of a database"),
        ("redis://host/²", "number of a database"),
        ("redis://host:port/0", "name:6379"),
        ("redis://host:70000/0", "name:6379"),
        ("redis://:se/cret@host/0", "%2F"),
        ("redis://host/0?colour=red", "'colour'"),
        ("redis://host/0?cluster=perhaps", "1 or 0"),
        ("redis://host/1?cluster=1", "database 0"),
        ("redis://a,b/0", "several hosts"),
        ("redis://a/0?cluster=1&sentinel=main", "only one"),
    ],
)
def test_a_bad_redis_url_says_what_to_write(url: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        BaseStorage.from_url(url)


def test_the_url_makes_the_storage_and_a_password_is_not_shown() -> None:
    storage = BaseStorage.from_url("redis://me:secret@example:7000/3")
    assert isinstance(storage, RedisStorage)
    with pytest.raises(ConfigError) as caught:
        BaseStorage.from_url("redis://me:secret@example:7000/x")
    assert "secret" not in str(caught.value)


def test_a_cluster_declares_that_queues_are_apart() -> None:
    assert RedisStorage("redis://a/0").capabilities.cross_queue
    assert not RedisStorage("redis://a/0?cluster=1").capabilities.cross_queue


def test_the_slot_is_that_of_the_queue_s_keys() -> None:
    assert slot_of("123456789") == 12739  # the example of the cluster specification


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, Any] = {"redis": None, "redis.asyncio": None, "omniq.storage.redis.client": None}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"\.\[redis\]"):
        RedisStorage("redis://example/0")
