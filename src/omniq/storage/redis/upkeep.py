"""Upkeep of a store: leases that ran out, sweeping, purging, checking, and taking in tasks of another store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from omniq.errors import Invalid
from omniq.models import Record, State, check_queue
from omniq.operations import EventRow, Lease, Saved
from omniq.retention import CutOffs
from omniq.storage.redis import wire
from omniq.storage.redis.calls import Calls, meta_key
from omniq.storage.redis.find import load_tasks, scored
from omniq.storage.redis.packing import Entry
from omniq.storage.redis.records import text_of, whole
from omniq.storage.redis.restoring import by_slot, event_calls, task_calls
from omniq.storage.sending import Repeats, until_answered

if TYPE_CHECKING:
    from omniq.storage.redis.client import RedisClient

TOGETHER = 50  # queues that one call of the script looks after: the server serves nobody else meanwhile


class Upkeep:
    """Upkeep of one store. A script call works on one queue or a few, so that others are served in between."""

    def __init__(self, client: RedisClient, calls: Calls) -> None:
        self._client, self._calls = client, calls

    async def on_each(self, queues: Iterable[str], now_us: int | None, kind: str, **fields: Any) -> list[Any]:
        """Carry out one upkeep operation on each queue. Returns their answers."""
        now = None if now_us is None else wire.ms_down(now_us)
        entries: list[Entry] = [[{"kind": kind, "queue": q, **fields}] for q in queues]
        answers: list[Any] = []
        # A script runs on one node, and queues of a cluster may be on several.
        together = 1 if self._client.target.cluster else TOGETHER
        for start in range(0, len(entries), together):
            part = entries[start : start + together]
            answers += await self._until_answered(meta_key(part[0][0]["queue"]), part, now)
        return [answer[0] for answer in answers]

    async def _until_answered(self, key: str, entries: Sequence[Entry], now: int | None) -> list[Any]:
        """All upkeep may be done twice, so what stayed without an answer is sent again."""
        return await until_answered(lambda _: self._calls.script(key, entries, now, False), Repeats(()))

    async def expired(self, names: Sequence[str], now_ms: int, limit: int, lost_workers: Sequence[str]) -> list[Lease]:
        # The tasks of a dead worker are lost long before their leases end, so with one all leases are read.
        upto = "+inf" if lost_workers else str(now_ms)
        most = -1 if lost_workers else limit
        ranges = [("ZRANGEBYSCORE", f"{{{q}}}:active", "-inf", upto, "WITHSCORES", "LIMIT", 0, most) for q in names]
        found = await self._client.pipeline(ranges)
        held = [(q, text_of(id), whole(until)) for q, pairs in zip(names, found, strict=True) for id, until in scored(pairs)]
        running = await load_tasks(self._client, [(q, id) for q, id, _ in held], ended=False)
        leases: list[Lease] = []
        haunted: set[str] = set()  # by leases without a task, or without one that can be named: nobody could take them back
        for (queue, _, until), task in zip(held, running, strict=True):
            if task is None or (until <= now_ms and not _can_be_taken(task)):
                haunted.add(queue)
            elif task.state is State.RUNNING and (task.worker in lost_workers or until <= now_ms):
                leases.append(Lease(record=task, lost="worker_lost" if task.worker in lost_workers else "expired"))
        await self.on_each(sorted(haunted), now_ms * 1000, "bury")
        leases.sort(key=lambda lease: (lease.record.lease_until_us or 0, lease.record.seq))
        return leases[:limit]

    async def purge(self, names: Sequence[str], cut: CutOffs) -> int:
        moments = {"dead_before": cut.dead_us, "events_before": cut.events_us, "limits_before": cut.groups_us}
        fields: dict[str, Any] = {name: wire.ms_down(us) for name, us in moments.items() if us is not None}
        if cut.events_max is not None:
            fields["events_max"] = cut.events_max
        return sum(await self.on_each(names, cut.now_us, "purge", limit=cut.limit, **fields))

    async def purge_results(self, names: Sequence[str], before_ms: int) -> int:
        gone = 0
        for queue in names:
            keys = [f"{{{queue}}}:{key}" for key in ("o:done", "o:cancelled", "o:results", "idx:failed")]
            found = await self._client.pipeline([("ZRANGE", key, 0, -1) for key in keys])
            # Listed by plain commands and looked at by the script in parts, so that others are served in between.
            ids = sorted({text_of(id) for members in found for id in members})
            for start in range(0, len(ids), 1000):
                gone += sum(await self.on_each([queue], None, "forget", ids=ids[start : start + 1000], before=before_ms))
        return gone

    async def check(self, names_of_store: Callable[[], Awaitable[list[str]]], repair: bool) -> list[str]:
        """Check every queue and group, also those that only other clients use: their keys tell."""
        # A repair that knew only our books would take the jobs of other clients for errors of the index.
        groups: dict[str, set[str]] = {key[1:-7]: set() for key in await self._client.keys("{*}:stats")}
        for key in await self._client.keys("{*}:g:*"):
            queue, _, rest = key[1:].partition("}:g:")
            groups.setdefault(queue, set()).add(rest.rpartition(":")[0])
        await self._calls.list_queues([name for name in groups if _is_queue(name)])
        complaints: list[str] = []
        for name in await names_of_store():
            (found,) = await self.on_each([name], None, "check", repair=repair, groups=sorted(groups.get(name, ())))
            complaints += [f"queue {name!r}: {text_of(line)}" for line in found]
        return complaints

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int) -> int:
        tasks = [saved for saved in tasks if saved.record.state is not State.STAGED]
        parts = by_slot(tasks, self._calls.slot_of)
        await self._calls.list_queues({saved.record.queue for saved in tasks})
        new = 0
        for part in parts:
            for call in task_calls(part, key_ttl_us):
                answers = await self._calls.script(meta_key(part[0].record.queue), [[call]], None, False)
                new += answers[0][0]
        return new

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        await self._calls.list_queues({row.queue for row in rows})
        for call in event_calls(rows):
            await self._calls.script(meta_key(call["queue"]), [[call]], None, False)


def _can_be_taken(task: Record) -> bool:
    """Whether the script can be told which lease is meant: another client may have stored a token that is no text."""
    return task.state is State.RUNNING and "\ufffd" not in (task.token or "")


def _is_queue(name: str) -> bool:
    try:
        check_queue(name)
    except Invalid:
        return False
    return True
