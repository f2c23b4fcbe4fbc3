"""The single checks of `omniq doctor`."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from omniq.cli.check_results import Finding
from omniq.cli.output import count
from omniq.cli.paging import groups_of, task_pages
from omniq.cli.parsing import short
from omniq.cli.queues.activity import alive
from omniq.cli.stores import must_exist, settings_and_url
from omniq.core import AsyncOmniQ
from omniq.errors import StoreError, StoreForeign, StoreFull, StoreTooNew
from omniq.models import Record, State
from omniq.operations import Filter, GroupInfo
from omniq.storage.base import BaseStorage
from omniq.storage.filesystems import network_fs

# Workers take back an expired lease within a second: one that is older is a sign that none is there.
LATE_US = 5_000_000
# Clocks of machines that follow NTP differ by less.
AHEAD_US = 5_000_000
LITTLE_ROOM = 200 * 1024**2
# A store may have millions of blocked tasks, and each costs a look at those that it waits for.
MAX_LOOKED_AT = 20_000
MAX_TOLD = 5


async def examine(store: str | None, repair: bool, lakes: Sequence[str] = ()) -> list[Finding]:
    """Every check, in the order in which one would look."""
    settings, url = settings_and_url(store)
    oq = AsyncOmniQ.from_url(url, settings=settings)
    try:
        await must_exist(oq, url, create=False)
        async with oq:
            found = await _look(oq.storage, repair)
            if lakes:
                from omniq.cli.lake.checks import examine_lakes

                found += await examine_lakes(lakes, oq.storage, settings.retention, url)
    except StoreError as exc:
        found = [_closed(exc, oq.storage.capabilities.local)]
    return [*found, *_place(oq.storage)]


async def _look(storage: BaseStorage, repair: bool) -> list[Finding]:
    info, lost = await storage.info(), await storage.lost_workers()
    return [
        Finding(check="version", status="ok", message=f"format {info.format}, store {info.store_id}"),
        *await _integrity(storage, repair),
        *await _clock(storage),
        *await _leases(storage, repair, lost),
        *await _orphans(storage, repair),
        *await _groups(storage),
        *await _queues(storage, lost),
        *await _dead_letters(storage),
    ]


def _closed(exc: StoreError, local: bool) -> Finding:
    if isinstance(exc, StoreTooNew):
        return Finding(check="version", status="wrong", message=str(exc), remedy="upgrade omniq on this machine")
    if isinstance(exc, StoreForeign):
        return Finding(check="open", status="wrong", message=str(exc), remedy="name another file or folder with --store")
    if isinstance(exc, StoreFull):
        return Finding(check="disk", status="wrong", message=str(exc), remedy="free disk space, or omniq purge --older-than 7d")
    remedy = "check that the server runs, and that the URL is right"
    if local:
        remedy = "check the path, its permissions and its disk; if the file is damaged, restore a backup"
    return Finding(check="open", status="wrong", message=f"the store cannot be used: {exc}", remedy=remedy)


async def _integrity(storage: BaseStorage, repair: bool) -> list[Finding]:
    faults = await storage.check()
    if not faults:
        return [Finding(check="integrity", status="ok", message="counters and groups agree with the tasks")]
    left: list[str] = []
    if repair:
        await storage.check(repair=True)
        left = await storage.check()
    return [
        Finding(check="integrity", status="repaired", message=fault)
        if repair and fault not in left
        else Finding(check="integrity", status="wrong", message=fault, remedy=_remedy_of(fault, repair))
        for fault in faults
    ]


def _remedy_of(fault: str, repaired: bool) -> str:
    if repaired or "damaged" in fault or "corrupt" in fault:
        return "stop the workers, keep a copy of the store, and copy what can be read with omniq migrate"
    return "omniq doctor --repair counts anew"


async def _clock(storage: BaseStorage) -> list[Finding]:
    now = storage.clock()
    latest = max([w.seen_at_us for w in await storage.workers()], default=0)
    for shard in await storage.event_shards():
        if shard.last >= shard.first:
            rows = await storage.events(shard.name, shard.last - 1, 1)
            latest = max([latest, *(row.ts_us for row in rows)])
    if latest <= now + AHEAD_US:
        return [Finding(check="clock", status="ok", message="nothing in the store is from the future")]
    ahead = short((latest - now) / 1e6)
    remedy = "set the clocks of all machines (NTP); until then leases and etas are off by as much"
    return [Finding(check="clock", status="wrong", message=f"the store has entries {ahead} ahead of this clock", remedy=remedy)]


async def _leases(storage: BaseStorage, repair: bool, lost: Sequence[str]) -> list[Finding]:
    expired = [
        lease
        for lease in await storage.expired(lost_workers=lost)
        if lease.lost == "worker_lost" or (lease.record.lease_until_us or 0) <= storage.clock() - LATE_US
    ]
    if not expired:
        return [Finding(check="leases", status="ok", message="no lease has run out")]
    message = f"{count(len(expired), 'task')} of workers that are gone: {_few([lease.record.id for lease in expired])}"
    if repair:
        await storage.reclaim(lost_workers=lost)
        return [Finding(check="leases", status="repaired", message=f"took back {message}")]
    remedy = "start a worker, which takes them back within a second, or omniq doctor --repair"
    return [Finding(check="leases", status="wrong", message=message, remedy=remedy)]


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:MAX_TOLD]) + (" …" if len(ids) > MAX_TOLD else "")


async def _orphans(storage: BaseStorage, repair: bool) -> list[Finding]:
    """Tasks that wait for tasks which have ended, or are gone."""
    if repair:
        while await storage.sweep():
            pass
    stuck: list[str] = []
    seen = 0
    async for tasks in task_pages(storage, Filter(states=(State.BLOCKED,))):
        stuck += [task.id for task in tasks if not await _waits_for_something(storage, task)]
        seen += len(tasks)
        if seen >= MAX_LOOKED_AT:
            break
    if not stuck:
        return [Finding(check="orphans", status="ok", message="every blocked task waits for one that has not ended")]
    message = f"{count(len(stuck), 'task waits', 'tasks wait')} for tasks that have ended or are gone: {_few(stuck)}"
    remedy = "omniq doctor --repair goes on with cascades that were cut short"
    if repair:
        remedy = "cancel them with omniq tasks cancel and enqueue them anew"
    return [Finding(check="orphans", status="wrong", message=message, remedy=remedy)]


async def _waits_for_something(storage: BaseStorage, task: Record) -> bool:
    for blocker in task.blocked_by:
        there = await storage.get(blocker.id)
        if there is not None and not there.state.final:
            return True
    return False


async def _groups(storage: BaseStorage) -> list[Finding]:
    """Groups that are full although nothing of them runs."""
    running = Counter[tuple[str, str]]()
    async for tasks in task_pages(storage, Filter(states=(State.RUNNING,))):
        running.update((t.queue, t.group) for t in tasks if t.group is not None)
    stuck: list[GroupInfo] = []
    for queue in await storage.queues():
        groups = groups_of(storage, queue)
        stuck += [g async for g in groups if g.ready and g.inflight >= g.limit and not running[queue, g.group]]
    if not stuck:
        return [Finding(check="groups", status="ok", message="no group is full without a running task")]
    return [
        Finding(
            check="groups",
            status="wrong",
            message=f"group {g.group!r} of queue {g.queue!r} counts {g.inflight} running tasks and has none",
            remedy="omniq doctor --repair counts anew",
        )
        for g in stuck[:MAX_TOLD]
    ]


async def _queues(storage: BaseStorage, lost: Sequence[str]) -> list[Finding]:
    """Reasons why nothing happens that are not faults of the store."""
    workers = [w for w in alive(await storage.workers(), storage.clock()) if w.worker not in lost]
    served = {queue for worker in workers for queue in worker.queues}
    found: list[Finding] = []
    for c in await storage.counts():
        if c.paused and c.ready:
            message = f"queue {c.queue!r} is paused with {count(c.ready, 'task')} ready"
            found.append(Finding(check="queues", status="warning", message=message, remedy=f"omniq resume {c.queue}"))
        # Clients of other makes are in no registry, but hold tasks.
        elif c.ready and not c.running and c.queue not in served:
            message = f"queue {c.queue!r} has {count(c.ready, 'task')} ready, and no worker serves it"
            remedy = "start omniq worker, or name the queue in its --queues"
            found.append(Finding(check="queues", status="warning", message=message, remedy=remedy))
    return found or [Finding(check="queues", status="ok", message=f"{count(len(workers), 'worker')} alive")]


async def _dead_letters(storage: BaseStorage) -> list[Finding]:
    dead = [c for c in await storage.counts() if c.dead]
    if not dead:
        return [Finding(check="dlq", status="ok", message="no dead letters")]
    return [
        Finding(
            check="dlq",
            status="warning",
            message=f"queue {c.queue!r} has {count(c.dead, 'dead letter')}",
            remedy=f"omniq dlq list --queue {c.queue} says why; then omniq dlq requeue or omniq dlq purge",
        )
        for c in dead
    ]


def _place(storage: BaseStorage) -> list[Finding]:
    """The disk below a local store."""
    path = storage.place
    if path is None:
        return []
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return [_room(folder), _kind(Path(path))]


def _room(folder: str) -> Finding:
    usage = shutil.disk_usage(folder)
    message = f"{usage.free // 1024**2} MB free of {usage.total // 1024**2} MB"
    if usage.free >= min(LITTLE_ROOM, usage.total // 20):
        return Finding(check="disk", status="ok", message=message)
    remedy = "free disk space, or omniq purge --older-than 7d --events"
    return Finding(check="disk", status="wrong", message=f"only {message}", remedy=remedy)


def _kind(path: Path) -> Finding:
    kind = network_fs(path)
    if kind is None:
        return Finding(check="filesystem", status="ok", message="a local file system")
    remedy = "move the store to a local disk: its locks cannot be trusted there"
    return Finding(check="filesystem", status="wrong", message=f"a network file system ({kind})", remedy=remedy)
