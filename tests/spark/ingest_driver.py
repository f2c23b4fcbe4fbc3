"""A driver that tests start in a process of its own: takes a store in and builds the lake, and says what it has done.

python ingest_driver.py URL LAKE MAX_ROWS
"""

import json
import sys
from typing import Any

from omniq.spark import Lake, build, ingest, session


def say(word: str, **fields: Any) -> None:
    print(json.dumps({"word": word, **fields}), flush=True)


def main() -> None:
    url, folder, max_rows = sys.argv[1:]
    spark = session(master="local[2]", fast_start=True, conf={"spark.driver.memory": "1g"})
    spark.range(10).mapInArrow(lambda batches: batches, "id long").count()  # the first job takes longest
    lake = Lake(folder)
    say("begin")
    report = ingest(spark, url, lake, max_rows=int(max_rows), on_batch=lambda taken: say("batch", rows=taken.rows))
    say("ingested", rows=report.rows)
    build(spark, lake)
    say("built")
    spark.stop()


if __name__ == "__main__":
    main()
