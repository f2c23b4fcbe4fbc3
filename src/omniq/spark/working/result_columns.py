"""The results of a function as columns of a DataFrame: they are JSON, which Spark itself reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import ParseException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omniq.errors import Invalid

if TYPE_CHECKING:
    from pyspark.sql import Column

RESULT_COLUMN = "result"
MAX_SHOWN = 200
_WRITE = "write 'double', or columns like 'price double, at timestamp'"
UNFIT = "_unfit"


@dataclass(frozen=True)
class Shape:
    """The columns of a result. With `bare` there is one column, which the function does not name."""

    columns: T.StructType
    bare: bool = False

    @classmethod
    def of(cls, returns: str | T.DataType, taken: Sequence[str]) -> Shape:
        """The columns that `returns` describes; raises `Invalid` for text that is no type, and for names that are `taken`."""
        if isinstance(returns, str):
            try:
                returns = T.DataType.fromDDL(returns)
            except ParseException as exc:
                raise Invalid(f"returns={returns!r} is no type: {_WRITE}") from exc
        bare = not isinstance(returns, T.StructType)
        columns = T.StructType([T.StructField(RESULT_COLUMN, returns)]) if bare else returns
        if not columns.fields:
            raise Invalid(f"returns has no columns: {_WRITE}")
        # Names of columns have no case in Spark; those with an underscore are left for the four that `map_tasks` adds.
        there = {name.lower() for name in taken}
        for name in columns.names:
            if name.lower() in there or name.startswith("_"):
                raise Invalid(f"returns: column {name!r} is taken; give it another name, or rename that of the DataFrame")
        return cls(columns, bare)

    def read(self, text: Column) -> Column:
        """The columns as a struct; its field `UNFIT` has the text that does not fit them."""
        # Else a result of another shape would be nulls, as if the function had returned none.
        schema = T.StructType([*self.columns.fields, T.StructField(UNFIT, T.StringType())])
        return F.from_json(self._as_object(text), schema, {"columnNameOfCorruptRecord": UNFIT})

    def unfit(self, text: Column) -> Column:
        """A sentence on a result that does not fit."""
        expected = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.columns)
        return F.concat(F.lit(f"the result does not fit returns ({expected}): "), F.left(text, F.lit(MAX_SHOWN)))

    def _as_object(self, text: Column) -> Column:
        # A function that returns None has nulls in all columns, and no result that does not fit.
        text = F.nullif(text, F.lit("null"))
        if len(self.columns) != 1:
            return text
        named = F.concat(F.lit(f"{{{json.dumps(self.columns[0].name)}:"), text, F.lit("}"))
        if self.bare:
            return named
        # An object may be the only column's value or its name and value; for these types it is always taken for the latter.
        if isinstance(self.columns[0].dataType, T.StructType | T.MapType):
            return text
        # A function that returns one value need not name it.
        return F.when(text.startswith("{"), text).otherwise(named)
