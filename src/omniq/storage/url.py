"""One syntax for every store: `memory://`, `sqlite:///relative.db`, `sqlite:////absolute.db`, `file:///absolute/folder`."""

from __future__ import annotations

import importlib
import re
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from omniq.errors import ConfigError

KNOWN = "memory://, sqlite:///path.db, sqlite:////absolute/path.db, file:///absolute/folder, redis://host:6379/0"

# By name, not by import: drivers import the contract, and the contract finds drivers here.
DRIVERS = {
    "memory": "omniq.storage.memory:MemoryStorage",
    "sqlite": "omniq.storage.sqlite.driver:SQLiteStorage",
    "file": "omniq.storage.file.driver:FileStorage",
    "redis": "omniq.storage.redis.driver:RedisStorage",
    "rediss": "omniq.storage.redis.driver:RedisStorage",
}


def open_url(url: str, options: dict[str, Any]) -> Any:
    """Make the storage that a URL names."""
    scheme = url.partition(":")[0]
    if scheme not in DRIVERS:
        raise ConfigError(f"storage URL {mask(url)!r}: unknown scheme {scheme!r}; use one of {KNOWN}")
    try:
        urlsplit(url)
    except ValueError as exc:
        raise ConfigError(f"storage URL {mask(url)!r}: {exc}; use one of {KNOWN}") from None
    if "\0" in unquote(url):
        raise ConfigError(f"storage URL {mask(url)!r}: a name cannot have a NUL in it")
    if scheme == "sqlite":
        given = {"path": sqlite_path(url), **local_options(url)}
    elif scheme == "file":
        given = {"base_dir": file_path(url), **local_options(url)}
    elif scheme == "memory":
        given = _options(url, set())
    else:
        given = {"url": url}
    module, _, name = DRIVERS[scheme].partition(":")
    return getattr(importlib.import_module(module), name)(**{**given, **options})


def sqlite_path(url: str) -> str:
    """`sqlite:///x.db` is relative to the working folder, `sqlite:////x.db` absolute, `sqlite://` and `:memory:` in memory."""
    parts = urlsplit(url)
    if parts.netloc:
        wanted = parts.netloc.rpartition("@")[2] + parts.path
        raise ConfigError(f"storage URL {mask(url)!r} names a host; write sqlite:///{wanted} with three slashes")
    if parts.path and not parts.path.startswith("/"):
        raise ConfigError(f"storage URL {url!r}: write sqlite:///{parts.path} with three slashes (four for an absolute path)")
    path = unquote(parts.path)[1:]
    if path.endswith("/"):
        raise ConfigError(f"storage URL {url!r} names a folder; give the path of a file")
    return path or ":memory:"


def sqlite_url(path: str) -> str:
    """The URL of a path, such that `sqlite_path` gives the path back."""
    return "sqlite://" if path == ":memory:" else "sqlite:///" + quote(path)


def file_path(url: str) -> str:
    """`file:///x` is the absolute folder `/x`, `file:x` the folder `x` of the working folder."""
    parts = urlsplit(url)
    if parts.netloc:
        wanted = parts.netloc.rpartition("@")[2] + parts.path
        raise ConfigError(
            f"storage URL {mask(url)!r} names a host; write file:///{wanted} (absolute) or file:{wanted} (relative)"
        )
    path = unquote(parts.path)
    if not path.strip("/"):
        raise ConfigError(f"storage URL {url!r} names no folder; write file:///absolute/folder or file:relative/folder")
    return path


def file_url(path: str) -> str:
    """The URL of an absolute path, such that `file_path` gives the path back."""
    return "file://" + quote(path)


def local_options(url: str) -> dict[str, Any]:
    return _options(url, {"durability", "allow_network_fs"})


def _options(url: str, allowed: set[str]) -> dict[str, Any]:
    query = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for key in query.keys() - allowed:
        raise ConfigError(
            f"storage URL {mask(url)!r}: unknown option {key!r}" + (f"; known: {', '.join(sorted(allowed))}" if allowed else "")
        )
    options: dict[str, Any] = dict(query)
    if "allow_network_fs" in options:
        word = query["allow_network_fs"].lower()
        if word not in _WORDS:
            raise ConfigError(f"storage URL {mask(url)!r}: allow_network_fs is true or false, not {word!r}")
        options["allow_network_fs"] = _WORDS[word]
    return options


_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def mask(url: str) -> str:
    """The URL without its password, fit for a log line; also where characters of it are missing their percent-encoding."""
    return _PASSWORD.sub(r"\1***@", url, count=1)


_PASSWORD = re.compile(r"(://[^/?#@:]*:).+@", re.DOTALL)
