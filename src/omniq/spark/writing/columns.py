"""The columns of a DataFrame that become tasks: chosen, checked and hashed by Spark itself, before any row is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omniq.errors import Invalid
from omniq.spark.rows import ID_CHARS
from omniq.spark.sessions import is_connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ID, KEY, GROUP, ETA = "id", "key", "group", "eta"

_PLAIN = (
    T.StringType,
    T.BooleanType,
    T.IntegralType,
    T.FractionalType,
    T.DatetimeType,
    T.DayTimeIntervalType,
    T.BinaryType,
    T.NullType,
)
# Types whose values have one text each, since the keys of a JSON object are texts.
_MAP_KEYS = (T.StringType, T.IntegralType, T.DecimalType, T.DateType, T.TimestampType, T.TimestampNTZType)

# Functions that make other values when Spark computes a row again. With a number behind it, `rand(7)#12` is a column's name.
_UNSTABLE = re.compile(
    r"\b(monotonically_increasing_id|spark_partition_id|uuid|rand|randn|randstr|uniform|shuffle)\((?:[^()]|\([^()]*\))*\)(?!#)"
)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that the user named; `keywords` are the names of the arguments, if they are not passed in order."""

    keys: tuple[str, ...]
    args: tuple[str, ...] = ()
    keywords: tuple[str, ...] | None = None
    group: str | None = None
    eta: str | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """The names of the argument columns where the tasks are made."""
        # The user's own names may be fields (`address.city`), stand twice, or be `id` and `key`.
        return tuple(f"a{n}" for n in range(len(self.args)))

    @property
    def names(self) -> dict[str, str]:
        """The user's name of each column that tasks are made of, for error texts."""
        found = {KEY: " or ".join(map(repr, self.keys)), GROUP: self.group, ETA: self.eta}
        return {place: name for place, name in found.items() if name} | dict(zip(self.places, self.args, strict=True))


def choice(
    key: str | Sequence[str],
    args: Sequence[str] | Mapping[str, str] | None = None,
    group: str | None = None,
    eta: str | None = None,
) -> Choice:
    if isinstance(args, str):
        raise Invalid(f"args is a list of columns, or a dict of keyword → column: write [{args!r}]")
    keys = (key,) if isinstance(key, str) else tuple(key)
    if not keys:
        raise Invalid("name the column that tells the rows apart: key='order_id'")
    if isinstance(args, Mapping):
        return Choice(keys=keys, args=tuple(args.values()), keywords=tuple(args), group=group, eta=eta)
    return Choice(keys=keys, args=tuple(args or ()), group=group, eta=eta)


def chosen(df: DataFrame, namespace: str, choice: Choice) -> DataFrame:
    """The columns that tasks are made of: `id`, `key` as text, `a0`, `a1`, …, and `group` and `eta` if there are any.

    Raises `Invalid` for a column that is missing or has a type that no task could have.
    """
    if df.isStreaming:
        raise Invalid("this DataFrame is a stream: use map_stream, or call this for each batch in foreachBatch")
    text = key_text(df, choice.keys)
    found = [id_of(namespace, text).alias(ID), text.alias(KEY)]
    for place, name in zip(choice.places, choice.args, strict=True):
        taken, kind = column(df, name)
        if wrong := _unfit(kind):
            raise Invalid(f"column {name!r} is {kind.simpleString()}: {wrong}; cast it to string or to a struct")
        found.append(taken.alias(place))
    if choice.group is not None:
        taken, kind = column(df, choice.group)
        if not isinstance(kind, T.StringType | T.IntegralType):
            raise Invalid(f"group column {choice.group!r} is {kind.simpleString()}; cast it to string")
        found.append(taken.cast("string").alias(GROUP))
    if choice.eta is not None:
        taken, kind = column(df, choice.eta)
        if not isinstance(kind, T.TimestampType):
            raise Invalid(f"eta column {choice.eta!r} is {kind.simpleString()}; cast it to timestamp, which has a time zone")
        found.append(taken.alias(ETA))
    _refuse_unstable(df, choice.keys, text)
    return df.select(*found)


def column(df: DataFrame, name: str) -> tuple[Column, T.DataType]:
    """A column by its name, or a field inside of one (`address.city`), and its type."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"name a column instead of {name!r}; add a computed column with withColumn first")
    # A column may itself have a dot in its name; only a name that is no column is taken for a field.
    taken = F.col(quoted(name) if name in df.columns else name)
    try:
        return taken, df.select(taken).schema[0].dataType
    except AnalysisException as exc:
        raise Invalid(f"there is no column {name!r}; the DataFrame has {', '.join(df.columns)}") from exc


def quoted(name: str) -> str:
    """A column's name, whatever it contains."""
    return f"`{name.replace('`', '``')}`"


def id_of(namespace: str, text: Column) -> Column:
    """The id that `omniq.spark.rows.task_id` computes, in Spark."""
    # In Spark, because the rows are sorted by it before a Python process sees them.
    return F.left(F.sha2(F.concat(F.lit(f"{namespace}\0"), text), 256), F.lit(ID_CHARS))


def key_text(df: DataFrame, keys: Sequence[str]) -> Column:
    """The key as text: the same in every session. Of several columns each is preceded by its length, as in `2:EU4:1042`."""
    parts = [_text(name, *column(df, name)) for name in keys]
    if len(parts) == 1:
        return parts[0]
    # Without lengths the keys ("a", "bc") and ("ab", "c") would be one, whatever stood between their parts.
    return F.concat(*[piece for part in parts for piece in (F.length(part).cast("string"), F.lit(":"), part)])


def _text(name: str, taken: Column, kind: T.DataType) -> Column:
    if isinstance(kind, T.TimestampType):  # as text it would depend on the session's time zone
        return F.unix_micros(taken).cast("string")
    if isinstance(kind, T.BinaryType):
        return F.lower(F.hex(taken))
    if isinstance(kind, T.StringType | T.IntegralType | T.DecimalType | T.DateType | T.TimestampNTZType):
        return taken.cast("string")
    raise Invalid(f"key column {name!r} is {kind.simpleString()}, which has no text that is always the same: cast it to string")


def in_ranges(df: DataFrame, parts: int) -> DataFrame:
    """All rows sorted by id, in `parts` parts of about the same size.

    Ids are hashes, hence evenly spread: the part of each row is known without a look at the others.
    """
    # Sorted, because a store takes in ids several times faster in the order of its index.
    first = F.conv(F.left(F.col(ID), F.lit(4)), 16, 10).cast("int")
    part = F.floor(first * F.lit(parts) / F.lit(0x10000)).cast("int")
    return df.repartitionById(parts, part).sortWithinPartitions(ID)


def _unfit(kind: T.DataType) -> str | None:
    """Why values of a type cannot be arguments of a task, or None."""
    if isinstance(kind, T.StructType):
        return next((wrong for field in kind.fields if (wrong := _unfit(field.dataType))), None)
    if isinstance(kind, T.ArrayType):
        return _unfit(kind.elementType)
    if isinstance(kind, T.MapType):
        if not isinstance(kind.keyType, _MAP_KEYS):
            return f"JSON has no objects with keys of type {kind.keyType.simpleString()}"
        return _unfit(kind.valueType)
    return None if isinstance(kind, _PLAIN) else f"there is no JSON for {kind.simpleString()}"


def _refuse_unstable(df: DataFrame, keys: Sequence[str], text: Column) -> None:
    """A row that Spark computes again must have the same key, or it would become another task."""
    found = _UNSTABLE.search(_optimized(df.select(text)))
    if found is not None:
        raise Invalid(
            f"key {', '.join(map(repr, keys))} is made by {found[1]}(), which may give other values when Spark computes a "
            "row again: use a key that comes from the data, or write the rows to a file first and read that"
        )


def _optimized(df: Any) -> str:
    # The optimized plan has only the columns that the key is made of: a row number in another column does no harm.
    if is_connect(df.sparkSession):
        return df._explain_string(extended=True).partition("== Optimized Logical Plan ==")[2]
    return df._jdf.queryExecution().optimizedPlan().toString()
