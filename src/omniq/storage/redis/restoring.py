"""Tasks of another store with their results, and its events, as the script takes them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from omniq.errors import CrossQueue
from omniq.models import Record, State
from omniq.operations import EventRow, Saved
from omniq.storage.redis.records import WORD_OF, value_of_result, words_of
from omniq.storage.redis.wire import blob, common_fields, encode_json, maybe_up, ms_down, ms_up, options_of

MAX_TASKS = 1000  # of one call: the server does nothing else meanwhile
MAX_BYTES = 8 * 1024 * 1024  # and of their payloads and results, far below the 512 MB at which a server hangs up
MAX_EVENTS = 10_000
DEFAULT_TTL_MS = 86_400_000


def by_slot(tasks: Sequence[Saved], slot_of: Callable[[str], int]) -> list[list[Saved]]:
    """Tasks that one call of the script may reach, in order within each; refuses them all if one of them spans slots."""
    slots: dict[int, list[Saved]] = {}
    for saved in tasks:
        task, slot = saved.record, slot_of(saved.record.queue)
        others = [b.queue for b in task.blocked_by if b.queue] if task.state is State.BLOCKED else []
        if task.dead_queue is not None and not task.state.final:
            others.append(task.dead_queue)
        for other in others:
            if slot_of(other) != slot:
                raise CrossQueue(
                    f"task {task.id!r} of queue {task.queue!r} needs queue {other!r}, which is in a different slot of the "
                    "cluster: a task, its blockers and its dead queue must be in one"
                )
        slots.setdefault(slot, []).append(saved)
    return list(slots.values())


def task_calls(tasks: Sequence[Saved], key_ttl_us: int) -> Iterable[dict[str, Any]]:
    """Makes the operations that bring tasks in: mostly one, more if the tasks are many or large."""
    part: list[dict[str, Any]] = []
    size = 0
    for saved in tasks:
        if part and (len(part) == MAX_TASKS or size >= MAX_BYTES):
            yield {"kind": "restore", "tasks": part}
            part, size = [], 0
        part.append(_task(saved, key_ttl_us))
        size += len(saved.record.payload or b"") + len((saved.result and saved.result.result) or b"")
    if part:
        yield {"kind": "restore", "tasks": part}


def _task(saved: Saved, key_ttl_us: int) -> dict[str, Any]:
    task, result = saved.record, saved.result
    ended_ms = ms_down(task.updated_at_us if task.finished_at_us is None else task.finished_at_us)
    ttl = maybe_up(task.result_ttl_us)
    lives_ms = DEFAULT_TTL_MS if ttl is None else ttl
    running = task.state is State.RUNNING  # its holder works elsewhere: it comes back unused
    due = ms_up(task.due_us)
    made: dict[str, Any] = {
        "queue": task.queue,
        "id": task.id,
        "state": WORD_OF[State.READY if running else task.state],
        "name": task.name,
        "fields": _fields(task, max(task.attempts - 1, 0) if running else task.attempts),
        "options": blob(options_of(task)),
        "fingerprint": task.fingerprint,
        "created": ms_down(task.created_at_us),
        "due": due,
        "since": ended_ms if task.state.final else due if task.state is State.READY else ms_down(task.updated_at_us),
    }
    if running or (task.returned and task.state is State.READY):
        made["returned"] = True
    if task.group is not None:
        made["group"] = task.group
    if ttl is not None:
        made["ttl"] = ttl
    if task.state in (State.DONE, State.CANCELLED):
        made["expires"] = ended_ms + lives_ms
    if task.state is State.BLOCKED:
        made["blocked_by"], made["left"] = task.blocked_by, task.blockers_left
    if task.idempotency_key is not None:
        made["key"], made["key_until"] = task.idempotency_key, ms_up(task.created_at_us + key_ttl_us)
    if result is not None:
        made["result"], made["result_until"] = blob(value_of_result(task, result)), ms_down(result.finished_at_us) + lives_ms
    return made


def _fields(task: Record, attempts: int) -> list[Any]:
    """The fields of its hash, but for those that depend on what else is in the store."""
    started, finished = _ms(task.started_at_us), _ms(task.finished_at_us)
    # A task with a past may have any field, so the script must not read it by its short ways.
    always = {"attempt": str(attempts), "updated_ms": _ms(task.updated_at_us), "more": "1"}
    given: dict[str, Any] = {
        "first_started_ms": started,
        "last_started_ms": started,
        "completed_ms": finished if task.state is State.DONE else None,
        "failed_ms": finished if task.state is State.DEAD else None,
        "gid": task.group,
        "idempotency_key": task.idempotency_key,
        "dead_queue": task.dead_queue,
        "worker": task.worker,
        "ended_by": task.ended_by,
        "cancel": "1" if task.cancel_requested else None,
        "interval_us": _text(task.interval_us),
        "eta_us": _text(task.eta_us),
        "finished_ms": finished,
        "headers": None if task.headers is None else blob(encode_json(task.headers)),
        "blocked_by": blob(encode_json(task.blocked_by)) if task.blocked_by else None,
        "error": None if task.last_error is None else blob(encode_json(task.last_error)),
        "last_error": words_of(task.last_error),
        "last_error_ms": _ms(task.failed_at_us),
        "progress": None if task.progress is None else blob(task.progress),
    }
    payload = b"null" if task.payload is None else task.payload
    fields: list[Any] = ["id", task.id, "payload", blob(payload), *common_fields(task)]
    for name, value in [*always.items(), *((name, value) for name, value in given.items() if value)]:
        fields += (name, value)
    return fields


def _ms(us: int | None) -> str:
    return "" if us is None else str(ms_down(us))


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def event_calls(rows: Sequence[EventRow]) -> Iterable[dict[str, Any]]:
    """One operation for each queue, more if they are many. An entry of the stream holds events of one moment."""
    queues: dict[str, list[EventRow]] = {}
    for row in rows:
        queues.setdefault(row.queue, []).append(row)
    for queue, theirs in queues.items():
        for start in range(0, len(theirs), MAX_EVENTS):
            moments = groupby(theirs[start : start + MAX_EVENTS], key=lambda row: ms_down(row.ts_us))
            entries = [[ms, [value for row in same for value in _event(row)]] for ms, same in moments]
            yield {"kind": "restore_events", "queue": queue, "entries": entries}


def _event(row: EventRow) -> tuple[Any, ...]:
    """Ten values, as `log.add` in lanes.lua has them."""
    task = (row.task_id, row.name, row.group or False, row.attempt, row.worker or False)
    data = False if row.data is None else blob(row.data)
    return (row.event, *task, ms_down(row.enqueued_at_us), ms_up(row.due_us), int(row.state), data)
