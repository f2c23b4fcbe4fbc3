"""Consumes a queue with our own contract client: `python own_side.py URL QUEUE FILE`."""

import sys

from omniq.contract import ContractClient


def main(url: str, queue: str, file: str) -> None:
    def handler(ctx: object) -> None:
        with open(file, "a") as log:
            log.write(f"ours {ctx.job_id}\n")  # type: ignore[attr-defined]

    with ContractClient.from_url(url) as client:
        print("ready", flush=True)
        client.consume(queue, handler, concurrency=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
