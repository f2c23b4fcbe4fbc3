"""`omniq enqueue`: one task, or a file of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from omniq.cli.commands import command, run
from omniq.cli.exits import say
from omniq.cli.output import compact_json, print_line
from omniq.cli.parsing import json_array, json_object, moment_or_delay, seconds
from omniq.cli.stores import StoreOption, opened
from omniq.cli.tasks.result import WaitOption, WaitTimeoutOption, ended_or_not, tell, wait_seconds
from omniq.errors import Invalid

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ, Func
    from omniq.models import TaskResult
    from omniq.tasks import Options

ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", help="Import this first: checks the arguments, and takes the task's own options."
    ),
]


class TaskOptions(msgspec.Struct, frozen=True):
    """The options that a task gets."""

    eta: Annotated[str | None, typer.Option(metavar="TIME", help="Not before: 10m from now, or RFC 3339.")] = None
    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="The queue. Default: default.", show_default=False)] = None
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="The group.")] = None
    retries: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=1_000_000, help="How often a failed run is repeated.")
    ] = None
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="How long a run may take: 30s, 10m, 2h.")] = None
    idempotency_key: Annotated[str | None, typer.Option(metavar="KEY", help="A second task with this key is not stored.")] = (
        None
    )

    def options(self) -> Options:
        """Only what was given: the rest is up to the function, then to the queue."""
        from omniq.tasks import Options

        given: dict[str, Any] = {
            "eta": None if self.eta is None else moment_or_delay(self.eta),
            "queue": self.queue,
            "group": self.group,
            "max_retries": self.retries,
            "timeout": None if self.timeout is None else seconds(self.timeout),
            "idempotency_key": self.idempotency_key,
        }
        return Options(**{name: value for name, value in given.items() if value is not None})


@command
def enqueue_command(
    *,
    func: Annotated[
        str | None,
        typer.Argument(metavar="FUNC_OR_NAME", help="module:function, or the name of a registered task.", show_default=False),
    ] = None,
    args: Annotated[
        str | None, typer.Argument(metavar="ARGS", help="One JSON array of the positional arguments.", show_default=False)
    ] = None,
    kwargs: Annotated[str | None, typer.Option("--kwargs", metavar="JSON", help="A JSON object of keyword arguments.")] = None,
    task: TaskOptions,
    imports: ImportOption = None,
    wait: WaitOption = False,
    wait_timeout: WaitTimeoutOption = None,
    file: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help='Enqueue a task per line: {"func": …, "args": […], …}. - is stdin.'),
    ] = None,
    skip: Annotated[
        int, typer.Option("--skip", metavar="N", min=0, help="With --from: leave out this many lines.", show_default=False)
    ] = 0,
    store: StoreOption = None,
) -> None:
    """Store a task, and print its id alone on the last line of stdout.

    With --wait the line before it is the result, as JSON. Exit code 3 if the task FAILED or was CANCELLED, 4 if it has not
    ended by --wait-timeout.

    With --from, each line of the file is one JSON object with func, args, kwargs, queue and key, all of them optional but
    func; FUNC_OR_NAME and the options hold for lines that do not say. A run that was cut short goes on where it stopped
    when it is started again: FILE.progress remembers. Lines that were refused are named on stderr, with exit code 2.

    Example: omniq enqueue myapp.tasks:add '[2, 3]' --queue math --wait

    Example: omniq enqueue send-mail --kwargs '{"to": "ada"}' --eta 10m --idempotency-key mail-42

    Example: omniq enqueue --from tasks.jsonl --queue import
    """
    from omniq.cli.modules import function_of, import_modules

    waits = wait_seconds(wait, wait_timeout)
    import_modules(imports or ())
    options = task.options()
    _tell_of_unknown(func)
    if file is not None:
        from omniq.cli.tasks.enqueue_file import enqueue_file

        if wait or args is not None or kwargs is not None or task.idempotency_key is not None:
            raise Invalid("--from takes arguments and keys from the file, and does not wait: leave those options out")
        raise typer.Exit(enqueue_file(file, func, options, skip, store))
    if func is None:
        raise Invalid("name the task: module:function or a registered name, or give a file with --from")
    if skip:
        raise Invalid("--skip needs --from")
    target = function_of(func, imports or ())
    positional = [] if args is None else json_array(args)
    named = {} if kwargs is None else json_object(kwargs)

    async def work() -> TaskResult | None:
        async with opened(store, create=True) as oq:
            id = await _store(oq, target, positional, named, options)
            try:
                result = await ended_or_not(oq, id, wait=True, timeout=waits) if wait else None
                if result is not None and result.ok:
                    print_line(compact_json(result.result))
            # The task is stored, whatever becomes of the waiting: a script can go on with its id.
            finally:
                print_line(id)
        return result

    result = run(work())
    if result is not None:
        raise typer.Exit(tell(result))


def _tell_of_unknown(name: str | None) -> None:
    from omniq.tasks import REGISTRY

    if name is not None and ":" not in name and name not in REGISTRY:
        say(
            f"{name!r} is not registered here: arguments are not checked, and options of the task itself do not hold; "
            f"name its module with --import MODULE for both{_with_colon(name)}"
        )


def _with_colon(name: str) -> str:
    from omniq.tasks import module_meant

    module, dot, function = name.rpartition(".")
    if function == "py":  # a file
        module, function = module_meant(name), "FUNCTION"
    return f"; a function of a module is written {module}:{function}" if dot and module and function else ""


async def _store(oq: AsyncOmniQ, func: Func, args: list[Any], kwargs: dict[str, Any], options: Options) -> str:
    try:
        return await oq.enqueue_call(func, tuple(args), kwargs, options)
    except TypeError as exc:  # arguments that do not fit the function
        raise Invalid(str(exc)) from None
