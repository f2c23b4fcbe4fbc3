"""A queue in a folder: readable with `ls` and `cat`, durable, shared by any number of processes of one machine.

Each process keeps an index of the folder in memory, some 500 bytes a task; the tasks themselves stay in their files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from omniq.errors import ConfigError, EventsLost, StoreUnavailable
from omniq.models import Record, State, StoredResult, check_encodable, check_queue, now_us
from omniq.operations import (
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    Page,
    QueueCounts,
    Retention,
    RunInfo,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.storage.copies import copy_folder, write_whole
from omniq.storage.file.disk import Files, LocalFiles, SharedMemoryFiles, local_or_memory
from omniq.storage.file.folder import FORMAT
from omniq.storage.file.index import Entry
from omniq.storage.file.opening import MARKS
from omniq.storage.file.upkeep import check_store, find_tasks, purge_results, purge_store, task_page
from omniq.storage.file.writer import FileWriter, Section, translate
from omniq.storage.filesystems import boot_id
from omniq.storage.local import DUE_CAP, Durability, LocalStorage
from omniq.storage.renewals import Held
from omniq.storage.url import file_path, file_url, local_options


class FileStorage(LocalStorage[Section]):
    """A queue in the folder `base_dir` (a path or a `file:` URL), made if need be.

    `durability="full"` survives a power cut, `"process"` a kill -9. `fs` is an fsspec file system: its local one, or its
    memory one for tests within one process; others are refused. A network file system is refused too, since its locks
    cannot be trusted; `allow_network_fs=True` overrides that.
    """

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
        text = os.fspath(base_dir)
        if text.startswith("file:"):
            asked = local_options(text)
            durability = asked.get("durability", durability)
            allow_network_fs = asked.get("allow_network_fs", allow_network_fs)
            text = file_path(text)
        if not text:
            raise ConfigError("FileStorage needs the path of a folder, or a file: URL")
        self._fs, text = local_or_memory(fs, text)
        text = os.path.abspath(text) if self._fs is None else text  # a program that changes its folder keeps its store
        locks = Path(text, "locks", "workers") if self._fs is None else None
        super().__init__(text, locks, durability, allow_network_fs, {"clock": clock, **options})

    @property
    def url(self) -> str:
        return file_url(self.path)

    # -- life --------------------------------------------------------------------------------------

    async def exists(self) -> bool:
        if self._fs is not None:
            return any(self._fs.exists(f"{self.path}/{name}") for name in MARKS)
        return await self._there(lambda: not MARKS.isdisjoint(os.listdir(self.path)))

    def _make_writer(self) -> FileWriter:
        if not self.in_memory:
            if Path(self.path).exists() and not Path(self.path).is_dir():
                raise StoreUnavailable(f"{self.path} is a file; give the path of a folder")
            self._refuse_network("whose locks cannot be trusted")
        durable = self._durability == "full" and not self.in_memory
        boot = "memory" if self.in_memory else boot_id()
        return FileWriter(self._make_files, self.path, durable, boot, self.events_on, self.waiters)

    def _make_files(self) -> Files:
        """What the store works on; tests put another layer underneath here."""
        return LocalFiles(Path(self.path)) if self._fs is None else SharedMemoryFiles(self._fs, self.path)

    def _allocate(self, section: Section, n: int) -> int:
        first = section.index.counters.ids + 1
        section.index.counters.ids += n
        return first

    async def _busy(self, workers: Collection[str]) -> set[str]:
        return await self._do(lambda section: {e.worker for e in section.index.running.values()}.intersection(workers))

    # -- upkeep ------------------------------------------------------------------------------------

    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        now, lost, given = self._now(now_us), set(lost_workers), now_us is not None

        def work(section: Section) -> list[Lease]:
            running = [e for e in section.index.running.values() if queues is None or e.queue in queues]
            held = [_held(section, e, now) for e in running]
            over = self._renewals.over(held, now, lost, whole=queues is None, given=given)[:limit]
            entries = {e.seq: e for e in running}
            return [
                Lease(record=section.record(entries[x.seq]), lost="worker_lost" if x.worker in lost else "expired")
                for x in over
            ]

        return await self._do(work)

    async def purge(self, retention: Retention, now_us: int | None = None, limit: int = 1000) -> int:
        return await self._do(lambda section: purge_store(section, retention, self._now(now_us), limit))

    async def _purge_results(self, older_than_us: int) -> int:
        return await self._do(lambda section: purge_results(section, older_than_us))

    async def backup(self, path: str | os.PathLike[str]) -> None:
        if self.in_memory:
            await super().backup(path)

        def work(_: Section) -> None:
            try:
                write_whole(path, lambda part: copy_folder(self.path, part))
            except OSError as exc:
                raise translate(exc, os.fspath(path)) from exc

        await self._do(work)

    async def check(self, repair: bool = False) -> list[str]:
        return await self._do(lambda section: check_store(section, repair))

    # -- looking -----------------------------------------------------------------------------------

    async def get(self, id: str, queue: str | None = None) -> Record | None:
        check_encodable(id, "task id")

        def work(section: Section) -> Record | None:
            entry = section.index.entries.get(id)
            return None if entry is None or (queue is not None and entry.queue != queue) else section.record(entry)

        return await self._do(work)

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        check_encodable("".join(ids), "task id")

        def work(section: Section) -> dict[str, StoredResult]:
            found = {id: section.ledger.result(id) for id in ids}
            return {id: result for id, result in found.items() if result is not None}

        return await self._do(work)

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page:
        limits = (limit, newest_first, self.scan_limit)
        return await self._do(lambda section: find_tasks(section, filter, cursor, *limits))

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
        store_id: str = await self._do(lambda section: section.folder.store_id)
        return StoreInfo(store_id=store_id, format=FORMAT, url=self.url, capabilities=self.capabilities)

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
        check_encodable(id, "task id")
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

    async def is_paused(self, queue: str) -> bool:
        check_queue(queue)
        return await self._do(lambda section: section.ledger.queue(queue).paused)


def _held(section: Section, entry: Entry, now_us: int) -> Held:
    """A lease, and how long it was: its holder beats when it renews, and before that the task has just started."""
    until, worker = entry.lease_until_us or 0, entry.worker or ""
    length = until
    if until <= now_us and worker:
        seen = section.index.workers.get(worker)
        length = until - max(section.record(entry).started_at_us or 0, seen.seen_at_us if seen is not None else 0)
    return Held(entry.seq, entry.token or "", worker, until, length)


def _count(section: Section, name: str, now: int) -> QueueCounts:
    index = section.index
    scheduled = index.scheduled(name)
    late = [e.due_us for e in scheduled.until(now, DUE_CAP)] if scheduled is not None else []
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
