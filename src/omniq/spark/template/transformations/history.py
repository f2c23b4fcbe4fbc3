"""The history of a store: its events come in as a stream, each once; the other tables are made of them at every run.

The functions of `omniq.spark.lake.models` do the work. Add tables of your own beside these, or in files of their own.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from omniq.spark.lake import models

URL = "{url}"  # env:NAME takes it from a variable, so that a password need not stand here

spark = SparkSession.active()


# Mind in views of your own: withColumn, withColumnRenamed and drop make Spark 4.3 forget which table a view is made of, as soon
# as that table is there; the view is then made before the table is brought up to date. Use select.
@dp.table
def events() -> DataFrame:
    stream = spark.readStream.format("omniq").option("url", URL).option("table", "events").load()
    return stream.select("*", models.day("enqueued_at").alias("task_date"))


@dp.materialized_view(partition_cols=["task_date"])
def attempts() -> DataFrame:
    return models.attempts(spark.read.table("events"))


@dp.materialized_view(partition_cols=["task_date"])
def tasks() -> DataFrame:
    return models.tasks(spark.read.table("events"))


@dp.materialized_view(partition_cols=["day"])
def queue_minute() -> DataFrame:
    return models.queue_minute(spark.read.table("attempts"), spark.read.table("tasks"))


@dp.materialized_view(partition_cols=["day"])
def func_hour() -> DataFrame:
    return models.func_hour(spark.read.table("attempts"))


@dp.materialized_view(partition_cols=["day"])
def group_hour() -> DataFrame:
    return models.group_hour(spark.read.table("attempts"), spark.read.table("tasks"))


@dp.materialized_view(partition_cols=["day"])
def failure_day() -> DataFrame:
    return models.failure_day(spark.read.table("attempts"), spark.read.table("tasks"))


@dp.materialized_view(partition_cols=["day"])
def retry_storm() -> DataFrame:
    return models.retry_storm(spark.read.table("attempts"))


@dp.materialized_view(partition_cols=["day"])
def capacity_hour() -> DataFrame:
    return models.capacity_hour(spark.read.table("queue_minute"))
