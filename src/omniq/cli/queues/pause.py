"""`omniq pause`: hand out no more tasks of a queue."""

from __future__ import annotations

from omniq.cli.commands import command
from omniq.cli.exits import say
from omniq.cli.output import print_line
from omniq.cli.queues.queues import QueueArgument
from omniq.cli.stores import StoreOption, opened


@command
async def pause_command(queue: QueueArgument, store: StoreOption = None) -> None:
    """Stop handing out tasks of a queue. Running ones go on, new ones are accepted and wait.

    A queue may be paused before its first task; that no such queue is known yet is said on stderr, since the name may be
    mistyped.

    Example: omniq pause mail
    """

    async with opened(store) as oq:
        was, known = await oq.is_paused(queue), queue in await oq.storage.queues()
        await oq.pause(queue)
    print_line(f"queue {queue} was paused already" if was else f"paused queue {queue}")
    if not known:
        say(f"no queue {queue!r} is known yet: its tasks will wait when they come; omniq queues shows the others")
