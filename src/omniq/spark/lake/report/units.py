"""Amounts, times and moments in words. Moments are in UTC, whatever zone they come in."""

from __future__ import annotations

from datetime import UTC, date, datetime

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1e3, 60e3, 3600e3, 86_400e3
NOTHING = "–"
# Below this many of a unit the next one is harder to read, but for just one of it.
_MANY = 120


def duration(milliseconds: float | None) -> str:
    """A time in milliseconds, seconds, minutes, hours or days, by its size."""
    # NaN alone differs from itself.
    if milliseconds is None or milliseconds != milliseconds:
        return NOTHING
    if milliseconds < 10:
        return f"{milliseconds:.2g} ms" if milliseconds else "0 ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    if milliseconds < _MANY * SECOND_MS and milliseconds != MINUTE_MS:
        return f"{milliseconds / SECOND_MS:.3g} s"
    if milliseconds < _MANY * MINUTE_MS and milliseconds != HOUR_MS:
        return f"{milliseconds / MINUTE_MS:.3g} min"
    if milliseconds < 48 * HOUR_MS:
        return f"{milliseconds / HOUR_MS:.3g} h"
    return f"{milliseconds / DAY_MS:,.3g} days" if milliseconds < 999.5 * DAY_MS else f"{milliseconds / DAY_MS:,.0f} days"


def step(seconds: float) -> str:
    """The length of a step of time: "hour", "5 minutes", "0.1 s"."""
    for size, word in ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size and seconds % size == 0:
            return word if seconds == size else f"{seconds // size:.0f} {word}s"
    return f"{seconds:g} s"


def number(amount: float) -> str:
    return f"{round(amount):,}"


def count(amount: float, noun: str) -> str:
    """An amount with its noun, in the plural unless it is one."""
    return f"{number(amount)} {noun}" if round(amount) == 1 else f"{number(amount)} {noun}s"


def moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"


def from_to(first: datetime, last: datetime, seconds: bool = False) -> str:
    """Both ends of a span; their day only once if it is the same."""
    first, last = first.astimezone(UTC), last.astimezone(UTC)
    clock = "%H:%M:%S" if seconds else "%H:%M"
    until = f"{last:{clock}}" if first.date() == last.date() else f"{last:%Y-%m-%d {clock}}"
    return f"{first:%Y-%m-%d {clock}} to {until}"


def day(at: date) -> str:
    return f"{at.day} {MONTHS[at.month - 1]}"
