"""Fan-in: count the members of a key, each once, and tell the last one that it is the last."""

from __future__ import annotations

from omniq.errors import IdempotencyConflict, Refused
from omniq.operations import CountFanIn, FannedIn, OpenFanIn
from omniq.storage.ledger import FanIn, Ledger


def open_fan_in(ledger: Ledger, op: OpenFanIn, now_us: int) -> FannedIn | Refused:
    """A parent that is run again opens the same fan-in again; so the same number is welcome, also after the end."""
    there = _alive(ledger, op.key, now_us)
    if there is None:
        # The members that an expired one of this key counted must not count for the new one.
        ledger.delete_fan_in(op.key)
        ledger.save_fan_in(op.key, FanIn(op.expected, op.expected, now_us + op.ttl_us))
        return FannedIn(left=op.expected)
    if there.expected != op.expected:
        return another_number(op, there.expected)
    return FannedIn(left=there.left)


def another_number(op: OpenFanIn, expected: int) -> IdempotencyConflict:
    return IdempotencyConflict(f"fan-in {op.key!r} was opened for {expected} members, not {op.expected}; use another key")


def count_fan_in(ledger: Ledger, op: CountFanIn, now_us: int) -> FannedIn:
    """A member that is run again after it was counted hears the same, so the last one can still do what the last one does."""
    there = _alive(ledger, op.key, now_us)
    if there is None:
        return FannedIn(left=-1)
    before = ledger.counted(op.key, op.member)
    if before is not None:
        return FannedIn(left=before)
    if there.left == 0:  # one too many
        return FannedIn(left=-1)
    there.left -= 1
    ledger.save_fan_in(op.key, there)
    ledger.count(op.key, op.member, there.left)
    return FannedIn(left=there.left)


def _alive(ledger: Ledger, key: str, now_us: int) -> FanIn | None:
    there = ledger.fan_in(key)
    return None if there is None or there.expires_us <= now_us else there
