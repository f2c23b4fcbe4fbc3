"""`omniq worker`: its options. One process is in `working`, several are in `supervisor`."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.parsing import names, seconds, size
from omniq.cli.stores import StoreOption
from omniq.errors import Invalid


def worker_command(
    modules: Annotated[
        list[str],
        typer.Argument(metavar="MODULE...", help="Modules with tasks; their functions and all registered tasks may run."),
    ],
    queues: Annotated[
        str | None,
        typer.Option("--queues", metavar="A,B", help="Queues to serve, in this order. Default: all.", show_default=False),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, max=10_000, help="How many tasks run at once, per process.")
    ] = 10,
    processes: Annotated[
        int,
        typer.Option(
            "--processes", metavar="N", min=1, max=1000, help="How many worker processes; those that die are replaced."
        ),
    ] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when Python files of the working folder change. For development.")
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace", metavar="DURATION", help="Time that running tasks get after SIGTERM. Default: 25s.", show_default=False
        ),
    ] = None,
    drain_and_exit: Annotated[
        bool,
        typer.Option("--drain-and-exit", help="End when nothing is ready, running or waiting for a retry; later etas stay."),
    ] = False,
    max_tasks: Annotated[
        int | None,
        typer.Option("--max-tasks", metavar="N", min=1, help="Replace a worker process after it has begun so many tasks."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", metavar="SIZE", help="Replace a worker process that has grown beyond 500MB, 2GB."),
    ] = None,
    link: Annotated[str | None, typer.Option("--link", hidden=True)] = None,
    store: StoreOption = None,
) -> None:
    """Run tasks until told to stop.

    SIGTERM and Ctrl-C let running tasks finish within the grace time; a second one ends at once.

    The working folder is put on the import path. Functions of the modules and all registered tasks may run, others are
    refused. A process that is replaced because of --max-tasks or --max-memory finishes what it runs first.

    Example: omniq worker myapp.tasks --concurrency 20

    Example: omniq worker myapp.tasks --queues urgent,default --processes 4 --max-memory 500MB

    Example: omniq worker myapp.tasks --drain-and-exit
    """
    from omniq.cli.worker.process import Plan

    plan = Plan(
        modules=tuple(modules),
        store=store,
        queues=names(queues),
        concurrency=concurrency,
        grace=None if grace is None else seconds(grace),
        drain=drain_and_exit,
        max_tasks=max_tasks,
        max_memory=None if max_memory is None else size(max_memory),
    )
    if link is not None:
        from omniq.cli.worker.process import run_linked

        raise typer.Exit(run_linked(plan, link))
    if reload and drain_and_exit:
        raise Invalid("--reload waits for changes and --drain-and-exit ends: give one of them")
    if processes > 1 or reload or max_tasks is not None or max_memory is not None:
        from omniq.cli.worker.supervisor import supervise

        raise typer.Exit(supervise(plan, processes, reload))
    from omniq.cli.worker.process import run_alone

    raise typer.Exit(run_alone(plan))
