"""Readable axes: the places of their marks, the words at them, and both ends."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import msgspec

from omniq.spark.lake.report.units import DAY_MS, HOUR_MS, MINUTE_MS, MONTHS, SECOND_MS, day, duration, number

_WIDE = 50  # largest by smallest value: beyond it equal steps would hide the small values
_MARKS = 5
_MOMENTS = 8
_DAY_S = 86_400
# Steps are round in the unit in which a person would say them: 15 minutes, but 20 ms; 2 hours, but not 20.
_STEPS_MS = (
    *(part for size in (0.01, 0.1, 1, 10, 100) for part in (size, 2 * size, 5 * size)),
    *(n * SECOND_MS for n in (1, 2, 5, 10, 15, 30)),
    *(n * MINUTE_MS for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR_MS for n in (1, 2, 6, 12)),
    *(n * DAY_MS for n in (1, 2, 7, 14, 30)),
)
_LOG_MS = (
    *(10.0**n for n in range(-3, 5)),
    *(MINUTE_MS, 10 * MINUTE_MS, HOUR_MS, 10 * HOUR_MS),
    *(n * DAY_MS for n in (4, 40, 400, 4000)),
)
_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200)
_STEPS_DAYS = (1, 2, 7, 14)
_STEPS_MONTHS = (1, 2, 3, 6, 12, 24, 60, 120)


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Marks and their words, from `low` to `high`; `log` if each mark is a multiple of the one before."""

    marks: tuple[float, ...]
    words: tuple[str, ...]
    low: float
    high: float
    log: bool = False
    caption: str = ""


def counts(most: float) -> Scale:
    """Whole numbers from 0 to at least `most`."""
    size = 1
    while most > _MARKS * size:
        size = size * 5 // 2 if str(size).startswith("2") else size * 2
    marks = tuple(range(0, size * max(1, math.ceil(most / size)) + 1, size))
    return Scale(marks=marks, words=tuple(map(number, marks)), low=0, high=marks[-1])


def durations(least: float, most: float) -> Scale:
    """Milliseconds, in units that fit their size; `least` is the smallest value above 0 that is shown."""
    most = max(most, 0.01)
    if most > _WIDE * least > 0:
        low = max((mark for mark in _LOG_MS if mark <= least), default=_LOG_MS[0])
        high = min((mark for mark in _LOG_MS if mark >= most), default=most)
        marks = tuple(mark for mark in _LOG_MS if low <= mark <= high)
        return Scale(marks=marks, words=tuple(map(duration, marks)), low=low, high=high, log=True)
    size = next((size for size in _STEPS_MS if most <= _MARKS * size), math.ceil(most / _MARKS / DAY_MS) * DAY_MS)
    # Less a trifle: 0.07 / 0.01 is a little more than 7, and would ask for one mark too many.
    marks = tuple(n * size for n in range(max(1, math.ceil(most / size - 1e-9)) + 1))
    return Scale(marks=marks, words=("0", *map(duration, marks[1:])), low=0, high=marks[-1])


def moments(first: datetime, last: datetime) -> Scale:
    """Seconds since 1970, from `first` to `last`; words are in UTC. The caption has the part that all marks share."""
    low, high = first.timestamp(), max(last.timestamp(), first.timestamp() + 0.1)
    span = high - low
    first, last = _utc(low), _utc(high)
    size = next((size for size in _STEPS_S if span <= _MOMENTS * size), None)
    if size is not None:
        marks = tuple(n * size for n in range(math.ceil(low / size - 1e-6), math.floor(high / size + 1e-6) + 1))
        # The end at midnight belongs to the day before it.
        one_day = first.date() == _utc(high - 1e-6).date()
        caption = f"{day(first)} {first.year}, UTC" if one_day else "UTC"
        return Scale(marks=marks, words=_clock(marks, size, one_day), low=low, high=high, caption=caption)
    days = next((days for days in _STEPS_DAYS if span <= _MOMENTS * days * _DAY_S), None)
    if days is not None:
        size = days * _DAY_S
        start = math.ceil(low / _DAY_S) * _DAY_S
        marks = tuple(range(start, math.floor(high) + 1, size))
        words = tuple(day(_utc(mark)) for mark in marks)
    else:
        dates = _months(first, last)
        marks = tuple(at.timestamp() for at in dates)
        words = tuple(f"{MONTHS[at.month - 1]} {at.year}" for at in dates)
        return Scale(marks=marks, words=words, low=low, high=high, caption="UTC")
    caption = f"{first.year}, UTC" if first.year == last.year else f"{first.year} to {last.year}, UTC"
    return Scale(marks=marks, words=words, low=low, high=high, caption=caption)


def _clock(marks: tuple[float, ...], size: float, one_day: bool) -> tuple[str, ...]:
    """The time of each mark, with the day below where a new one begins."""
    words: list[str] = []
    before = None
    for mark in marks:
        at = _utc(mark)
        word = f"{at:%H:%M}" if size >= 60 else f"{at:%H:%M:%S}"
        if size < 1:
            word += f".{at.microsecond // 100_000}"
        if not one_day and at.date() != before:
            word += f"\n{day(at)}"
        before = at.date()
        words.append(word)
    return tuple(words)


def _months(first: datetime, last: datetime) -> list[datetime]:
    """The first days of months between two moments, evenly."""
    begin, end = first.year * 12 + first.month, last.year * 12 + last.month - 1
    size = next((size for size in _STEPS_MONTHS if end - begin <= _MOMENTS * size), _STEPS_MONTHS[-1])
    numbers = range(math.ceil(begin / size) * size, end + 1, size)
    return [datetime(number // 12, number % 12 + 1, 1, tzinfo=UTC) for number in numbers]


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 3), UTC)
