"""Runs in the environment of the published client: `python guest.py PORT publish|drain JOBS SIZE` prints its seconds."""

import os
import signal
import sys
import time

from omniq import OmniqClient

QUEUE = "bench"


def publish(client: OmniqClient, jobs: int, size: int) -> float:
    payload = {"payload": "x" * size}
    start = time.perf_counter()
    for _ in range(jobs):
        client.publish(queue=QUEUE, payload=payload)
    return time.perf_counter() - start


def drain(client: OmniqClient, jobs: int, _: int) -> float:
    left = jobs

    def handler(ctx: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # its way to end: finish the job in hand and return

    start = time.perf_counter()
    client.consume(queue=QUEUE, handler=handler)
    return time.perf_counter() - start


if __name__ == "__main__":
    port, what, jobs, size = sys.argv[1:]
    guest = OmniqClient(host="127.0.0.1", port=int(port))
    print({"publish": publish, "drain": drain}[what](guest, int(jobs), int(size)))
