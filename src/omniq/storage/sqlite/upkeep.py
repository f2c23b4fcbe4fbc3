"""What a SQLite store deletes when its time is over, and how it is checked and repaired."""

from __future__ import annotations

from collections import Counter
from typing import Any, LiteralString

from omniq.models import State
from omniq.operations import KEY_TTL_US, Retention
from omniq.storage.sqlite.rows import COUNTERS
from omniq.storage.sqlite.writer import Section

Row = tuple[Any, ...]


def purge_store(section: Section, retention: Retention, now_us: int, limit: int) -> int:
    """One bounded round; how many things went."""
    db = section.connection
    gone = purge_results(section, "expires_at <= ?", now_us, limit)
    if retention.dead_us is not None:
        sql = "SELECT seq, queue, state FROM tasks WHERE state=6 AND status='FAILED' AND finished_at <= ? LIMIT ?"
        gone += _delete_tasks(section, db.execute(sql, (now_us - retention.dead_us, limit)).fetchall())
    gone += db.execute(
        """DELETE FROM keys WHERE rowid IN (SELECT k.rowid FROM keys k LEFT JOIN tasks t ON t.id = k.task_id
        WHERE k.expires_at <= ? AND (t.state IS NULL OR t.state >= 5) LIMIT ?)""",
        (now_us, limit),
    ).rowcount
    gone += _purge_events(section, retention, now_us, limit)
    gone += db.execute("DELETE FROM workers WHERE seen_at <= ?", (now_us - retention.workers_us,)).rowcount
    gone += _purge_fan_ins(section, now_us, limit)
    gone += db.execute(
        """DELETE FROM runs WHERE rowid IN
        (SELECT rowid FROM runs WHERE settled = 1 AND ended_at + max(key_ttl, ?) <= ? LIMIT ?)""",
        (KEY_TTL_US, now_us, limit),
    ).rowcount
    return gone + _purge_lanes(section, retention, now_us, limit)


def purge_results(section: Section, condition: LiteralString, moment_us: int, limit: int) -> int:
    """Results go, and the ended tasks they belong to; a task that goes on (an interval, a dead queue) stays."""
    db = section.connection
    sql = f"SELECT r.seq, t.queue, t.state FROM results r JOIN tasks t USING (seq) WHERE r.{condition} LIMIT ?"
    rows = db.execute(sql, (moment_us, limit)).fetchall()
    db.executemany("DELETE FROM results WHERE seq=?", [(row[0],) for row in rows])
    _delete_tasks(section, [row for row in rows if row[2] >= State.DONE])
    return len(rows)


def _delete_tasks(section: Section, rows: list[Row]) -> int:
    db = section.connection
    db.executemany("DELETE FROM results WHERE seq=?", [(row[0],) for row in rows])
    db.executemany("DELETE FROM tasks WHERE seq=?", [(row[0],) for row in rows])
    ended: Counter[tuple[str, int]] = Counter((row[1], row[2]) for row in rows)
    for (queue, state), n in ended.items():
        column = COUNTERS[state]
        db.execute(f"UPDATE queues SET {column} = {column} - ? WHERE queue=?", (n, queue))
    return len(rows)


def _purge_events(section: Section, retention: Retention, now_us: int, limit: int) -> int:
    db = section.connection
    edge = 0
    if retention.events_max is not None:
        last = db.execute("SELECT max(seq) FROM events").fetchone()[0] or 0
        edge = max(edge, last - retention.events_max)
    if retention.events_us is not None:
        rows = db.execute("SELECT seq, ts FROM events ORDER BY seq LIMIT ?", (limit,)).fetchall()
        edge = max([edge, *(seq for seq, ts in rows if ts <= now_us - retention.events_us)])
    if not edge:
        return 0
    sql = "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE seq <= ? ORDER BY seq LIMIT ?)"
    return db.execute(sql, (edge, limit)).rowcount


def _purge_lanes(section: Section, retention: Retention, now_us: int, limit: int) -> int:
    """Groups without tasks go; those with a limit when they have rested for long, see `Lane.turn`."""
    db = section.connection
    section.ledger.forget_lanes()  # the same commit may have used one of them, and may go on to
    since = -1 if retention.limits_us is None else now_us - retention.limits_us
    over = """DELETE FROM lanes WHERE rowid IN
        (SELECT rowid FROM lanes WHERE members = 0 AND ("limit" = 0 OR (turn < 0 AND -turn <= ?)) LIMIT ?)"""
    gone = db.execute(over, (since, limit)).rowcount
    news = """UPDATE lanes SET turn = -? WHERE rowid IN
        (SELECT rowid FROM lanes WHERE members = 0 AND "limit" > 0 AND turn >= 0 LIMIT ?)"""
    db.execute(news, (now_us, limit))
    return gone


def _purge_fan_ins(section: Section, now_us: int, limit: int) -> int:
    rows = section.connection.execute("SELECT key FROM fan_ins WHERE expires_at <= ? LIMIT ?", (now_us, limit)).fetchall()
    for (key,) in rows:
        section.ledger.delete_fan_in(key)
    return len(rows)


def check_store(section: Section, repair: bool) -> list[str]:
    """Compare counters and lanes with the rows they count; with `repair`, set them right."""
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
