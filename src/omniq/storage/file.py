"""A queue in a folder: readable with `ls` and `cat`, durable, shared by any number of processes of one machine.

Each process keeps an index of the folder in memory, some 500 bytes a task; the tasks themselves stay in their files.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from omniq.errors import ConfigError, DriverClosed, EventsLost, Invalid, StoreUnavailable
from omniq.models import Record, State, StoredResult, check_queue, check_text, now_us
from omniq.operations import (
    KEY_TTL_US,
    Capabilities,
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    Page,
    QueueCounts,
    Retention,
    RunInfo,
    Saved,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.storage.base import BaseStorage, Result, Transaction
from omniq.storage.file_folder import FORMAT
from omniq.storage.file_opening import MARKS
from omniq.storage.file_upkeep import check_store, find_tasks, purge_results, purge_store, task_page
from omniq.storage.file_writer import FileWriter, Section, Work
from omniq.storage.files import Files, LocalFiles, SharedMemoryFiles, local_or_memory
from omniq.storage.filesystems import boot_id, network_fs
from omniq.storage.liveness import WorkerLocks
from omniq.storage.restoring import restore_events, restore_tasks
from omniq.storage.url import file_path, file_url, local_options

Durability = Literal["full", "process"]

_DUE_CAP = 10_000


class FileStorage(BaseStorage):
    """A queue in the folder `base_dir` (a path or a `file:` URL), made if need be.

    `durability="full"` survives a power cut, `"process"` a kill -9. `fs` is an fsspec file system: its local one, or its
    memory one for tests within one process; others are refused. A network file system is refused too, since its locks
    cannot be trusted; `allow_network_fs=True` overrides that.
    """

    capabilities = Capabilities(durability="power", push_wait=True, kernel_liveness=True, restores=True)

    def __init__(
        self,
        base_dir: str | os.PathLike[str] = "omniq-data",
        *,
        fs: Any = None,
        durability: Durability = "full",
        allow_network_fs: bool = False,
        clock: Callable[[], int] = now_us,
        **options: Any,
    ) -> None:
        super().__init__(clock=clock, **options)
        text = os.fspath(base_dir)
        if text.startswith("file:"):
            asked = local_options(text)
            durability = asked.get("durability", durability)
            allow_network_fs = asked.get("allow_network_fs", allow_network_fs)
            text = file_path(text)
        if not text:
            raise ConfigError("FileStorage needs the path of a folder, or a file: URL")
        if durability not in ("full", "process"):
            raise ConfigError(f"durability {durability!r}: use 'full' (survives a power cut) or 'process' (survives kill -9)")
        self._fs, text = local_or_memory(fs, text)
        self.in_memory = self._fs is not None
        self.path = text if self.in_memory else os.path.abspath(text)  # a program that changes its folder keeps its store
        self._durability: Durability = durability
        self._allow_network_fs = allow_network_fs
        self._opening = threading.Lock()
        self._writer: FileWriter | None = None
        self._pid = os.getpid()
        self._closed = False
        self.waiters.on_waiting = self._listen
        self._locks = None if self.in_memory else WorkerLocks(Path(self.path, "locks", "workers"))
        if self.in_memory:
            self.capabilities = Capabilities(durability="none", push_wait=True, restores=True)
        elif durability == "process":
            self.capabilities = msgspec.structs.replace(self.capabilities, durability="process")

    @property
    def url(self) -> str:
        return file_url(self.path)

    # -- life --------------------------------------------------------------------------------------

    async def exists(self) -> bool:
        if self._fs is not None:
            return any(self._fs.exists(f"{self.path}/{name}") for name in MARKS)
        try:
            return await asyncio.to_thread(lambda: not MARKS.isdisjoint(os.listdir(self.path)))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            raise StoreUnavailable(f"{self.path}: {exc.strerror}") from exc

    async def open(self) -> None:
        if self._writer is None or self._pid != os.getpid():
            await asyncio.to_thread(self._writing)

    def _writing(self) -> FileWriter:
        writer = self._writer
        if writer is not None and self._pid == os.getpid() and not self._closed:
            return writer
        with self._opening:
            if self._closed:
                raise DriverClosed(f"the storage {self.path} was closed; make a new one")
            if self._writer is None or self._pid != os.getpid():  # a forked child opens the folder for itself
                self._check_place()
                durable = self._durability == "full" and not self.in_memory
                boot = "memory" if self.in_memory else boot_id()
                self._writer = FileWriter(self._make_files, self.path, durable, boot, self.events_on, self.waiters)
                self._pid = os.getpid()
            return self._writer

    def _make_files(self) -> Files:
        """What the store works on; tests put another layer underneath here."""
        return LocalFiles(Path(self.path)) if self._fs is None else SharedMemoryFiles(self._fs, self.path)

    def _check_place(self) -> None:
        path = Path(self.path)
        if self.in_memory:
            return
        if path.exists() and not path.is_dir():
            raise StoreUnavailable(f"{path} is a file; give the path of a folder")
        kind = None if self._allow_network_fs else network_fs(path)
        if kind is not None:
            raise StoreUnavailable(
                f"{path} is on a network file system ({kind}), whose locks cannot be trusted: "
                "use a local disk, or allow_network_fs=True at your own risk"
            )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid() and self._writer is not None:
            await asyncio.to_thread(self._writer.close)
        self._writer = None
        self.waiters.notify_all()

    # -- changing ----------------------------------------------------------------------------------

    async def _apply(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        return await self._do(self._work(transactions, now_us, repeat), weight=sum(map(len, transactions)))

    def _apply_blocking(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> list[Result]:
        return self._writing().submit_blocking(self._work(transactions, now_us, repeat), weight=sum(map(len, transactions)))

    def _work(self, transactions: Sequence[Transaction], now_us: int | None, repeat: bool) -> Work[list[Result]]:
        def work(section: Section) -> list[Result]:
            # Each transaction has its own moment: what one frees stands behind what the one before it enqueued.
            return [section.machine.run(t, self._now(now_us), repeat) for t in transactions]

        return work

    async def _do(self, work: Work[Any], weight: int = 1) -> Any:
        """Everything, looking included, is a piece of work for the writer: only under the lock is the index up to date."""
        if self._writer is None:
            await self.open()
        return await self._writing().submit(work, weight=weight)

    def _now(self, now_us: int | None) -> int:
        return self.clock() if now_us is None else now_us

    async def allocate_ids(self, n: int) -> int:
        if n < 1:
            raise Invalid(f"allocate_ids({n}): ask for at least one")

        def work(section: Section) -> int:
            first = section.index.counters.ids + 1
            section.index.counters.ids += n
            return first

        return await self._do(work)

    # -- waiting and liveness ----------------------------------------------------------------------

    async def wait(self, *args: Any, **kwargs: Any) -> None:
        if self._writer is None or self._pid != os.getpid():
            await self.open()
        await super().wait(*args, **kwargs)

    def _listen(self) -> None:
        writer = self._writer
        if writer is not None and writer.bell is not None:
            writer.bell.listen(self.waiters.notify_all, self.waiters.anyone)

    async def hold_worker(self, worker: str) -> None:
        await self.open()
        if self._locks is not None:
            self._locks.hold(worker)

    async def release_worker(self, worker: str) -> None:
        if self._locks is not None:
            self._locks.release(worker)

    async def lost_workers(self) -> list[str]:
        if self._locks is None:
            return []
        gone = self._locks.lost()
        if not gone:
            return []
        holding: set[str] = await self._do(lambda section: {e.worker for e in section.index.running.values()})
        for worker in gone:
            if worker not in holding:
                self._locks.forget(worker)
        return [worker for worker in gone if worker in holding]

    # -- upkeep ------------------------------------------------------------------------------------

    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        now, lost = self._now(now_us), set(lost_workers)

        def work(section: Section) -> list[Lease]:
            running = [e for e in section.index.running.values() if queues is None or e.queue in queues]
            dead = [e for e in running if e.worker in lost or (e.lease_until_us or 0) <= now]
            dead.sort(key=lambda e: (e.lease_until_us or 0, e.seq))
            return [
                Lease(record=section.record(e), lost="worker_lost" if e.worker in lost else "expired") for e in dead[:limit]
            ]

        return await self._do(work)

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        return await self._do(lambda section: section.machine.sweep(self._now(now_us), limit))

    async def promote(self, queue: str, limit: int = 1000, now_us: int | None = None) -> int:
        return await self._do(lambda section: section.machine.promote(queue, self._now(now_us), limit))

    async def purge(self, retention: Retention, now_us: int | None = None, limit: int = 1000) -> int:
        return await self._do(lambda section: purge_store(section, retention, self._now(now_us), limit))

    async def _purge_results(self, older_than_us: int) -> int:
        return await self._do(lambda section: purge_results(section, older_than_us))

    async def restore(self, tasks: Sequence[Saved], key_ttl_us: int = KEY_TTL_US) -> int:
        return await self._do(lambda section: restore_tasks(section.machine, tasks, key_ttl_us), weight=len(tasks))

    async def restore_events(self, rows: Sequence[EventRow]) -> None:
        await self._do(lambda section: restore_events(section.ledger, rows), weight=len(rows))

    async def check(self, repair: bool = False) -> list[str]:
        return await self._do(lambda section: check_store(section, repair))

    # -- looking -----------------------------------------------------------------------------------

    async def get(self, id: str, queue: str | None = None) -> Record | None:
        def work(section: Section) -> Record | None:
            entry = section.index.entries.get(id)
            return None if entry is None or (queue is not None and entry.queue != queue) else section.record(entry)

        return await self._do(work)

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        def work(section: Section) -> dict[str, StoredResult]:
            found = {id: section.ledger.result(id) for id in ids}
            return {id: result for id, result in found.items() if result is not None}

        return await self._do(work)

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page:
        return await self._do(lambda section: find_tasks(section, filter, cursor, limit, newest_first))

    async def counts(self, now_us: int | None = None) -> list[QueueCounts]:
        now = self._now(now_us)
        return await self._do(lambda section: [_count(section, name, now) for name in sorted(section.index.queues)])

    async def queues(self, fed: bool = False) -> list[str]:
        return await self._do(
            lambda section: sorted(queue for queue, row in section.index.queues.items() if row.fed or not fed)
        )

    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        def work(section: Section) -> tuple[list[GroupInfo], str | None]:
            lanes = section.index.lanes.get(queue, {})
            names = sorted(g for g in lanes if cursor is None or g > cursor)
            infos = [
                GroupInfo(queue=queue, group=g, limit=lanes[g].limit or 1, inflight=lanes[g].inflight, ready=lanes[g].ready)
                for g in names[:limit]
            ]
            return infos, names[limit - 1] if len(names) > limit else None

        return await self._do(work)

    async def workers(self, now_us: int | None = None) -> list[WorkerInfo]:
        return await self._do(lambda section: sorted(section.index.workers.values(), key=lambda w: w.worker))

    async def info(self) -> StoreInfo:
        await self.open()
        return StoreInfo(store_id=self._writing().store_id, format=FORMAT, url=self.url, capabilities=self.capabilities)

    # -- events ------------------------------------------------------------------------------------

    async def event_shards(self) -> list[Shard]:
        counters = await self._do(lambda section: section.index.counters)
        return [Shard(name="", first=counters.first_event, last=counters.event)]

    async def events(self, shard: str = "", after: int = 0, limit: int = 1000, upto: int | None = None) -> list[EventRow]:
        def work(section: Section) -> list[EventRow]:
            first = section.index.counters.first_event
            if after < first - 1:
                raise EventsLost(f"events up to {first - 1} were purged; go on from there")
            return section.folder.events(after, limit, upto)

        return await self._do(work)

    async def events_of(self, id: str) -> list[EventRow]:
        return await self._do(lambda section: section.folder.events_of(id))

    # -- in bulk -----------------------------------------------------------------------------------

    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        def work(section: Section) -> RunInfo | None:
            run = section.index.runs.get((queue, run_id))
            return None if run is None else run.info()

        return await self._do(work)

    async def task_shards(self) -> list[Shard]:
        def work(section: Section) -> list[Shard]:
            entries = section.index.entries
            first, last = next(iter(entries.values()), None), next(reversed(entries.values()), None)
            return [Shard(name="", first=first.seq if first else 1, last=last.seq if last else 0)]

        return await self._do(work)

    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        return await self._do(lambda section: task_page(section, after, upto, limit))

    # -- steering ----------------------------------------------------------------------------------

    async def pause(self, queue: str) -> None:
        check_queue(queue)
        await self._do(lambda section: section.set_paused(queue, True))

    async def resume(self, queue: str) -> bool:
        check_queue(queue)
        return await self._do(lambda section: section.set_paused(queue, False))

    async def is_paused(self, queue: str) -> bool:
        check_queue(queue)
        return await self._do(lambda section: section.ledger.queue(queue).paused)

    async def set_group_limit(self, queue: str, group: str, limit: int) -> None:
        check_queue(queue)
        check_text(group, "group")
        if limit < 1:
            raise Invalid(f"group limit {limit}: it must be at least 1")
        await self._do(lambda section: section.machine.set_group_limit(queue, group, limit))


def _count(section: Section, name: str, now: int) -> QueueCounts:
    index = section.index
    scheduled = index.scheduled(name)
    late = [e.due_us for e in scheduled.until(now, _DUE_CAP)] if scheduled is not None else []
    return QueueCounts(
        queue=name,
        staged=index.count(name, State.STAGED),
        blocked=index.count(name, State.BLOCKED),
        scheduled=index.count(name, State.SCHEDULED) - len(late),
        ready=index.count(name, State.READY) + len(late),
        running=index.count(name, State.RUNNING),
        done=index.count(name, State.DONE),
        dead=index.count(name, State.DEAD),
        cancelled=index.count(name, State.CANCELLED),
        paused=index.queues[name].paused,
        oldest_ready_us=min([*late, *(e.due_us for e in index.heads(name))], default=None),
    )
