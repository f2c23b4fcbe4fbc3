"""The checks of `BaseStorage` before any I/O: of fields, of sizes, and for transactions that touch a task twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omniq.backoff import parse_backoff
from omniq.errors import DuplicateTarget, Invalid, InvalidLease, LimitExceeded, TaskIdRequired
from omniq.models import (
    MAX_AT_ONCE,
    MAX_BLOCKERS,
    MAX_COUNT,
    MAX_DURATION_US,
    MAX_TIME_US,
    check_count,
    check_encodable,
    check_id,
    check_name,
    check_queue,
    check_text,
)
from omniq.operations import (
    Ack,
    Beat,
    Cancel,
    Capabilities,
    CountFanIn,
    Enqueue,
    Extend,
    Fail,
    Held,
    OnRun,
    OnTask,
    OpenFanIn,
    OpenRun,
    Operation,
    Progress,
    Requeue,
    Reschedule,
    Reserve,
    Retry,
    Stage,
)

Transaction = Sequence[Operation]

MAX_PROGRESS = 4 * 1024
MIN_TOKEN = 24  # hex digits of 96 bits
# The wire contract's bound: there the key is part of the names of keys, in braces.
MAX_FAN_IN_KEY = 128


def check_transactions(transactions: Sequence[Transaction], limits: Capabilities) -> None:
    """Raise `Invalid` for the first operation that no store could take."""
    good_queues: set[str] = set()  # looked at already: the tasks of a large call mostly share a queue
    for transaction in transactions:
        if len(transaction) == 1:
            _check(transaction[0], limits, good_queues)
        else:
            _check_combined(transaction, limits, good_queues)


def check_now(us: int) -> None:
    """Raise `Invalid` for a clock that no store could take."""
    _check_time(us, "now_us")


def _check_combined(transaction: Transaction, limits: Capabilities, good_queues: set[str]) -> None:
    if len(transaction) > limits.max_transaction:
        raise LimitExceeded(f"a transaction of {len(transaction)} operations; the limit is {limits.max_transaction}")
    targets: dict[str, Operation] = {}
    for op in transaction:
        if isinstance(op, Reserve | Beat | OpenFanIn | CountFanIn | OnRun):
            raise Invalid(f"{type(op).__name__} stands alone in its transaction")
        _check(op, limits, good_queues)
        assert isinstance(op, Enqueue | OnTask)
        # All checks come before the first write, so the second one would be checked against what the first is about to change.
        if op.id in targets:
            kinds = f"{type(targets[op.id]).__name__} and {type(op).__name__}"
            raise DuplicateTarget(f"task {op.id!r} appears twice in one transaction ({kinds}); send two transactions")
        targets[op.id] = op


def _check(op: Operation, limits: Capabilities, good_queues: set[str]) -> None:
    if isinstance(op, Enqueue):
        _check_enqueue(op, limits, good_queues)
    elif isinstance(op, Reserve):
        _check_reserve(op, good_queues)
    elif isinstance(op, OnTask):
        if not op.id:
            raise TaskIdRequired(f"{type(op).__name__} needs the id of a task")
        if not op.id.isascii():
            check_encodable(op.id, "task id", TaskIdRequired)
        if op.queue not in good_queues:
            check_queue(op.queue)
            good_queues.add(op.queue)
        if isinstance(op, Ack):  # what is sent most
            _check_ack(op, limits)
        else:
            _check_on_task(op)
    elif isinstance(op, OpenFanIn | CountFanIn):
        _check_fan_in(op)
    elif isinstance(op, OnRun):
        _check_run(op, limits, good_queues)
    elif isinstance(op, Beat):
        _check_beat(op)
    else:
        raise Invalid(f"{type(op).__name__} is not an operation of the driver contract")


def _check_ack(op: Ack, limits: Capabilities) -> None:
    # UTF-8 cannot hold half characters, which ASCII does not have: only other texts have to be encoded to find out.
    if not (op.token.isascii() and op.encoding.isascii()):
        _check_texts(op, "token", "encoding")
    if op.result is not None and len(op.result) > limits.max_payload:
        raise LimitExceeded(f"result of {len(op.result)} bytes; the limit of this store is {limits.max_payload}")
    if op.again_us is not None:
        _check_time(op.again_us, "again_us")
    if op.ran_us is not None and not 0 <= op.ran_us <= MAX_COUNT:
        check_count(op.ran_us, "ran_us")


def _check_on_task(op: OnTask) -> None:
    if isinstance(op, Held) and op.token and not op.token.isascii():  # a lease that others damaged may have none
        check_encodable(op.token, "token")
    if isinstance(op, Extend):
        _check_lease(op.lease_us)
    elif isinstance(op, Progress):
        if len(op.data) > MAX_PROGRESS:
            raise LimitExceeded(f"progress of {len(op.data)} bytes; the limit is {MAX_PROGRESS}")
    elif isinstance(op, Retry):
        _at_most_one(op, "delay_us", "due_us")
        _check_counts(op, "attempts", "ran_us")
    elif isinstance(op, Fail):
        _check_counts(op, "ran_us")
        if op.again_us is not None:
            _check_time(op.again_us, "again_us")
    elif isinstance(op, Reschedule | Requeue):
        _at_most_one(op, "delay_us", "eta_us")
    elif isinstance(op, Cancel) and op.token is not None:
        check_encodable(op.token, "token")


def _check_enqueue(op: Enqueue, limits: Capabilities, good_queues: set[str]) -> None:
    check_id(op.id)
    check_name(op.name)
    if op.queue not in good_queues:
        check_queue(op.queue)
        good_queues.add(op.queue)
    if op.payload is not None and len(op.payload) > limits.max_payload:
        raise LimitExceeded(f"payload of {len(op.payload)} bytes; the limit of this store is {limits.max_payload}")
    if op.eta_us is not None or op.delay_us is not None:
        _at_most_one(op, "delay_us", "eta_us")
    if not (0 <= op.max_attempts <= MAX_COUNT and 0 <= op.group_limit <= MAX_COUNT):
        _check_counts(op, "max_attempts", "group_limit")
    # Compared here, since every enqueue passes: a function is called only for its error.
    timeout, lease, interval, ttl = op.timeout_us, op.lease_us, op.interval_us, op.result_ttl_us
    if timeout is not None and not 0 < timeout <= MAX_DURATION_US:
        _check_duration(timeout, "timeout")
    if lease is not None and not 0 < lease <= MAX_DURATION_US:
        _check_lease(lease)
    if interval is not None and not 0 < interval <= MAX_DURATION_US:
        _check_duration(interval, "interval")
    if ttl is not None and not 0 <= ttl <= MAX_DURATION_US:
        _check_duration(ttl, "result_ttl", 0)
    if not 0 < op.key_ttl_us <= MAX_DURATION_US:
        _check_duration(op.key_ttl_us, "key_ttl")
    if not (op.encoding.isascii() and op.origin.isascii() and op.fingerprint.isascii()):
        _check_texts(op, "encoding", "origin", "fingerprint")
    # Read once here: every later reader of the task may rely on it.
    if op.backoff:
        parse_backoff(op.backoff)
    if op.headers is not None:
        _check_headers(op.headers)
    if op.group is not None:
        check_text(op.group, "group")
    if op.idempotency_key is not None:
        check_text(op.idempotency_key, "idempotency_key")
    if op.dead_queue is not None:
        check_queue(op.dead_queue)
    if op.blocked_by:
        if len(op.blocked_by) > MAX_BLOCKERS:
            raise LimitExceeded(f"blocked_by names {len(op.blocked_by)} tasks; the limit is {MAX_BLOCKERS}")
        for blocker in op.blocked_by:
            if blocker.id == op.id:
                raise Invalid(f"task {op.id!r} cannot wait for itself")
            check_encodable(blocker.id, "blocked_by", TaskIdRequired)
            check_encodable(blocker.queue, "the queue of blocked_by")


def _check_reserve(op: Reserve, good_queues: set[str]) -> None:
    if not 1 <= op.limit <= MAX_AT_ONCE:
        check_count(op.limit, "the limit of a Reserve", 1, MAX_AT_ONCE)
    _check_lease(op.lease_us)
    if not (op.token.isascii() and op.worker.isascii()):
        _check_texts(op, "token", "worker")
    if len(op.token) < MIN_TOKEN:
        raise Invalid("Reserve needs a fresh token of at least 96 random bits; omniq.models.new_token() makes one")
    for queue in op.queues:
        if queue not in good_queues:
            check_queue(queue)
            good_queues.add(queue)


def _check_fan_in(op: OpenFanIn | CountFanIn) -> None:
    check_text(op.key, "fan-in key")
    if len(op.key) > MAX_FAN_IN_KEY or "{" in op.key or "}" in op.key:
        raise Invalid(f"fan-in key {op.key[:140]!r}: use 1 to {MAX_FAN_IN_KEY} characters without braces")
    if isinstance(op, CountFanIn):
        check_text(op.member, "member of a fan-in")
    else:
        check_count(op.expected, "expected", 1)
        _check_duration(op.ttl_us, "the ttl of a fan-in")


def _check_run(op: OnRun, limits: Capabilities, good_queues: set[str]) -> None:
    check_queue(op.queue)
    check_text(op.run_id, "run_id")
    if isinstance(op, OpenRun):
        _check_duration(op.ttl_us, f"the ttl of run {op.run_id!r}")
    if not isinstance(op, Stage):
        return
    if len(op.tasks) > limits.max_transaction:
        raise LimitExceeded(f"{len(op.tasks)} tasks at once; the limit is {limits.max_transaction}: stage them in parts")
    for task in op.tasks:
        _check_enqueue(task, limits, good_queues)
        if task.queue != op.queue:
            raise Invalid(f"task {task.id!r} is for queue {task.queue!r}, its run for {op.queue!r}; one run, one queue")
        if task.blocked_by or task.delay_us is not None:
            raise Invalid(f"task {task.id!r}: a staged task can wait for a time (eta), not for other tasks or a delay")


def _check_beat(op: Beat) -> None:
    info = op.info
    _check_texts(info, "worker", "host")
    for queue in info.queues:
        check_encodable(queue, "queues")
    for queue, runs in (info.busy or {}).items():
        check_encodable(queue, "a queue of busy")
        check_count(runs, "busy")
    _check_counts(info, "pid", "running", "concurrency", "started_at_us", "seen_at_us")


# -- fields ----------------------------------------------------------------------------------------


def _check_texts(holder: Any, *names: str) -> None:
    for name in names:
        check_encodable(getattr(holder, name), name)


def _check_counts(holder: Any, *names: str) -> None:
    for name in names:
        value = getattr(holder, name)
        if value is not None:
            check_count(value, name)


def _check_headers(headers: dict[str, str]) -> None:
    for name, value in headers.items():
        if not (name.isascii() and value.isascii()):
            check_encodable(name, "the name of a header")
            check_encodable(value, f"header {name!r}")


def _check_lease(us: int | None) -> None:
    if us is not None and not 0 < us <= MAX_DURATION_US:
        raise InvalidLease(f"a lease of {us} µs: it must be longer than 0 µs and at most {MAX_DURATION_US} µs")


def _check_duration(us: int, what: str, least: int = 1) -> None:
    if not least <= us <= MAX_DURATION_US:
        raise Invalid(f"{what} must be {least} to {MAX_DURATION_US} µs, not {us}")


def _check_time(us: int, what: str) -> None:
    if not 0 <= us <= MAX_TIME_US:
        raise Invalid(f"{what} must be a time from 1970 to 9999, in µs, not {us}")


def _at_most_one(op: Operation, delay: str, moment: str) -> None:
    delay_us, moment_us = getattr(op, delay), getattr(op, moment)
    if delay_us is not None and moment_us is not None:
        raise Invalid(f"{type(op).__name__}: give only one of {delay}, {moment}")
    if delay_us is not None:
        _check_duration(delay_us, delay, 0)
    if moment_us is not None:
        _check_time(moment_us, moment)
