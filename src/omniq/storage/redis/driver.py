"""Redis: one script call per `apply`, on keys that other clients of the contract share.

The state machine is Lua (`lua/*.lua`, where the keys are listed) and runs inside the server, on the server's clock. Calls of
one event loop that come while another is on its way travel together in the next one. What is only looked at is read with plain
commands, in pipelines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import (
    ConfigError,
    DriverClosed,
    EventsLost,
    Invalid,
    OutcomeUnknown,
    StoreError,
    StoreFull,
    StoreTooNew,
    StoreUnavailable,
)
from omniq.models import (
    MAX_AT_ONCE,
    Record,
    State,
    StoredResult,
    check_count,
    check_encodable,
    check_queue,
    check_text,
    new_id,
    now_us,
)
from omniq.operations import (
    KEY_TTL_US,
    Capabilities,
    Enqueue,
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    OnRun,
    OnTask,
    Page,
    QueueCounts,
    Reserve,
    Retention,
    RunInfo,
    Saved,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.liveness import WorkerLocks, host_locks
from omniq.storage.redis import records, wire
from omniq.storage.redis.batches import Batches
from omniq.storage.redis.find import find_tasks, scored, task_page, task_shards
from omniq.storage.redis.plan import STORE, WIDE, Plan, spans_slots
from omniq.storage.redis.publish import publish_answer, publish_call
from omniq.storage.redis.restoring import by_slot, event_calls, task_calls
from omniq.storage.redis.staging import RUN_FIELDS, run_of, staged_record
from omniq.storage.redis.wake import Listener
from omniq.storage.redis.wire import Command
from omniq.storage.sending import Repeats
from omniq.storage.url import mask

if TYPE_CHECKING:
    from omniq.storage.redis.client import Client

FORMAT = 1
TOGETHER = 50  # queues that one call of the script looks after: the server serves nobody else meanwhile
POLL_S = 0.5  # other clients ring no bell: how long a wait for work lasts at most

QUEUES, WORKERS, IDS, INFO = (f"{{{STORE}}}:{name}" for name in ("queues", "workers", "ids", "info"))


class RedisStorage(BaseStorage):
    """A queue on a Redis or Valkey server, a cluster (`?cluster=1`), or the master that sentinels name (`?sentinel=name`).

    Times are the server's, in milliseconds. Inside a lane the order is that of arrival. On a cluster a transaction, a blocker
    and a dead queue stay within one slot, which is one queue; anything else is refused with `CrossQueue`.
    """

    stage_rows = 500
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
            from omniq.storage.redis.client import Client, Target, slot_of
        except ModuleNotFoundError as exc:
            raise ConfigError(f"RedisStorage needs the package {exc.name!r}: pip install '.[redis]'") from exc
        self._target, self._slot_of = Target(url), slot_of
        self._client = Client(self._target)
        self._listener = Listener(self._client, self.waiters)
        self.waiters.on_waiting = self._listener.start
        self._batches = Batches(self._script)
        self._known: set[str] = set()
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
        """What the server's configuration promises; servers that do not tell are taken to survive a killed process."""
        try:
            found = await self._client.configuration("append*")
        except Exception as exc:
            if isinstance(exc, DriverClosed):
                raise
            return "process"
        told = {_text(k): _text(v) for k, v in found.items()}
        if told.get("appendonly", "yes") != "yes":
            return "none"
        return "power" if told.get("appendfsync") == "always" else "process"

    def _check_open(self) -> None:
        if self._closed:
            raise DriverClosed(f"the storage {mask(self.url)} was closed; make a new one")

    async def _opened(self) -> Client:
        if self._closed or not self._store_id:
            await self.open()
        return self._client

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._batches.close()
        await asyncio.to_thread(self._listener.stop)
        await self._client.close()
        self.waiters.notify_all()

    # -- changing ----------------------------------------------------------------------------------

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        await self._opened()
        await self._list(self._new_queues(transactions))
        now = None if now_us is None else wire.ms_down(now_us)
        answers: list[Result] = []
        for part in _parts(transactions):
            if self._target.cluster or _is_wide(part):
                answers += await self._apply_in_steps(part, now, repeat)
                continue
            packed = wire.Packed(part)
            if part and isinstance(part[0][0], OnRun):
                answers += packed.read(await self._script(self._key(part), packed.entries, now, repeat))
            else:
                answers += packed.read(await self._batches.send(self._key(part), packed.entries, now, repeat))
        return answers

    def _plan(self, transactions: Sequence[Transaction], repeat: bool) -> Plan:
        """What one server holds is in one slot, as it were."""
        return Plan(transactions, self._slot_of if self._target.cluster else lambda _: 0, repeat)

    async def _apply_in_steps(self, transactions: Sequence[Transaction], now: int | None, repeat: bool) -> list[Result]:
        plan = self._plan(transactions, repeat)
        for key, part in plan.steps():
            try:
                answers = await self._script(key, part.entries, now, repeat)
            except (StoreUnavailable, StoreFull) as exc:
                part.miss(exc)
            else:
                part.take(answers)
        return plan.answers

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        self._check_open()
        new = self._new_queues(transactions)
        if new:
            self._list_blocking(new)
        now = None if now_us is None else wire.ms_down(now_us)
        if len(transactions) == 1:
            flags = ("e" if self.events_on else "") + ("c" if self._target.cluster else "") + ("a" if repeat else "")
            call = publish_call(transactions[0], now, flags)
            if call is not None:
                reply = self._client.script_blocking(self._key(transactions), *call)
                return [publish_answer(transactions[0], self._heard(reply))]
        if not self._target.cluster and not _is_wide(transactions):
            try:
                return self._apply_flying(transactions, now, repeat)
            except StoreFull:  # the first call is answered before a second one flies: nothing happened
                packed = wire.Packed(transactions)
                if wire.grows(packed.entries):
                    raise
                return packed.read(self._script_blocking(self._key(transactions), packed.entries, now, repeat))
        answers: list[Result] = []
        for part in _parts(transactions):
            plan = self._plan(part, repeat)
            for key, step in plan.steps():
                try:
                    found = self._script_blocking(key, step.entries, now, repeat)
                except (StoreUnavailable, StoreFull) as exc:
                    step.miss(exc)
                else:
                    step.take(found)
            answers += plan.answers
        return answers

    def _apply_flying(self, transactions: Sequence[Transaction], now: int | None, repeat: bool) -> list[Result]:
        """On a single node the next call is made while the server works on the one before."""
        answers: list[Result] = []
        flying: deque[wire.Packed] = deque()

        def calls() -> Iterator[bytes]:
            for part in _parts(transactions):
                flying.append(wire.Packed(part))
                yield self._call(flying[-1].entries, now, repeat)

        key = self._key(transactions)
        for reply in self._client.scripts_blocking(key, calls()):
            packed, found = flying.popleft(), self._heard(reply)
            rest = wire.rest_of(packed.entries, found)  # only where one call carries all: no other is on its way then
            if rest:
                with _begun():
                    found = wire.joined(packed.entries, found, self._script_blocking(key, rest, now, repeat))
            answers += packed.read(found)
        return answers

    @staticmethod
    def _key(transactions: Sequence[Transaction]) -> str:
        """One server serves every key, so any queue's will do."""
        for transaction in transactions:
            for op in transaction:
                if isinstance(op, Enqueue | OnTask | OnRun):
                    return f"{{{op.queue}}}:meta"
        return f"{{{STORE}}}:meta"

    def _call(self, transactions: Sequence[wire.Entry], now: int | None, repeat: bool, full: bool = False) -> bytes:
        """`full`: go beyond `maxmemory`, on a server that has none left."""
        call: dict[str, Any] = {"transactions": transactions, "events": self.events_on}
        if full:
            call["full"] = True
        if now is not None:
            call["now"] = now
        if repeat:
            call["again"] = True
        if self._target.cluster:
            call["cluster"] = True
        return wire.encode_call(call)

    async def _script(self, key: str, transactions: Sequence[wire.Entry], now: int | None, repeat: bool) -> list[Any]:
        """One answer per entry, by as many calls of the script as that takes: mostly one."""
        answers = await self._once(key, transactions, now, repeat)
        rest = wire.rest_of(transactions, answers)
        while rest:
            with _begun():
                more = await self._once(key, rest, now, repeat)
            answers, rest = wire.joined(transactions, answers, more), wire.rest_of(rest, more)
        return answers

    def _script_blocking(self, key: str, transactions: Sequence[wire.Entry], now: int | None, repeat: bool) -> list[Any]:
        """`_script` from any thread."""
        answers = self._once_blocking(key, transactions, now, repeat)
        rest = wire.rest_of(transactions, answers)
        while rest:
            with _begun():
                more = self._once_blocking(key, rest, now, repeat)
            answers, rest = wire.joined(transactions, answers, more), wire.rest_of(rest, more)
        return answers

    async def _once(self, key: str, transactions: Sequence[wire.Entry], now: int | None, repeat: bool) -> list[Any]:
        try:
            return self._heard(await self._client.script(key, self._call(transactions, now, repeat)))
        except StoreFull:
            if wire.grows(transactions):
                raise
            return self._heard(await self._client.script(key, self._call(transactions, now, repeat, full=True)))

    def _once_blocking(self, key: str, transactions: Sequence[wire.Entry], now: int | None, repeat: bool) -> list[Any]:
        try:
            return self._heard(self._client.script_blocking(key, self._call(transactions, now, repeat)))
        except StoreFull:
            if wire.grows(transactions):
                raise
            return self._heard(self._client.script_blocking(key, self._call(transactions, now, repeat, full=True)))

    def _heard(self, reply: list[Any]) -> list[Any]:
        """The answers of a call; who waits in this process is told."""
        answers, ready, ended, _ = reply
        if ready or ended:
            self.waiters.notify([_text(name) for name in ready], [_text(id) for id in ended])
        return answers

    def _new_queues(self, transactions: Sequence[Transaction]) -> set[str]:
        new = _queues_of(transactions) - self._known
        if new and self._target.cluster:  # what is refused leaves not even a name behind
            new &= _queues_of([t for t in transactions if not spans_slots(t, self._slot_of)])
        return new

    async def _list(self, names: Iterable[str]) -> None:
        """Put queues on the store's list before their first use, also those that only other clients feed."""
        new = set(names) - self._known
        if not new:
            return
        try:
            await self._client.command("SADD", QUEUES, *new)
        except StoreFull:  # those that are on it need nothing; of the others nothing new comes in now
            new &= {_text(name) for name in await self._client.command("SMEMBERS", QUEUES)}
        self._known |= new

    def _list_blocking(self, new: set[str]) -> None:
        """`_list` from any thread."""
        try:
            self._client.command_blocking("SADD", QUEUES, *new)
        except StoreFull:
            new = new & {_text(name) for name in self._client.command_blocking("SMEMBERS", QUEUES)}
        self._known |= new

    async def _upkeep(self, queues: Iterable[str], now_us: int | None, kind: str, **fields: Any) -> list[Any]:
        """One upkeep operation on each queue; their answers."""
        await self._opened()
        now = None if now_us is None else wire.ms_down(now_us)
        calls = [[{"kind": kind, "queue": q, **fields}] for q in queues]
        if not calls:
            return []
        replies: list[Any] = []
        if self._target.cluster:
            for call in calls:
                replies += await self._until_answered(f"{{{call[0]['queue']}}}:meta", [call], now)
        else:
            for start in range(0, len(calls), TOGETHER):
                replies += await self._until_answered(f"{{{STORE}}}:meta", calls[start : start + TOGETHER], now)
        return [answer[0] for answer in replies]

    async def _until_answered(self, key: str, calls: Sequence[wire.Entry], now: int | None) -> list[Any]:
        """All upkeep may be done twice, so what stayed without an answer is sent again."""
        repeats = Repeats(())
        while True:
            try:
                return await self._script(key, calls, now, False)
            except StoreError as exc:
                await asyncio.sleep(repeats.after(exc))

    async def allocate_ids(self, n: int) -> int:
        check_count(n, "allocate_ids", 1, MAX_AT_ONCE)
        client = await self._opened()
        return int(await client.command_anyway("INCRBY", IDS, n)) - n + 1

    # -- waiting -----------------------------------------------------------------------------------

    async def wait(
        self,
        queues: Iterable[str] = (),
        tasks: Iterable[str] = (),
        events: bool = False,
        timeout: float | None = None,
        *,
        after: int | None = None,
    ) -> None:
        self._check_open()
        await super().wait(queues, tasks, events, POLL_S if timeout is None else min(timeout, POLL_S), after=after)

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
        client = await self._opened()
        names = await self._names() if queues is None else list(queues)
        now = await self._now_ms(now_us)
        upto = "+inf" if lost_workers else str(now)
        most = -1 if lost_workers else limit
        ranges = [("ZRANGEBYSCORE", f"{{{q}}}:active", "-inf", upto, "WITHSCORES", "LIMIT", 0, most) for q in names]
        found = await client.pipeline(ranges)
        leased = [(q, *pair) for q, pairs in zip(names, found, strict=True) for pair in scored(pairs)]
        held = [(q, _text(id), records.whole(until)) for q, id, until in leased]
        running = await self._load([(q, id) for q, id, _ in held], ended=False)
        leases: list[Lease] = []
        haunted: set[str] = set()  # by leases without a task, or without one that can be named: nobody could take them back
        for (queue, _, until), task in zip(held, running, strict=True):
            if task is None or (until <= now and not _can_be_taken(task)):
                haunted.add(queue)
            elif task.state is State.RUNNING and (task.worker in lost_workers or until <= now):
                leases.append(Lease(record=task, lost="worker_lost" if task.worker in lost_workers else "expired"))
        if haunted:
            await self._upkeep(sorted(haunted), now_us, "bury")
        leases.sort(key=lambda lease: (lease.record.lease_until_us or 0, lease.record.seq))
        return leases[:limit]

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        return sum(await self._upkeep(await self._names(), now_us, "sweep", limit=limit))

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        return sum(await self._upkeep([queue], now_us, "promote", limit=limit))

    async def purge(self, retention: Retention, now_us: int | None = None, limit: int = 1000) -> int:
        now = await self._now_ms(now_us)
        fields: dict[str, Any] = {"limit": limit}
        if retention.dead_us is not None:
            fields["dead_before"] = now - wire.ms_up(retention.dead_us)
        if retention.events_us is not None:
            fields["events_before"] = now - wire.ms_up(retention.events_us)
        if retention.events_max is not None:
            fields["events_max"] = retention.events_max
        if retention.limits_us is not None:
            fields["limits_before"] = now - wire.ms_up(retention.limits_us)
        gone = sum(await self._upkeep(await self._names(), now_us, "purge", **fields))
        edge = now * 1000 - retention.workers_us
        silent = [w.worker for w in await self.workers() if w.seen_at_us <= edge]
        if silent:
            gone += await self._client.command("HDEL", WORKERS, *silent)
        return gone

    async def _purge_results(self, older_than_us: int) -> int:
        client, gone = await self._opened(), 0
        before = wire.ms_up(older_than_us)
        for queue in await self._names():
            ids: set[bytes] = set()
            base = f"{{{queue}}}:"
            for key in (f"{base}o:done", f"{base}o:cancelled", f"{base}o:results", f"{base}idx:failed"):
                ids.update(await client.command("ZRANGE", key, 0, -1))
            every = sorted(ids)
            for start in range(0, len(every), 1000):
                part = [_text(id) for id in every[start : start + 1000]]
                gone += sum(await self._upkeep([queue], None, "forget", ids=part, before=before))
        return gone

    async def check(self, repair: bool = False) -> list[str]:
        """Also of queues and groups that only other clients use: their keys tell."""
        client = await self._opened()
        groups: dict[str, set[str]] = {key[1:-7]: set() for key in await client.keys("{*}:stats")}
        for key in await client.keys("{*}:g:*"):
            queue, _, rest = key[1:].partition("}:g:")
            groups.setdefault(queue, set()).add(rest.rpartition(":")[0])
        await self._list([name for name in groups if _is_queue(name)])
        names = await self._names()
        found: list[Any] = []
        for name in names:
            found += await self._upkeep([name], None, "check", repair=repair, groups=sorted(groups.get(name, ())))
        return [f"queue {q!r}: {_text(line)}" for q, lines in zip(names, found, strict=True) for line in lines]

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        await self._opened()
        tasks = [saved for saved in tasks if saved.record.state is not State.STAGED]
        parts = by_slot(tasks, self._slot_of) if self._target.cluster else [tasks]
        await self._list({saved.record.queue for saved in tasks})
        new = 0
        for part in parts:
            for call in task_calls(part, key_ttl_us):
                answers = await self._script(f"{{{part[0].record.queue}}}:meta", [[call]], None, False)
                new += answers[0][0]
        return new

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        await self._opened()
        await self._list({row.queue for row in rows})
        for call in event_calls(rows):
            await self._script(f"{{{call['queue']}}}:meta", [[call]], None, False)

    # -- looking -----------------------------------------------------------------------------------

    async def _names(self) -> list[str]:
        """Every queue that was ever heard of."""
        client = await self._opened()
        return sorted(_text(name) for name in await client.command("SMEMBERS", QUEUES))

    async def _load(self, places: Sequence[tuple[str, str]], *, ended: bool = True) -> list[Record | None]:
        """The tasks of these ids in these queues, staged ones too; of one whose hash others trimmed, what its result tells."""
        found = await self._client.pipeline([("HGETALL", f"{{{queue}}}:job:{id}") for queue, id in places], wrong_type={})
        tasks = [_record(*place, fields) for place, fields in zip(places, found, strict=True)]
        missing = [n for n, record in enumerate(tasks) if record is None]
        if not ended or not missing:
            return tasks
        commands: list[Command] = [("HGETALL", "{{{}}}:o:end:{}".format(*places[n])) for n in missing]
        commands += [("GET", "{{{}}}:o:res:{}".format(*places[n])) for n in missing]
        commands += [("HGET", f"{{{places[n][0]}}}:o:staged", places[n][1]) for n in missing]
        found = await self._client.pipeline(commands)
        some = len(missing)
        for n, fields, result, staged in zip(missing, found[:some], found[some : 2 * some], found[2 * some :], strict=True):
            tasks[n] = _record(*places[n], fields)
            if tasks[n] is None and staged is not None:
                tasks[n] = staged_record(*places[n], staged)
            elif tasks[n] is None and result is not None:
                tasks[n] = records.record_of_result(*places[n], result)
        return tasks

    async def get(self, id: str, queue: str | None = None) -> Record | None:
        check_encodable(id, "task id")
        names = await self._names() if queue is None else [queue]
        await self._opened()
        found = [t for t in await self._load([(q, id) for q in names]) if t is not None]
        return found[0] if found else None

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        check_encodable("".join(ids), "task id")
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
        return await find_tasks(self._client, self._load, names, filter, cursor, limit, newest_first)

    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        client = await self._opened()
        found = await client.command("HMGET", f"{{{queue}}}:o:run:{run_id}", *RUN_FIELDS)
        return None if found[0] is None else run_of(queue, run_id, found)

    async def task_shards(self) -> list[Shard]:
        return await task_shards(self._client, await self._names())

    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        return await task_page(self._client, self._load, shard, after, upto, limit)

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
                ("ZCARD", f"{base}idx:wait"),
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
            commands = [("HEXISTS", f"{{{q}}}:stats", "last_enqueue_ms") for q in names]
        return [q for q, there in zip(names, await self._client.pipeline(commands), strict=True) if there]

    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        client = await self._opened()
        start = "-" if cursor is None else f"({cursor}"
        names = await client.command("ZRANGEBYLEX", f"{{{queue}}}:o:lanes", start, "+", "LIMIT", 0, limit + 1)
        shown = [_text(name) for name in names[:limit]]
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
        """Whole entries, until they hold enough events."""
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
        check_encodable(id, "task id")
        rows: list[EventRow] = []
        for queue in await self._names():
            rows += [e for e in await self._read_events(queue, 0, "+", 1 << 40) if e.task_id == id]
        return sorted(rows, key=lambda e: e.ts_us)

    # -- steering ----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> None:
        check_queue(queue)
        client = await self._opened()
        await self._list([queue])
        await client.command_anyway("SET", f"{{{queue}}}:paused", "1")

    async def resume(self, queue: str) -> bool:
        check_queue(queue)
        client = await self._opened()
        was = await client.command("DEL", f"{{{queue}}}:paused") == 1
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
        await self._list([queue])
        await self._upkeep([queue], None, "limit", group=group, limit=limit)


@contextlib.contextmanager
def _begun() -> Generator[None]:
    """That nothing happened is not true any more."""
    try:
        yield
    except (StoreUnavailable, StoreFull) as exc:
        raise OutcomeUnknown(f"a part of this call was carried out, and then {exc}") from exc


def _is_wide(transactions: Sequence[Transaction]) -> bool:
    """Whether a `Reserve` asks more queues than one call of the script should."""
    for transaction in transactions:
        if transaction and isinstance(first := transaction[0], Reserve) and len(first.queues) > WIDE:
            return True
    return False


def _parts(transactions: Sequence[Transaction]) -> list[Sequence[Transaction]]:
    """What one call of the script carries: everything, but staging and settling only by themselves, as they take long."""
    if any(isinstance(transaction[0], OnRun) for transaction in transactions):
        return [[transaction] for transaction in transactions]
    return [transactions]


def _queues_of(transactions: Sequence[Transaction]) -> set[str]:
    names: set[str] = set()
    for transaction in transactions:
        for op in transaction:
            if isinstance(op, Enqueue | OnTask | OnRun):
                names.add(op.queue)
            elif isinstance(op, Reserve):
                names.update(op.queues)
    return names


def _is_queue(name: str) -> bool:
    try:
        check_queue(name)
    except Invalid:
        return False
    return True


def _record(queue: str, id: str, fields: records.Hash) -> Record | None:
    return records.record_of(queue, id, fields) if b"state" in fields else None


def _can_be_taken(task: Record) -> bool:
    """Whether a lease can be named to the script, which knows it by a token that may be no text."""
    return task.state is State.RUNNING and "\ufffd" not in (task.token or "")


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


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
