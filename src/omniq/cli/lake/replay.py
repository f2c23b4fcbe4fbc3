"""`omniq lake replay`: from a condition over the lake's tasks to copies of them in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli.commands import command
from omniq.cli.exits import say
from omniq.cli.lake.opening import LakeOption
from omniq.cli.output import JsonOption, count, print_json, print_line, print_table
from omniq.cli.spark.options import SessionOptions
from omniq.cli.stores import StoreOption, settings_and_url

if TYPE_CHECKING:
    from omniq.spark import ReplayReport


@command
def replay_command(
    *,
    where: Annotated[
        str, typer.Option("--where", metavar="CONDITION", help="Which tasks, in SQL over the lake's table tasks.")
    ],
    label: Annotated[
        str, typer.Option("--label", metavar="LABEL", help="A name for this replay: a task is replayed once per label.")
    ],
    lake: LakeOption,
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="QUEUE", help="Where the copies go. Default: the queue of each task.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this, only count.")] = False,
    session: SessionOptions,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Run tasks again that a query over the lake found: enqueue a copy of each in the store.

    Without --yes it only says which ones, and how many. Copies keep the arguments of their originals, which must still be in
    the store; those that are not are counted. The headers replay_of and replay of a copy name its original and the label.

    Example: omniq lake replay --lake lake --where "status = 'FAILED' AND error LIKE '%timed out%'" --label timeouts

    Example: omniq lake replay --lake lake --where "fingerprint = '9c1e'" --label fix-42 --yes
    """
    from omniq.spark import Lake, replay
    from omniq.spark.address import existing
    from omniq.spark.causes import reported

    _, url = settings_and_url(store)
    with existing(url) as bulk:
        store_id = bulk.info().store_id
    with reported():
        spark = session.start()
        tasks = Lake(lake).table(spark, "tasks").where(where)
        mine = tasks.where(tasks["store"] == store_id)
        report = replay(mine, url, label=label, dry_run=not yes, queue=queue)
        elsewhere = tasks.where(tasks["store"] != store_id).count()
    if json:
        print_json(report)
    else:
        tell(report)
    if elsewhere:
        say(f"{count(elsewhere, 'task')} of other stores: name one of those with --store to replay them")


def tell(report: ReplayReport) -> None:
    """The report for a person."""
    if report.found:
        rows = [(one.what, one.tasks, one.queue or None, one.name or None, " ".join(one.sample)) for one in report.found]
        print_table(["WHAT", ">TASKS", "QUEUE", "NAME", "FOR EXAMPLE"], rows)
    done = "would replay" if report.dry_run else "replayed"
    there = f"; {report.already_there} had been under this label" if report.already_there else ""
    print_line(f"{done} {count(report.replayed, 'task')} under label {report.label}{there}")
    if report.missing:
        say(f"{count(report.missing, 'task')} cannot be replayed: no longer in the store")
    if report.unended:
        say(f"{count(report.unended, 'task')} not replayed: waiting or running")
    if report.dry_run and report.replayed:
        say("nothing was done; add --yes to do it")
