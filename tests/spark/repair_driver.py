"""A driver that tests start in a process of its own: repairs a lake, and says what it has done.

python repair_driver.py LAKE
"""

import json
import sys

from omniq.spark import Lake, repair, session


def say(word: str, **fields: object) -> None:
    print(json.dumps({"word": word, **fields}), flush=True)


def main() -> None:
    spark = session(master="local[2]", fast_start=True, conf={"spark.driver.memory": "1g"})
    spark.range(10).count()  # the first job takes longest
    say("begin")
    report = repair(spark, Lake(sys.argv[1]))
    say("repaired", events=report.events)
    spark.stop()


if __name__ == "__main__":
    main()
