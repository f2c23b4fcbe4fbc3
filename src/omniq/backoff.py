"""How long to wait before a retry: a value that a task carries as text."""

from __future__ import annotations

import functools
from typing import Annotated, Literal

import msgspec

from omniq.errors import ConfigError
from omniq.models import MAX_DURATION_US

HOUR_MS = 3_600_000


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
        # Above 2⁴⁰ nobody waits for the end any more, and after thousands of failures the number itself would be huge.
        factor = {"exp": 1 << min(n - 1, 40), "fixed": 1, "quartic": n**4}[self.kind]
        raw = self.base_ms * factor
        return min(int(min(raw, self.max_ms) * 1000 * (1 + random * self.jitter / 100)), MAX_DURATION_US)


# Tasks by the thousand carry the same few texts, and each failure reads its own.
@functools.lru_cache(maxsize=1024)
def parse_backoff(text: str) -> Backoff:
    """Returns the policy that a task carries. An empty text stands for the default."""
    if not text:
        return Backoff()
    kind, _, rest = text.partition(":")
    try:
        pairs = dict(part.split("=", 1) for part in rest.split(",") if part)
        values = {{"base": "base_ms", "max": "max_ms"}.get(k, k): v for k, v in pairs.items()}
        return msgspec.convert({"kind": kind, **values}, Backoff, strict=False)
    except (ValueError, msgspec.ValidationError) as exc:
        raise ConfigError(f"backoff {text[:140]!r}: write it like {Backoff()!s}") from exc
