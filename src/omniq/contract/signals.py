"""The meaning of SIGTERM and SIGINT to a consumer.

|               | drain=True                  | drain=False                 |
|---------------|-----------------------------|-----------------------------|
| SIGTERM       | finish the jobs, return     | the same                    |
| SIGINT once   | finish the jobs, return     | hand the jobs back, return  |
| SIGINT twice  | hand the jobs back, return  | as once                     |
"""

from __future__ import annotations

import signal
from collections.abc import Callable


class Decision:
    """Turns signals into one of two calls: end in good order, or leave now."""

    def __init__(self, drain: bool, stop: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._drain, self._stop, self._abandon = drain, stop, abandon
        self._stopping = False

    def __call__(self, number: int) -> None:
        if number == signal.SIGINT and (self._stopping or not self._drain):
            self._abandon()
        else:
            self._stopping = True
            self._stop()
