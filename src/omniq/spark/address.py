"""Where a store is, for programs that run in many processes: drivers and executors open it on their own.

A URL may be given as `env:NAME`, and then only that name travels: passwords stay out of plans, logs and pickles.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Generator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import msgspec

from omniq.errors import ConfigError, StoreUnavailable
from omniq.storage.bulk import Bulk, open_bulk
from omniq.storage.filesystems import boot_id
from omniq.storage.url import file_path, file_url, mask, sqlite_path, sqlite_url

ENV = "env:"
SHARE = "a SQLite file or a folder cannot be shared between machines; keep the tasks in Redis (redis://host:6379/0)"


class Address(msgspec.Struct, frozen=True):
    """A store that one process has seen and others shall open: the same one, and not a new one of that name.

    `machine` is where it was seen, of a store that belongs to one machine.
    """

    url: str
    store: str
    machine: str = ""

    def __repr__(self) -> str:
        return f"Address({mask(self.url)!r}, {self.store!r}, {self.machine!r})"

    @contextmanager
    def opened(self) -> Generator[Bulk, None, None]:
        """The bulk side of this store. Raises `StoreUnavailable` on a machine where it cannot be this one."""
        if self.machine and self.machine != machine():
            raise StoreUnavailable(f"{mask(self.url)} was opened on another machine than {platform.node()}: {SHARE}")
        with existing(self.url) as bulk:
            found = bulk.info().store_id
            if found != self.store:
                raise StoreUnavailable(f"{mask(self.url)} holds the store {found} and not {self.store}: it was replaced")
            yield bulk


@contextmanager
def existing(url: str) -> Generator[Bulk, None, None]:
    """Open a store that is there; raises `StoreUnavailable` instead of making one."""
    real = resolved(url)
    with closing(open_bulk(real)) as bulk:
        if not bulk.call(bulk.storage.exists()):
            raise StoreUnavailable(f"no store at {mask(real)} on {platform.node()}: check the URL")
        bulk.call(bulk.storage.open())
        yield bulk


def address_of(url: str, store: str) -> Address:
    """What other processes need to open the same store, which has this id."""
    return Address(anchored(url), store, machine() if is_file(resolved(url)) else "")


def resolved(url: str) -> str:
    """The URL itself, also where it is given as `env:NAME`."""
    if not url.startswith(ENV):
        return url
    name = url.removeprefix(ENV)
    found = os.environ.get(name)
    if not found:
        raise ConfigError(
            f"url {url!r}: the variable {name} is not set on {platform.node()}; set it before the session starts, "
            f"and for executors of a cluster with spark.executorEnv.{name}"
        )
    return found


def anchored(url: str) -> str:
    """The URL with an absolute path, since every process has a working folder of its own; `env:NAME` of a server stays."""
    real = resolved(url)
    if not is_file(real):
        return url
    query = urlsplit(real).query
    if real.startswith("sqlite:"):
        absolute = sqlite_url(os.path.abspath(sqlite_path(real)))
    else:
        absolute = file_url(os.path.abspath(file_path(real)))
    return f"{absolute}?{query}" if query else absolute


def is_file(url: str) -> bool:
    """Whether a store belongs to one machine. Raises `ConfigError` for one that lives inside a single process."""
    scheme = url.partition(":")[0]
    if scheme == "memory" or (scheme == "sqlite" and sqlite_path(url) == ":memory:"):
        raise ConfigError(f"{url!r} lives inside one process and Spark runs in several; name a SQLite file, a folder or Redis")
    return scheme in ("sqlite", "file")


def must_reach(url: str, local: bool) -> None:
    """Raise `ConfigError` for a store that belongs to one machine, unless all that opens it runs there (`local`)."""
    real = resolved(url)
    if is_file(real) and not local:
        raise ConfigError(f"{mask(real)} is on this machine and the session's executors are not: {SHARE}")


def identity(url: str) -> tuple[int, int] | None:
    """What tells a file or folder from another one that was put in its place; None of a server, and of what is not there."""
    real = resolved(url)
    try:
        found = os.stat(sqlite_path(real) if real.startswith("sqlite:") else file_path(real)) if is_file(real) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if found is None else (found.st_dev, found.st_ino)


def machine() -> str:
    """What tells this machine from others, until it starts anew."""
    return boot_id() or platform.node()
