"""`omniq spark`: the commands that run on Spark. They need the extra `spark`."""

from __future__ import annotations

import typer

from omniq.cli.commands import command
from omniq.cli.output import JsonOption, count, print_json, print_line
from omniq.cli.parsing import short
from omniq.cli.spark.options import JavaOption, MasterOption, RowOptions, SessionOptions, SlotOptions
from omniq.cli.stores import StoreOption

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


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
@command
def worker_command(options: SlotOptions) -> None:
    """Run tasks on the executors of Spark.

    Each slot is a worker like that of omniq worker, inside a Spark task. SIGTERM and Ctrl-C let running tasks finish within
    the grace time; a second one ends at once. Tasks of an executor that is lost come back when their lease runs out.

    The working folder is put on the import path of this machine; on other machines the modules must be installed. A SQLite
    file or a folder serves only executors of this machine: use Redis on a cluster.

    Example: omniq spark worker myapp.tasks --drain

    Example: omniq spark worker myapp.tasks --store redis://10.0.0.5/0 --master spark://10.0.0.4:7077 --queues mail --slots 16
    """
    from omniq.cli.spark.draining import work

    work(options)


@app.command("enqueue")
@command
def enqueue_command(*, rows: RowOptions, session: SessionOptions, json: JsonOption = False, store: StoreOption = None) -> None:
    """Enqueue a task per row of a file, each key once, and nothing before all of it is there.

    Prints how many rows there were, how many tasks are new, and how many were there before. A run that was cut short is
    simply started again: what it had staged is used.

    Example: omniq spark enqueue --from orders.csv --func shop.tasks:ship --key order_id --args order_id,address

    Example: omniq spark enqueue --from orders.parquet --func ship --import shop.tasks --key order_id --args order=order_id
    """
    from omniq.cli.spark.enqueueing import enqueue_file

    report = enqueue_file(rows, session, store)
    if json:
        print_json(report)
        return
    there = f"; {report.already_there} were there" if report.already_there else ""
    print_line(f"enqueued {count(report.inserted, 'task')} of {count(report.rows, 'row')} in queue {report.queue}{there}")
    print_line(f"run {report.run_id}, {short(report.seconds)}")
