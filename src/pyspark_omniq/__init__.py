"""Makes `spark.read.format("omniq")` work without registration: Spark looks for `DefaultSource` in modules named `pyspark_*`.

Spark imports this with every other such module, so nothing here may fail or take long; the work is in
`omniq.spark.reading.source`.
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
