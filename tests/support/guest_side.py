"""Runs inside the virtual environment of the published client: calls come as lines of JSON, answers go back the same way.

`python guest_side.py PORT` answers calls, `python guest_side.py PORT QUEUE FILE` consumes a queue and writes the ids it ran.
"""

import json
import sys

from omniq import OmniqClient


def plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    if hasattr(value, "__slots__"):
        return {name: getattr(value, name) for name in value.__slots__}
    return value


def answer_calls(client: OmniqClient) -> None:
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"ok": plain(getattr(client, call["method"])(**call["arguments"]))}
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)


def consume(client: OmniqClient, queue: str, file: str) -> None:
    def handler(ctx: object) -> None:
        with open(file, "a") as log:
            log.write(f"theirs {ctx.job_id}\n")

    print("ready", flush=True)
    client.consume(queue=queue, handler=handler, promote_interval_s=0.2, reap_interval_s=0.2)


if __name__ == "__main__":
    port, *rest = sys.argv[1:]
    guest = OmniqClient(host="127.0.0.1", port=int(port))
    if rest:
        consume(guest, *rest)
    else:
        answer_calls(guest)
