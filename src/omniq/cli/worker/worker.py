"""`omniq worker`. One process is in `process`, several are in `supervisor`."""

from __future__ import annotations

import typer

from omniq.cli.commands import command
from omniq.cli.worker.options import WorkerOptions
from omniq.errors import Invalid


@command
def worker_command(options: WorkerOptions) -> None:
    """Run tasks until told to stop.

    SIGTERM and Ctrl-C let running tasks finish within the grace time; a second one ends at once.

    The working folder is put on the import path. Functions of the modules and all registered tasks may run, others are
    refused. A process that is replaced because of --max-tasks or --max-memory finishes what it runs first.

    Example: omniq worker myapp.tasks --concurrency 20

    Example: omniq worker myapp.tasks --queues urgent,default --processes 4 --max-memory 500MB

    Example: omniq worker myapp.tasks --drain-and-exit
    """
    if options.reload and options.drain_and_exit and options.link is None:
        raise Invalid("--reload waits for changes and --drain-and-exit ends: give one of them")
    if options.supervised and options.link is None:
        from omniq.cli.worker.supervisor import supervise

        raise typer.Exit(supervise(options))
    from omniq.cli.worker.process import work

    raise typer.Exit(work(options))
