"""Purging, checking and repairing a SQLite store."""

from __future__ import annotations

from collections import Counter
from typing import Any, LiteralString, NamedTuple

from omniq.models import State
from omniq.retention import RUN_KEPT_US, CutOffs
from omniq.storage.sqlite.rows import COUNTERS
from omniq.storage.sqlite.writer import SQLiteSection

Row = tuple[Any, ...]


class _Moment(NamedTuple):
    seq: int
    ts_us: int


def purge_store(section: SQLiteSection, cut: CutOffs) -> int:
    """One round in statements that read no payload and move no row to Python; the rules are those of `omniq.retention`."""
    db, now_us, limit = section.connection, cut.now_us, cut.limit
    gone = purge_results(section, "expires_at <= ?", now_us, limit)
    if cut.dead_us is not None:
        sql = "SELECT seq, queue, state FROM tasks WHERE state=6 AND status='FAILED' AND finished_at <= ? LIMIT ?"
        gone += _delete_tasks(section, db.execute(sql, (cut.dead_us, limit)).fetchall())
    gone += db.execute(
        """DELETE FROM keys WHERE rowid IN (SELECT k.rowid FROM keys k LEFT JOIN tasks t ON t.id = k.task_id
        WHERE k.expires_at <= ? AND (t.state IS NULL OR t.state >= 5) LIMIT ?)""",
        (now_us, limit),
    ).rowcount
    gone += _purge_events(section, cut)
    silent = "DELETE FROM workers WHERE rowid IN (SELECT rowid FROM workers WHERE seen_at <= ? LIMIT ?)"
    gone += db.execute(silent, (cut.workers_us, limit)).rowcount
    gone += _purge_fan_ins(section, now_us, limit)
    gone += db.execute(
        """DELETE FROM runs WHERE rowid IN
        (SELECT rowid FROM runs WHERE settled = 1 AND ended_at + max(key_ttl, ?) <= ? LIMIT ?)""",
        (RUN_KEPT_US, now_us, limit),
    ).rowcount
    return gone + _purge_lanes(section, cut)


def purge_results(section: SQLiteSection, condition: LiteralString, moment_us: int, limit: int) -> int:
    """Delete results and the ended tasks that they belong to; a task that goes on (an interval, a dead queue) stays."""
    db = section.connection
    sql = f"SELECT r.seq, t.queue, t.state FROM results r JOIN tasks t USING (seq) WHERE r.{condition} LIMIT ?"
    rows = db.execute(sql, (moment_us, limit)).fetchall()
    db.executemany("DELETE FROM results WHERE seq=?", [(row[0],) for row in rows])
    _delete_tasks(section, [row for row in rows if row[2] >= State.DONE])
    return len(rows)


def _delete_tasks(section: SQLiteSection, rows: list[Row]) -> int:
    db = section.connection
    db.executemany("DELETE FROM results WHERE seq=?", [(row[0],) for row in rows])
    db.executemany("DELETE FROM tasks WHERE seq=?", [(row[0],) for row in rows])
    ended: Counter[tuple[str, int]] = Counter((row[1], row[2]) for row in rows)
    for (queue, state), n in ended.items():
        column = COUNTERS[state]
        db.execute(f"UPDATE queues SET {column} = {column} - ? WHERE queue=?", (n, queue))
    return len(rows)


def _purge_events(section: SQLiteSection, cut: CutOffs) -> int:
    db = section.connection
    first, last = db.execute("SELECT min(seq), max(seq) FROM events").fetchone()
    if first is None:
        return 0

    def read(after: int, limit: int) -> list[_Moment]:
        rows = db.execute("SELECT seq, ts FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)).fetchall()
        return [_Moment(*row) for row in rows]

    return db.execute("DELETE FROM events WHERE seq <= ?", (cut.events_upto(first, last, read),)).rowcount


def _purge_lanes(section: SQLiteSection, cut: CutOffs) -> int:
    """`CutOffs.group` in SQL. The `turn` of a group says since when it rests."""
    db = section.connection
    section.ledger.forget_lanes()  # the same commit may have used one of them, and may go on to
    # No lane rests since before 1970: limits are kept for ever.
    since = -1 if cut.groups_us is None else cut.groups_us
    over = """DELETE FROM lanes WHERE rowid IN
        (SELECT rowid FROM lanes WHERE members = 0 AND ("limit" = 0 OR (turn < 0 AND -turn <= ?)) LIMIT ?)"""
    gone = db.execute(over, (since, cut.limit)).rowcount
    news = """UPDATE lanes SET turn = -? WHERE rowid IN
        (SELECT rowid FROM lanes WHERE members = 0 AND "limit" > 0 AND turn >= 0 LIMIT ?)"""
    db.execute(news, (cut.now_us, cut.limit))
    return gone


def _purge_fan_ins(section: SQLiteSection, now_us: int, limit: int) -> int:
    rows = section.connection.execute("SELECT key FROM fan_ins WHERE expires_at <= ? LIMIT ?", (now_us, limit)).fetchall()
    for (key,) in rows:
        section.ledger.delete_fan_in(key)
    return len(rows)


def check_store(section: SQLiteSection, repair: bool) -> list[str]:
    """Compare counters and lanes with the rows they count; with `repair`, set them right. In SQL no task is read for it."""
    section.ledger.flush()  # others of the same commit may have written tasks whose counts still wait
    db = section.connection
    found: list[str] = []
    for index, column in enumerate(COUNTERS):
        sql = f"""SELECT q.queue, q.{column}, (SELECT count(*) FROM tasks t WHERE t.queue = q.queue AND t.state = ?) AS true
            FROM queues q WHERE q.{column} <> true"""
        for queue, counted, true in db.execute(sql, (index,)).fetchall():
            found.append(f"queue {queue!r} counts {counted} {column} tasks and has {true}")
            if repair:
                db.execute(f"UPDATE queues SET {column}=? WHERE queue=?", (true, queue))
    sql = """SELECT l.queue, l."group",
        (SELECT count(*) FROM tasks t WHERE t.queue=l.queue AND t."group"=l."group" AND t.state=3) AS true_ready,
        (SELECT count(*) FROM tasks t WHERE t.queue=l.queue AND t."group"=l."group" AND t.state=4) AS true_inflight,
        (SELECT count(*) FROM tasks t WHERE t.queue=l.queue AND t."group"=l."group" AND t.state BETWEEN 1 AND 4) AS true_members
        FROM lanes l WHERE l.ready<>true_ready OR l.inflight<>true_inflight OR l.members<>true_members"""
    for queue, group, ready, inflight, members in db.execute(sql).fetchall():
        found.append(f"group {group!r} of queue {queue!r} is miscounted")
        if repair:
            fix = 'UPDATE lanes SET ready=?, inflight=?, members=? WHERE queue=? AND "group"=?'
            db.execute(fix, (ready, inflight, members, queue, group))
            section.machine.ready_queues.add(queue)
    return found
