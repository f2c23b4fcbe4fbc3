"""SQLite: durable, shared by any number of processes of one machine, with group commit.

Writes cross to one writer thread in one hop per batch (`writer`); reads go through aiosqlite on a connection of their
own, so that looking never waits for writing.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import aiosqlite
import msgspec

from omniq.errors import ConfigError, DriverClosed, EventsLost, Invalid, StoreUnavailable
from omniq.models import Record, State, StoredResult, check_queue, now_us
from omniq.operations import (
    EventRow,
    Filter,
    GroupInfo,
    Lease,
    Page,
    QueueCounts,
    RunInfo,
    Shard,
    StoreInfo,
    WorkerInfo,
)
from omniq.retention import CutOffs
from omniq.storage.copies import copy_database, write_whole
from omniq.storage.liveness import WATCHED_FROM, WatchedLease
from omniq.storage.local import Durability, LocalStorage
from omniq.storage.scanning import Range
from omniq.storage.sqlite.check import examine
from omniq.storage.sqlite.find import COUNTS, find_page
from omniq.storage.sqlite.header import refuse_foreign
from omniq.storage.sqlite.rows import COLUMNS, COUNTERS, RESULT_COLUMNS, RUN, record_of, result_of_row, run_of
from omniq.storage.sqlite.scan import SOURCES, scan, scan_blocking
from omniq.storage.sqlite.schema import VERSION
from omniq.storage.sqlite.upkeep import check_store, purge_results, purge_store
from omniq.storage.sqlite.writer import BUSY_TIMEOUT_MS, SQLiteSection, SQLiteWriter, connect, translate
from omniq.storage.tables import Columns, Condition
from omniq.storage.url import local_options, sqlite_path, sqlite_url

Row = tuple[Any, ...]

_EVENT_COLUMNS = 'seq, ts, event, task_id, queue, name, "group", attempt, worker, enqueued_at, due, state, data'
# Running tasks whose lease is over or was not renewed for a while, and those of lost workers, as `WatchedLease`.
WATCHED = f"""SELECT t.seq, t.token, coalesce(t.worker, ''), t.lease_until, max(t.started_at, coalesce(w.seen_at, 0))
 FROM tasks t INDEXED BY tasks_running LEFT JOIN workers w ON w.worker = t.worker WHERE t.state=4
 AND (t.lease_until - ? <= (t.lease_until - t.started_at) * {WATCHED_FROM} OR t.worker IN (SELECT value FROM json_each(?)))
 AND (? IS NULL OR t.queue IN (SELECT value FROM json_each(?)))"""
_decode_worker = msgspec.json.Decoder(WorkerInfo).decode


class SQLiteStorage(LocalStorage[SQLiteSection]):
    """A queue in one SQLite file (`path`, `sqlite:` URL or `":memory:"`).

    `durability="full"` survives a power cut, `"process"` a kill -9. A network file system is refused, since its locks and
    memory maps cannot be trusted; `allow_network_fs=True` overrides that.
    """

    default_url = "sqlite:///omniq.db"

    def __init__(
        self,
        path: str | os.PathLike[str] = "omniq.db",
        *,
        durability: Durability = "full",
        allow_network_fs: bool = False,
        clock: Callable[[], int] = now_us,
        **options: Any,
    ) -> None:
        text = os.fspath(path)
        if text.startswith("sqlite:"):
            asked = local_options(text)
            durability = asked.get("durability", durability)
            allow_network_fs = asked.get("allow_network_fs", allow_network_fs)
            text = sqlite_path(text)
        if not text:
            raise ConfigError('SQLiteStorage needs a path, a sqlite: URL or ":memory:"')
        in_memory = text == ":memory:"
        text = text if in_memory else os.path.abspath(text)  # a program that changes its folder keeps its database
        locks = None if in_memory else Path(f"{text}-locks")
        super().__init__(text, locks, durability, allow_network_fs, {"clock": clock, **options})
        self._reader: aiosqlite.Connection | None = None

    @property
    def url(self) -> str:
        return sqlite_url(self.path)

    # -- life --------------------------------------------------------------------------------------

    async def exists(self) -> bool:
        if self.in_memory:
            return True
        return await self._there(lambda: os.stat(self.path).st_size > 0)

    def _make_writer(self) -> SQLiteWriter:
        if self._pid != os.getpid():
            self._reader = None  # its thread stayed with the parent
        if not self.in_memory:
            self._prepare_folder()
        return SQLiteWriter(self.path, self._durability, self.events_on, self.waiters)

    def _prepare_folder(self) -> None:
        path = Path(self.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise StoreUnavailable(f"{path} is a folder; give the path of a database file")
        except OSError as exc:
            raise StoreUnavailable(f"cannot create {path.parent}: {exc.strerror}") from exc
        self._refuse_network("where SQLite can corrupt a database")
        # Before SQLite opens it, which would leave files beside the database of another program.
        refuse_foreign(self.path)

    async def _close_rest(self) -> None:
        if self._reader is not None:
            await self._reader.close()
            self._reader = None

    # -- reading -----------------------------------------------------------------------------------
    # All that looks is overridden: SQL on a connection of its own reads only the rows that it shows and never waits for the
    # writer, while `LedgerStorage` would take the store's lock and go through every task.

    async def _fetch(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        if self._writer is None or self._pid != os.getpid():
            await self.open()
        try:
            if self.in_memory:
                # A database in memory belongs to the one connection that made it.
                return await self._do(lambda section: section.connection.execute(sql, parameters).fetchall())
            reader = self._reader or await self._open_reader()
            return cast("list[Row]", await reader.execute_fetchall(sql, parameters))
        except UnicodeDecodeError as exc:
            raise translate(exc, self.path) from exc
        except UnicodeEncodeError as exc:
            raise Invalid(f"{exc.object[:40]!r} cannot be in a store: it has half a character at {exc.start}") from exc
        except OverflowError as exc:
            raise Invalid(f"a number is too large to be in a store: {exc}") from exc
        except ValueError as exc:  # aiosqlite says so of a connection that was closed meanwhile
            raise DriverClosed(f"the storage {self.path} was closed") from exc
        except Exception as exc:
            translated = translate(exc, self.path)
            raise translated from (None if translated is exc else exc)

    async def _open_reader(self) -> aiosqlite.Connection:
        self._writing()
        connecting = aiosqlite.connect(self.path, isolation_level=None)
        thread = getattr(connecting, "_thread", None)
        if thread is not None:
            thread.daemon = True  # a script that forgets close() must still be able to end
        reader = await connecting
        await reader.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        # Only the writer writes: a change by this connection would miss the lock, the counters and the bell.
        await reader.execute("PRAGMA query_only = ON")
        with self._opening:
            if self._reader is None and not self._closed:
                self._reader = reader
                return reader
        await reader.close()  # another caller was faster
        if self._closed:
            raise DriverClosed(f"the storage {self.path} was closed; make a new one")
        return cast(aiosqlite.Connection, self._reader)

    async def _busy(self, workers: Collection[str]) -> set[str]:
        sql = "SELECT DISTINCT worker FROM tasks WHERE state=4 AND worker IN (SELECT value FROM json_each(?))"
        return {row[0] for row in await self._fetch(sql, (_json(list(workers)),))}

    # -- upkeep ------------------------------------------------------------------------------------

    async def expired(
        self,
        now_us: int | None = None,
        limit: int = 1000,
        queues: Sequence[str] | None = None,
        lost_workers: Sequence[str] = (),
    ) -> list[Lease]:
        now = self._now(now_us)
        names = None if queues is None else _json(list(queues))
        rows = await self._fetch(WATCHED, (now, _json(list(lost_workers)), names, names))
        held, given = [WatchedLease(*row) for row in rows], now_us is not None
        over = self._renewals.over(held, now, set(lost_workers), whole=queues is None, given=given)[:limit]
        if not over:
            return []
        # Only the few that count as lost are read whole. One that was renewed or ended between the two reads is left out below.
        sql = f"SELECT {COLUMNS} FROM tasks WHERE state=4 AND seq IN (SELECT value FROM json_each(?)) ORDER BY lease_until, seq"
        found = {t.seq: t for t in map(record_of, await self._fetch(sql, (_json([lease.seq for lease in over]),)))}
        leases = [(found[lease.seq], lease) for lease in over if lease.seq in found]
        return [
            Lease(record=task, lost="worker_lost" if task.worker in lost_workers else "expired")
            for task, lease in leases
            if task.token == lease.token and task.lease_until_us == lease.until_us
        ]

    async def sweep(self, now_us: int | None = None, limit: int = 1000) -> int:
        """Every worker sweeps twice a second: where nothing is left to do, a read spares the lock and a commit."""
        now = self._now(now_us)
        work = """SELECT 1 FROM deferred UNION ALL
            SELECT 1 FROM runs WHERE settled = 0 AND (state <> 'OPEN' OR expires_at <= ?) LIMIT 1"""
        if not await self._fetch(work, (now,)):
            return 0
        return await super().sweep(now, limit)

    async def _purge(self, cut: CutOffs) -> int:
        return await self._do(lambda section: purge_store(section, cut))

    async def _purge_results(self, older_than_us: int) -> int:
        gone = 0
        while True:
            # A commit for each thousand, so that others write in between.
            batch: int = await self._do(lambda section: purge_results(section, "finished_at < ?", older_than_us, 1000))
            gone += batch
            if batch < 1000:
                return gone

    async def check(self, repair: bool = False) -> list[str]:
        def counted(section: SQLiteSection) -> list[str]:
            there = examine(section.connection) if self.in_memory else []
            return [*there, *check_store(section, repair)]

        await self.open()
        found = [] if self.in_memory else await asyncio.to_thread(self._examine)
        return [*found, *await self._do(counted)]

    def _examine(self) -> list[str]:
        try:
            with closing(connect(self.path)) as connection:  # its own: looking must not keep others from writing
                connection.execute("PRAGMA query_only = ON")
                connection.execute("BEGIN")
                return examine(connection)
        except (sqlite3.Error, UnicodeDecodeError) as exc:
            raise translate(exc, self.path) from exc

    async def backup(self, path: str | os.PathLike[str]) -> None:
        if self.in_memory:
            await super().backup(path)
        await self.open()

        def work() -> None:
            try:
                with closing(connect(self.path)) as connection:  # its own: a copy of this kind needs no place in the queue
                    write_whole(path, lambda part: copy_database(connection, part))
            except (sqlite3.Error, OSError) as exc:
                raise translate(exc, os.fspath(path)) from exc

        await asyncio.to_thread(work)

    # -- looking -----------------------------------------------------------------------------------

    async def get(self, id: str, queue: str | None = None) -> Record | None:
        rows = await self._fetch(f"SELECT {COLUMNS} FROM tasks WHERE id=? AND (? IS NULL OR queue=?)", (id, queue, queue))
        return record_of(rows[0]) if rows else None

    async def results(self, ids: Sequence[str]) -> dict[str, StoredResult]:
        sql = f"""SELECT {RESULT_COLUMNS} FROM results WHERE seq IN
            (SELECT seq FROM tasks WHERE id IN (SELECT value FROM json_each(?)))"""
        return {row[0]: result_of_row(row) for row in await self._fetch(sql, (_json(list(ids)),))}

    async def find(self, filter: Filter, cursor: str | None = None, limit: int = 50, newest_first: bool = True) -> Page:
        return await find_page(self._fetch, filter, cursor, limit, newest_first, self.scan_limit)

    async def counts(self, now_us: int | None = None) -> list[QueueCounts]:
        now = self._now(now_us)
        found: list[QueueCounts] = []
        for queue, paused, *numbers in await self._fetch(COUNTS, (now, now)):
            counters, (late, *oldest) = numbers[: len(COUNTERS)], numbers[len(COUNTERS) :]
            count = QueueCounts(queue=queue, paused=bool(paused), **dict(zip(COUNTERS, counters, strict=True)))
            count.scheduled -= late
            count.ready += late
            count.oldest_ready_us = min((moment for moment in oldest if moment is not None), default=None)
            found.append(count)
        return found

    async def queues(self, fed: bool = False) -> list[str]:
        return [row[0] for row in await self._fetch("SELECT queue FROM queues WHERE fed >= ? ORDER BY queue", (int(fed),))]

    async def groups(self, queue: str, cursor: str | None = None, limit: int = 50) -> tuple[list[GroupInfo], str | None]:
        sql = """SELECT "group", max("limit", 1), inflight, ready FROM lanes
            WHERE queue=? AND "group" > ? ORDER BY "group" LIMIT ?"""
        rows = await self._fetch(sql, (queue, cursor or "", limit + 1))
        infos = [GroupInfo(queue=queue, group=g, limit=n, inflight=i, ready=r) for g, n, i, r in rows[:limit]]
        return infos, infos[-1].group if len(rows) > limit else None

    async def workers(self, now_us: int | None = None) -> list[WorkerInfo]:
        rows = await self._fetch("SELECT info, seen_at FROM workers ORDER BY worker")
        return [msgspec.structs.replace(_decode_worker(info), seen_at_us=seen) for info, seen in rows]

    async def info(self) -> StoreInfo:
        rows = await self._fetch("SELECT store_id FROM store")
        return StoreInfo(store_id=rows[0][0], format=VERSION, url=self.url, capabilities=self.capabilities)

    # -- events ------------------------------------------------------------------------------------

    async def event_shards(self) -> list[Shard]:
        rows = await self._fetch("SELECT coalesce((SELECT min(seq) FROM events), next_event), next_event - 1 FROM store")
        return [Shard(name="", first=rows[0][0], last=rows[0][1])]

    async def events(self, shard: str = "", after: int = 0, limit: int = 1000, upto: int | None = None) -> list[EventRow]:
        (there,) = await self.event_shards()
        if after < there.first - 1:
            raise EventsLost(f"events up to {there.first - 1} were purged; go on from there")
        sql = f"SELECT {_EVENT_COLUMNS} FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        return [_event(row) for row in await self._fetch(sql, (after, (1 << 62) if upto is None else upto, limit))]

    async def events_of(self, id: str) -> list[EventRow]:
        sql = f"SELECT {_EVENT_COLUMNS} FROM events WHERE task_seq = (SELECT seq FROM tasks WHERE id=?) ORDER BY seq"
        rows = await self._fetch(sql, (id,))
        if not rows:  # the record is gone: its events are found by reading
            rows = await self._fetch(f"SELECT {_EVENT_COLUMNS} FROM events WHERE task_id=? ORDER BY seq", (id,))
        return [_event(row) for row in rows]

    # -- in bulk -----------------------------------------------------------------------------------

    async def run(self, queue: str, run_id: str) -> RunInfo | None:
        rows = await self._fetch(f"{RUN} WHERE queue=? AND run_id=?", (queue, run_id))
        return run_of(rows[0]).info() if rows else None

    async def task_shards(self) -> list[Shard]:
        rows = await self._fetch("SELECT coalesce(min(seq), 1), coalesce(max(seq), 0) FROM tasks")
        return [Shard(name="", first=rows[0][0], last=rows[0][1])]

    async def task_page(self, shard: str, after: int, upto: int, limit: int) -> tuple[list[Record], int]:
        rows = await self._fetch(
            f"SELECT {COLUMNS} FROM tasks WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?", (after, upto, limit)
        )
        tasks = [record_of(row) for row in rows]
        return tasks, upto if len(tasks) < limit else tasks[-1].seq

    def scan(self, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int) -> AsyncIterator[Columns]:
        if range.table not in SOURCES:
            return super().scan(range, columns, where, rows)
        return scan(self._fetch, range, columns, where, rows)

    def scan_blocking(
        self, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int
    ) -> Iterator[Columns] | None:
        if range.table not in SOURCES or self.in_memory:
            return None
        return self._scan_blocking(range, columns, where, rows)

    def _scan_blocking(self, range: Range, columns: Sequence[str], where: Sequence[Condition], rows: int) -> Iterator[Columns]:
        self._writing()
        try:
            with closing(connect(self.path)) as connection:
                connection.execute("PRAGMA query_only = ON")
                yield from scan_blocking(connection, range, columns, where, rows)
        except sqlite3.Error as exc:
            raise translate(exc, self.path) from exc

    # -- steering ----------------------------------------------------------------------------------

    async def is_paused(self, queue: str) -> bool:
        check_queue(queue)
        rows = await self._fetch("SELECT paused FROM queues WHERE queue=?", (queue,))
        return bool(rows and rows[0][0])


def _event(row: Row) -> EventRow:
    return EventRow(
        seq=row[0],
        ts_us=row[1],
        event=row[2],
        task_id=row[3],
        queue=row[4],
        name=row[5],
        group=row[6],
        attempt=row[7],
        worker=row[8] or None,
        enqueued_at_us=row[9],
        due_us=row[10],
        state=State(row[11]),
        data=row[12].encode() if row[12] else None,
    )


def _json(values: list[Any]) -> str:
    return msgspec.json.encode(values).decode()
