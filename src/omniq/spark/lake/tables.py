"""The tables of a lake: their columns, with types and meanings. No Spark here; the reference page is checked against this."""

from __future__ import annotations

from typing import Literal

import msgspec

Layer = Literal["bronze", "silver", "gold"]

# The outcomes of a run; `running` and `lost` have no end in the log.
OUTCOMES = ("succeeded", "retried", "failed", "expired", "cancelled", "lost", "running")


class LakeColumn(msgspec.Struct, frozen=True):
    name: str
    type: str  # a type of Spark SQL
    doc: str


class LakeTable(msgspec.Struct, frozen=True, kw_only=True):
    """One table: its columns, the column by which its folders are split, and the meaning of one row (`grain`)."""

    name: str
    layer: Layer
    partition: str  # a column of type date
    grain: str
    columns: tuple[LakeColumn, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def ddl(self) -> str:
        """The columns as Spark writes a schema."""
        return ", ".join(f"`{column.name}` {column.type}" for column in self.columns)


def _table(name: str, layer: Layer, grain: str, columns: str) -> LakeTable:
    """A table from lines `name type – doc`."""
    rows: list[LakeColumn] = []
    for line in columns.strip().splitlines():
        head, _, doc = line.strip().partition(" – ")
        column, _, kind = head.partition(" ")
        rows.append(LakeColumn(column, kind, doc))
    return LakeTable(
        name=name, layer=layer, partition="day" if layer == "gold" else "task_date", grain=grain, columns=tuple(rows)
    )


_EVENTS = """
    store string – id of the store that the event came from
    shard string – part of the store's log that numbers its events by itself: empty, or the queue in Redis
    seq bigint – number of the event within its shard
    ts timestamp – when it happened, by the store's clock
    event string – what happened: enqueued, started, succeeded, retried, failed, expired, released, cancelled, progress, …
    task_id string – id of the task
    queue string – the task's queue at that moment
    name string – the task's function
    group_id string – the task's group; null without one
    attempt int – count of attempts after the event
    worker string – worker that holds or last held the task
    enqueued_at timestamp – when the task was stored
    due_at timestamp – when the task may run, as of the event
    status string – the task's status after the event: PENDING, RUNNING, SUCCESS, FAILED, RETRYING, CANCELLED
    data string – the event's own data as JSON text; never arguments or results
    task_date date – day (UTC) of enqueued_at: all events of a task share it
"""

_PAYLOADS = """
    store string – id of the store
    id string – id of the task
    queue string – queue that it was in
    name string – its function
    group_id string – its group; null without one
    created_at timestamp – when it was stored
    encoding string – how the payload is encoded
    payload binary – the encoded arguments
    task_date date – day (UTC) on which it was stored
"""

_ATTEMPTS = """
    store string – id of the store
    task_id string – id of the task
    queue string – queue in which it ran
    name string – the task's function
    group_id string – the task's group; null without one
    run int – 1 for the task's first run, and so on; never starts anew
    attempt int – the store's count of attempts; starts anew for an interval task, in a dead queue and after a requeue
    worker string – worker that ran it
    ready_at timestamp – earliest moment at which it could have started: due, and not behind an earlier run
    started_at timestamp – when a worker took it; null if that event was purged before it was ingested
    finished_at timestamp – when the run ended; null while it runs, and if no end is in the log
    outcome string – succeeded, retried, failed, expired, cancelled, running, or lost (no end in the log)
    wait_ms double – from ready_at to started_at
    run_ms double – time of the run as the worker measured it, else from started_at to finished_at
    result_bytes bigint – size of the result, if the run succeeded
    error_type string – class of the error
    error string – the first 500 characters of the error's message
    fingerprint string – one value for errors that differ in numbers, ids and quoted words only
    moved_to string – the dead queue that the task went to
    again boolean – whether the task had already ended before: an interval task, a requeued one, one in a dead queue
    previous_started_at timestamp – start of the run before
    task_date date – day (UTC) on which the task was stored
"""

_TASKS = """
    store string – id of the store
    id string – id of the task
    queue string – queue that it is in now
    name string – its function
    group_id string – its group; null without one
    status string – PENDING, RUNNING, SUCCESS, FAILED, RETRYING or CANCELLED, after its last event
    attempts int – the store's count of attempts
    runs int – number of its runs in all
    releases int – number of times that a worker handed it back unused
    created_at timestamp – when it was stored
    due_at timestamp – when it may run, or could have run
    started_at timestamp – start of its last run
    finished_at timestamp – when it ended; null if it has not
    removed_at timestamp – when its record was deleted by a call
    wait_ms double – waiting time of its last run
    run_ms double – time of its last run
    total_wait_ms double – waiting time of all its runs
    total_run_ms double – time of all its runs
    worker string – worker that ran it last
    error_type string – class of its last error, even if a later run succeeded
    error string – message of that error
    fingerprint string – fingerprint of that error
    payload_bytes bigint – size of its arguments
    enqueued_queue string – queue that it was put into; differs from queue after a move to a dead queue
    events bigint – number of its events
    last_event_at timestamp – when the last of them happened
    task_date date – day (UTC) on which it was stored
"""

_QUEUE_MINUTE = """
    store string – id of the store
    queue string – the queue
    minute timestamp – beginning of the minute
    enqueued bigint – tasks stored
    rearmed bigint – tasks that became due again: interval tasks, requeued ones, arrivals in a dead queue
    started bigint – runs started
    succeeded bigint – runs that succeeded
    retried bigint – runs that failed and were to be tried again
    failed bigint – runs and blocked tasks that failed for good
    expired bigint – runs whose worker was lost
    cancelled bigint – tasks cancelled, running or waiting
    backlog_delta bigint – enqueued and rearmed, less succeeded, failed and cancelled
    max_wait_ms double – longest wait of a run that started
    total_wait_ms double – sum of the waits of the runs that started
    in_time bigint – runs that started within 60 seconds of being due
    busy_ms double – time that runs spent in this minute; counted when a run has ended
    incomplete boolean – whether events of that time were purged before they came in, so that counts may be too low
    day date – day of the minute (UTC)
"""

_FUNC_HOUR = """
    store string – id of the store
    queue string – the queue
    name string – the function
    hour timestamp – beginning of the hour in which the runs ended
    runs bigint – runs that ended
    succeeded bigint – of them, those that succeeded
    retried bigint – of them, those that failed and were to be tried again
    failed bigint – of them, those that failed for good
    expired bigint – of them, those whose worker was lost
    cancelled bigint – of them, those that were cancelled
    total_wait_ms double – sum of their waits
    total_run_ms double – sum of their times
    wait_p50_ms double – half of the runs waited this long or less
    wait_p95_ms double – 95 % of the runs waited this long or less
    wait_p99_ms double – 99 % of the runs waited this long or less
    run_p50_ms double – half of the runs took this long or less
    run_p95_ms double – 95 % of the runs took this long or less
    run_p99_ms double – 99 % of the runs took this long or less
    wait_sketch binary – KLL sketch of the waits; merge with kll_merge_agg_double
    run_sketch binary – KLL sketch of the times; merge with kll_merge_agg_double
    incomplete boolean – whether events of that time were purged before they came in, so that counts may be too low
    day date – day of the hour (UTC)
"""

_GROUP_HOUR = """
    store string – id of the store
    queue string – the queue
    group_id string – the group
    hour timestamp – beginning of the hour
    enqueued bigint – tasks stored
    started bigint – runs started
    finished bigint – runs ended
    failed bigint – of them, those that failed for good
    share double – the group's part of all runs that started in the queue
    busy_ms double – time that its runs spent in this hour
    peak_running bigint – most runs at one time
    max_wait_ms double – longest wait of a run that started
    total_wait_ms double – sum of the waits of the runs that started
    waiting_ms double – time in which at least one task waited
    blocked_ms double – of it, time in which as many ran as ever did on that day: the most that a limit can have cost
    waiting_end bigint – tasks that waited at the end of the hour
    stuck boolean – whether tasks waited at the end, and none had started in the hour
    incomplete boolean – whether events of that time were purged before they came in, so that counts may be too low
    day date – day of the hour (UTC)
"""

_FAILURE_DAY = """
    store string – id of the store
    fingerprint string – one value for errors that differ in numbers, ids and quoted words only
    name string – the function
    error_type string – class of the error
    failures bigint – runs that ended with it
    final bigint – of them, those after which the task failed for good
    tasks bigint – number of tasks concerned, within about 2 %
    first_seen timestamp – first of the runs' ends
    last_seen timestamp – last of the runs' ends
    sample_error string – message of the last one
    sample_ids array<string> – ids of up to 5 of the tasks, the latest first
    incomplete boolean – whether events of that time were purged before they came in, so that counts may be too low
    day date – day of the ends (UTC)
"""

_RETRY_STORM = """
    store string – id of the store
    name string – the function
    window_start timestamp – beginning of five minutes
    attempts bigint – runs started
    tasks bigint – tasks that they belong to
    retries bigint – runs started of a task's second or later attempt, whenever the first was
    attempts_per_task double – attempts divided by tasks
    baseline double – the same over the 24 hours before; null without any
    ratio double – retries per task, divided by the retries per task of the 24 hours before: 1 is as usual
    storm boolean – whether there were at least 10 retries, and twice as many per task as usual
    incomplete boolean – whether events of that time were purged before they came in, so that counts may be too low
    day date – day of the window (UTC)
"""

_CAPACITY_HOUR = """
    store string – id of the store
    queue string – the queue
    hour timestamp – beginning of the hour
    is_forecast boolean – whether the hour had not begun at the last event
    arrivals bigint – tasks stored or due again; null in a forecast
    finished bigint – tasks that left: succeeded, failed, cancelled; null in a forecast
    busy_s double – seconds that runs spent; null in a forecast
    peak_slots double – most runs at one time, as the mean of a minute; null in a forecast
    slots_seen bigint – most slots in use at a time, in the 7 days before and this hour; of a forecast, in the last 7 known
    utilisation double – busy_s divided by the seconds that slots_seen have in an hour
    forecast_arrivals double – mean of the arrivals in this hour of the 4 weeks before, else of the 7 days before
    forecast_busy_s double – the same for busy_s
    slots_needed bigint – slots for the load (forecast, else measured) with room for its swings: load + 2 × √load, rounded up
    short boolean – whether slots_needed is more than slots_seen
    incomplete boolean – whether events of that time were purged before they came in, so that counts may be too low
    day date – day of the hour (UTC)
"""

TABLES: dict[str, LakeTable] = {
    table.name: table
    for table in (
        _table("events", "bronze", "one event of the log", _EVENTS),
        _table("payloads", "bronze", "the arguments of one task; empty unless they were asked for", _PAYLOADS),
        _table("attempts", "silver", "one run of a task", _ATTEMPTS),
        _table("tasks", "silver", "one task, as of its last event", _TASKS),
        _table("queue_minute", "gold", "store, queue, minute", _QUEUE_MINUTE),
        _table("func_hour", "gold", "store, queue, function, hour", _FUNC_HOUR),
        _table("group_hour", "gold", "store, queue, group, hour", _GROUP_HOUR),
        _table("failure_day", "gold", "store, fingerprint, function, day", _FAILURE_DAY),
        _table("retry_storm", "gold", "store, function, five minutes", _RETRY_STORM),
        _table("capacity_hour", "gold", "store, queue, hour; 7 days of forecast follow the last event", _CAPACITY_HOUR),
    )
}
SILVER = tuple(name for name, table in TABLES.items() if table.layer == "silver")
GOLD = tuple(name for name, table in TABLES.items() if table.layer == "gold")
