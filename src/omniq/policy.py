"""Every decision about a task, as pure functions: when to retry, how long to wait, when a task is dead.

Drivers never import this module; the queue, the workers and the doors do, and `BaseStorage` only to take back a lost lease.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, cast

import msgspec

from omniq.backoff import Backoff, parse_backoff
from omniq.durations import format_duration
from omniq.errors import ConfigError
from omniq.models import MAX_TIME_US, Record, TaskError, from_us, to_us
from omniq.operations import Cancel, Fail, Lease, Operation, Retry

DEFAULT_MAX_ATTEMPTS = 4
SERVER_PREFIX = "serve:"  # how a TCP server's name as a holder begins
NOT_RUNNABLE = "NotRunnable"  # the kind of error of a task that no worker will or can run
# While a new version is rolled out, the next worker may have the function: the first looks follow each other soon. A function
# that no worker has any more must not keep all of them busy, so looks become rare.
UNKNOWN_PAUSE_US = 1_000_000
MAX_UNKNOWN_PAUSE_US = 300_000_000
# `after_unknown` writes these words into stored tasks: other words would make those that wait begin anew.
_WAITS = re.compile(r"waits since (\S{1,40}Z) for a worker that has its function: ")


def backoff_of(task: Record) -> Backoff:
    """The policy of a stored task. A text that is damaged, or of another program, must not keep the task from ending."""
    try:
        return parse_backoff(task.backoff)
    except ConfigError:
        return Backoff()


def max_attempts(task: Record) -> int:
    return task.max_attempts or DEFAULT_MAX_ATTEMPTS


def next_run(task: Record, now_us: int) -> int | None:
    """The next tick of an interval task: on its grid, after now, so that nothing drifts and nothing piles up."""
    if not task.interval_us:
        return None
    # A retry moves `due_us` and not `eta_us`: the grid stays where it was.
    anchor = task.eta_us if task.eta_us is not None else task.due_us
    if anchor > now_us:
        return anchor
    return min(anchor + task.interval_us * ((now_us - anchor) // task.interval_us + 1), MAX_TIME_US)


def after_failure(
    task: Record,
    error: TaskError | None,
    now_us: int,
    random: float,
    *,
    after_us: int | None = None,
    final: bool = False,
    ran_us: int | None = None,
    late: bool = True,
) -> Retry | Fail:
    """Returns what follows a failed run: a retry after a pause, or the end. `after_us` is the pause that the task asked for."""
    held: dict[str, Any] = {"queue": task.queue, "id": task.id, "token": task.token, "late": late}
    if final or task.attempts >= max_attempts(task):
        return Fail(**held, error=error, ran_us=ran_us, again_us=next_run(task, now_us))
    delay = after_us if after_us is not None else backoff_of(task).delay_us(task.attempts, random)
    return Retry(**held, error=error, delay_us=delay, ran_us=ran_us)


def unknown_pause_us(elapsed_us: int) -> int:
    """Returns the pause before a function that was missing for `elapsed_us` is looked for again: 1 s, 2 s, 4 s, up to 5 min."""
    return min(elapsed_us + UNKNOWN_PAUSE_US, MAX_UNKNOWN_PAUSE_US)


def after_unknown(task: Record, error: TaskError, now_us: int, limit_us: int, *, last: bool = False) -> Retry | Fail:
    """Returns what follows when a worker lacks a task's function: another may have it, so the task waits and keeps its attempt.

    After `limit_us` of that it fails, and at once with `last`. Since when it waits stands in its error, for people and for the
    worker that sees it next: the record has no other place that every store keeps.
    """
    held: dict[str, Any] = {"queue": task.queue, "id": task.id, "token": task.token, "late": True}
    since_us = _waits_since(task, now_us, limit_us)
    elapsed = now_us - since_us
    if last or elapsed >= limit_us:
        told = _preceded(error, f"no worker had its function for {_rounded(elapsed)}: ") if elapsed else error
        return Fail(**held, error=told, again_us=next_run(task, now_us))
    since = from_us(since_us).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    told = _preceded(error, f"waits since {since} for a worker that has its function: ")
    delay = min(unknown_pause_us(elapsed), limit_us - elapsed)
    return Retry(**held, error=told, delay_us=delay, attempts=max(task.attempts - 1, 0))


def waits_for_function(task: Record) -> bool:
    """Whether `after_unknown` put this task aside, and nothing has ended it since."""
    error = task.last_error
    return (
        error is not None
        and error.type == NOT_RUNNABLE
        and _WAITS.match(error.message) is not None
        and task.failed_at_us is not None
        and (task.finished_at_us is None or task.finished_at_us < task.failed_at_us)
    )


def _waits_since(task: Record, now_us: int, limit_us: int) -> int:
    """Returns when a worker first lacked the function, in a row of such times. Now, if this is the first.

    A row ends with a run that ended, well or not, and when no worker looked for longer than the limit: a queue that was paused
    over night has not been tried for a night.
    """
    if not waits_for_function(task) or now_us - cast(int, task.failed_at_us) > max(limit_us, 2 * MAX_UNKNOWN_PAUSE_US):
        return now_us
    found = cast("re.Match[str]", _WAITS.match(cast(TaskError, task.last_error).message))
    try:
        return min(to_us(datetime.fromisoformat(found[1])), now_us)
    except ValueError:
        return now_us


def _preceded(error: TaskError, by: str) -> TaskError:
    return msgspec.structs.replace(error, message=by + error.message).cut()


def _rounded(us: int) -> str:
    return format_duration(max(us // 1_000_000, 1) * 1_000_000_000)


def after_loss(lease: Lease, now_us: int, random: float) -> Operation:
    """Returns what follows a lost lease. The run counts, so a task that keeps killing its workers ends as a dead letter."""
    task, lost = lease.record, lease.lost
    held: dict[str, Any] = {"queue": task.queue, "id": task.id, "token": task.token}
    error = _loss_error(task, lost)
    if (task.worker or "").startswith(SERVER_PREFIX):
        # A server only keeps the lease for a client, whose work has not failed: that costs no attempt.
        if task.cancel_requested:
            return Cancel(**held, lost=lost, error=error)
        return Retry(**held, error=error, lost=lost, attempts=max(task.attempts - 1, 0))
    if task.attempts >= max_attempts(task):
        return Fail(**held, error=error, lost=lost, again_us=next_run(task, now_us))
    if task.cancel_requested:
        return Cancel(**held, lost=lost, error=error)
    policy = backoff_of(task)
    delay = None
    if policy.loss == "backoff":
        delay = policy.delay_us(task.attempts, random)
    elif lost == "worker_lost" and task.attempts > 1:
        # A worker died under it, and not for the first time: one of those that were lost together may be what kills workers.
        # Spread them, so that it does not take the same neighbours with it until all of them are out of attempts.
        delay = int(random * policy.delay_us(task.attempts, 0))
    return Retry(**held, error=error, lost=lost, delay_us=delay)


def _loss_error(task: Record, lost: str) -> TaskError:
    worker = task.worker or "an unknown worker"
    happened = "died" if lost == "worker_lost" else "was silent until the lease ran out"
    return TaskError(
        "WorkerLost",
        f"worker {worker} {happened} during attempt {task.attempts} of {max_attempts(task)}",
        "",
    )
