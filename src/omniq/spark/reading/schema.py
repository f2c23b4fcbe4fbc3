"""The schemas of a store's tables for Spark and Arrow; `omniq.storage.tables` says what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omniq.errors import ConfigError
from omniq.storage.tables import Columns, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

SPARK_TYPES = {
    "string": "STRING",
    "int": "INT",
    "long": "BIGINT",
    "boolean": "BOOLEAN",
    "timestamp": "TIMESTAMP",
    "binary": "BINARY",
}


def schema(options: Mapping[str, str]) -> str:
    """The columns that the options of a read ask for. Called for every DataFrame, so this module imports little."""
    table = options.get("table") or "tasks"
    return ddl(table, names_of(table, options.get("columns")))


def names_of(table: str, text: str | None) -> tuple[str, ...] | None:
    """The columns of a table that a text like `id, status` names; None for all of them."""
    if text is None:
        columns_of(table)
        return None
    names = [name.strip().strip("`").lower() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"columns {text!r}: name each column once, with commas between them")
    return tuple(column.name for column in columns_of(table, names))


def ddl(table: str, names: Sequence[str] | None = None) -> str:
    """The schema of a table, or of some of its columns, as Spark reads it."""
    return ", ".join(f"`{column.name}` {SPARK_TYPES[column.type]}" for column in columns_of(table, names))


def arrow_schema(table: str, names: Sequence[str] | None = None) -> pa.Schema:
    """The same for Arrow. Times have a zone, so that no session's own zone can shift them."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int": pa.int32(),
        "long": pa.int64(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", "UTC"),
        "binary": pa.binary(),
    }
    return pa.schema([pa.field(column.name, types[column.type]) for column in columns_of(table, names)])


def record_batch(columns: Columns, schema: pa.Schema, constants: Mapping[str, Any] | None = None) -> pa.RecordBatch:
    """Columns as an Arrow batch; a column in `constants` has that value in every row."""
    import pyarrow as pa

    fixed = constants or {}
    rows = len(next(iter(columns.values())))
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(fixed[field.name], field.type), rows)
            if field.name in fixed
            else _array(columns[field.name], field.type)
            for field in schema
        ],
        schema=schema,
    )


def _array(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    import pyarrow as pa

    # A view of the numbers as times is five times quicker than converting them one by one.
    if pa.types.is_timestamp(type):
        return pa.array(values, pa.int64()).view(type)
    return pa.array(values, type)
