"""The options of `omniq worker`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from omniq.cli.parsing import names, seconds, size
from omniq.cli.stores import StoreOption

ModulesArgument = Annotated[
    list[str],
    typer.Argument(metavar="MODULE...", help="Modules with tasks; their functions and all registered tasks may run."),
]
QueuesOption = Annotated[
    str | None,
    typer.Option("--queues", metavar="A,B", help="Queues to serve, in this order. Default: all.", show_default=False),
]
GraceOption = Annotated[
    str | None,
    typer.Option(
        "--grace", metavar="DURATION", help="Time that running tasks get after SIGTERM. Default: 25s.", show_default=False
    ),
]


class WorkerOptions(msgspec.Struct, frozen=True):
    """The options of a worker, in the words of the command line: a supervisor passes them on to its processes."""

    modules: ModulesArgument
    queues: QueuesOption = None
    concurrency: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="How many tasks run at once, per process.")
    ] = 10
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="How many worker processes; those that die are replaced.")
    ] = 1
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when Python files of the working folder change. For development.")
    ] = False
    grace: GraceOption = None
    drain_and_exit: Annotated[
        bool,
        typer.Option("--drain-and-exit", help="End when nothing is ready, running or waiting for a retry; later etas stay."),
    ] = False
    max_tasks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Replace a worker process after it has begun so many tasks.")
    ] = None
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Replace a worker process that has grown beyond 500MB, 2GB.")
    ] = None
    link: Annotated[str | None, typer.Option(hidden=True)] = None
    store: StoreOption = None

    def __post_init__(self) -> None:
        # A mistake is told before any process is started.
        _ = self.queue_names, self.grace_s, self.max_bytes

    @property
    def queue_names(self) -> list[str] | None:
        return names(self.queues)

    @property
    def grace_s(self) -> float | None:
        return None if self.grace is None else seconds(self.grace)

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_memory is None else size(self.max_memory)

    @property
    def supervised(self) -> bool:
        """Whether the tasks run in processes that this one starts and replaces."""
        return self.processes > 1 or self.reload or self.max_tasks is not None or self.max_memory is not None

    def for_process(self) -> list[str]:
        """The same words for one process of several."""
        given = msgspec.structs.asdict(msgspec.structs.replace(self, modules=[], processes=1, reload=False, link=None))
        words: list[str] = []
        for name, value in given.items():
            if value not in (None, False, []) and name != "processes":
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return [*words, "--", *self.modules]
