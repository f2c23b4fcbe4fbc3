"""The manifests of a lake: the files that make up each day of each table, and the events that were ever taken in."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime
from itertools import pairwise

import msgspec

Ranges = list[tuple[int, int]]
Span = tuple[str, int, int]  # a store, and from when to when in microseconds


class File(msgspec.Struct, frozen=True):
    path: str  # relative to the lake
    rows: int
    bytes: int


class TableDay(msgspec.Struct, kw_only=True):
    """One day of a table."""

    # With moments and the stamp here, a build finds the days that it has to touch without opening a file.
    files: list[File] = msgspec.field(default_factory=list[File])
    stamp: str = ""  # changes with the content; of silver: what it was built from
    first: datetime | None = None  # the earliest and the latest moment that the rows tell of
    last: datetime | None = None
    open_from: datetime | None = None  # the earliest moment from which on a task still waits

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def touches(self, days: Iterable[date]) -> bool:
        """Whether the rows may tell of one of these days."""
        if self.first is None or self.last is None:
            return False
        first, last = self.first.date(), self.last.date()
        opened = None if self.open_from is None else self.open_from.date()
        return any(first <= day <= last or (opened is not None and opened <= day) for day in days)


class Manifest(msgspec.Struct, kw_only=True):
    """One version of one table. It is written once and never changed."""

    table: str
    number: int = 0
    parts: dict[str, TableDay] = msgspec.field(default_factory=dict[str, TableDay])  # by day, YYYY-MM-DD
    model: int = 0  # version of the models that built it
    pending: list[str] = msgspec.field(default_factory=list[str])  # days of gold that silver left behind
    horizon: datetime | None = None  # the latest event that the last build knew of
    lost: list[Span] = msgspec.field(default_factory=list[Span])  # the accepted gaps that it knew of
    # Of events only: numbers taken in per store and shard, and the last batch of each stream.
    seen: dict[str, dict[str, Ranges]] = msgspec.field(default_factory=dict[str, dict[str, Ranges]])
    batches: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    quarantined: int = 0
    quarantine: list[File] = msgspec.field(default_factory=list[File])

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts.values())

    @property
    def files(self) -> list[File]:
        return [file for day in sorted(self.parts) for file in self.parts[day].files]

    @property
    def last(self) -> datetime | None:
        return max((part.last for part in self.parts.values() if part.last is not None), default=None)


class Current(msgspec.Struct, kw_only=True):
    """The version of each table that counts. Readers look at this file first."""

    number: int = 0
    at: datetime | None = None
    tables: dict[str, int] = msgspec.field(default_factory=dict[str, int])


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same numbers in as few ranges as possible, in order."""
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


def overlap(ranges: Ranges, others: Ranges) -> Ranges:
    """The numbers that are in both."""
    out: Ranges = []
    i = j = 0
    while i < len(ranges) and j < len(others):
        low, high = max(ranges[i][0], others[j][0]), min(ranges[i][1], others[j][1])
        if low <= high:
            out.append((low, high))
        if ranges[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return out


def holes(ranges: Ranges) -> Ranges:
    """The numbers that are missing between the first and the last."""
    return [(a[1] + 1, b[0] - 1) for a, b in pairwise(ranges)]
