"""The address of a store for programs that run in many processes: drivers and executors each open it on their own.

A URL may be given as `env:NAME`. Then only that name travels, and passwords stay out of plans, logs and pickles.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Generator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import msgspec

from omniq.errors import ConfigError, StoreUnavailable
from omniq.storage.base import BaseStorage
from omniq.storage.bulk import Bulk, open_bulk
from omniq.storage.filesystems import boot_id
from omniq.storage.filesystems import identity as identity_of
from omniq.storage.url import driver_of, mask

ENV = "env:"
SHARE = "a store on the disk of one machine cannot be shared between machines; keep the tasks in Redis (redis://host:6379/0)"


class Address(msgspec.Struct, frozen=True):
    """A store that one process has opened and others are to open: the same store, and not a new one at the same URL.

    `machine` is the machine of a store that belongs to one, else empty.
    """

    url: str
    store: str
    machine: str = ""

    # Spark prints the objects of a plan that fails, and the URL may hold a password.
    def __repr__(self) -> str:
        return f"Address({mask(self.url)!r}, {self.store!r}, {self.machine!r})"

    @contextmanager
    def opened(self) -> Generator[Bulk, None, None]:
        """The bulk side of this store. Raises `StoreUnavailable` on another machine, or when the store was replaced."""
        if self.machine and self.machine != machine():
            raise StoreUnavailable(f"{mask(self.url)} was opened on another machine than {platform.node()}: {SHARE}")
        with existing(self.url) as bulk:
            # A file of that name may have been made anew since the driver planned: its rows would be mixed with the old ones.
            found = bulk.info().store_id
            if found != self.store:
                raise StoreUnavailable(f"{mask(self.url)} holds the store {found} and not {self.store}: it was replaced")
            yield bulk


@contextmanager
def existing(url: str) -> Generator[Bulk, None, None]:
    """Open a store that exists; raises `StoreUnavailable` instead of making one."""
    real = resolved(url)
    with closing(open_bulk(real)) as bulk:
        # Asked first, since opening makes a file that is not there: a slip in a URL would be an empty store.
        if not bulk.call(bulk.storage.exists()):
            raise StoreUnavailable(f"no store at {mask(real)} on {platform.node()}: check the URL")
        bulk.call(bulk.storage.open())
        yield bulk


def address_of(url: str, store: str) -> Address:
    """The address by which other processes open the store with this id."""
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
    storage = _on_this_machine(real)
    if storage is None or not storage.url:
        return url
    query = urlsplit(real).query
    return f"{storage.url}?{query}" if query else storage.url


def is_file(url: str) -> bool:
    """Whether a store belongs to one machine. Raises `ConfigError` for one that lives inside a single process."""
    return _on_this_machine(url) is not None


def _on_this_machine(url: str) -> BaseStorage | None:
    """The storage, not opened, of a URL that only this machine can open; None for a server."""
    # The class of a driver says this without the packages that it connects with: a client of Spark Connect may lack them.
    declared = getattr(driver_of(url), "capabilities", None)
    if declared is not None and not declared.local:
        return None
    storage = BaseStorage.from_url(url)
    if storage.capabilities.in_process:
        raise ConfigError(
            f"{mask(url)!r} lives inside one process and Spark runs in several; name a SQLite file, a folder or Redis"
        )
    return storage if storage.capabilities.local else None


def must_reach(url: str, local: bool) -> None:
    """Raise `ConfigError` for a store that belongs to one machine, unless every process that opens it runs there (`local`)."""
    real = resolved(url)
    if is_file(real) and not local:
        raise ConfigError(f"{mask(real)} is on this machine and the session's executors are not: {SHARE}")


def identity(url: str) -> tuple[int, int] | None:
    """Device and inode of a store's file or folder, which change when another is put in its place; None for a server."""
    storage = _on_this_machine(resolved(url))
    return None if storage is None else identity_of(storage.place)


def machine() -> str:
    """A name that no other machine has, until this one starts anew."""
    # Host names repeat in containers and images; the id that the kernel makes at each boot does not.
    return boot_id() or platform.node()
