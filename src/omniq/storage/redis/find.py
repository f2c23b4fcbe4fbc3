"""Tasks in pages, over several queues: each queue has its own order of insertion, and pages merge them."""

from __future__ import annotations

import base64
import binascii
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omniq.errors import InvalidCursor
from omniq.models import Record, State
from omniq.operations import Filter, Page, Shard
from omniq.storage.cursors import SCAN_LIMIT
from omniq.storage.redis.records import Hash, record_of, record_of_result
from omniq.storage.redis.staging import staged_record

if TYPE_CHECKING:
    from omniq.storage.redis.client import Command, RedisClient

CHUNK = 200
SMALL = 5000  # ids of a state that are sorted here rather than found by looking at every task

_SETS = {
    State.BLOCKED: "o:blocked",
    State.SCHEDULED: "delayed",
    State.READY: "idx:wait",
    State.RUNNING: "active",
    State.DONE: "o:done",
    State.DEAD: "idx:failed",
    State.CANCELLED: "o:cancelled",
}

Place = tuple[int, str]  # number of a task and its queue: an order of all tasks that never changes


def encode_place(place: Place) -> str:
    return base64.urlsafe_b64encode(f"r{place[0]}.{place[1]}".encode()).decode().rstrip("=")


def decode_place(cursor: str | None) -> Place | None:
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        number, dot, queue = text[1:].partition(".")
        if not text.startswith("r") or not number.isascii() or not number.isdigit() or not dot:
            raise ValueError(text)
        return int(number), queue
    except (ValueError, binascii.Error) as exc:
        raise InvalidCursor(f"cursor {cursor[:40]!r} is not one that this store gave out; start without one") from exc


async def load_tasks(client: RedisClient, places: Sequence[tuple[str, str]], *, ended: bool = True) -> list[Record | None]:
    """The tasks of these ids in these queues, staged ones too; of one whose hash others trimmed, what its result tells."""
    # Other clients may keep something else than a hash under such a key: then there is no task.
    found = await client.pipeline([("HGETALL", f"{{{queue}}}:job:{id}") for queue, id in places], wrong_type={})
    tasks = [_record(*place, fields) for place, fields in zip(places, found, strict=True)]
    missing = [n for n, record in enumerate(tasks) if record is None]
    if not ended or not missing:
        return tasks
    commands: list[Command] = [("HGETALL", "{{{}}}:o:end:{}".format(*places[n])) for n in missing]
    commands += [("GET", "{{{}}}:o:res:{}".format(*places[n])) for n in missing]
    commands += [("HGET", f"{{{places[n][0]}}}:o:staged", places[n][1]) for n in missing]
    found = await client.pipeline(commands)
    some = len(missing)
    for n, fields, result, staged in zip(missing, found[:some], found[some : 2 * some], found[2 * some :], strict=True):
        tasks[n] = _record(*places[n], fields)
        if tasks[n] is None and staged is not None:
            tasks[n] = staged_record(*places[n], staged)
        elif tasks[n] is None and result is not None:
            tasks[n] = record_of_result(*places[n], result)
    return tasks


def _record(queue: str, id: str, fields: Hash) -> Record | None:
    return record_of(queue, id, fields) if b"state" in fields else None


class _Merge:
    """The ids of several queues as one sequence, read in chunks that grow: of most queues a page shows few tasks."""

    def __init__(self, client: RedisClient, queues: Sequence[str], after: Place | None, newest_first: bool) -> None:
        self._client, self._newest_first = client, newest_first
        self._buffers: dict[str, deque[tuple[int, str]]] = {q: deque() for q in queues}
        self._bounds = {q: self._first_bound(q, after) for q in queues}
        self._sizes = dict.fromkeys(queues, max(CHUNK // max(len(queues), 1), 4))
        self._dry = set(queues)  # whose next ids have to be read first
        self._heads: list[Place] = []  # of the others, in order

    def _first_bound(self, queue: str, after: Place | None) -> str:
        if after is None:
            return "+inf" if self._newest_first else "-inf"
        seq, name = after
        inclusive = queue < name if self._newest_first else queue > name
        return f"{seq}" if inclusive else f"({seq}"

    async def _refill(self) -> None:
        empty = sorted(self._dry)
        commands: list[Command] = []
        for queue in empty:
            key, bound, size = f"{{{queue}}}:o:tasks", self._bounds[queue], self._sizes[queue]
            if self._newest_first:
                commands.append(("ZREVRANGEBYSCORE", key, bound, "-inf", "WITHSCORES", "LIMIT", 0, size))
            else:
                commands.append(("ZRANGEBYSCORE", key, bound, "+inf", "WITHSCORES", "LIMIT", 0, size))
        for queue, found in zip(empty, await self._client.pipeline(commands), strict=True):
            # Nothing keeps the ids of other clients to UTF-8.
            pairs = [(int(float(score)), id.decode("utf-8", "replace")) for id, score in scored(found)]
            if pairs:
                self._buffers[queue].extend(pairs)
                self._heads.append((pairs[0][0], queue))
                self._bounds[queue] = f"({pairs[-1][0]}"
            if len(pairs) < self._sizes[queue]:
                del self._bounds[queue]  # there are no more
            self._sizes[queue] = min(4 * self._sizes[queue], CHUNK)
        self._heads.sort()
        self._dry.clear()

    async def take(self, limit: int) -> list[tuple[Place, str]]:
        """Returns the next ids, at most `limit`; none at the end."""
        taken: list[tuple[Place, str]] = []
        while len(taken) < limit:
            if self._dry:
                if taken:
                    break
                await self._refill()
            if not self._heads:
                break
            place = self._heads.pop(-1 if self._newest_first else 0)
            queue = place[1]
            buffer = self._buffers[queue]
            taken.append((place, buffer.popleft()[1]))
            if buffer:
                insort(self._heads, (buffer[0][0], queue))
            elif queue in self._bounds:
                self._dry.add(queue)
        return taken


def scored(found: list[object]) -> list[tuple[bytes, float]]:
    """Members with scores, however the client shaped them."""
    if found and isinstance(found[0], list | tuple):
        return [(pair[0], pair[1]) for pair in found]  # type: ignore[index, misc]
    return list(zip(found[::2], found[1::2], strict=True))  # type: ignore[arg-type]


class _Sorted:
    """The ids of a few tasks, already in order."""

    def __init__(self, places: list[tuple[Place, str]]) -> None:
        self._places = places

    async def take(self, limit: int) -> list[tuple[Place, str]]:
        taken, self._places = self._places[:limit], self._places[limit:]
        return taken


def _how_many(queue: str, state: State) -> Command:
    return ("HLEN", f"{{{queue}}}:o:staged") if state is State.STAGED else ("ZCARD", f"{{{queue}}}:{_SETS[state]}")


def _who(queue: str, state: State) -> Command:
    return ("HKEYS", f"{{{queue}}}:o:staged") if state is State.STAGED else ("ZRANGE", f"{{{queue}}}:{_SETS[state]}", 0, -1)


async def _by_state(
    client: RedisClient, queues: Sequence[str], states: Sequence[State], after: Place | None, newest_first: bool
) -> _Sorted | None:
    """Returns the tasks in some states, from the sets that hold just those; None if they are too many for that."""
    places_of = [(queue, state) for queue in queues for state in states]
    if sum(await client.pipeline([_how_many(*place) for place in places_of])) > SMALL:
        return None
    members = await client.pipeline([_who(*place) for place in places_of])
    named = [(queue, ids) for (queue, _), ids in zip(places_of, members, strict=True) if ids]
    scores = await client.pipeline([("ZMSCORE", f"{{{queue}}}:o:tasks", *ids) for queue, ids in named])
    places = [
        ((int(float(seq)), queue), id.decode("utf-8", "replace"))
        for (queue, ids), seqs in zip(named, scores, strict=True)
        for id, seq in zip(ids, seqs, strict=True)
        if seq is not None
    ]
    if after is not None:
        places = [p for p in places if (p[0] < after if newest_first else p[0] > after)]
    return _Sorted(sorted(places, reverse=newest_first))


async def find_tasks(
    client: RedisClient,
    queues: Sequence[str],
    filter: Filter,
    cursor: str | None,
    limit: int,
    newest_first: bool,
) -> Page:
    after = decode_place(cursor)
    # Without states every task may match, and then the order of insertion leads to a page at once.
    narrow = bool(filter.states or filter.statuses)
    merge = await _by_state(client, queues, filter.possible, after, newest_first) if narrow else None
    if merge is None:
        merge = _Merge(client, queues, after, newest_first)
    tasks: list[Record] = []
    last, scanned = after, 0
    while batch := await merge.take(CHUNK):
        records = await load_tasks(client, [(queue, id) for (_, queue), id in batch])
        for (place, _), task in zip(batch, records, strict=True):
            if task is not None and filter.matches(task):
                if len(tasks) == limit:
                    return Page(tasks=tasks, cursor=None if last is None else encode_place(last))
                tasks.append(task)
                last = place
        scanned += len(batch)
        # A filter that nothing matches would otherwise read the whole store for one page.
        if scanned >= SCAN_LIMIT:
            return Page(tasks=tasks, cursor=encode_place(batch[-1][0]), partial=True)
    return Page(tasks=tasks)


async def task_shards(client: RedisClient, queues: Sequence[str]) -> list[Shard]:
    """Returns the first and the last number of each queue's tasks."""
    commands: list[Command] = []
    for queue in queues:
        key = f"{{{queue}}}:o:tasks"
        commands += [("ZRANGE", key, 0, 0, "WITHSCORES"), ("ZRANGE", key, -1, -1, "WITHSCORES")]
    ends = [scored(found) for found in await client.pipeline(commands)]
    return [
        Shard(name=queue, first=int(float(first[0][1])), last=int(float(last[0][1])))
        for queue, first, last in zip(queues, ends[::2], ends[1::2], strict=True)
        if first and last
    ]


async def task_page(client: RedisClient, queue: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
    """Returns tasks of a queue by their numbers, and the last number that the page covers."""
    key = f"{{{queue}}}:o:tasks"
    [found] = await client.pipeline([("ZRANGEBYSCORE", key, f"({after}", upto, "WITHSCORES", "LIMIT", 0, limit)])
    pairs = scored(found)
    records = await load_tasks(client, [(queue, id.decode("utf-8", "replace")) for id, _ in pairs])
    return [task for task in records if task is not None], upto if len(pairs) < limit else int(float(pairs[-1][1]))
