"""Finding and counting the tasks of a SQLite store.

Pages follow `seq`. A page for tasks that are few, by the counters of the queues, reads their numbers from the index of their
state; any other one looks through the table, up to a bound. Both give the same tasks and take the same cursors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from omniq.models import Record, State
from omniq.operations import Filter, Page
from omniq.storage.cursors import decode_cursor, encode_cursor, few
from omniq.storage.ledger_storage import DUE_CAP
from omniq.storage.sqlite.rows import COLUMNS, COUNTERS, record_of

Row = tuple[Any, ...]
Fetch = Callable[[str, Sequence[Any]], Awaitable[list[Row]]]

CHUNK = 500  # tasks that are looked up at once
_LAST = 1 << 62

# Done and cancelled tasks have no index of their own, which every task would pay for: their results lead to them.
_INDEXES = {
    State.STAGED: "tasks_staged",
    State.BLOCKED: "tasks_blocked",
    State.SCHEDULED: "tasks_scheduled",
    State.READY: "tasks_ready",
    State.RUNNING: "tasks_running",
    State.DEAD: "tasks_dead",
}
_BY_QUEUE = frozenset(_INDEXES) - {State.DEAD}  # the other indexes know no queues

# Tasks that came back are first in their lane whatever their time, so their oldest one is asked for apart.
_READY = 'SELECT min(eta) FROM tasks t WHERE t.state=3 AND t.queue=q.queue AND t."group" IS'
COUNTS = f"""SELECT queue, paused, {", ".join(COUNTERS)},
 (SELECT count(*) FROM (SELECT 1 FROM tasks t WHERE t.state=2 AND t.queue=q.queue AND t.eta<=? LIMIT {DUE_CAP})),
 ({_READY} NULL AND t.returned=0),
 ({_READY} NULL AND t.returned=1),
 ({_READY} NOT NULL),
 (SELECT min(eta) FROM tasks t WHERE t.state=2 AND t.queue=q.queue AND t.eta<=?)
 FROM queues q ORDER BY queue"""


async def find_page(fetch: Fetch, filter: Filter, cursor: str | None, limit: int, newest_first: bool, scan_limit: int) -> Page:
    after = decode_cursor(cursor)
    seqs = await _few(fetch, filter, scan_limit)
    if seqs is None:
        return await _look_through(fetch, filter, after, limit, newest_first, scan_limit)
    if after is not None:
        seqs = [seq for seq in seqs if (seq < after if newest_first else seq > after)]
    seqs.sort(reverse=newest_first)
    tasks: list[Record] = []
    where, parameters = _conditions(filter)
    where.append("seq IN (SELECT value FROM json_each(?))")
    for at in range(0, len(seqs), CHUNK):
        given = (*parameters, _json(seqs[at : at + CHUNK]))
        tasks += await _select(fetch, where, given, newest_first, limit + 1 - len(tasks))
        if len(tasks) > limit:
            return Page(tasks=tasks[:limit], cursor=encode_cursor(tasks[limit - 1].seq))
    return Page(tasks=tasks)


async def _look_through(
    fetch: Fetch, filter: Filter, after: int | None, limit: int, newest_first: bool, scan_limit: int
) -> Page:
    where, parameters = _conditions(filter)
    if after is not None:
        where.append("seq < ?" if newest_first else "seq > ?")
        parameters.append(after)
    edge = await _edge(fetch, after, newest_first, scan_limit)
    if edge is not None:
        where.append("seq >= ?" if newest_first else "seq <= ?")
        parameters.append(edge)
    tasks = await _select(fetch, where, parameters, newest_first, limit + 1)
    if len(tasks) > limit:
        return Page(tasks=tasks[:limit], cursor=encode_cursor(tasks[limit - 1].seq))
    if edge is not None:
        return Page(tasks=tasks, cursor=encode_cursor(edge), partial=True)
    return Page(tasks=tasks)


async def _edge(fetch: Fetch, after: int | None, newest_first: bool, scan_limit: int) -> int | None:
    """Returns the row at which a page stops looking, `scan_limit` further on; None if there are not so many."""
    start = after if after is not None else _LAST if newest_first else 0
    side, order = ("<", "DESC") if newest_first else (">", "ASC")
    sql = f"SELECT seq FROM tasks WHERE seq {side} ? ORDER BY seq {order} LIMIT 1 OFFSET ?"
    rows = await fetch(sql, (start, scan_limit))
    return rows[0][0] if rows else None


async def _select(fetch: Fetch, where: list[str], parameters: Sequence[Any], newest_first: bool, limit: int) -> list[Record]:
    order = "DESC" if newest_first else "ASC"
    sql = f"SELECT {COLUMNS} FROM tasks WHERE {' AND '.join(where) or '1'} ORDER BY seq {order} LIMIT ?"
    return [record_of(row) for row in await fetch(sql, (*parameters, limit))]


# -- the few ---------------------------------------------------------------------------------------


async def _few(fetch: Fetch, filter: Filter, scan_limit: int) -> list[int] | None:
    """Returns the numbers of the few tasks that can match, with some that do not; None if no index leads to few."""
    if filter.ids:
        ids = _json(list(filter.ids[: scan_limit + 1]))
        rows = await fetch("SELECT seq FROM tasks WHERE id IN (SELECT value FROM json_each(?))", (ids,))
        return [seq for (seq,) in rows] if len(filter.ids) <= scan_limit else None
    states = filter.possible
    rows = await fetch(f"SELECT queue, {', '.join(COUNTERS)} FROM queues", ())
    if not few(_cost(rows, states, filter.queue), sum(sum(row[1:]) for row in rows), scan_limit):
        return None
    sql, parameters = _numbers(states, filter.queue, scan_limit)
    found = await fetch(sql, parameters)
    ended = sum(n for kind, n in found if kind < 0)
    if sum(kind == State.DONE for kind, _ in found) != ended:  # some that another store kept came without a result
        return None
    return [seq for kind, seq in found if kind >= 0]


def _cost(counters: Sequence[Row], states: Sequence[State], queue: str | None) -> int:
    """Returns the number of rows to which the indexes of these states lead."""
    cost = 0
    for state in states:
        everywhere = sum(row[1 + state] for row in counters)
        here = sum(row[1 + state] for row in counters if queue is None or row[0] == queue)
        if state in _BY_QUEUE:
            cost += here
        elif state is State.DEAD:
            cost += everywhere
        elif here:
            cost += sum(row[1 + final] for row in counters for final in (State.DONE, State.DEAD, State.CANCELLED))
    return cost


def _numbers(states: Sequence[State], queue: str | None, scan_limit: int) -> tuple[str, list[Any]]:
    """A single statement for pairs of a state and a number: between two of them a task might move to another state.

    Ended tasks are found by their results and come as DONE. A pair with −1 says how many there are by the counters.
    """
    here = "" if queue is None else " AND queue=?"
    parts = [f"SELECT {s:d}, seq FROM tasks INDEXED BY {_INDEXES[s]} WHERE state={s:d}{here}" for s in states if s in _INDEXES]
    ended = [s for s in states if s not in _INDEXES]
    if ended:
        counted = f"SELECT coalesce(sum({'+'.join(COUNTERS[s] for s in ended)}), 0) FROM queues WHERE 1{here}"
        parts.append(f"SELECT -1, ({counted})")
        parts.append(
            f"""SELECT {State.DONE:d}, t.seq FROM (SELECT seq FROM results WHERE ({counted}) > 0 LIMIT {scan_limit:d}) r
            CROSS JOIN tasks t ON t.seq = r.seq WHERE t.state IN ({", ".join(str(int(s)) for s in ended)}){here}"""
        )
    sql = " UNION ALL ".join(parts)
    return sql, [queue] * sql.count("queue=?")


# -- conditions ------------------------------------------------------------------------------------


def _conditions(filter: Filter) -> tuple[list[str], list[Any]]:
    where: list[str] = []
    parameters: list[Any] = []

    def add(condition: str, value: object, *more: object) -> None:
        if value is not None and value != ():
            where.append(condition)
            parameters.extend((value, *more))

    if filter.states:
        where.append(f"state IN ({', '.join(str(int(s)) for s in filter.states)})")
    # Before their run is committed, tasks are shown only to those who ask for the run or the state.
    elif filter.run_id is None:
        where.append(f"state <> {State.STAGED:d}")
    if filter.statuses:
        add("status IN (SELECT value FROM json_each(?))", _json(list(filter.statuses)))
    if filter.ids:
        add("id IN (SELECT value FROM json_each(?))", _json(list(filter.ids)))
    add("queue = ?", filter.queue)
    add("func_path = ?", filter.name)
    add('"group" = ?', filter.group)
    add("worker = ?", filter.worker)
    add("origin = ?", filter.origin)
    add("run_id = ?", filter.run_id)
    add("attempts >= ?", filter.min_attempts or None)
    add("created_at >= ?", filter.created_from_us)
    add("created_at < ?", filter.created_to_us)
    add("finished_at >= ?", filter.finished_from_us)
    add("finished_at < ?", filter.finished_to_us)
    if filter.error_contains:
        shown = "json_extract(last_error, '$.type') || ': ' || json_extract(last_error, '$.message') || char(10) || "
        shown += "json_extract(last_error, '$.traceback')"
        add(f"last_error IS NOT NULL AND instr({shown}, ?) > 0", filter.error_contains)
    if filter.payload_contains:
        whole = """CASE WHEN args IS NULL THEN payload ELSE '{"args":' || args || ',"kwargs":' || kwargs || '}' END"""
        add(f"instr(CAST({whole} AS BLOB), CAST(? AS BLOB)) > 0", filter.payload_contains)
    return where, parameters


def _json(values: list[Any]) -> str:
    return msgspec.json.encode(values).decode()
