"""What SQLite itself does on this machine in these minutes: WAL, synchronous=FULL, one thread, no queue around it."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from benchmarks.timing import Stopwatch

PAYLOAD = '{"args":["' + "x" * 80 + '"],"kwargs":{}}'


def _open(store: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(store, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE jobs (id INTEGER PRIMARY KEY, state INTEGER, token TEXT, payload TEXT, result TEXT)")
    connection.execute("CREATE INDEX ready ON jobs (id) WHERE state = 0")
    return connection


def inserts(store: Path, rows: int, batch: int) -> Stopwatch:
    connection = _open(store)
    with Stopwatch(rows) as watch:
        _insert(connection, rows, batch)
    connection.close()
    return watch


def _insert(connection: sqlite3.Connection, rows: int, batch: int) -> None:
    for start in range(0, rows, batch):
        connection.execute("BEGIN IMMEDIATE")
        made = [(PAYLOAD,)] * min(batch, rows - start)
        connection.executemany("INSERT INTO jobs (state, payload) VALUES (0, ?)", made)
        connection.execute("COMMIT")


def reserve_and_ack(store: Path, rows: int, batch: int) -> Stopwatch:
    """Each transaction ends a batch of jobs with a result and leases the next one."""
    connection = _open(store)
    _insert(connection, rows, 1000)
    lease = """UPDATE jobs SET state = 1, token = ? WHERE id IN (SELECT id FROM jobs WHERE state = 0 ORDER BY id LIMIT ?)
        RETURNING id, payload"""
    end = "UPDATE jobs SET state = 2, result = 'null' WHERE id = ? AND state = 1"
    held: list[tuple[int, str]] = []
    with Stopwatch(rows) as watch:
        while True:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(end, [(job,) for job, _ in held])
            held = connection.execute(lease, ("token", batch)).fetchall()
            connection.execute("COMMIT")
            if not held:
                break
    connection.close()
    return watch


def commit_ms(store: Path, commits: int) -> list[float]:
    """How long each of so many commits of one row takes."""
    connection = _open(store)
    took: list[float] = []
    for _ in range(commits):
        begun = time.perf_counter()
        _insert(connection, 1, 1)
        took.append((time.perf_counter() - begun) * 1000)
    connection.close()
    return took
