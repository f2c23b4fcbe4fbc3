"""How a URL finds its driver, and how the URLs of our own stores are read.

`memory://`, `sqlite:///relative.db`, `sqlite:////absolute.db`, `file:///absolute/folder`, `redis://host:6379/0`; other packages
register schemes of their own in the entry point group `omniq.storage`.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from omniq.errors import ConfigError

GROUP = "omniq.storage"
# What pyproject.toml registers in the group; a test compares the two. Our own schemes stand here too, because the metadata of
# the installed packages cost 30 ms to read, which only a scheme of another package shall pay, and because a source tree on
# PYTHONPATH has no metadata. By name, not by import: drivers import the contract, and the contract finds drivers here.
OWN = {
    "memory": "omniq.storage.memory:MemoryStorage",
    "sqlite": "omniq.storage.sqlite.driver:SQLiteStorage",
    "file": "omniq.storage.file.driver:FileStorage",
    "redis": "omniq.storage.redis.driver:RedisStorage",
    "rediss": "omniq.storage.redis.driver:RedisStorage",
}
_EXAMPLES = "sqlite:///path.db, sqlite:////absolute/path.db, file:///absolute/folder, redis://host:6379/0"


def schemes() -> dict[str, str]:
    """Returns every registered scheme with the `module:name` of its driver. Another package cannot replace one of our own."""
    from importlib.metadata import entry_points

    return OWN | {x.name: f"{x.module}:{x.attr}" for x in entry_points(group=GROUP) if x.name not in OWN}


def scheme_of(text: str) -> str:
    """Returns the scheme of a URL; a mere path has none."""
    return text.partition(":")[0] if ":" in text.partition("/")[0] else ""


def backend_of(url: str) -> str:
    """Returns the first scheme that is registered for the driver of a URL: `redis` for `rediss://host/0`."""
    driver, table = _registered(url), OWN if scheme_of(url) in OWN else schemes()
    return next(scheme for scheme, other in table.items() if other == driver)


def driver_of(url: str) -> Callable[..., Any]:
    """Returns the class or function that opens a URL. Raises `ConfigError` if there is none or its import fails."""
    driver = _registered(url)
    module, _, name = driver.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as exc:
        missing = exc.name if isinstance(exc, ModuleNotFoundError) else module
        raise ConfigError(
            f"storage URL {mask(url)!r}: its driver {driver} cannot be imported ({exc}); install what brings {missing!r}"
        ) from exc


def _registered(url: str) -> str:
    scheme = scheme_of(url)
    driver = OWN.get(scheme) or schemes().get(scheme)
    if driver is None:
        raise ConfigError(f"storage URL {mask(url)!r}: unknown scheme {url.partition(':')[0]!r}; {_advice()}")
    return driver


def open_url(url: str, options: dict[str, Any]) -> Any:
    """Make the storage that a URL names."""
    driver = driver_of(url)
    try:
        urlsplit(url)
    except ValueError as exc:
        raise ConfigError(f"storage URL {mask(url)!r}: {exc}; {_advice()}") from None
    if "\0" in unquote(url):
        raise ConfigError(f"storage URL {mask(url)!r}: a name cannot have a NUL in it")
    return driver(url, **options)


def _advice() -> str:
    return f"write a URL such as {_EXAMPLES}, with one of the registered schemes: {', '.join(sorted(schemes()))}"


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
    options: dict[str, Any] = options_of(url, "durability", "allow_network_fs")
    if "allow_network_fs" in options:
        word = options["allow_network_fs"].lower()
        if word not in _WORDS:
            raise ConfigError(f"storage URL {mask(url)!r}: allow_network_fs is true or false, not {word!r}")
        options["allow_network_fs"] = _WORDS[word]
    return options


def options_of(url: str, *known: str) -> dict[str, str]:
    """Returns the options behind the `?` of a URL. Raises `ConfigError` for one that is not known."""
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for key in options.keys() - set(known):
        told = f"; known: {', '.join(sorted(known))}" if known else ""
        raise ConfigError(f"storage URL {mask(url)!r}: unknown option {key!r}{told}")
    return options


_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def mask(url: str) -> str:
    """The URL without its password, fit for a log line; also where characters of it are missing their percent-encoding."""
    return _PASSWORD.sub(r"\1***@", url, count=1)


_PASSWORD = re.compile(r"(://[^/?#@:]*:).+@", re.DOTALL)
