"""The rows of a query as plain values, for JSON and for people."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")


def plain_rows(found: DataFrame) -> Iterator[dict[str, Any]]:
    """The rows as dicts, fetched part by part. Of columns with the same name the last one is kept."""
    fields = found.schema.fields
    for row in found.toLocalIterator():
        yield {field.name: plain(value, field.dataType) for field, value in zip(fields, row, strict=True)}


def numeric(found: DataFrame) -> list[bool]:
    """For each column, whether it is a number."""
    return [kind.startswith(_NUMBERS) for _, kind in found.dtypes]


def plain(value: Any, kind: Any = None) -> Any:
    """A value of one of Spark's types as JSON: times in RFC 3339 UTC, bytes as base64, NaN and infinities as null."""
    if isinstance(value, datetime):
        if getattr(kind, "typeName", str)() == "timestamp_ntz":
            return value.isoformat()
        # Spark gives the local time of this process, without a zone.
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if hasattr(value, "asDict"):
        return {name: plain(part, kind and kind[name].dataType) for name, part in value.asDict().items()}
    if isinstance(value, list | tuple):
        return [plain(part, getattr(kind, "elementType", None)) for part in value]
    if isinstance(value, dict):
        return {str(key): plain(part, getattr(kind, "valueType", None)) for key, part in value.items()}
    return value
