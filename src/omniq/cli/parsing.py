"""Words of the command line as values: durations, moments, sizes, JSON."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

from omniq.durations import in_seconds as seconds
from omniq.errors import Invalid

_SIZES = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?\Z", re.IGNORECASE | re.ASCII)
# Python reads more than RFC 3339, such as 20300131: only what begins like a date is taken for a moment.
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[Tt ]", re.ASCII)


def moment_or_delay(text: str) -> datetime | timedelta:
    """A duration from now, or an RFC 3339 moment with its offset."""
    if _MOMENT.match(text.strip()):
        return _moment(text.strip())
    try:
        return timedelta(seconds=seconds(text))
    except Invalid:
        raise Invalid(f"{text!r} is not a time: write a duration like 10m, or RFC 3339 like 2030-01-31T08:00:00Z") from None


def past(text: str, now: datetime | None = None) -> datetime:
    """A moment, or how long ago it was."""
    found = moment_or_delay(text)
    return (now or datetime.now(UTC)) - found if isinstance(found, timedelta) else found


def day(text: str) -> date:
    """`2026-11-01`"""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{text!r} is not a day: write it like 2026-11-01") from None


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text.replace("z", "Z"))
    except ValueError as exc:
        raise Invalid(f"{text!r} is not an RFC 3339 moment: {exc}") from None
    if found.tzinfo is None:
        raise Invalid(f"{text!r} has no time zone: end it with Z or with an offset such as +02:00")
    return found


def size(text: str) -> int:
    """`500MB`, `2GiB`, or a number of bytes."""
    found = _SIZE.match(text.strip())
    if found is None or float(found[1]) <= 0:
        raise Invalid(f"{text!r} is not a size: write it like 500MB or 2GB")
    return int(float(found[1]) * _SIZES[found[2].lower()])


def json_array(text: str) -> list[Any]:
    value = _json(text, "ARGS")
    if not isinstance(value, list):
        raise Invalid(f"ARGS is one JSON array of the positional arguments, like '[2, 3]', not {text!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def json_object(text: str) -> dict[str, Any]:
    value = _json(text, "--kwargs")
    if not isinstance(value, dict):
        raise Invalid(f"""--kwargs is one JSON object, like '{{"a": 2}}', not {text!r}""")
    return value  # pyright: ignore[reportUnknownVariableType]


def _json(text: str, what: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as exc:
        raise Invalid(f"{what} is not valid JSON ({exc}): {text[:200]!r}") from None


def names(text: str | None) -> list[str] | None:
    """The parts of `a,b`; None for none at all."""
    if text is None:
        return None
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise Invalid(f"{text!r} names nothing: write names separated by commas")
    return found


def short(duration_s: float) -> str:
    """A duration for people: `3.2s`, `4m12s`, `2h05m`, `3d04h`."""
    if duration_s < 0:
        return "0s"
    if duration_s < 1:
        return f"{duration_s * 1000:.0f}ms"
    if duration_s < 60:
        return f"{duration_s:.1f}s"
    whole = int(duration_s)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"
