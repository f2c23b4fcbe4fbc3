"""`omniq backup`: a copy of the store as it is at one moment, while everybody works on."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.commands import command
from omniq.cli.output import print_line
from omniq.cli.stores import StoreOption, opened


@command
async def backup_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The file (SQLite) or folder (file store) to write; a new one.")],
    store: StoreOption = None,
) -> None:
    """Write a copy of the store to a new file or folder, while workers and servers go on.

    The copy shows the store at one moment. On SQLite nobody waits for it; on a file store writers wait until it is made. To
    restore, stop all processes and put the copy in the place of the store. Redis has means of its own for this.

    Example: omniq backup nightly.db
    """
    async with opened(store) as oq:
        await oq.storage.backup(path)
    print_line(f"written to {path}")
