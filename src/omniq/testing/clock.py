"""A clock that moves only when it is told to."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta

from omniq.models import from_us

START_US = 1_704_067_200_000_000  # 2024-01-01 00:00:00 UTC


class FakeClock:
    """Pass it to a storage as `clock=`. A call returns microseconds since the epoch.

    It starts at a whole millisecond. Advance it by whole milliseconds: some stores keep nothing finer.
    """

    def __init__(self, start_us: int = START_US) -> None:
        self._now_us = start_us
        self._lock = threading.Lock()  # workers run plain functions in threads, which may move the clock too

    def __call__(self) -> int:
        return self._now_us

    @property
    def now(self) -> datetime:
        """The same moment as an aware datetime, UTC."""
        return from_us(self._now_us)

    def advance(self, by: float | timedelta) -> int:
        """Moves on by seconds or a timedelta and returns the new time in microseconds. Raises `ValueError` for a step back."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        if seconds < 0:
            raise ValueError(f"FakeClock.advance({by!r}): time does not go back")
        with self._lock:
            self._now_us += round(seconds * 1_000_000)
            return self._now_us

    def __repr__(self) -> str:
        return f"<FakeClock {self.now.isoformat()}>"
