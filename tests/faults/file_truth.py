"""What is so in a file store: told by the store, and read from its folder by somebody who knows nothing of it."""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
from support.inside import InsideStorage

from omniq.models import State
from omniq.operations import Ack, Enqueue, Filter, Reserve, Reserved
from omniq.storage.file import FileStorage
from omniq.storage.file.writer import FileSection

FOLDER_OF = {
    State.STAGED: "queue/pending",
    State.BLOCKED: "queue/pending",
    State.SCHEDULED: "queue/pending",
    State.READY: "queue/pending",
    State.RUNNING: "queue/running",
    State.DEAD: "queue/failed",
    State.DONE: "results",
    State.CANCELLED: "results",
}
TABLES = ("queue/pending", "queue/running", "queue/failed", "queue/keys", "results", "events")

Dump = dict[str, Any]


async def dump(storage: InsideStorage) -> Dump:
    """Everything that a store can tell, comparable. Numbers of files are left out: a failed commit may use one up."""
    tasks = (await storage.find(Filter(states=tuple(State)), limit=10_000, newest_first=False)).tasks
    (shard,) = await storage.event_shards()
    return {
        "tasks": {task.id: msgspec.to_builtins(task) for task in tasks},
        "order": [task.id for task in tasks],
        "results": msgspec.to_builtins(await storage.results([task.id for task in tasks])),
        "events": msgspec.to_builtins(await storage.events(after=shard.first - 1, limit=100_000)),
        "shard": msgspec.to_builtins(shard),
        "counts": msgspec.to_builtins(await storage.counts()),
        "fed": await storage.queues(fed=True),
        "workers": msgspec.to_builtins(await storage.workers()),
        "rows": await storage.inside(_rows),
    }


def _rows(section: FileSection) -> Dump:
    """The small tables, which no public call shows whole."""
    index = section.index
    for queue in index.queues:
        ends = [entry.lease_until_us for entry in index.running.values() if entry.queue == queue]
        assert index.next_lease(queue) == min(ends, default=None)
    counters = msgspec.to_builtins(index.counters)
    del counters["segment"]
    return {
        "queues": {name: msgspec.to_builtins(row) for name, row in index.queues.items()},
        "lanes": {(q, g): msgspec.to_builtins(lane) for q, lanes in index.lanes.items() for g, lane in lanes.items()},
        "keys": {place: msgspec.to_builtins(key.line) for place, key in index.keys.items()},
        "waits_for": {entry.id: entry.waits_for for entry in index.entries.values() if entry.waits_for},
        "deferrals": dict(index.deferrals),
        "fan_ins": {key: msgspec.to_builtins(fan_in) for key, fan_in in index.fan_ins.items()},
        "members": {key: dict(members) for key, members in index.members.items() if members},
        "runs": {place: msgspec.to_builtins(run) for place, run in index.runs.items()},
        "claims": dict(index.claims),
        "staged": {place: sorted(e.id for e in index.staged(run, 10_000)) for place, run in index.runs.items()},
        "counters": counters,
    }


def difference(one: Dump, other: Dump) -> list[str]:
    """Where two dumps differ, for a message that a human can read."""
    found: list[str] = []
    for part, left in one.items():
        right = other[part]
        if left == right:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            found += [f"{part}.{k}: {left.get(k)} != {right.get(k)}" for k in {**left, **right} if left.get(k) != right.get(k)]
        else:
            found.append(f"{part}: {left} != {right}")
    return found


def read_lines(path: Path) -> list[Any]:
    """The lines of a file that are not blank, each with its checksum compared."""
    found: list[Any] = []
    for line in path.read_bytes().split(b"\n"):
        if line.strip():
            body, mark, checksum = line.rpartition(b',"sum":"')
            assert mark, f"{path}: {line!r}"
            assert checksum == b'%08x"}' % zlib.crc32(body), f"{path}: {line!r}"
            found.append(json.loads(line))
    return found


def seen_in(base: Path) -> dict[str, list[Any]]:
    """What `cat` shows in each folder: ids of tasks and results, keys, numbers of events; sorted, doubles included."""
    found: dict[str, list[Any]] = defaultdict(list)
    for table in TABLES:
        for file in sorted((base / table).iterdir()):
            for line in read_lines(file):
                if table == "queue/keys":
                    found["keys"].append((line["queue"], line["key"]))
                elif table == "events":
                    found["events"].append(line["seq"])
                else:
                    if "task" in line:
                        found[table].append(line["task"]["id"])
                    if "result" in line:
                        assert table == "results", f"a result in {file}"
                        found["result lines"].append(line["result"]["task_id"])
    return {name: sorted(values) for name, values in found.items()}


def shown_by(dumped: Dump) -> dict[str, list[Any]]:
    """What should be seen in the folder when the store says this."""
    found: dict[str, list[Any]] = defaultdict(list)
    for id, task in dumped["tasks"].items():
        found[FOLDER_OF[State(task.get("state", State.READY))]].append(id)
    found["keys"] = list(dumped["rows"]["keys"])
    found["result lines"] = list(dumped["results"])
    found["events"] = [event["seq"] for event in dumped["events"]]
    return {name: sorted(values) for name, values in found.items() if values}


def check_folder(base: Path, dumped: Dump) -> None:
    """What can be read in the folder is what the store says, no more and no less."""
    seen = seen_in(base)
    first = dumped["shard"]["first"]
    if "events" in seen:  # purged ones stay readable until their file goes
        seen["events"] = [seq for seq in seen["events"] if seq >= first]
    assert {k: v for k, v in seen.items() if v} == shown_by(dumped)


async def check_works(storage: FileStorage, id: str = "works-on") -> None:
    """A new task passes through the store."""
    queue, token = "after", f"{id:->24}"[:40]
    (enqueued,) = await storage.apply([(Enqueue(id=id, name="job", queue=queue, payload=b'{"n":1}'),)])
    assert isinstance(enqueued, list), enqueued
    (reserved,) = await storage.apply([(Reserve(queues=(queue,), token=token, lease_us=1_000_000),)])
    assert isinstance(reserved, list), reserved
    assert isinstance(reserved[0], Reserved)
    assert [task.id for task in reserved[0].tasks] == [id]
    (acked,) = await storage.apply([(Ack(queue=queue, id=id, token=token, result=b"42"),)])
    assert isinstance(acked, list), acked
    assert (await storage.results([id]))[id].result == b"42"


def reports(base: Path) -> list[Any]:
    """What was put aside, as the reports tell it; each stands beside what it tells of."""
    found: list[Any] = []
    for report in sorted((base / "corrupt").glob("*.report")):
        assert os.path.lexists(report.with_suffix("")), f"{report} tells of nothing"
        found.append(json.loads(report.read_bytes()))
    return found
