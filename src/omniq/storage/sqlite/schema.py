"""The tables of a SQLite store, and how an older one becomes a newer one.

    tasks      one row per task; `eta` is the moment from which it may run (the sort key), `asked_eta` what the user asked
    results    how the last run of a task ended, by the task's `seq`
    queues     flags and a counter per state, so that counting costs nothing
    lanes      one row per group of a queue: limit, counts, and its turn among the open ones
    keys       idempotency keys          blocks      who waits for whom
    deferred   cascades to go on with    events      the log, one row per transition
    workers    signs of life             store       one row: the store's id and its counters
    fan_ins    members to be counted     fan_in_members   who was counted, and what it was told
    runs       staged runs               claims      staged tasks that a second run brought too

All times and durations are integer microseconds (UTC). `args` and `kwargs` hold a Python call as JSON; any other payload, and
a call that would not come back byte for byte, stands in `payload`.
"""

from __future__ import annotations

import sqlite3

from omniq.errors import StoreForeign, StoreTooNew
from omniq.models import new_id

APPLICATION_ID = 0x6F6D6E71  # "omnq": a database that is not ours is refused, not adopted
VERSION = 4

# A step that was released is never changed: databases of users have made it. The next format is a step of its own.
# An index of tasks holds those of one state, so that a transition touches few pages and a task that succeeded is in none.
_V1 = """
CREATE TABLE tasks (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    queue TEXT NOT NULL,
    func_path TEXT NOT NULL,
    state INTEGER NOT NULL,
    status TEXT NOT NULL,
    eta INTEGER NOT NULL,
    asked_eta INTEGER,
    returned INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    max_retries INTEGER NOT NULL,
    timeout INTEGER,
    lease INTEGER,
    "interval" INTEGER,
    result_ttl INTEGER,
    backoff TEXT NOT NULL DEFAULT '',
    "group" TEXT,
    token TEXT,
    lease_until INTEGER,
    ended_by TEXT,
    worker TEXT,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    dead_queue TEXT,
    blocked_by BLOB,
    blockers_left INTEGER NOT NULL DEFAULT 0,
    has_dependents INTEGER NOT NULL DEFAULT 0,
    run_id TEXT,
    idempotency_key TEXT,
    fingerprint TEXT NOT NULL DEFAULT '',
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    last_error BLOB,
    failed_at INTEGER,
    progress BLOB,
    headers BLOB,
    origin TEXT NOT NULL DEFAULT '',
    encoding TEXT NOT NULL DEFAULT 'json',
    args TEXT,
    kwargs TEXT,
    payload BLOB
);
CREATE INDEX tasks_ready ON tasks (queue, "group", returned DESC, eta) WHERE state = 3;
CREATE INDEX tasks_scheduled ON tasks (queue, eta) WHERE state = 2;
CREATE INDEX tasks_running ON tasks (queue, lease_until) WHERE state = 4;
CREATE INDEX tasks_dead ON tasks (status, finished_at) WHERE state = 6;

CREATE TABLE results (
    seq INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL,
    status TEXT NOT NULL,
    result BLOB,
    encoding TEXT NOT NULL,
    error BLOB,
    finished_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    last_attempt_at INTEGER,
    expires_at INTEGER
);
CREATE INDEX results_expiry ON results (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE queues (
    queue TEXT PRIMARY KEY,
    paused INTEGER NOT NULL DEFAULT 0,
    has_groups INTEGER NOT NULL DEFAULT 0,
    groups_turn INTEGER NOT NULL DEFAULT 1,
    fed INTEGER NOT NULL DEFAULT 0,
    staged INTEGER NOT NULL DEFAULT 0,
    blocked INTEGER NOT NULL DEFAULT 0,
    scheduled INTEGER NOT NULL DEFAULT 0,
    ready INTEGER NOT NULL DEFAULT 0,
    running INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    dead INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE lanes (
    queue TEXT NOT NULL,
    "group" TEXT NOT NULL,
    "limit" INTEGER NOT NULL DEFAULT 0,
    ready INTEGER NOT NULL DEFAULT 0,
    inflight INTEGER NOT NULL DEFAULT 0,
    members INTEGER NOT NULL DEFAULT 0,
    turn INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, "group")
);
CREATE INDEX lanes_open ON lanes (queue, turn) WHERE ready > 0 AND inflight < max("limit", 1);

CREATE TABLE keys (
    queue TEXT NOT NULL,
    key TEXT NOT NULL,
    task_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
);
CREATE INDEX keys_expiry ON keys (expires_at);

CREATE TABLE blocks (
    blocker_id TEXT NOT NULL,
    dependent INTEGER NOT NULL,
    PRIMARY KEY (blocker_id, dependent)
);

CREATE TABLE deferred (
    blocker_id TEXT PRIMARY KEY,
    dead INTEGER NOT NULL
);

CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    ts INTEGER NOT NULL,
    event TEXT NOT NULL,
    task_seq INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    "group" TEXT,
    attempt INTEGER NOT NULL,
    worker TEXT NOT NULL,
    enqueued_at INTEGER NOT NULL,
    due INTEGER NOT NULL,
    state INTEGER NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX events_of_task ON events (task_seq);

CREATE TABLE workers (
    worker TEXT PRIMARY KEY,
    seen_at INTEGER NOT NULL,
    info BLOB NOT NULL
);

CREATE TABLE store (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    store_id TEXT NOT NULL,
    next_seq INTEGER NOT NULL,
    next_event INTEGER NOT NULL,
    next_turn INTEGER NOT NULL,
    next_id INTEGER NOT NULL
);
"""

_V2 = """
CREATE TABLE fan_ins (
    key TEXT PRIMARY KEY,
    expected INTEGER NOT NULL,
    "left" INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE INDEX fan_ins_expiry ON fan_ins (expires_at);

CREATE TABLE fan_in_members (
    key TEXT NOT NULL,
    member TEXT NOT NULL,
    "left" INTEGER NOT NULL,
    PRIMARY KEY (key, member)
);
"""

_V3 = """
CREATE INDEX tasks_staged ON tasks (queue, run_id) WHERE state = 0;

CREATE TABLE runs (
    queue TEXT NOT NULL,
    run_id TEXT NOT NULL,
    opened_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    state TEXT NOT NULL,
    ended_at INTEGER,
    key_ttl INTEGER NOT NULL,
    new INTEGER NOT NULL,
    claimed INTEGER NOT NULL,
    released INTEGER NOT NULL,
    dropped INTEGER NOT NULL,
    settled INTEGER NOT NULL,
    PRIMARY KEY (queue, run_id)
);
CREATE INDEX runs_unsettled ON runs (expires_at) WHERE settled = 0;

CREATE TABLE claims (
    queue TEXT NOT NULL,
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    PRIMARY KEY (queue, run_id, task_id)
);
CREATE INDEX claims_of_task ON claims (task_id);
"""

# Only tasks of groups and blocked ones pay for these. They lead to the oldest ready task of all groups, and to blocked tasks
# that are few.
_V4 = """
CREATE INDEX tasks_ready_in_groups ON tasks (queue, eta) WHERE state = 3 AND "group" IS NOT NULL;
CREATE INDEX tasks_blocked ON tasks (queue) WHERE state = 1;
"""

MIGRATIONS = {1: _V1, 2: _V2, 3: _V3, 4: _V4}


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Bring the database to `VERSION`, all or nothing; refuse a newer one and one that belongs to somebody else."""
    # Mostly there is nothing to do, which is seen without the write lock that others may hold.
    if _version(connection) == VERSION and _is_ours(connection):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Asked again: another process may have been faster.
        version = _version(connection)
        if version and not _is_ours(connection):
            raise StoreForeign(f"{path} is a database of another program: give omniq a file of its own")
        if version > VERSION:
            raise StoreTooNew(f"{path} has format {version}; this omniq knows {VERSION}: upgrade omniq, or use another path")
        if version == 0:
            _refuse_foreign(connection, path)
        for step in range(version + 1, VERSION + 1):
            # One by one: `executescript` would commit first, and a step must be made whole or not at all.
            for statement in MIGRATIONS[step].split(";\n"):
                connection.execute(statement)
            if step == 1:
                connection.execute("INSERT INTO store VALUES (1, ?, 1, 1, 1, 1)", (new_id(),))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _is_ours(connection: sqlite3.Connection) -> bool:
    return connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID


def _refuse_foreign(connection: sqlite3.Connection, path: str) -> None:
    """Refuse a file in which somebody has made tables since it was looked at."""
    if connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise StoreForeign(f"{path} has tables of another program: give omniq a file of its own")
