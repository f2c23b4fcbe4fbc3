"""A driver that tests start in a process of its own, to kill it: enqueues what it is told, and says when it begins and ends.

python enqueue_driver.py '[{"url": …, "queue": …, "rows": …, "run_id": …}, …]'
"""

import json
import sys
from typing import Any

import msgspec

from omniq.spark import enqueue, session


def say(word: str, **fields: Any) -> None:
    print(json.dumps({"word": word, **fields}), flush=True)


def main() -> None:
    steps: list[dict[str, Any]] = json.loads(sys.argv[1])
    spark = session(master="local[2]", fast_start=True, conf={"spark.driver.memory": "1g"})
    spark.range(10).mapInArrow(lambda batches: batches, "id long").count()  # the first job takes longest
    for step in steps:
        rows = spark.range(step["rows"]).selectExpr("id", "concat('row ', id) as text")
        say("begin", queue=step["queue"])
        done = enqueue(
            rows, step["url"], "support.jobs:echo", key="id", args=["text"], queue=step["queue"], run_id=step["run_id"]
        )
        say("done", **msgspec.structs.asdict(done))
    spark.stop()


if __name__ == "__main__":
    main()
