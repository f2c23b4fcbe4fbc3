"""Durations as people write them: `45s`, `200ms`, `1.5h`; the line protocol also strings them together, like `1m30s`."""

from __future__ import annotations

import re

from omniq.errors import Invalid

# The micro sign and the Greek letter look alike, and clients send either.
NS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 1_000_000, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
# Clients of the line protocol keep a duration as a signed number of 64 bits.
MAX_NS = (1 << 63) - 1
MAX_S = 36_500 * 86_400.0  # moments that are so far away are still moments

_PART = re.compile(r"([0-9]{1,20})?(?:\.([0-9]{0,20}))?(ns|us|µs|μs|ms|s|m|h)")
_WHOLE = re.compile(rf"[+-]?(?:{_PART.pattern})+")

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?\Z", re.ASCII)


def in_seconds(text: str) -> float:
    """`30s`, `10m`, `2h`, `30d`, `500ms`; a bare number is seconds."""
    found = _DURATION.match(text.strip())
    if found is None:
        raise Invalid(f"{text!r} is not a duration: write it like 30s, 10m, 2h or 30d")
    value = float(found[1]) * _SECONDS[found[2] or "s"]
    if value > MAX_S:
        raise Invalid(f"{text!r} is more than a hundred years: write at most 36500d")
    return value


def parse_duration(text: str) -> int:
    """Nanoseconds. Decimal numbers, each with a unit, one after another; a bare `0` is the only number without one."""
    if text in ("0", "+0", "-0"):
        return 0
    total = 0
    if len(text) <= 100 and _WHOLE.fullmatch(text):
        for whole, fraction, unit in _PART.findall(text):
            # A point alone, or nothing but a unit: the pattern lets both pass.
            if not whole and not fraction:
                break
            total += int(whole or 0) * NS[unit]
            if fraction:
                total += int(fraction) * NS[unit] // 10 ** len(fraction)
        else:
            if total <= MAX_NS:
                return -total if text[0] == "-" else total
    raise Invalid(f"duration {text[:40]!r}: write numbers with units, like 45s, 200ms or 1m30s")


def format_duration(ns: int) -> str:
    """The shortest text that says the same: `45s`, `1m30s`, `1.5s`, `200ms`."""
    if ns < 0:
        return "-" + format_duration(-ns)
    if ns < NS["s"]:
        unit = next((u for u in ("ms", "µs", "ns") if ns >= NS[u]), "s")
        return _decimal(ns, NS[unit]) + unit
    minutes, rest = divmod(ns, NS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return text + _decimal(rest, NS["s"]) + "s"


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    digits = f"{rest:0{len(str(unit)) - 1}d}".rstrip("0") if rest else ""
    return f"{whole}.{digits}" if digits else str(whole)
