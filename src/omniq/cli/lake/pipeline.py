"""`omniq lake pipeline`: the tables of the lake as a project of Spark Declarative Pipelines."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.output import print_line
from omniq.cli.spark.options import JavaOption
from omniq.cli.stores import StoreOption, settings_and_url

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

FolderArgument = Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of the project.")]


@app.callback()
def pipeline_commands() -> None:
    """The tables of the lake as a project of Spark Declarative Pipelines, to change and to add to."""


@app.command("init")
def init_command(folder: FolderArgument, store: StoreOption = None) -> None:
    """Write the project into a new or empty folder.

    Example: omniq lake pipeline init history --store sqlite:///omniq.db
    """
    from omniq.spark.pipelines import write_project

    _, url = settings_and_url(store)
    for path in write_project(folder, url):
        print_line(str(path))


@app.command("run")
def run_command(
    folder: FolderArgument,
    refresh: Annotated[bool, typer.Option("--refresh", help="Make all tables anew, from the first event there is.")] = False,
    java: JavaOption = "auto",
) -> None:
    """Run the pipeline with spark-pipelines: take in new events, and make the other tables of all of them.

    Its server listens on the loopback only, at port 15002. The exit code is that of spark-pipelines.

    Example: omniq lake pipeline run history
    """
    from omniq.spark.pipelines import run_project

    raise typer.Exit(run_project(folder, java=java, refresh=refresh))
