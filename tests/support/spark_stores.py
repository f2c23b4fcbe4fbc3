"""Stores that Spark's processes can open, and what tests put into them."""

from pathlib import Path

from omniq import OmniQ
from support import jobs
from support.redis_server import Server

KINDS = ("sqlite", "file", "redis")


def empty(kind: str, folder: Path, server: Server) -> str:
    """The URL of an empty store."""
    if kind == "redis":
        with server.client() as client:
            client.flushall()
        return server.url
    return {"sqlite": f"sqlite:///{folder}/queue.db", "file": f"file://{folder}/queue"}[kind]


def fill(url: str, tasks: int = 20) -> None:
    """Run tasks, in turn in the queues `default` and `mail`, those of the first in groups; every fifth fails. One waits."""
    with OmniQ.from_url(url) as oq:
        for n in range(tasks):
            options = oq.options(queue="mail", max_retries=0) if n % 2 else oq.options(group=f"g-{n % 3}", max_retries=0)
            if n % 5 == 4:
                options.enqueue(jobs.fail, f"spark-{n}", "ähm, no luck")
            else:
                options.enqueue(jobs.add, n, 1)
        with oq.worker(queues=["default", "mail"], allow=["support.jobs"]) as pool:
            pool.drain()
        oq.enqueue(jobs.add, 99)


def enqueue(url: str, tasks: int, queue: str = "default") -> None:
    """Add tasks that nobody runs, each of which is one event."""
    with OmniQ.from_url(url) as oq:
        oq.options(queue=queue).enqueue_many(jobs.add, [(n,) for n in range(tasks)])
