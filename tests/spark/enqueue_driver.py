"""A driver that tests start in a process of its own: enqueues what it is told, and says when it begins and ends.

python enqueue_driver.py STEPS OPTIONS, both JSON: the rows to enqueue, and the arguments of `started`.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from omniq.spark import enqueue, map_tasks, session
from omniq.spark.writing import staging
from omniq.spark.writing.staging import Work, stage

TOO_LONG_S = 600.0


def say(word: str, **fields: Any) -> None:
    print(json.dumps({"word": word, **fields}), flush=True)


def troubled(batches: Iterator[pa.RecordBatch], work: Work, folder: str) -> Iterator[pa.RecordBatch]:
    """Stages a part like others. At the first attempt part 0 fails after its last write, and part 1 does not come to an end."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    counted = list(stage(batches, work))
    Path(folder, f"part{context.partitionId()}-attempt{context.attemptNumber()}").touch()
    if context.attemptNumber() == 0 and context.partitionId() == 0:
        raise ArithmeticError("after its last write")
    if context.attemptNumber() == 0 and context.partitionId() == 1:
        time.sleep(TOO_LONG_S)
    yield from counted


def started(master: str = "local[2]", conf: dict[str, str] | None = None, remote: str = "", trouble: str = "") -> Any:
    if trouble:
        staging.stage = lambda batches, work: troubled(batches, work, trouble)
    if remote:
        from pyspark.sql import SparkSession

        return SparkSession.builder.remote(remote).getOrCreate()
    return session(master=master, fast_start=True, conf={"spark.driver.memory": "1g", **(conf or {})})


def main() -> None:
    steps: list[dict[str, Any]] = json.loads(sys.argv[1])
    spark = started(**json.loads(sys.argv[2]))
    spark.range(10).mapInArrow(lambda batches: batches, "id long").count()  # the first job takes longest
    for step in steps:
        rows = spark.range(step["rows"]).selectExpr("id", "concat('row ', id) as text")
        say("begin", queue=step["queue"])
        if step.get("map"):
            found = map_tasks(rows, "support.jobs:add", step["url"], key="id", args=["id"], returns="int", queue=step["queue"])
            say("done", results=sorted(row.result for row in found.collect()))
            continue
        done = enqueue(
            rows, step["url"], "support.jobs:echo", key="id", args=["text"], queue=step["queue"], run_id=step["run_id"]
        )
        say("done", **msgspec.structs.asdict(done))
    spark.stop()


if __name__ == "__main__":
    main()
