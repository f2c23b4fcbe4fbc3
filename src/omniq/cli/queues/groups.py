"""`omniq groups`: what runs and waits per group, and how much of it may run at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote, unquote

import typer

from omniq.cli.commands import command
from omniq.cli.exits import Missing
from omniq.cli.output import AfterOption, JsonOption, LimitOption, next_page, print_json, print_line, print_table
from omniq.cli.queues.queues import QueueArgument
from omniq.cli.stores import StoreOption, opened
from omniq.errors import Invalid

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ
    from omniq.operations import GroupInfo

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@command
async def groups_command(
    context: typer.Context,
    queue: Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="Only groups of this queue.")] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Show groups: their limits, what runs, what is ready.

    Example: omniq groups --queue mail
    """
    if context.invoked_subcommand is not None:
        return

    async with opened(store) as oq:
        if queue is not None and queue not in await oq.storage.queues():
            raise Missing(f"no queue {queue!r} in this store")
        found, cursor = await _page(oq, queue, limit, after)
    if json:
        print_json(found)
    elif found:
        columns = ["QUEUE", "GROUP", ">LIMIT", ">RUNNING", ">READY"]
        print_table(columns, [(g.queue, g.group, g.limit, g.inflight, g.ready) for g in found])
    else:
        print_line("no groups")
    next_page(cursor)


async def _page(oq: AsyncOmniQ, queue: str | None, limit: int, after: str | None) -> tuple[list[GroupInfo], str | None]:
    """Groups by queue and name.

    The cursor is `queue/` and the store's own within it, or nothing after its last. The names of groups may have anything in
    them, so it is percent-encoded: it goes to a terminal and back into a shell.
    """
    first, slash, cursor = (after or "").partition("/")
    if after is not None and not slash:
        raise Invalid(f"--after {after!r} is not a cursor that this command named")
    found: list[GroupInfo] = []
    names = [queue] if queue is not None else await oq.storage.queues()
    for name in names:
        # Queues come by name, so a queue that was deleted since the last page is passed over and not looked for.
        if name < first or (name == first and slash and not cursor):
            continue
        within = unquote(cursor) if name == first and cursor else None
        page, within = await oq.groups(name, cursor=within, limit=limit - len(found))
        found += page
        if within is not None:
            return found, f"{name}/{quote(within)}"
        if len(found) == limit:
            return found, None if name == names[-1] else f"{name}/"
    return found, None


@app.command("set-limit")
@command
async def set_limit_command(
    context: typer.Context,
    queue: QueueArgument,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of a group.")],
    limit: Annotated[
        int, typer.Argument(metavar="N", min=1, max=1_000_000, help="How many tasks of the group may run at once.")
    ],
    new: Annotated[bool, typer.Option("--new", help="Also for a group that has had no task yet.")] = False,
    store: StoreOption = None,
) -> None:
    """Set how many tasks of a group may run at once.

    Example: omniq groups set-limit mail customer-42 3
    """
    # Also `omniq groups --store URL set-limit …`: --store belongs to the group of commands as well.
    url = store if store is not None or context.parent is None else context.parent.params.get("store")

    async with opened(url) as oq:
        if not new and not await _is_known(oq, queue, group):
            raise Missing(f"no group {group!r} in queue {queue!r}; --new sets the limit of one that is to come")
        await oq.set_group_limit(queue, group, limit)
    print_line(f"group {group} of queue {queue} runs up to {limit} at once")


async def _is_known(oq: AsyncOmniQ, queue: str, group: str) -> bool:
    from omniq.cli.paging import groups_of

    async for found in groups_of(oq.storage, queue):
        if found.group == group:
            return True
    return False
