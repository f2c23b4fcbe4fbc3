"""Functions that the tests of Spark enqueue."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter, defaultdict
from decimal import Decimal
from typing import Any

runs: Counter[str] = Counter()
inside: Counter[str] = Counter()
most: Counter[str] = Counter()
gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
_lock = threading.Lock()


def price(n: int, scale: float = 1.0) -> dict[str, Any]:
    """A result with values of many types."""
    return {
        "price": n * scale,
        "label": f"no. {n}",
        "at": dt.datetime(2026, 11, 16, 12, tzinfo=dt.UTC) + dt.timedelta(days=n),
        "exact": Decimal(n) / 4,
        "raw": bytes([n]),
        "parts": [{"n": n}, {"n": None}],
    }


def half(n: int) -> float:
    """Fails for odd numbers."""
    if n % 2:
        raise ValueError(f"{n} is odd")
    return n / 2


def count(mark: str, n: int) -> int:
    """Counts its runs of each row."""
    with _lock:
        runs[f"{mark}/{n}"] += 1
    return n


def count_good(mark: str, n: int) -> int:
    """The same, and fails for odd numbers until the gate is open."""
    count(mark, n)
    if n % 2 and not gates[mark].is_set():
        raise ValueError(f"{n} is odd")
    return n


def crowd(mark: str, tenant: str, n: int) -> int:
    """Notes how many of a tenant are inside at once."""
    place = f"{mark}/{tenant}"
    with _lock:
        inside[place] += 1
        most[place] = max(most[place], inside[place])
    gates[mark].wait(0.02)
    with _lock:
        inside[place] -= 1
    return n


def text(n: int) -> str:
    return f"no number {n}"
