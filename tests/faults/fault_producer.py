"""A producer process for the fault tests: `python fault_producer.py URL SIDE SEED PER_SECOND LEASE`.

Prints the id of each task once its enqueue has returned, and ends when its standard input closes. The mix: short tasks on the
loop and in threads, tasks that fail once, and tasks of five groups whose limits are 1, 2 and 3.
"""

import os
import random
import select
import sys
import time
from contextlib import closing

import fault_jobs
import fault_small_files  # noqa: F401

from omniq import OmniQ, Settings, StoreUnavailable

GROUP_LIMITS = {"g0": 1, "g1": 1, "g2": 2, "g3": 2, "g4": 3}


def enqueue(oq: OmniQ, side: str, lease: float, dice: random.Random) -> str:
    kind = dice.choices(["loop", "thread", "fails", "group", "many"], [4, 2, 2, 4, 1])[0]
    seconds = dice.choice([0.0, 0.0, 0.005, 0.02, 0.1])
    if kind == "many":
        return " ".join(oq.options(lease=lease).enqueue_many(fault_jobs.work, [(side, 0.0)] * dice.randint(1, 20)))
    if kind == "group":
        group = dice.choice(list(GROUP_LIMITS))
        chosen = oq.options(lease=lease, group=group, group_limit=GROUP_LIMITS[group])
        return chosen.enqueue(fault_jobs.work, side, seconds)
    if kind == "fails":
        return oq.options(lease=lease).enqueue(fault_jobs.fail_once, side)
    function = fault_jobs.work if kind == "loop" else fault_jobs.work_in_thread
    return oq.options(lease=lease).enqueue(function, side, seconds)


def main(url: str, side: str, seed: str, per_second: str, lease: str) -> None:
    dice = random.Random(seed)
    settings = Settings(default_max_retries=5, backoff_base=0.05)
    with closing(OmniQ.from_url(url, settings=settings)) as oq:  # opened by its first call
        due = time.monotonic()
        while True:
            try:
                os.write(1, (enqueue(oq, side, float(lease), dice) + "\n").encode())
            except StoreUnavailable as exc:  # somebody who was frozen has the lock: nothing of the call was stored
                print(exc, file=sys.stderr)
            due = max(due + 1 / float(per_second), time.monotonic() - 1)
            if select.select([0], [], [], max(due - time.monotonic(), 0))[0]:
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
