"""The models of the lake: plain functions from DataFrame to DataFrame, called by `build`, by pipelines and by tests.

They only describe a query: a declarative pipeline calls them before the tables that they read exist, and finds those tables
in the plan. `columns`, `drop`, `withColumn` and `withColumnRenamed` would have Spark Connect look at the tables at once, so no
model uses them.
"""

from __future__ import annotations

from omniq.spark.lake.capacity import capacity_hour
from omniq.spark.lake.clock import day
from omniq.spark.lake.gold import failure_day, func_hour, group_hour, percentiles, queue_minute, retry_storm
from omniq.spark.lake.silver import attempts, fingerprint, normalized, tasks

# Raised when a model changes what it yields: the next build then does everything anew.
VERSION = 2

__all__ = [
    "VERSION",
    "attempts",
    "capacity_hour",
    "day",
    "failure_day",
    "fingerprint",
    "func_hour",
    "group_hour",
    "normalized",
    "percentiles",
    "queue_minute",
    "retry_storm",
    "tasks",
]
