"""`omniq migrate`: copy everything of one store into another, of any kind."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.commands import command
from omniq.cli.exits import FAILED, say
from omniq.cli.output import print_line
from omniq.cli.stores import opened_url


@command
async def migrate_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="URL of the store to copy.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="URL of the store to copy to; made if need be.")],
) -> None:
    """Copy a store into another, and compare the counts.

    Tasks, results and events are copied; pauses and group limits go with them; the source stays as it is. Stop the workers of
    both first. A copy that was cut short goes on when the same command is run again. Tasks that a dead worker left running come
    in as if they had been handed back.

    Example: omniq migrate sqlite:///omniq.db file:///var/lib/omniq
    """
    from omniq.cli.store.copying import Copy, check_stores
    from omniq.config import load_settings

    settings = load_settings()
    async with opened_url(source, settings) as src, opened_url(destination, settings, create=True) as dst:
        await check_stores(src.storage, dst.storage)
        copy = Copy(src.storage, dst.storage, round(settings.idempotency_ttl * 1e6))
        try:
            await copy.run()
        except BaseException:
            say(f"cut short after {copy.tasks} tasks and {copy.events} events; the same command goes on")
            raise
        print_line(
            f"copied {copy.tasks} tasks, {copy.results} results and {copy.events} events ({copy.there} tasks there before)"
        )
        differences = await copy.differences()
    for difference in differences:
        say(difference)
    if differences:
        raise typer.Exit(FAILED)
    print_line("the counts agree")
