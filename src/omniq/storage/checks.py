"""What `BaseStorage` refuses before any I/O: wrong fields, sizes, and transactions that touch a task twice."""

from __future__ import annotations

from collections.abc import Sequence

from omniq.errors import DuplicateTarget, Invalid, InvalidLease, LimitExceeded, TaskIdRequired
from omniq.models import MAX_BLOCKERS, check_id, check_name, check_queue, check_text
from omniq.operations import (
    Ack,
    Beat,
    Capabilities,
    CountFanIn,
    Enqueue,
    Extend,
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
MAX_FAN_IN_KEY = 128


def check_transactions(transactions: Sequence[Transaction], limits: Capabilities) -> None:
    """Raise `Invalid` for the first operation that no store could take."""
    good_queues: set[str] = set()
    for transaction in transactions:
        if len(transaction) == 1:
            _check(transaction[0], limits, good_queues)
        else:
            _check_combined(transaction, limits, good_queues)


def _check_combined(transaction: Transaction, limits: Capabilities, good_queues: set[str]) -> None:
    if len(transaction) > limits.max_transaction:
        raise LimitExceeded(f"a transaction of {len(transaction)} operations; the limit is {limits.max_transaction}")
    targets: set[str] = set()
    for op in transaction:
        if isinstance(op, Reserve | Beat | OpenFanIn | CountFanIn | OnRun):
            raise Invalid(f"{type(op).__name__} stands alone in its transaction")
        _check(op, limits, good_queues)
        assert isinstance(op, Enqueue | OnTask)
        if op.id in targets:
            raise DuplicateTarget(f"task {op.id!r} appears twice in one transaction; send two transactions")
        targets.add(op.id)


def _check(op: Operation, limits: Capabilities, good_queues: set[str]) -> None:
    if isinstance(op, Enqueue):
        _check_enqueue(op, limits, good_queues)
    elif isinstance(op, Reserve):
        _check_reserve(op, good_queues)
    elif isinstance(op, OnTask):
        if not op.id:
            raise TaskIdRequired(f"{type(op).__name__} needs the id of a task")
        if op.queue not in good_queues:
            check_queue(op.queue)
            good_queues.add(op.queue)
        if not isinstance(op, Ack):  # it has nothing more to check, and is what is sent most
            _check_on_task(op)
    elif isinstance(op, OpenFanIn | CountFanIn):
        _check_fan_in(op)
    elif isinstance(op, OnRun):
        _check_run(op, limits, good_queues)
    elif not isinstance(op, Beat):
        raise Invalid(f"{type(op).__name__} is not an operation of the driver contract")


def _check_on_task(op: OnTask) -> None:
    if isinstance(op, Extend) and op.lease_us is not None and op.lease_us <= 0:
        raise InvalidLease(f"a lease of {op.lease_us} µs: it must last longer than nothing")
    if isinstance(op, Progress) and len(op.data) > MAX_PROGRESS:
        raise LimitExceeded(f"progress of {len(op.data)} bytes; the limit is {MAX_PROGRESS}")
    if isinstance(op, Retry):
        _at_most_one(op, "delay_us", "due_us")
        if op.attempts is not None and op.attempts < 0:
            raise Invalid(f"attempts cannot be negative: {op.attempts}")
    if isinstance(op, Reschedule | Requeue):
        _at_most_one(op, "delay_us", "eta_us")


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
    if op.max_attempts < 0 or op.group_limit < 0:
        raise Invalid(f"max_attempts and group_limit cannot be negative: {op.max_attempts}, {op.group_limit}")
    timeout, lease, interval = op.timeout_us, op.lease_us, op.interval_us
    if timeout is not None and timeout <= 0:
        raise Invalid(f"timeout must be longer than nothing, not {timeout} µs")
    if lease is not None and lease <= 0:
        raise InvalidLease(f"lease must be longer than nothing, not {lease} µs")
    if interval is not None and interval <= 0:
        raise Invalid(f"interval must be longer than nothing, not {interval} µs")
    if (op.result_ttl_us is not None and op.result_ttl_us < 0) or op.key_ttl_us <= 0:
        raise Invalid(f"result_ttl cannot be negative and key_ttl must be positive: {op.result_ttl_us}, {op.key_ttl_us}")
    if op.group is not None:
        check_text(op.group, "group")
    if op.idempotency_key is not None:
        check_text(op.idempotency_key, "idempotency_key")
    if op.dead_queue is not None:
        check_queue(op.dead_queue)
    if op.blocked_by:
        if len(op.blocked_by) > MAX_BLOCKERS:
            raise LimitExceeded(f"blocked_by names {len(op.blocked_by)} tasks; the limit is {MAX_BLOCKERS}")
        if any(b.id == op.id for b in op.blocked_by):
            raise Invalid(f"task {op.id!r} cannot wait for itself")


def _check_reserve(op: Reserve, good_queues: set[str]) -> None:
    if op.limit < 1:
        raise Invalid(f"Reserve(limit={op.limit}): ask for at least one task")
    if op.lease_us is not None and op.lease_us <= 0:
        raise InvalidLease(f"a lease of {op.lease_us} µs: it must last longer than nothing")
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
    elif op.expected < 1 or op.ttl_us <= 0:
        raise Invalid(f"a fan-in waits for at least one member, longer than nothing: {op.expected}, {op.ttl_us} µs")


def _check_run(op: OnRun, limits: Capabilities, good_queues: set[str]) -> None:
    check_queue(op.queue)
    check_text(op.run_id, "run_id")
    if isinstance(op, OpenRun) and op.ttl_us <= 0:
        raise Invalid(f"run {op.run_id!r}: its ttl must be longer than nothing, not {op.ttl_us} µs")
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


def _at_most_one(op: Operation, *names: str) -> None:
    given = {n: getattr(op, n) for n in names if getattr(op, n) is not None}
    if len(given) > 1:
        raise Invalid(f"{type(op).__name__}: give only one of {', '.join(given)}")
    if any(value < 0 for value in given.values()):
        raise Invalid(f"{type(op).__name__}: times cannot be negative: {given}")
