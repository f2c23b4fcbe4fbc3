"""`omniq resume`: hand out tasks of a paused queue again."""

from __future__ import annotations

from omniq.cli.commands import command
from omniq.cli.exits import say
from omniq.cli.output import print_line
from omniq.cli.queues.queues import QueueArgument
from omniq.cli.stores import StoreOption, opened


@command
async def resume_command(queue: QueueArgument, store: StoreOption = None) -> None:
    """Hand out tasks of a paused queue again.

    Example: omniq resume mail
    """

    async with opened(store) as oq:
        known = queue in await oq.storage.queues()
        was = await oq.resume(queue)
    print_line(f"resumed queue {queue}" if was else f"queue {queue} was not paused")
    if not known:
        say(f"no queue {queue!r} is known yet; omniq queues shows the others")
