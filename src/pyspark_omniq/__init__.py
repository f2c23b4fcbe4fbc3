"""Makes `spark.read.format("omniq")` work without registration: Spark looks for `DefaultSource` in modules named `pyspark_*`.

Spark imports it with every other such module, and an error here would break every Python source of the session. So nothing
here may fail or take long: the methods import their work when they are called.
"""

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Format `omniq`."""

    @classmethod
    def name(cls) -> str:
        return "omniq"

    # Spark calls each of these in a process of its own, where `sentence_first` keeps the traceback out of the error.
    def schema(self) -> str:
        from omniq.spark.causes import sentence_first
        from omniq.spark.reading.schema import schema

        with sentence_first():
            return schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from omniq.spark.causes import sentence_first
        from omniq.spark.reading.source import reader

        with sentence_first():
            return reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from omniq.spark.reading.stream import StreamReader

        # Without a check of the options, which the reader does itself: Spark hides errors that are raised here.
        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from omniq.spark.causes import sentence_first
        from omniq.spark.writing.writing import writer

        with sentence_first():
            return writer(self.options, schema.fieldNames(), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from omniq.errors import ConfigError
        from omniq.spark.causes import sentence_first

        with sentence_first():
            raise ConfigError(
                "format omniq is no sink of a stream: write each batch with "
                "df.writeStream.foreachBatch(lambda batch, n: omniq.spark.enqueue(batch, url, func, key=…))"
            )
