"""The output of commands: tables for people, one JSON document for programs, messages on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from omniq.cli.escapes import escape, escape_json, indented

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="How many to show.")]
AfterOption = Annotated[
    str | None, typer.Option("--after", metavar="CURSOR", help="Go on after a page: the cursor that it named.")
]


def one_line(text: str, width: int = 80) -> str:
    """The first words of a text, on one line."""
    joined = " ".join(escape(text, keep="\n\t").split())
    return joined if len(joined) <= width else joined[: width - 1] + "…"


def print_json(value: Any) -> None:
    """Structs by their field names, times in RFC 3339 UTC."""
    data = msgspec.json.encode(value, enc_hook=repr)
    sys.stdout.write(escape_json(msgspec.json.format(data, indent=2).decode()) + "\n")


def compact_json(value: Any) -> str:
    return escape_json(msgspec.json.encode(value, enc_hook=repr).decode())


def print_line(text: str = "") -> None:
    """One line, whatever the names in it contain."""
    sys.stdout.write(escape(text) + "\n")


def print_indented(text: str) -> None:
    """Text of several lines, such as a traceback."""
    sys.stdout.write("".join(line + "\n" for line in indented(text)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, fold: bool = False) -> None:
    """In a terminal too narrow for it, names are cut and numbers stay: see `Fitted` for the marks of titles.

    With `fold` the last column goes on in the next line. In a pipe nothing is cut: it has no width.
    """
    from rich.console import Console

    from omniq.cli.table import Fitted

    table = Fitted(columns, fold=fold)
    for row in rows:
        table.add(*row)
    console = Console(file=sys.stdout, highlight=False)
    # Rich takes a pipe for a terminal of 80 columns.
    console.width = table.width(console.width if sys.stdout.isatty() else 1_000_000)
    # Rich fills lines up with blanks, which programs that read them would have to cut off.
    with console.capture() as shown:
        console.print(table)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in shown.get().splitlines()))


def next_page(cursor: str | None) -> None:
    """Say how to go on, on stderr, so that stdout stays what it is."""
    if cursor is not None:
        print(f"there is more: go on with --after {cursor}", file=sys.stderr)


def when(moment: datetime | None) -> str | None:
    """A moment as RFC 3339 UTC, to the second."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def count(n: int, what: str, many: str | None = None) -> str:
    return f"{n} {what if n == 1 else many or what + 's'}"


@contextmanager
def bar(what: str, total: int | None, done: int = 0) -> Generator[Callable[[int], None], None, None]:
    """Gives a function that moves a progress bar on stderr by so many; without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda n: progress.advance(task, n)


@contextmanager
def steps() -> Generator[Callable[[str], None], None, None]:
    """Gives a function that shows on stderr what is being done; without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as line:
        yield line.update
