"""Format `omniq` where the session is not of this process: over Spark Connect, and on executors of their own."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.spark_cluster import cluster
from support.spark_server import connect_server
from support.spark_stores import fill

READING = """
import sys
from pyspark.sql import SparkSession
import omniq.spark

place, url, folder = sys.argv[1:]
if place.startswith("sc:"):
    spark = SparkSession.builder.remote(place).getOrCreate()
else:
    spark = omniq.spark.session(master=place, fast_start=True)
print(omniq.spark.read(spark, url, where="status = 'FAILED'", partitions=2).count())
print(spark.read.format("omniq").options(url=url, table="events", pushFilters="true").load().filter("event = 'failed'").count())
stream = omniq.spark.read_stream(spark, url, columns=["seq"], max_rows=50)
written = stream.writeStream.format("parquet").option("checkpointLocation", folder + "/checkpoint")
written.trigger(availableNow=True).start(folder + "/events").awaitTermination()
print(spark.read.parquet(folder + "/events").count())
rows = spark.range(10).selectExpr("id AS key", "id AS a")
rows.write.format("omniq").options(url=url, func="support.jobs:add", argColumns="a").mode("append").save()
print(omniq.spark.read(spark, url, columns=["id"]).count())
spark.stop()
"""


def read_from(place: str, folder: Path) -> None:
    url = f"sqlite:///{folder}/queue.db"
    fill(url)
    command = [sys.executable, "-c", READING, place, url, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "4", "61", "31"]


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.timeout(900)
def test_a_store_is_read_and_written_over_spark_connect(tmp_path: Path) -> None:
    with connect_server(tmp_path) as place:
        read_from(place, tmp_path)


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.timeout(900)
def test_a_store_is_read_and_written_by_executors_of_their_own(tmp_path: Path) -> None:
    with cluster(tmp_path / "cluster") as made:
        read_from(made.master, tmp_path)
