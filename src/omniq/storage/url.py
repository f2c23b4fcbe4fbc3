"""One syntax for every store: `memory://`, `sqlite:///relative.db`, `sqlite:////absolute.db`, `file:///dir`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from omniq.errors import ConfigError

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

KNOWN = "memory://, sqlite:///path.db, sqlite:////absolute/path.db"


def driver_for(url: str) -> tuple[type[BaseStorage], dict[str, Any], dict[str, Any]]:
    """The driver's class, the arguments that say what to open, and the options of the query part."""
    scheme, _, _ = url.partition(":")
    if scheme == "memory":
        from omniq.storage.memory import MemoryStorage

        return MemoryStorage, {}, _options(url, set())
    if scheme == "sqlite":
        from omniq.storage.sqlite import SQLiteStorage

        return SQLiteStorage, {"path": sqlite_path(url)}, _options(url, {"durability", "allow_network_fs"})
    raise ConfigError(f"storage URL {mask(url)!r}: unknown scheme {scheme!r}; use one of {KNOWN}")


def sqlite_path(url: str) -> str:
    """`sqlite:///x.db` is relative to the working folder, `sqlite:////x.db` absolute, `sqlite://` and `:memory:` in memory."""
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigError(f"storage URL {url!r} names a host; write sqlite:///{parts.netloc}{parts.path} with three slashes")
    path = unquote(parts.path)[1:]
    if path.endswith("/"):
        raise ConfigError(f"storage URL {url!r} names a folder; give the path of a file")
    return path or ":memory:"


def _options(url: str, allowed: set[str]) -> dict[str, Any]:
    query = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for key in query.keys() - allowed:
        raise ConfigError(
            f"storage URL {mask(url)!r}: unknown option {key!r}" + (f"; known: {', '.join(sorted(allowed))}" if allowed else "")
        )
    options: dict[str, Any] = dict(query)
    if "allow_network_fs" in options:
        options["allow_network_fs"] = query["allow_network_fs"].lower() in ("1", "true", "yes")
    return options


def mask(url: str) -> str:
    """The URL without its password, fit for a log line."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")).geturl()
