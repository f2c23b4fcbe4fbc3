"""The command line for operators. Each command lives in a module of its own, and they meet here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from omniq._version import __version__
from omniq.cli.exits import Quiet, run_app
from omniq.cli.lake import lake
from omniq.cli.queues import groups
from omniq.cli.queues.pause import pause_command
from omniq.cli.queues.queues import queues_command
from omniq.cli.queues.resume import resume_command
from omniq.cli.queues.top import top_command
from omniq.cli.serve.send import send_command
from omniq.cli.serve.serve import serve_command
from omniq.cli.spark import spark
from omniq.cli.store.backup import backup_command
from omniq.cli.store.bench import bench_command
from omniq.cli.store.doctor import doctor_command
from omniq.cli.store.migrate import migrate_command
from omniq.cli.store.purge import purge_command
from omniq.cli.tasks import dlq, tasks
from omniq.cli.tasks.enqueue import enqueue_command
from omniq.cli.tasks.result import result_command
from omniq.cli.worker.worker import worker_command

# Without Rich's panels the help is plain text, and answers in half the time.
app = typer.Typer(
    name="omniq",
    cls=Quiet,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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
    """A job queue that is embedded in your program and durable by default.

    Every command works on the store that --store names, else the OMNIQ_… variables, else sqlite:///omniq.db.

    Exit codes: 0 done; 1 the store failed, or there is no such task, queue or group; 2 wrong usage or unreadable input; 3
    the task that was waited for FAILED or was CANCELLED; 4 it has not ended; 130 cut short by Ctrl-C.
    """


app.command("worker")(worker_command)
app.command("enqueue")(enqueue_command)
app.command("result")(result_command)
app.add_typer(tasks.app, name="tasks")
app.add_typer(dlq.app, name="dlq")
app.command("queues")(queues_command)
app.command("pause")(pause_command)
app.command("resume")(resume_command)
app.add_typer(groups.app, name="groups")
app.command("top")(top_command)
app.command("doctor")(doctor_command)
app.command("purge")(purge_command)
app.command("backup")(backup_command)
app.command("migrate")(migrate_command)
app.command("bench")(bench_command)
app.command("serve")(serve_command)
app.command("send")(send_command)
app.add_typer(spark.app, name="spark")
app.add_typer(lake.app, name="lake")


def main() -> None:
    """Run the command; a mistake or a failing store is a sentence on stderr and an exit code, never a traceback."""
    sys.exit(run_app(app))
