"""Tables that fit their terminal: names are cut, numbers stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from omniq.cli.escapes import escape

# What a name is cut to before ids and states are cut too, and what is left of it at the least.
NARROW, NARROWEST = 8, 3
# What a column that goes on in the next line is narrowed to before anything is cut.
FOLDED = 24


class Fitted:
    """Rows under titles, at most as wide as there is room, if that is possible without cutting numbers.

    The mark of a title says what its column is: `>` numbers, which are never cut; `=` ids and states, which are cut when
    nothing else is left to cut; no mark: names and other words, the longest of which are cut first. With `fold` the last
    column goes on in the next line instead. With `expand` the words take all the room there is.
    """

    def __init__(self, columns: Sequence[str], *, fold: bool = False, expand: bool = False, header_style: str = "bold") -> None:
        self._columns, self._fold, self._expand, self._header_style = columns, fold, expand, header_style
        self._rows: list[tuple[list[Text], str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *cells: object, style: str = "") -> None:
        """A row; None is shown as a dash."""
        made = [cell if isinstance(cell, Text) else Text(escape("–" if cell is None else str(cell))) for cell in cells]
        self._rows.append((made, style))

    def width(self, room: int) -> int:
        """How wide it will be: more than the room only where numbers would have to be cut."""
        widths, gap = self._layout(room)
        return sum(widths) + gap * (len(widths) - 1)

    def readable_from(self) -> int:
        """The width from which nothing but names is cut, and of those enough stays to know them by."""
        widths = self._widths()
        cut = [min(width, NARROW) if self._is_word(n) else width for n, width in enumerate(widths)]
        return sum(cut) + len(cut) - 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths, gap = self._layout(options.max_width)
        table = Table(box=None, padding=(0, gap, 0, 0), header_style=self._header_style, width=sum(widths) + gap * len(widths))
        for number, (column, width) in enumerate(zip(self._columns, widths, strict=True)):
            folded = self._fold and number == len(widths) - 1
            table.add_column(
                Text(_name(column), no_wrap=True, overflow="ellipsis"),
                justify="right" if column.startswith(">") else "left",
                width=width,
                no_wrap=not folded,
                overflow="fold" if folded else "ellipsis",
            )
        for cells, style in self._rows:
            table.add_row(*cells, style=style)
        yield table

    def _layout(self, room: int) -> tuple[list[int], int]:
        """The width of each column, and how many blanks stand between two."""
        widths = self._widths()
        last = len(widths) - 1
        words = [n for n in range(len(widths)) if self._is_word(n)]
        states = [n for n, column in enumerate(self._columns) if column.startswith("=")]
        # The second blank between columns goes before a name is cut to what it can hardly be known by.
        gap = 2 if self.readable_from() + last <= room else 1
        room -= gap * last
        # Names are known by how they begin; an id that is cut can be given to no other command.
        steps = [(words, NARROW), (states, NARROW), (words, NARROWEST), (states, NARROWEST)]
        for which, least in [([last], FOLDED), *steps] if self._fold else steps:
            _cut(widths, which, least, sum(widths) - room)
        if self._expand:
            _widen(widths, words, room - sum(widths))
        return widths, gap

    def _widths(self) -> list[int]:
        widths = [cell_len(_name(column)) for column in self._columns]
        for cells, _ in self._rows:
            widths = [max(width, cell_len(cell.plain)) for width, cell in zip(widths, cells, strict=True)]
        return widths

    def _is_word(self, place: int) -> bool:
        return not self._columns[place].startswith((">", "="))


def _name(column: str) -> str:
    return column.lstrip(">=")


def _cut(widths: list[int], which: Sequence[int], least: int, too_many: int) -> None:
    """Take so much from these columns, always from the widest of them, and leave each its least."""
    while too_many > 0:
        widest = max(which, key=lambda n: widths[n], default=None)
        if widest is None or widths[widest] <= least:
            return
        second = max([widths[n] for n in which if widths[n] < widths[widest]], default=least)
        alike = sum(widths[n] == widths[widest] for n in which)
        less = max(min(widths[widest] - max(second, least), too_many // alike), 1)
        widths[widest] -= min(less, too_many)
        too_many -= min(less, too_many)


def _widen(widths: list[int], which: Sequence[int], spare: int) -> None:
    for place, n in enumerate(which):
        widths[n] += max(spare, 0) // len(which) + (place < spare % len(which) if spare > 0 else 0)
