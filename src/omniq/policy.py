"""Every decision about a task, as pure functions: when to retry, how long to wait, when a task is dead.

Drivers never import this module; the queue, the workers and the doors do.
"""

from __future__ import annotations

import functools
import re
from datetime import datetime
from typing import Annotated, Any, Literal, cast

import msgspec

from omniq.durations import format_duration
from omniq.errors import ConfigError
from omniq.models import MAX_DURATION_US, MAX_TIME_US, Record, TaskError, from_us, to_us
from omniq.operations import Cancel, Fail, Lease, Operation, Retry

HOUR_MS = 3_600_000
DEFAULT_MAX_ATTEMPTS = 4
SERVER_PREFIX = "serve:"  # how a TCP server's name as a holder begins
NOT_RUNNABLE = "NotRunnable"  # the kind of error of a task that no worker will or can run
UNKNOWN_PAUSE_US = 1_000_000
MAX_UNKNOWN_PAUSE_US = 300_000_000
_WAITS = re.compile(r"waits since (\S{1,40}Z) for a worker that has its function: ")


class Backoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait before a retry. Written on the task as text, so that whoever runs it obeys the same policy.

    `exp` waits base × 2ⁿ⁻¹ before retry n, `fixed` always base, `quartic` base × n⁴; `jitter` is per cent on top.
    """

    kind: Literal["exp", "fixed", "quartic"] = "exp"
    base_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_DURATION_US // 1000)] = 1000
    max_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_DURATION_US // 1000)] = HOUR_MS
    jitter: Annotated[int, msgspec.Meta(ge=0, le=100)] = 10
    loss: Literal["now", "backoff"] = "now"

    def __str__(self) -> str:
        return f"{self.kind}:base={self.base_ms},max={self.max_ms},jitter={self.jitter},loss={self.loss}"

    def delay_us(self, failures: int, random: float) -> int:
        n = max(failures, 1)
        factor = {"exp": 1 << min(n - 1, 40), "fixed": 1, "quartic": n**4}[self.kind]
        raw = self.base_ms * factor
        return min(int(min(raw, self.max_ms) * 1000 * (1 + random * self.jitter / 100)), MAX_DURATION_US)


@functools.lru_cache(maxsize=1024)
def parse_backoff(text: str) -> Backoff:
    """The policy that a task carries; an empty text is the default one."""
    if not text:
        return Backoff()
    kind, _, rest = text.partition(":")
    try:
        pairs = dict(part.split("=", 1) for part in rest.split(",") if part)
        values = {{"base": "base_ms", "max": "max_ms"}.get(k, k): v for k, v in pairs.items()}
        return msgspec.convert({"kind": kind, **values}, Backoff, strict=False)
    except (ValueError, msgspec.ValidationError) as exc:
        raise ConfigError(f"backoff {text[:140]!r}: write it like {Backoff()!s}") from exc


def backoff_of(task: Record) -> Backoff:
    """The policy of a stored task. What was damaged since, or written by another program, must not keep it from ending."""
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
    """What follows a failed run: a retry after a pause, or the end. `after_us` is the task's own wish."""
    held: dict[str, Any] = {"queue": task.queue, "id": task.id, "token": task.token, "late": late}
    if final or task.attempts >= max_attempts(task):
        return Fail(**held, error=error, ran_us=ran_us, again_us=next_run(task, now_us))
    delay = after_us if after_us is not None else backoff_of(task).delay_us(task.attempts, random)
    return Retry(**held, error=error, delay_us=delay, ran_us=ran_us)


def unknown_pause_us(elapsed_us: int) -> int:
    """How long to wait before looking again for what was not there for `elapsed_us`: 1 s, 2 s, 4 s and so on, up to 5 min."""
    return min(elapsed_us + UNKNOWN_PAUSE_US, MAX_UNKNOWN_PAUSE_US)


def after_unknown(task: Record, error: TaskError, now_us: int, limit_us: int, *, last: bool = False) -> Retry | Fail:
    """What follows when a worker does not have a task's function: another may, so the task waits and no attempt is spent.

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
    """The first time in a row that a worker did not have the function; now, if this is it.

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
    """What follows a lost lease: the run counts, so a task that keeps killing its workers ends as a dead letter."""
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
