"""The command line: what an operator does from a shell."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from omniq._version import __version__
from omniq.errors import ConfigError, Invalid, OmniQError

app = typer.Typer(
    name="omniq",
    help="A job queue that is embedded in your program and durable by default.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"omniq {__version__}")
        raise typer.Exit


@app.callback()
def omniq(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A job queue that is embedded in your program and durable by default."""


@app.command()
def worker(
    modules: Annotated[list[str], typer.Argument(help="Modules with tasks; their functions and registered tasks may run.")],
    store: Annotated[
        str | None, typer.Option(help="Storage URL, for example sqlite:///omniq.db. Default: the OMNIQ_… variables.")
    ] = None,
    queues: Annotated[str | None, typer.Option(help="Queues to serve, in order, separated by commas. Default: all.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="How many tasks run at once.")] = 10,
    grace: Annotated[
        float | None, typer.Option(min=0, help="Seconds that running tasks get after SIGTERM. Default 25.")
    ] = None,
    drain_and_exit: Annotated[
        bool, typer.Option("--drain-and-exit", help="End when nothing is ready, running or waiting for a retry.")
    ] = False,
) -> None:
    """Run tasks. The working folder is put on the import path.

    Example: omniq worker myapp.tasks --store sqlite:///omniq.db --concurrency 20
    """
    from omniq.cli.worker import run_worker

    names = None if queues is None else [name.strip() for name in queues.split(",") if name.strip()]
    raise typer.Exit(run_worker(modules, store, names, concurrency, grace, drain_and_exit))


def main() -> None:
    """Run the command; a mistake or a failing store is a sentence on stderr and an exit code, never a traceback."""
    try:
        app()
    except (ConfigError, Invalid) as exc:
        _leave(exc, 2)
    except OmniQError as exc:
        _leave(exc, 1)


def _leave(exc: Exception, code: int) -> None:
    typer.echo(f"omniq: {exc}", err=True)
    sys.exit(code)
