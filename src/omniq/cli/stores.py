"""The store of a command, and how it is opened: only `enqueue`, `worker` and `serve` make one that is not there."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.exits import Missing

if TYPE_CHECKING:
    from omniq.config import Settings
    from omniq.core import AsyncOmniQ

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Which store: sqlite:///omniq.db, file:///folder, redis://host/0. Default: the OMNIQ_… variables, else"
        " sqlite:///omniq.db.",
        show_default=False,
    ),
]


def settings_and_url(store: str | None) -> tuple[Settings, str]:
    """Returns the settings of the environment, and the URL of the store: `--store` wins over the variables."""
    from omniq.config import load_settings

    settings = load_settings()
    return settings, settings.url if store is None else store


@asynccontextmanager
async def opened(store: str | None, *, create: bool = False) -> AsyncGenerator[AsyncOmniQ, None]:
    """The queue on the store that `--store` or the environment names. Without `create`, it must be there."""
    settings, url = settings_and_url(store)
    async with opened_url(url, settings, create=create) as oq:
        yield oq


@asynccontextmanager
async def opened_url(url: str, settings: Settings, *, create: bool = False) -> AsyncGenerator[AsyncOmniQ, None]:
    from omniq.core import AsyncOmniQ

    oq = AsyncOmniQ.from_url(url, settings=settings)
    await must_exist(oq, url, create)
    async with oq:
        yield oq


async def must_exist(oq: AsyncOmniQ, url: str, create: bool) -> None:
    """Refuse a store that is not there, and one that no other process can see."""
    from omniq.storage.url import mask

    shown = mask(url)
    if oq.storage.capabilities.in_process:
        raise Missing(f"{shown} lives inside one process, where no command can see it; name a durable store")
    # A mistyped path must not become an empty store that looks healthy.
    if not create and not await oq.storage.exists():
        await oq.close()
        raise Missing(f"no store at {shown}: check --store and the OMNIQ_… variables (enqueue, worker and serve make one)")
