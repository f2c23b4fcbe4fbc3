"""Later and again: a task with an eta, one with an interval, and one that asks for its own retry."""

import itertools
import logging
import time
from datetime import UTC, datetime, timedelta

import omniq
from omniq import MemoryStorage, OmniQ, Retry, current_task

ticks: list[float] = []


@omniq.task(name="remind")
def remind(what: str) -> str:
    return what


@omniq.task(name="tick")
def tick() -> int:
    ticks.append(time.monotonic())
    return len(ticks)


@omniq.task(name="ask-again")
def ask_again() -> str:
    if current_task().attempt == 1:
        raise Retry("not ready yet", after=0.3)
    return "ready"


def main() -> None:
    with OmniQ(MemoryStorage()) as oq:
        soon = oq.enqueue(remind, "drink water", eta=timedelta(seconds=0.5))
        at = oq.enqueue(remind, "stand up", eta=datetime.now(UTC) + timedelta(seconds=0.8))
        series = oq.enqueue(tick, interval=timedelta(seconds=0.25))
        later = oq.enqueue(ask_again)

        with oq.worker(concurrency=4):
            for task_id in (later, soon, at):
                result = oq.get_result(task_id, wait=True, timeout=10)
                print(f"{result.result} (attempt {result.attempts})")
            oq.cancel(series)

    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    print(f"the interval task ran {len(ticks)} times, {sum(gaps) / len(gaps):.2f} s apart on average")


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    main()
