"""`omniq lake`: the history of stores in a folder of Parquet files, made and read by Spark. Needs the extra `spark`."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.commands import command
from omniq.cli.exits import FAILED, say
from omniq.cli.lake import pipeline
from omniq.cli.lake.opening import LakeOption, working
from omniq.cli.lake.query import query_command
from omniq.cli.lake.replay import replay_command
from omniq.cli.lake.status import status_command
from omniq.cli.output import JsonOption, count, print_json, print_line, print_table, steps
from omniq.cli.parsing import day, names, short
from omniq.cli.spark.options import SessionOptions
from omniq.cli.stores import StoreOption, settings_and_url

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def lake_commands() -> None:
    """Keep the history of stores in a lake, and learn from it. Needs the extra: pip install '.[spark]'"""


@app.command("init")
def init_command(lake: LakeOption) -> None:
    """Make a lake in a new or empty folder; one that is there stays as it is.

    Example: omniq lake init --lake history
    """
    from omniq.spark import Lake

    print_line(f"lake {Lake.init(lake).path}")


@app.command("ingest")
@command
def ingest_command(
    *,
    lake: LakeOption,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="TIME", help="Go on, with a batch that often: '30 seconds'.", show_default=False),
    ] = None,
    payloads: Annotated[bool, typer.Option("--payloads", help="Take in the tasks' encoded arguments too.")] = False,
    accept_gap: Annotated[
        bool, typer.Option("--accept-gap", help="Go on where events were purged before they came in, and note the gap.")
    ] = False,
    session: SessionOptions,
    json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Take the events of a store into the lake, each exactly once, up to the last one there is.

    It may be killed at any moment and started again. With --every it goes on until Ctrl-C. When the store purged events that
    had not come in, it says so and ends with code 1. With --accept-gap it takes in what is there, and notes what it lacks.

    Example: omniq lake ingest --lake history --store sqlite:///omniq.db
    """
    from omniq.cli.lake.ingesting import ingest_store

    _, url = settings_and_url(store)
    with working(lake, session) as (spark, opened):
        report = ingest_store(spark, url, opened, every, payloads, accept_gap)
    if json:
        print_json(report)
        return
    print_line(f"took in {count(report.rows, 'event')} of store {report.store} in {short(report.seconds)}")
    if report.quarantined:
        say(f"{count(report.quarantined, 'event')} went into quarantine, with the reason: see {opened.path}/quarantine")
    if report.gaps:
        lost = sum(gap.last - gap.first + 1 for gap in report.gaps)
        say(f"{count(lost, 'event')} had been purged before they came in: the lake goes on without them, see omniq lake status")


@app.command("build")
@command
def build_command(
    *,
    lake: LakeOption,
    tables: Annotated[
        str | None, typer.Option("--tables", metavar="A,B", help="Only these tables of gold.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Build everything anew, not only what changed.")] = False,
    session: SessionOptions,
    json: JsonOption = False,
) -> None:
    """Bring the tables of the lake up to the events that were taken in: only the days that changed.

    All is checked before it is published, all tables at once. When it does not add up, nothing is, and the exit code is 1.

    Example: omniq lake build --lake history
    """
    from omniq.spark import build

    with working(lake, session) as (spark, opened), steps() as tell:
        report = build(spark, opened, tables=names(tables), full=full, say=tell)
    if json:
        print_json(report)
    elif report.changed:
        print_table(
            ["TABLE", ">DAYS", ">ROWS"], [(name, len(days), report.rows.get(name, 0)) for name, days in report.days.items()]
        )
        print_line(f"built in {short(report.seconds)}")
    else:
        print_line("nothing has changed")


@app.command("check")
@command
def check_command(
    *,
    lake: LakeOption,
    session: SessionOptions,
    json: JsonOption = False,
) -> None:
    """Look for gaps, repeats and sums that disagree. Exit code 1 when there are any.

    Example: omniq lake check --lake history
    """
    from omniq.spark import check

    with working(lake, session) as (spark, opened):
        results = check(spark, opened, fail=False)
    if json:
        print_json(results)
    else:
        rows = [(r.name, "ok" if r.ok else "WRONG", r.detail) for r in results]
        print_table(["=CHECK", "=RESULT", "DETAIL"], rows, fold=True)
    if not all(result.ok for result in results):
        raise typer.Exit(FAILED)


@app.command("repair")
@command
def repair_command(
    *,
    lake: LakeOption,
    session: SessionOptions,
    json: JsonOption = False,
) -> None:
    """Put a lake right whose days were made in other time zones than UTC: move the rows, and build all tables anew.

    It says so if there is nothing to repair. It may be killed at any moment and repeated; ingest may go on beside it.

    Example: omniq lake repair --lake history
    """
    from omniq.spark import repair
    from omniq.spark.lake.days import beyond_repair

    with working(lake, session) as (spark, opened), steps() as tell:
        report = repair(spark, opened, say=tell)
    if json:
        print_json(report)
        return
    if report.frozen:
        say(beyond_repair(report.frozen))
    if report.built is None:
        print_line("nothing to repair")
        return
    moved = f"moved {count(report.events, 'event')} and {count(report.payloads, 'payload')} to the folders of their days"
    print_line(f"{moved}, and built all tables anew in {short(report.seconds)}")


@app.command("compact")
@command
def compact_command(
    *,
    lake: LakeOption,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="DAY", help="Only days before it. Default: today.", show_default=False),
    ] = None,
    target_mb: Annotated[int, typer.Option("--target-mb", metavar="N", min=1, help="How large a file may become.")] = 128,
    session: SessionOptions,
    json: JsonOption = False,
) -> None:
    """Put small files together, day by day; the rows stay what they are.

    Example: omniq lake compact --lake history
    """
    from omniq.spark import compact

    with working(lake, session) as (spark, opened):
        report = compact(spark, opened, before=None if before is None else day(before), target_mb=target_mb)
    if json:
        print_json(report)
    else:
        print_line(f"{count(report.days, 'day')} rewritten: {report.before} files became {report.after}")


@app.command("expire")
def expire_command(
    lake: LakeOption,
    keep_days: Annotated[int, typer.Option("--keep-days", metavar="N", min=1, help="Days of events and tasks to keep.")],
    gold_days: Annotated[
        int | None,
        typer.Option("--gold-days", metavar="N", min=1, help="Days of gold to keep. Default: all.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Drop old days. The small tables of gold stay, unless --gold-days is given.

    Example: omniq lake expire --lake history --keep-days 90
    """
    from omniq.spark import Lake, expire

    report = expire(None, Lake(lake), keep_days=keep_days, gold_days=gold_days)
    if json:
        print_json(report)
    else:
        print_line(
            f"kept from {report.kept_from}; {count(sum(report.rows.values()), 'row')} of {sum(report.days.values())} days went"
        )


@app.command("erase")
@command
def erase_command(
    *,
    lake: LakeOption,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="The task to erase.", show_default=False)] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="GROUP", help="Or the group, with all its tasks.", show_default=False)
    ] = None,
    session: SessionOptions,
    json: JsonOption = False,
) -> None:
    """Delete everything that the lake holds of one task, or of one group. It does not come back with a later ingest.

    Example: omniq lake erase --lake history --group customer-17
    """
    from omniq.spark import erase

    with working(lake, session) as (spark, opened):
        report = erase(spark, opened, task=task, group=group)
    if json:
        print_json(report)
    else:
        print_line(f"erased {count(report.rows, 'event')} of {count(len(report.days), 'day')}")


app.command("status")(status_command)
app.command("query")(query_command)


@app.command("report")
@command
def report_command(
    *,
    lake: LakeOption,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The page to write.")] = "report.html",
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="The title of the page.")] = "omniq",
    since: Annotated[
        str | None, typer.Option("--since", metavar="DAY", help="Only from this day on: 2026-11-01.", show_default=False)
    ] = None,
    session: SessionOptions,
    json: JsonOption = False,
) -> None:
    """Write one page about the tables as they were last built: pictures and tables, nothing loaded from elsewhere.

    Example: omniq lake report --lake history --out report.html
    """
    from omniq.spark import report

    with working(lake, session) as (spark, opened):
        written = report(spark, opened, out, title=title, since=None if since is None else day(since))
    if json:
        print_json(written)
        return
    for sentence in written.findings:
        say(sentence)
    print_line(written.path)


app.command("replay")(replay_command)
app.add_typer(pipeline.app, name="pipeline")
