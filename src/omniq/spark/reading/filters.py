"""The rows that a query wants: Spark's pushed filters and the option `where`, as conditions that a store understands.

status = 'FAILED' AND attempts >= 3 AND name LIKE 'app.mail:%' AND finished_at > '2026-11-01'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from omniq.errors import Invalid
from omniq.models import to_us
from omniq.storage.tables import Condition, Test, Type, columns_of

HELP = (
    "write comparisons of a column with a value (= < <= > >= IN BETWEEN LIKE 'start%' IS [NOT] NULL) joined by AND; "
    "for anything else, filter the DataFrame"
)
_PUSHED: dict[str, Test] = {
    "EqualTo": "=",
    "EqualNullSafe": "=",
    "In": "in",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "StringStartsWith": "starts",
    "IsNull": "null",
    "IsNotNull": "not null",
}
# The comparison with its sides exchanged, for `3 < attempts`. Its keys are also all comparison signs that there are.
_TURNED: dict[str, Test] = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


class Unfit(ValueError):
    """A value that does not fit its column."""


def pushed(table: str, filter: Any) -> Condition | None:
    """The condition that selects exactly the rows of one of Spark's filters, or None where there is no such condition."""
    # Exactly, because Spark does not apply a filter again that a source took. A filter on a field of a struct stays with it.
    test = _PUSHED.get(type(filter).__name__)
    if test is None or len(filter.attribute) != 1:
        return None
    (column,) = columns_of(table, filter.attribute)
    if test in ("null", "not null"):
        return Condition(column.name, test)
    # `column = NULL` holds for no row, `column <=> NULL` for those that are null: only the latter is a condition here.
    if filter.value is None:
        return Condition(column.name, "null") if type(filter).__name__ == "EqualNullSafe" else None
    try:
        if test == "in":
            return Condition(column.name, "in", tuple(value_of(column.type, v) for v in filter.value if v is not None))
        return Condition(column.name, test, value_of(column.type, filter.value))
    except Unfit:
        return None


def value_of(type: Type, value: Any) -> Any:
    """A value as `Condition` takes it; raises `Unfit` for a value of another type."""
    if type == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
        return to_us(value)
    kinds: dict[Type, type] = {"string": str, "int": int, "long": int, "boolean": bool}
    # In Python True is an int, and `attempts = true` would compare with 1.
    if type not in kinds or not isinstance(value, kinds[type]) or (kinds[type] is int and isinstance(value, bool)):
        raise Unfit(value)
    # SQLite takes no larger numbers: it would fail on an executor, with an error of its own.
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Unfit(value)
    return value


# -- the option `where` ----------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
      | (?P<number>[+-]?\d+)
      | (?P<quoted>`[^`]+`)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<sign><=|>=|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)


def conditions(table: str, text: str) -> tuple[Condition, ...]:
    """The conditions of a predicate; raises `Invalid` for one that is more than comparisons joined by AND."""
    return _Predicate(table, text).read()


class _Predicate:
    """Reads one predicate from left to right."""

    def __init__(self, table: str, text: str) -> None:
        self.table, self.text = table, text
        self.tokens = list(self._tokens())
        self.at = 0

    def read(self) -> tuple[Condition, ...]:
        found = self._all()
        if self.at < len(self.tokens):
            raise self._wrong()
        return tuple(found)

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        at, end = 0, len(self.text.rstrip())
        while at < end:
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise self._wrong(at)
            kind = match.lastgroup or ""
            yield kind, match[kind], match.start(kind)
            at = match.end()

    def _wrong(self, at: int | None = None, why: str = "") -> Invalid:
        if at is None:
            at = self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text)
        rest = self.text[at:].strip()
        return Invalid(f"where {self.text!r}: {why or 'cannot read'} {rest[:30]!r}: {HELP}" if rest else self._short())

    def _short(self) -> str:
        return f"where {self.text!r}: it ends too early: {HELP}"

    def _all(self) -> list[Condition]:
        found = self._one()
        while self._word("AND"):
            found += self._one()
        return found

    def _one(self) -> list[Condition]:
        if self._sign("("):
            found = self._all()
            self._must(self._sign(")"))
            return found
        kind, _, _ = self._peek()
        if kind in ("text", "number"):  # 3 < attempts
            turned = self._later_value()
            test = _TURNED[self._comparison()]
            name, type = self._column()
            return [Condition(name, test, turned(type))]
        name, type = self._column()
        if self._word("IS"):
            test = "not null" if self._word("NOT") else "null"
            self._must(self._word("NULL"))
            return [Condition(name, test)]
        if self._word("IN"):
            return [Condition(name, "in", self._values(type))]
        if self._word("BETWEEN"):
            low = self._later_value()(type)
            self._must(self._word("AND"))
            return [Condition(name, ">=", low), Condition(name, "<=", self._later_value()(type))]
        if self._word("LIKE"):
            return [self._like(name, type)]
        return [Condition(name, self._comparison(), self._later_value()(type))]

    def _column(self) -> tuple[str, Type]:
        kind, text, _ = self._peek()
        if kind not in ("word", "quoted"):
            raise self._wrong()
        # Lower case, because names of columns have no case in Spark.
        (column,) = columns_of(self.table, [text.strip("`").lower()])
        if column.type == "binary":
            raise self._wrong(why="nothing compares with the bytes of")
        self.at += 1
        return column.name, column.type

    def _comparison(self) -> Test:
        for sign in _TURNED:
            if self._sign(sign):
                return _TURNED[_TURNED[sign]]
        raise self._wrong()

    def _values(self, type: Type) -> tuple[Any, ...]:
        self._must(self._sign("("))
        found = [self._later_value()(type)]
        while self._sign(","):
            found.append(self._later_value()(type))
        self._must(self._sign(")"))
        return tuple(found)

    def _like(self, name: str, type: Type) -> Condition:
        at = self.at
        pattern = self._later_value()(type)
        start = pattern[:-1] if isinstance(pattern, str) else None
        if start is None or not pattern.endswith("%") or re.search(r"[%_\\]", start):
            self.at = at
            raise self._wrong(why="LIKE takes a start and one % at the end, not")
        return Condition(name, "starts", start)

    def _later_value(self) -> Callable[[Type], Any]:
        """A function from a column's type to the value, since `3 < attempts` has the value before its column."""
        kind, text, at = self._peek()
        if kind == "word" and text.upper() in ("TIMESTAMP", "DATE") and self._kind_after() == "text":
            self.at += 1
            kind, text, _ = self._peek()
        given: Any
        if kind == "text":
            given = text[1:-1].replace(text[0] * 2, text[0])
        elif kind == "number":
            given = int(text)
        elif kind == "word" and text.upper() in ("TRUE", "FALSE"):
            given = text.upper() == "TRUE"
        else:
            raise self._wrong()
        self.at += 1

        def value(type: Type) -> Any:
            try:
                return value_of(type, moment(given) if type == "timestamp" and isinstance(given, str) else given)
            except ValueError as exc:
                raise self._wrong(at, f"no {type} is") from exc

        return value

    # -- tokens --

    def _peek(self) -> tuple[str, str, int]:
        if self.at >= len(self.tokens):
            raise Invalid(self._short())
        return self.tokens[self.at]

    def _kind_after(self) -> str:
        return self.tokens[self.at + 1][0] if self.at + 1 < len(self.tokens) else ""

    def _word(self, word: str) -> bool:
        return self._take("word", word)

    def _sign(self, sign: str) -> bool:
        return self._take("sign", sign)

    def _take(self, kind: str, text: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at][0] == kind and self.tokens[self.at][1].upper() == text:
            self.at += 1
            return True
        return False

    def _must(self, met: bool) -> None:
        if not met:
            raise self._wrong()


def moment(text: str) -> datetime:
    """A time in ISO form; one without a zone is UTC. Raises `ValueError`."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def names_of(conditions: Sequence[Condition]) -> list[str]:
    return [condition.column for condition in conditions]
