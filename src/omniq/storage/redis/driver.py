"""Redis: one script call per `apply`, on keys that other clients of the contract share.

The state machine is Lua (`lua/*.lua`, where the keys are listed) and runs inside the server, on the server's clock. Calls of
one event loop that come while another is on its way travel together in the next one. What is only looked at is read with plain
commands, in pipelines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import (
    ConfigError,
    DriverClosed,
    EventsLost,
    Invalid,
    StoreTooNew,
)
from omniq.models import (
    MAX_AT_ONCE,
    Record,
    StoredResult,
    check_count,
    check_queue,
    check_text,
    new_id,
    now_us,
)
from omniq.operations import (
    KEY_TTL_US,
    Capabilities,
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    Page,
    QueueCounts,
    RunInfo,
    Saved,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.retention import CutOffs
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.liveness import WorkerLocks, host_locks
from omniq.storage.redis import records, wire
from omniq.storage.redis.calls import QUEUES, Calls
from omniq.storage.redis.find import find_tasks, load_tasks, scored, task_page, task_shards
from omniq.storage.redis.plan import STORE
from omniq.storage.redis.records import text_of
from omniq.storage.redis.staging import RUN_FIELDS, run_of
from omniq.storage.redis.upkeep import Upkeep
from omniq.storage.redis.wake import Listener
from omniq.storage.url import mask

if TYPE_CHECKING:
    from omniq.storage.redis.client import Command, RedisClient

FORMAT = 1

WORKERS, IDS, INFO = (f"{{{STORE}}}:{name}" for name in ("workers", "ids", "info"))


class RedisStorage(BaseStorage):
    """A queue on a Redis or Valkey server, a cluster (`?cluster=1`), or the master that sentinels name (`?sentinel=name`).

    Times are the server's, in milliseconds. Inside a lane the order is that of arrival. On a cluster a transaction, a blocker
    and a dead queue stay within one slot, which is one queue; anything else is refused with `CrossQueue`.
    """

    stage_rows = 500  # the server serves nobody else meanwhile, so fewer than elsewhere
    longest_wait_s = 0.5  # clients of other makes ring no bell
    # Other clients share the keys: their times are whole milliseconds, and their lanes are lists in the order of arrival.
    capabilities = Capabilities(
        durability="process",
        store_clock=True,
        resolution_us=1000,
        push_wait=True,
        kernel_liveness=True,
        foreign_writers=True,
        due_order=False,
        local=False,
        restores=True,
    )

    def __init__(self, url: str = "redis://localhost:6379/0", *, clock: Callable[[], int] = now_us, **options: Any) -> None:
        super().__init__(clock=clock, **options)
        try:
            # An extra: only who makes such a storage needs the package, and hears here what to install.
            from omniq.storage.redis.client import RedisClient, Target, slot_of
        except ModuleNotFoundError as exc:
            raise ConfigError(f"RedisStorage needs the package {exc.name!r}: pip install '.[redis]'") from exc
        self._target = Target(url)
        self._client = RedisClient(self._target)
        self._listener = Listener(self._client, self.waiters)
        self.waiters.on_waiting = self._listener.start
        self._calls = Calls(self._client, self.waiters, slot_of, events=self.events_on)
        self._upkeep = Upkeep(self._client, self._calls)
        self._store_id = ""
        self._closed = False
        if self._target.cluster:
            self.capabilities = msgspec.structs.replace(type(self).capabilities, cross_queue=False)

    @property
    def url(self) -> str:
        return self._target.url

    # -- life --------------------------------------------------------------------------------------

    async def exists(self) -> bool:
        self._check_open()
        return bool(await self._client.command("HEXISTS", INFO, "store_id"))

    async def open(self) -> None:
        self._check_open()
        if self._store_id:
            return
        asked = ("HMGET", INFO, "store_id", "format")
        store_id, version = await self._client.command(*asked)
        if store_id is None or version is None:  # a store that is there is opened without a write: its server may be full
            made = [("HSETNX", INFO, "store_id", new_id()), ("HSETNX", INFO, "format", FORMAT)]
            *_, (store_id, version) = await self._client.pipeline([*made, asked])
        if int(version) > FORMAT:
            raise StoreTooNew(f"{mask(self.url)} has format {int(version)}, this omniq knows {FORMAT}: upgrade omniq")
        durability = await self._durability()
        self.capabilities = msgspec.structs.replace(self.capabilities, durability=durability)
        self._store_id = store_id.decode()

    async def _durability(self) -> str:
        """Returns the promise of the server's configuration. A server that hides it counts as one that survives a kill."""
        try:
            found = await self._client.configuration("append*")
        except Exception as exc:
            if isinstance(exc, DriverClosed):
                raise
            return "process"
        told = {text_of(k): text_of(v) for k, v in found.items()}
        if told.get("appendonly", "yes") != "yes":
            return "none"
        return "power" if told.get("appendfsync") == "always" else "process"

    def _check_open(self) -> None:
        if self._closed:
            raise DriverClosed(f"the storage {mask(self.url)} was closed; make a new one")

    async def _opened(self) -> RedisClient:
        if self._closed or not self._store_id:
            await self.open()
        return self._client

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._calls.close()
        await asyncio.to_thread(self._listener.stop)
        await self._client.close()
        self.waiters.notify_all()

    # -- changing ----------------------------------------------------------------------------------

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        await self._opened()
        return await self._calls.apply(transactions, now_us, repeat)

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        self._check_open()
        return self._calls.apply_blocking(transactions, now_us, repeat)

    async def allocate_ids(self, n: int) -> int:
        check_count(n, "allocate_ids", 1, MAX_AT_ONCE)
        client = await self._opened()
        return int(await client.command_anyway("INCRBY", IDS, n)) - n + 1

    # -- liveness, of workers of this host ---------------------------------------------------------

    async def _worker_locks(self) -> WorkerLocks | None:
        """Lock files for the workers of this host and user, apart from those of other stores."""
        await self._opened()
        return host_locks(self._store_id)

    async def hold_worker(self, worker: str) -> None:
        locks = await self._worker_locks()
        if locks is not None:
            locks.hold(worker)

    async def release_worker(self, worker: str) -> None:
        locks = await self._worker_locks() if not self._closed else None
        if locks is not None:
            locks.release(worker)

    async def lost_workers(self) -> list[str]:
        locks = await self._worker_locks()
        gone = locks.lost() if locks is not None else []
        if locks is None or not gone:
            return []
        holding = {lease.record.worker for lease in await self.expired(lost_workers=gone)}
        for worker in gone:
            if worker not in holding:
                # It held nothing. The others are named until their tasks have been taken back.
                locks.forget(worker)
        return [worker for worker in gone if worker in holding]

    # -- upkeep ------------------------------------------------------------------------------------

    async def _now_ms(self, now_us: int | None) -> int:
        if now_us is not None:
            return wire.ms_down(now_us)
        return await (await self._opened()).time_ms()

    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        names = await self._names() if queues is None else list(queues)
        return await self._upkeep.expired(names, await self._now_ms(now_us), limit, lost_workers)

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        return sum(await self._upkeep.on_each(await self._names(), now_us, "sweep", limit=limit))

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        await self._opened()
        return sum(await self._upkeep.on_each([queue], now_us, "promote", limit=limit))

    async def _moment(self, now_us: int | None) -> int:
        return await self._now_ms(now_us) * 1000

    async def _purge(self, cut: CutOffs) -> int:
        gone = await self._upkeep.purge(await self._names(), cut)
        # Workers belong to the store and not to a queue, so no call of the script on a queue deletes them.
        silent = [w.worker for w in await self.workers() if w.seen_at_us <= cut.workers_us][: cut.limit]
        return gone + (await self._client.command("HDEL", WORKERS, *silent) if silent else 0)

    async def _purge_results(self, older_than_us: int) -> int:
        return await self._upkeep.purge_results(await self._names(), wire.ms_up(older_than_us))

    async def check(self, repair: bool = False) -> list[str]:
        await self._opened()
        return await self._upkeep.check(self._names, repair)

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        await self._opened()
        return await self._upkeep.restore(tasks, key_ttl_us)

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        await self._opened()
        await self._upkeep.restore_events(rows)

    # -- looking -----------------------------------------------------------------------------------

    async def _names(self) -> list[str]:
        """Returns every queue that was ever heard of."""
        client = await self._opened()
        return sorted(text_of(name) for name in await client.command("SMEMBERS", QUEUES))

    async def get(self, id: str, queue: str | None = None) -> Record | None:
        # The name of a queue is part of the key, and an id does not tell it.
        names = await self._names() if queue is None else [queue]
        await self._opened()
        found = [t for t in await load_tasks(self._client, [(q, id) for q in names]) if t is not None]
        return found[0] if found else None

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        client, names = self._client, await self._names()
        if not ids:
            return {}
        found = await client.pipeline([("MGET", *[f"{{{q}}}:o:res:{id}" for id in ids]) for q in names])
        results: dict[str, StoredResult] = {}
        for values in found:
            results.update(
                {id: records.result_of(id, value) for id, value in zip(ids, values, strict=True) if value is not None}
            )
        return results

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page:
        names = await self._names()
        if filter.queue is not None:
            names = [name for name in names if name == filter.queue]
        return await find_tasks(self._client, names, filter, cursor, limit, newest_first)

    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        client = await self._opened()
        found = await client.command("HMGET", f"{{{queue}}}:o:run:{run_id}", *RUN_FIELDS)
        return None if found[0] is None else run_of(queue, run_id, found)

    async def task_shards(self) -> list[Shard]:
        return await task_shards(self._client, await self._names())

    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        return await task_page(self._client, shard, after, upto, limit)

    async def counts(self, now_us: int | None = None) -> list[QueueCounts]:
        names = await self.queues()
        now = await self._now_ms(now_us)
        commands: list[Command] = []
        for queue in names:
            base = f"{{{queue}}}:"
            commands += [
                ("ZCARD", f"{base}o:blocked"),
                ("ZCARD", f"{base}delayed"),
                ("ZCOUNT", f"{base}delayed", "-inf", now),
                ("ZCARD", f"{base}idx:wait"),  # all lanes: each group has a list of its own
                ("ZCARD", f"{base}active"),
                ("ZCARD", f"{base}o:done"),
                ("LLEN", f"{base}failed"),
                ("ZCARD", f"{base}o:cancelled"),
                ("EXISTS", f"{base}paused"),
                ("ZRANGEBYSCORE", f"{base}idx:wait", "-inf", "+inf", "WITHSCORES", "LIMIT", 0, 1),
                ("ZRANGEBYSCORE", f"{base}delayed", "-inf", now, "WITHSCORES", "LIMIT", 0, 1),
                ("HLEN", f"{base}o:staged"),
            ]
        found = await self._client.pipeline(commands)
        return [_counts(queue, found[n * 12 : n * 12 + 12]) for n, queue in enumerate(names)]

    async def queues(self, fed: bool = False) -> list[str]:
        names = await self._names()
        commands: list[Command] = [("EXISTS", f"{{{q}}}:stats", f"{{{q}}}:paused") for q in names]
        if fed:
            # A publish stamps the hash, so a queue without the stamp is a mere dead queue.
            commands = [("HEXISTS", f"{{{q}}}:stats", "last_enqueue_ms") for q in names]
        return [q for q, there in zip(names, await self._client.pipeline(commands), strict=True) if there]

    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        client = await self._opened()
        start = "-" if cursor is None else f"({cursor}"
        names = await client.command("ZRANGEBYLEX", f"{{{queue}}}:o:lanes", start, "+", "LIMIT", 0, limit + 1)
        shown = [text_of(name) for name in names[:limit]]
        commands: list[Command] = []
        for group in shown:
            base = f"{{{queue}}}:g:{group}:"
            commands += [("MGET", f"{base}limit", f"{base}inflight"), ("LLEN", f"{base}wait")]
        found = await client.pipeline(commands)
        infos = [
            GroupInfo(
                queue=queue,
                group=group,
                limit=max(records.whole(found[2 * n][0] or 0), 1),
                inflight=records.whole(found[2 * n][1] or 0),
                ready=found[2 * n + 1],
            )
            for n, group in enumerate(shown)
        ]
        return infos, shown[-1] if len(names) > limit else None

    async def workers(self, now_us: int | None = None) -> list[WorkerInfo]:
        client = await self._opened()
        found = await client.command("HGETALL", WORKERS)
        return sorted((records.worker_of(value) for value in found.values()), key=lambda w: w.worker)

    async def info(self) -> StoreInfo:
        await self._opened()
        return StoreInfo(store_id=self._store_id, format=FORMAT, url=mask(self.url), capabilities=self.capabilities)

    # -- events ------------------------------------------------------------------------------------

    async def event_shards(self) -> list[Shard]:
        names = await self.queues()
        found = await self._client.pipeline([("HMGET", f"{{{q}}}:o:meta", "events", "first") for q in names])
        shards: list[Shard] = []
        for queue, (last, first) in zip(names, found, strict=True):
            if last is not None:
                shards.append(Shard(name=queue, first=int(first or 1), last=int(last)))
        return shards

    async def events(self, shard: str = "", after: int = 0, limit: int = 1000, upto: int | None = None) -> list[EventRow]:
        client = await self._opened()
        if not shard:
            shards = await self.event_shards()
            if not shards:
                return []
            if len(shards) > 1:
                names = ", ".join(s.name for s in shards)
                raise Invalid(f"this store keeps the events of each queue apart; name a shard: {names}")
            shard = shards[0].name
        first = int(await client.command("HGET", f"{{{shard}}}:o:meta", "first") or 1)
        if after < first - 1:
            raise EventsLost(f"events of {shard!r} up to {first - 1} were purged; go on from there")
        stop = "+" if upto is None else f"{_last_entry(upto)}"
        rows = await self._read_events(shard, after + 1, stop, limit)
        return [e for e in rows if e.seq > after and (upto is None or e.seq <= upto)][:limit]

    async def _read_events(self, shard: str, start: int, stop: str, limit: int) -> list[EventRow]:
        """Reads whole entries until they hold enough events."""
        rows: list[EventRow] = []
        while len(rows) < limit + 1:
            count = min(max(limit - len(rows), 1), 100)
            entries = await self._client.command("XRANGE", f"{{{shard}}}:o:events", f"{start}-0", stop, "COUNT", count)
            for number, fields in _entries(entries):
                rows += records.events_of_entry(shard, number, fields)
                start = number + 1
            if len(entries) < count:
                break
        return rows

    async def events_of(self, id: str) -> list[EventRow]:
        rows: list[EventRow] = []
        for queue in await self._names():
            rows += [e for e in await self._read_events(queue, 0, "+", 1 << 40) if e.task_id == id]
        # A task that moved to a dead queue has events in both queues.
        return sorted(rows, key=lambda e: e.ts_us)

    # -- steering ----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> None:
        check_queue(queue)
        client = await self._opened()
        # A queue may be paused before its first task, and is on no list yet.
        await self._calls.list_queues([queue])
        await client.command_anyway("SET", f"{{{queue}}}:paused", "1")

    async def resume(self, queue: str) -> bool:
        check_queue(queue)
        client = await self._opened()
        was = await client.command("DEL", f"{{{queue}}}:paused") == 1
        # No script ran that would ring: workers sleep beside a paused queue.
        self.waiters.notify([queue])
        await self._listener.ring(queue)
        return was

    async def is_paused(self, queue: str) -> bool:
        check_queue(queue)
        client = await self._opened()
        return await client.command("EXISTS", f"{{{queue}}}:paused") == 1

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        check_queue(queue)
        check_text(group, "group")
        check_count(limit, "group limit", 1)
        await self._opened()
        await self._calls.list_queues([queue])
        await self._upkeep.on_each([queue], None, "limit", group=group, limit=limit)


def _last_entry(upto: int) -> str:
    """Events up to a number may be inside an entry that goes on after it; no entry is larger than a call."""
    return f"{upto + 1_000_000}-0"


def _entries(entries: list[Any]) -> list[tuple[int, bytes]]:
    return [(int(id.partition(b"-")[0]), fields[b"e"]) for id, fields in entries]


def _counts(queue: str, found: list[Any]) -> QueueCounts:
    blocked, delayed, due, waiting, running, done, dead, cancelled, paused, first, first_due, staged = found
    moments = [records.whole(until) * 1000 for pair in (first, first_due) for _, until in scored(pair)]
    return QueueCounts(
        queue=queue,
        staged=staged,
        blocked=blocked,
        scheduled=delayed - due,
        ready=waiting + due,
        running=running,
        done=done,
        dead=dead,
        cancelled=cancelled,
        paused=paused == 1,
        oldest_ready_us=min(moments, default=None),
    )
